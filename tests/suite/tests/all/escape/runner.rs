//! The base image in normal use: the seccomp profile must not break tools, and git must reach no
//! remote.

use anyhow::{Result, ensure};
use cynode_api::SessionCreate;
use cynode_tests::{BASE, World, exec, on_every_runtime, session, sh};

use super::arena::Arena;

on_every_runtime!(tools_work_in_a_sandbox_and_git_reaches_no_remote);

// One world for both: copying the image for an ordinary user takes longer than both tests.
// part of: CYNAI.SANDBX.SandboxThreatModel, CYNAI.SANDBX.GitLocalOnly, REQ-SANDBX-0123
// invariant: no-way-out
async fn tools_work_in_a_sandbox_and_git_reaches_no_remote(world: World) -> Result<()> {
    let request = SessionCreate {
        image_ref: BASE.to_owned(),
        ..session()
    };
    let mut arena = Arena::with(world, "git", request, &[]).await?;
    tools(&arena).await?;
    git(&mut arena).await?;
    arena.end().await
}

/// Threads, processes, pools, pipes, loopback sockets, timers and semaphores in Python.
const PYTHON: &str = r#"
import concurrent.futures, ctypes, multiprocessing, os, queue, socket, subprocess, tempfile, threading, time, select, signal, mmap, asyncio, fcntl
def square(n): return n * n
if __name__ == "__main__":
    with concurrent.futures.ThreadPoolExecutor(8) as pool: assert list(pool.map(square, range(100)))[9] == 81
    with multiprocessing.Pool(3) as pool: assert pool.map(square, range(10))[3] == 9
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool: assert pool.submit(square, 5).result() == 25
    assert subprocess.run(["sh", "-c", "echo $0", "out"], capture_output=True, text=True).stdout == "out\n"
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname()); peer, _ = server.accept()
    client.sendall(b"x"); assert peer.recv(1) == b"x"
    six = socket.create_server(("::1", 0), family=socket.AF_INET6); socket.create_connection(six.getsockname()[:2])
    a, b = socket.socketpair(); a.send(b"y"); assert b.recv(1) == b"y"
    assert [name for _, name in socket.if_nameindex()] == ["lo"]
    socket.getaddrinfo("127.0.0.1", 80)
    async def quick(): return await (await asyncio.create_subprocess_exec("echo", "z", stdout=-1)).communicate()
    assert asyncio.run(quick())[0] == b"z\n"
    with tempfile.TemporaryFile() as file: file.write(b"1" * 8192); file.flush(); fcntl.flock(file, fcntl.LOCK_EX); mmap.mmap(file.fileno(), 8192)
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=4096) if hasattr(multiprocessing, "shared_memory") else None
    if memory: memory.close(); memory.unlink()
    os.mkfifo("/tmp/fifo"); os.memfd_create("m"); os.pidfd_open(os.getpid()); os.sched_setaffinity(0, os.sched_getaffinity(0))
    pid, fd = __import__("pty").fork()
    if pid == 0: os.execlp("tty", "tty")
    assert os.read(fd, 100).startswith(b"/dev/pts/")
    libc = ctypes.CDLL(None, use_errno=True)
    # A debugger: a child that lets itself be traced, stopped and looked into.
    child = os.fork()
    if child == 0:
        assert libc.ptrace(0, 0, 0, 0) == 0
        os.kill(os.getpid(), signal.SIGSTOP); os._exit(7)
    _, status = os.waitpid(child, 0); assert os.WIFSTOPPED(status)
    registers = ctypes.create_string_buffer(512); vector = (ctypes.c_void_p * 2)(ctypes.addressof(registers), 512)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    assert libc.ptrace(0x4204, child, 1, ctypes.addressof(vector)) == 0
    assert libc.ptrace(7, child, None, None) == 0
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert libc.personality(0x0040000) >= 0
    print("well")
"#;

async fn tools(arena: &Arena) -> Result<()> {
    let (client, id) = (&arena.client, arena.attacker);
    client
        .put_file(
            id,
            std::path::Path::new("t.py"),
            PYTHON,
            &cynode_client::PutOptions::default(),
        )
        .await?;
    let python = client.exec(id, &exec(["python3", "t.py"])).await?;
    ensure!(
        python.stdout == "well\n",
        "{}{}",
        python.stdout,
        python.stderr
    );
    let git = "set -e; git init -q a; cd a; git config user.name a; git config user.email a; for i in 1 2 3; do seq $i 1000 > f; git add f; git commit -qm $i; done
               git clone -q . ../b; git clone -q file:///workspace/a ../c; git -C ../c gc -q --aggressive; git -C ../c fsck; git worktree add -q ../w HEAD~1; git -C ../w log --oneline | wc -l
               git bundle create -q ../bundle HEAD; git clone -q ../bundle ../d; echo well";
    let git = client.exec(id, &sh(git)).await?;
    ensure!(git.stdout == "2\nwell\n", "{}{}", git.stdout, git.stderr);
    let make = "printf 'all: %s\\n' \"$(seq -s ' ' 20)\" > Makefile; printf '%%:\\n\\t@echo $@ > \
                m$@\\n' >> Makefile; make -s -j8 all && ls m* | wc -l; rg --files | wc -l \
                >/dev/null && tar c m1 | xz | unxz | tar t";
    let make = client.exec(id, &sh(make)).await?;
    ensure!(make.stdout == "21\nm1\n", "{}{}", make.stdout, make.stderr);
    Ok(())
}

/// Remotes that must be unreachable.
const REMOTES: &[&str] = &[
    "https://192.0.2.1/a.git",
    "http://192.0.2.1/a.git",
    "git://192.0.2.1/a.git",
    "ssh://git@192.0.2.1/a.git",
    "git@192.0.2.1:a.git",
    "https://example.com/a.git",
];

