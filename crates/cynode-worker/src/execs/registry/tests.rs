use super::*;

fn request(argument: &str) -> ExecRequest {
    ExecRequest {
        argv: vec!["true".to_owned(), argument.to_owned()],
        timeout_ms: 1_000,
        ..Default::default()
    }
}

fn run(execs: &Arc<SessionExecs>, argument: &str) -> Arc<Exec> {
    let Ok(OpenExec::New(exec)) = execs.register(&request(argument), "/".to_owned(), None) else {
        panic!("a new exec")
    };
    execs.finish(&exec, lost_exit(&exec));
    exec
}

#[test]
fn a_long_command_is_truncated_to_whole_arguments() {
    let word = "x".repeat(MAX_SHOWN_ARGV_BYTES / 4 - 1);
    assert_eq!(
        truncate_argv(&vec![word.clone(); 4]),
        (vec![word.clone(); 4], false)
    );
    assert_eq!(truncate_argv(&vec![word.clone(); 5]), (vec![word; 4], true));
    let words = vec!["x".to_owned(); MAX_ARGV + 1];
    assert_eq!(truncate_argv(&words[1..]), (words[1..].to_vec(), false));
    assert_eq!(truncate_argv(&words), (words[1..].to_vec(), true));
}

#[tokio::test]
async fn another_input_is_another_request() {
    let directory = tempfile::tempdir().expect("a directory");
    let execs = SessionExecs::open(directory.path()).expect("opens");
    let request = ExecRequest {
        exec_id: Some(ExecId::generate()),
        ..request("a")
    };
    let register = |input| execs.register(&request, "/".to_owned(), input);
    assert!(matches!(register(Some("aa")), Ok(OpenExec::New(_))));
    assert!(matches!(register(Some("aa")), Ok(OpenExec::Existing(_))));
    assert!(register(Some("bb")).is_err() && register(None).is_err());
}

#[tokio::test]
// invariant: bounded
async fn long_commands_are_forgotten_before_they_fill_the_memory() {
    let directory = tempfile::tempdir().expect("a directory");
    let execs = Arc::new(SessionExecs::open(directory.path()).expect("opens"));
    let argument = "x".repeat(500 * 1024);
    for _ in 0..99 {
        run(&execs, &argument);
    }
    let last = run(&execs, &argument).id();
    execs.trim();
    let retained: usize = execs.list().iter().map(|exec| exec.record_bytes()).sum();
    assert!(
        (MAX_RECORD_BYTES / 2..=MAX_RECORD_BYTES).contains(&retained),
        "{retained}"
    );
    assert!(execs.get(last).is_ok(), "the newest exec was forgotten");
    let log = fs_err::metadata(directory.path().join("execs/log"))
        .expect("a log")
        .len();
    assert!(
        log < COMPACT_THRESHOLD_BYTES + 2 * MAX_RECORD_BYTES as u64,
        "{log}"
    );
}

#[tokio::test]
async fn an_ended_exec_that_nobody_waits_for_holds_no_output_in_memory() {
    let directory = tempfile::tempdir().expect("a directory");
    let execs = Arc::new(SessionExecs::open(directory.path()).expect("opens"));
    let Ok(OpenExec::New(exec)) = execs.register(&request("a"), "/".to_owned(), None) else {
        panic!("a new exec")
    };
    let watching = exec.watch();
    exec.append_output(&crate::execs::Piece {
        seq: 1,
        at_ms: 0,
        stream: cynode_api::Stream::Stdout,
        data: b"text".to_vec(),
    })
    .expect("stored");
    execs.finish(
        &exec,
        ExecExit {
            bytes: cynode_api::ByteCounts {
                stdout: 4,
                stderr: 0,
            },
            ..lost_exit(&exec)
        },
    );
    assert!(exec.inner.lock().collector.is_some());
    drop(watching);
    assert!(exec.inner.lock().collector.is_none());
    let again = exec.result().await.expect("the same answer from the files");
    assert_eq!(
        (again.stdout.as_str(), again.truncated.stdout),
        ("text", false)
    );
}

#[tokio::test]
async fn a_streamed_exec_stores_its_output_once_and_still_has_a_result() {
    let directory = tempfile::tempdir().expect("a directory");
    let execs = Arc::new(SessionExecs::open(directory.path()).expect("opens"));
    let Ok(OpenExec::New(exec)) = execs.register(&request("a"), "/".to_owned(), None) else {
        panic!("a new exec")
    };
    exec.skip_collecting();
    // More than a collector holds in memory.
    let text = vec![b'x'; 200_000];
    write(&exec, &text);
    assert!(exec.inner.lock().collector.is_none());
    let exit = ExecExit {
        bytes: cynode_api::ByteCounts {
            stdout: 200_000,
            stderr: 0,
        },
        ..lost_exit(&exec)
    };
    execs.finish(&exec, exit);
    let result = exec
        .result()
        .await
        .expect("a result from the stored output");
    assert!(result.stdout.as_bytes() == text && !result.truncated.stdout);
}

