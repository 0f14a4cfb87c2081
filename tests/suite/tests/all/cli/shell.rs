//! `session shell`: a terminal.

use std::{process::Stdio, time::Duration};

use anyhow::{Context as _, Result};
use cynode_tests::eventually;
use serde_json::{Value, json};

use super::{Cli, run};

/// Runs a program on a pseudo-terminal and plays its user. Arguments: the steps as JSON, then the
/// program. A step waits for a text, types one, or changes the size; finally the script prints what
/// it saw and how the program ended.
const PERSON: &str = r#"
import fcntl, json, os, pty, select, struct, sys, termios, time
steps, program = json.loads(sys.argv[1]), sys.argv[2:]
def resize(fd, rows, cols):
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
looked, look = os.pipe()
pid, fd = pty.fork()
if pid == 0:
    resize(0, 33, 101)
    # Not before the modes that it will change have been looked at.
    os.read(looked, 1)
    os.execv(program[0], program)
seen, start, deadline = b"", 0, time.monotonic() + 60
def pump():
    global seen
    if time.monotonic() > deadline:
        sys.exit("too late; seen: %r" % seen)
    if select.select([fd], [], [], 0.2)[0]:
        try:
            piece = os.read(fd, 65536)
        except OSError:
            piece = b""
        if not piece:
            return False
        seen += piece
    return True
modes = lambda: termios.tcgetattr(fd)[3] & (termios.ECHO | termios.ICANON)
before = modes()
os.write(look, b"!")
for kind, *value in steps:
    if kind == "expect":
        while seen.find(value[0].encode(), start) < 0:
            if not pump():
                sys.exit("it ended before %r; seen: %r" % (value[0], seen))
        start = seen.find(value[0].encode(), start) + len(value[0].encode())
    elif kind == "type":
        os.write(fd, value[0].encode())
    elif kind == "resize":
        resize(fd, *value)
    elif kind == "leave":
        os.kill(pid, 9)
while pump():
    pass
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps({"code": code, "seen": seen.decode("utf-8", "replace"), "restored": before == modes()}))
"#;