async fn git(arena: &mut Arena) -> Result<()> {
    let prepared = arena
        .client
        .exec(
            arena.attacker,
            &sh("set -e; export GIT_CONFIG_GLOBAL=/workspace/config
                git config --global user.name a; git config --global user.email a; git config --global protocol.file.allow always
                git init -q -b main origin; cd origin; echo one > file; git add .; git commit -qm one; cd ..
                git clone -q file:///workspace/origin copy; cd copy; git fetch -q; git submodule add -q file:///workspace/origin sub; cat sub/file
                git push -q origin HEAD:refs/heads/other; git -C ../origin rev-parse -q --verify other >/dev/null; echo within"),
        )
        .await?;
    ensure!(prepared.stdout == "one\nwithin\n", "{prepared:?}");
    for remote in REMOTES {
        let git = "export GIT_CONFIG_GLOBAL=/workspace/config GIT_TERMINAL_PROMPT=0; cd \
                   /workspace/copy; git -c protocol.allow=always";
        for (what, command) in [
            ("clone", format!("clone -q {remote} /tmp/c")),
            ("fetch", format!("fetch -q {remote}")),
            ("push", format!("push -q {remote} HEAD:refs/heads/x")),
            ("ls-remote", format!("ls-remote {remote}")),
            ("submodule add", format!("submodule add -q {remote} s")),
        ] {
            let script = format!("{git} {command} && echo REACHED");
            arena
                .script(&format!("git {what} {remote}"), &script, |seen| {
                    !seen.contains("REACHED")
                })
                .await?;
        }
    }
    // Git LFS first asks an object server over HTTP; that server is unreachable with or without the
    // LFS program.
    let lfs = "cd /workspace/copy; git config lfs.url http://192.0.2.1/lfs; git lfs push origin --all && echo REACHED; \
               python3 -c 'import urllib.request; urllib.request.urlopen(\"http://192.0.2.1/lfs/objects/batch\", b\"{}\", 5)' && echo REACHED";
    arena
        .script("git LFS", lfs, |seen| !seen.contains("REACHED"))
        .await?;
    Ok(())
}

const C: &str = r#"
#include <pthread.h>
#include <stdio.h>
static int sum; static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *add(void *n) { pthread_mutex_lock(&lock); sum += *(int *)n; pthread_mutex_unlock(&lock); return 0; }
int main(void) {
    pthread_t threads[16]; int numbers[16];
    for (int i = 0; i < 16; i++) { numbers[i] = i; pthread_create(&threads[i], 0, add, &numbers[i]); }
    for (int i = 0; i < 16; i++) pthread_join(threads[i], 0);
    printf("%d\n", sum); return 0;
}
"#;

/// Threads, processes, a loopback server, files, timers.
const NODE: &str = r#"
const { Worker, isMainThread, parentPort } = require("worker_threads");
if (!isMainThread) { parentPort.postMessage(6 * 7); return; }
const http = require("http"), fs = require("fs"), { execFileSync } = require("child_process");
(async () => {
  const said = await new Promise((done) => new Worker(__filename).once("message", done));
  const server = http.createServer((_, answer) => answer.end("served")).listen(0, "127.0.0.1");
  await new Promise((done) => server.once("listening", done));
  const body = await (await fetch(`http://127.0.0.1:${server.address().port}/`)).text();
  server.close();
  await fs.promises.writeFile("made", "x"); fs.watch("made").close();
  await new Promise((done) => setTimeout(done, 5));
  console.log(said, body, execFileSync("echo", ["child"]).toString().trim());
  process.exit(0);
})();
"#;

/// On one runtime only: the image is large, and the profile is the same everywhere.
#[tokio::test]
async fn compilers_runtimes_and_debuggers_work_in_a_sandbox() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&cynode_tests::Options::default()).await?;
    let client = worker.client()?;
    let mut request = SessionCreate {
        image_ref: "localhost/cynode/toolchains:latest".to_owned(),
        ..session()
    };
    request.limits = Some(cynode_api::LimitsRequest {
        memory_bytes: Some(1 << 30),
        cpus: Some(2.0),
        ..Default::default()
    });
    let id = client.create_session(&request).await?.session_id;
    for (name, text) in [("t.c", C), ("t.js", NODE)] {
        client
            .put_file(
                id,
                std::path::Path::new(name),
                text,
                &cynode_client::PutOptions::default(),
            )
            .await?;
    }
    for (script, expected) in [
        ("gcc -O2 -g -pthread -o t t.c && ./t", "120\n"),
        (
            "gdb -batch -ex 'break add' -ex run -ex 'info threads' -ex continue ./t 2>&1 | grep \
             -c 'hit Breakpoint\\|Breakpoint 1'",
            "",
        ),
        (
            "strace -f -o trace ./t && grep -c 'clone' trace | grep -qv '^0' && echo traced",
            "120\ntraced\n",
        ),
        ("node t.js", "42 served child\n"),
        (
            "cargo init -q --vcs git --name app app && cd app && cargo run -q --offline && cargo \
             test -q --offline 2>&1 | grep -c '^test result: ok'",
            "Hello, world!\n1\n",
        ),
    ] {
        let ran = client
            .exec(
                id,
                &cynode_api::ExecRequest {
                    timeout_ms: 240_000,
                    ..sh(script)
                },
            )
            .await?;
        ensure!(
            ran.exit.exit_code == Some(0) && (expected.is_empty() || ran.stdout == expected),
            "{script}: {ran:?}"
        );
    }
    Ok(())
}