fn write(exec: &Exec, text: &[u8]) {
    let seq = exec.last_seq() + 1;
    exec.append_output(&crate::execs::Piece {
        seq,
        at_ms: 0,
        stream: cynode_api::Stream::Stdout,
        data: text.to_vec(),
    })
    .expect("stored");
}

#[tokio::test]
async fn the_hash_of_the_output_survives_a_restart_while_all_output_is_kept() {
    for background in [false, true] {
        let directory = tempfile::tempdir().expect("a directory");
        let execs = Arc::new(SessionExecs::open(directory.path()).expect("opens"));
        let request = ExecRequest {
            background,
            ..request("a")
        };
        let Ok(OpenExec::New(exec)) = execs.register(&request, "/".to_owned(), None) else {
            panic!("a new exec")
        };
        write(&exec, b"he");
        drop((exec, execs));

        let execs = Arc::new(SessionExecs::open(directory.path()).expect("opens"));
        let exec = execs.running().pop().expect("it runs");
        write(&exec, b"llo");
        let bytes = cynode_api::ByteCounts {
            stdout: 5,
            stderr: 0,
        };
        let sha256 = exec.sha256(bytes).expect("known");
        assert_eq!(
            (sha256.stdout, sha256.stderr),
            (
                hex::encode(Sha256::digest("hello")),
                hex::encode(Sha256::digest(""))
            )
        );
        assert_eq!(
            exec.sha256(cynode_api::ByteCounts {
                stdout: 6,
                stderr: 0
            }),
            None,
            "incomplete output has a hash"
        );
        execs.finish(
            &exec,
            ExecExit {
                bytes,
                sha256: exec.sha256(bytes),
                ..lost_exit(&exec)
            },
        );

        let execs = SessionExecs::open(directory.path()).expect("opens");
        let exit = execs
            .get(exec.id())
            .expect("known")
            .to_api()
            .exit
            .expect("it has ended");
        assert_eq!(
            exit.sha256.map(|sha256| sha256.stdout),
            Some(hex::encode(Sha256::digest("hello")))
        );
    }
}

#[tokio::test]
async fn output_dropped_before_a_restart_has_no_hash() {
    let directory = tempfile::tempdir().expect("a directory");
    let execs = Arc::new(SessionExecs::open(directory.path()).expect("opens"));
    let Ok(OpenExec::New(exec)) = execs.register(&request("a"), "/".to_owned(), None) else {
        panic!("a new exec")
    };
    let piece = vec![b'x'; 64 * 1024];
    let mut all = Sha256::new();
    for _ in 0..400 {
        exec.make_room().await;
        write(&exec, &piece);
        all.update(&piece);
    }
    let bytes = cynode_api::ByteCounts {
        stdout: 400 * 64 * 1024,
        stderr: 0,
    };
    assert_eq!(
        exec.sha256(bytes).map(|sha256| sha256.stdout),
        Some(hex::encode(all.finalize())),
        "the hash does not cover all output"
    );
    drop((exec, execs));
    let execs = SessionExecs::open(directory.path()).expect("opens");
    assert_eq!(execs.running().pop().expect("it runs").sha256(bytes), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compacting_the_log_never_loses_an_end() {
    let directory = tempfile::tempdir().expect("a directory");
    let execs = Arc::new(SessionExecs::open(directory.path()).expect("opens"));
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let compacting = {
        let (execs, stop) = (Arc::clone(&execs), Arc::clone(&stop));
        tokio::task::spawn_blocking(move || {
            while !stop.load(Ordering::SeqCst) {
                execs.compact().expect("writes");
            }
        })
    };
    for _ in 0..1_500 {
        run(&execs, "x");
    }
    stop.store(true, Ordering::SeqCst);
    compacting.await.expect("ends");
    let again = SessionExecs::open(directory.path()).expect("opens");
    assert_eq!(
        again.running().len(),
        0,
        "an exec that had ended runs again after a restart"
    );
}

#[tokio::test]
async fn a_half_written_line_loses_only_that_line() {
    let directory = tempfile::tempdir().expect("a directory");
    let execs = Arc::new(SessionExecs::open(directory.path()).expect("opens"));
    let first = run(&execs, "a").id();
    {
        // A full disk truncated a line.
        let mut log = execs.log.lock();
        log.file
            .as_mut()
            .expect("open")
            .write_all(b"{\"start\":{\"exec_id\"")
            .expect("writes");
        log.torn = true;
    }
    let second = run(&execs, "b").id();
    let again = SessionExecs::open(directory.path()).expect("opens");
    assert!(
        again.get(first).is_ok_and(|exec| !exec.is_running())
            && again.get(second).is_ok_and(|exec| !exec.is_running())
    );
}