impl Cli {
    /// Runs `session shell` on a terminal and returns what its user saw.
    fn at_terminal(&self, id: &str, steps: &Value) -> Result<Value> {
        let mut command = self.command()?;
        let program = command.get_program().to_owned();
        let environment: Vec<_> = command
            .get_envs()
            .map(|(name, value)| (name.to_owned(), value.map(std::ffi::OsStr::to_owned)))
            .collect();
        command = std::process::Command::new("python3");
        for (name, value) in environment {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        run(
            command
                .args(["-c", PERSON, &steps.to_string()])
                .arg(program)
                .args(["session", "shell", id]),
            b"",
        )?
        .json()
    }
}

// proves: ISC-04, REQ-SANDBX-0102, REQ-SANDBX-0103
// part of: CYNAI.SANDBX.LongRunningSession
#[tokio::test]
async fn a_shell_is_a_terminal_that_can_be_resized_and_ends_with_its_own_code() -> Result<()> {
    let cli = Cli::new().await?;
    let id = cli.create(&["--pty"])?;
    let seen = cli.at_terminal(
        &id,
        &json!([
            ["expect", "$ "],
            [
                "type",
                "tty | cut -c1-9; stty size; pwd; id -u; echo $TERM\r"
            ],
            [
                "expect",
                "/dev/pts/\r\n33 101\r\n/workspace\r\n1000\r\nxterm-256color\r\n"
            ],
            ["resize", 40, 120],
            [
                "type",
                "while [ \"$(stty size)\" != '40 120' ]; do :; done; echo re''sized\r"
            ],
            ["expect", "resized\r\n"],
            // The program itself prints `begun`: only then does the key surely interrupt that
            // program.
            ["type", "sh -c 'echo be\\gun; exec sleep 1000'\r"],
            ["expect", "begun\r\n"],
            ["type", "\u{3}"],
            ["expect", "$ "],
            ["type", "echo interrupted $?\r"],
            ["expect", "interrupted 130\r\n"],
            // No inbound network: only loopback, and only the proxies (3128, 11434, 11480) listen.
            [
                "type",
                "ls /sys/class/net | xargs echo net; cat /proc/net/tcp /proc/net/tcp6 | grep \
                 ' 0A ' | cut -d: -f3 | cut -c1-4 | sort -u | xargs echo\r"
            ],
            ["expect", "net lo\r\n0C38 2CAA 2CD8\r\n"],
            ["type", "exit 7\r"]
        ]),
    )?;
    assert_eq!(
        (&seen["code"], &seen["restored"]),
        (&7.into(), &true.into()),
        "{seen}"
    );

    // The next shell is a terminal again, and Ctrl-D leaves it.
    let seen = cli.at_terminal(&id, &json!([["expect", "$ "], ["type", "\u{4}"]]))?;
    assert_eq!(
        (&seen["code"], &seen["restored"]),
        (&0.into(), &true.into()),
        "{seen}"
    );
    Ok(())
}

#[tokio::test]
async fn a_shell_without_a_local_terminal_reads_plain_input() -> Result<()> {
    let cli = Cli::new().await?;
    let id = cli.create(&["--pty"])?;
    let ran = cli.run_with(&["session", "shell", &id], b"echo ha''llo\nexit 3\n")?;
    assert!(
        ran.code == Some(3) && ran.text().contains("hallo"),
        "{ran:?}"
    );
    let ran = cli.run(&[
        "session",
        "shell",
        &id,
        "--",
        "sh",
        "-c",
        "echo \"$0 $1\"; exit 4",
        "a b",
        "c",
    ])?;
    assert_eq!(
        (ran.code, ran.text()),
        (Some(4), "a b c\r\n".to_owned()),
        "{ran:?}"
    );
    let ran = cli.run(&["session", "shell", &id, "none-such"])?;
    assert!(ran.code.is_some_and(|code| code != 0), "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn a_session_has_a_terminal_only_on_request() -> Result<()> {
    let cli = Cli::new().await?;
    let id = cli.create(&[])?;
    for arguments in [
        vec!["session", "shell", &id],
        vec!["session", "shell", "--pty", &id],
    ] {
        let ran = cli.run(&arguments)?;
        assert_eq!(
            (ran.failure(), ran.text().as_str()),
            ((77, "pty_not_allowed".to_owned()), "")
        );
        assert!(
            ran.stderr.contains("Create the session with --pty"),
            "{ran:?}"
        );
    }
    let exec = cli.run(&["session", "exec", "--pty", &id, "top"])?;
    assert_eq!(exec.failure(), (64, "usage".to_owned()));
    assert!(exec.stderr.contains("cynode session shell"), "{exec:?}");
    Ok(())
}

#[tokio::test]
async fn processes_in_a_terminal_end_when_its_user_disconnects() -> Result<()> {
    let cli = Cli::new().await?;
    let id = cli.create(&["--pty"])?;
    let seen = cli.at_terminal(
        &id,
        &json!([
            ["expect", "$ "],
            ["type", "echo be''gun; sleep 4444\r"],
            ["expect", "begun\r\n"],
            ["leave"]
        ]),
    )?;
    assert_eq!(seen["code"], -9);
    eventually(
        "the terminal's processes end",
        Duration::from_secs(20),
        async || Ok(!cli.sh(&id, "ps -o args")?.contains("sleep 4444\n")),
    )
    .await?;

    // So does a shell whose cynode receives SIGTERM.
    let mut child = cli
        .command()?
        .args([
            "session",
            "shell",
            &id,
            "--",
            "sh",
            "-c",
            "echo begun; sleep 4545",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut stdout = std::io::BufReader::new(child.stdout.take().context("stdout")?);
    std::io::BufRead::read_line(&mut stdout, &mut String::new())?;
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(child.id().cast_signed()).context("a pid")?,
        rustix::process::Signal::TERM,
    )?;
    assert_eq!(child.wait()?.code(), Some(143));
    eventually(
        "the terminal's processes end",
        Duration::from_secs(20),
        async || Ok(!cli.sh(&id, "ps -o args")?.contains("sleep 4545\n")),
    )
    .await
}
