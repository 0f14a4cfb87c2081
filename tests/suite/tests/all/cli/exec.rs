//! `session exec`: output, input and exit as if the command ran locally.

use std::{
    io::Read as _,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use cynode_tests::eventually;
use rustix::process::{Pid, Signal, kill_process};
use sha2::{Digest as _, Sha256};

use super::{Cli, begin_exec, run};

// part of: CYNAI.SANDBX.RuntimeContractBaseline
#[tokio::test]
async fn exec_exits_like_the_command_in_the_sandbox() -> Result<()> {
    let cli = Cli::new().await?;
    let id = cli.create(&[])?;
    let exec =
        |arguments: &[&str]| cli.run(&[&["session", "exec", id.as_str()], arguments].concat());
    let sh = |script: &str| exec(&["--", "sh", "-c", script]);
    for (script, code) in [
        ("exit 0", 0),
        ("exit 7", 7),
        ("exit 255", 255),
        ("kill -9 $$", 137),
        ("kill -TERM $$", 143),
        ("kill -SEGV $$", 139),
        ("exit 69", 69),
    ] {
        let ran = sh(script)?;
        assert_eq!(
            (ran.code, ran.stderr.as_str()),
            (Some(code), ""),
            "{script}: {ran:?}"
        );
    }
    let ran = sh("echo out; echo err >&2; exit 3")?;
    assert_eq!(
        (ran.code, ran.text(), ran.stderr.as_str()),
        (Some(3), "out\n".to_owned(), "err\n")
    );
    assert_eq!(
        exec(&["none-such"])?.failure(),
        (127, "exec_failed".to_owned())
    );
    assert_eq!(
        exec(&["/etc/passwd"])?.failure(),
        (126, "exec_failed".to_owned())
    );
    assert_eq!(
        exec(&["--cwd", "/nowhere", "true"])?.failure(),
        (127, "exec_failed".to_owned())
    );
    assert_eq!(
        exec(&[
            "-w",
            "/tmp",
            "-e",
            "A=b c",
            "--",
            "sh",
            "-c",
            "pwd; echo $A"
        ])?
        .success()?,
        "/tmp\nb c\n"
    );
    // Arguments after the command belong to the command.
    assert_eq!(
        exec(&["echo", "--output", "json", "-i"])?.success()?,
        "--output json -i\n"
    );

    let json = exec(&["--output", "json", "--", "sh", "-c", "echo out; exit 4"])?;
    assert_eq!(json.code, Some(4));
    let result: serde_json::Value = serde_json::from_slice(&json.stdout)?;
    assert_eq!(
        (&result["exit_code"], &result["stdout"]),
        (&4.into(), &"out\n".into())
    );

    // Raw to a pipe: every byte value, and a large volume.
    let bytes =
        sh("i=0; while [ $i -lt 256 ]; do printf \"\\\\$(printf %o $i)\"; i=$((i+1)); done")?;
    assert_eq!(bytes.stdout, (0..=255).collect::<Vec<u8>>());
    let much = sh("seq 1 600000")?;
    let expected = (1..=600_000)
        .map(|number: u32| number.to_string())
        .collect::<Vec<_>>()
        .join("\n")
        + "\n";
    assert_eq!(
        (
            much.stdout.len(),
            Sha256::digest(&much.stdout) == Sha256::digest(&expected)
        ),
        (expected.len(), true)
    );

    // A background command keeps running, and its id is printed.
    let begun = exec(&["--detach", "--", "sh", "-c", "echo x > made; sleep 300"])?.success()?;
    assert!(
        begun.trim_end().parse::<cynode_api::ExecId>().is_ok(),
        "{begun:?}"
    );
    eventually(
        "the background command has started",
        Duration::from_secs(10),
        async || Ok(exec(&["cat", "made"])?.code == Some(0)),
    )
    .await
}

// proves: ISC-24
#[tokio::test]
async fn a_command_that_blocks_on_a_prompt_is_ended_by_its_deadline() -> Result<()> {
    let cli = Cli::new().await?;
    let id = cli.create(&[])?;
    // The test keeps the input open and writes nothing.
    let mut child = cli
        .command()?
        .args([
            "session",
            "exec",
            &id,
            "-i",
            "--timeout",
            "500ms",
            "--",
            "sh",
            "-c",
            "printf 'Password: '; read answer",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let held = child.stdin.take().context("stdin")?;
    let begun = Instant::now();
    let output = child.wait_with_output()?;
    drop(held);
    assert_eq!(
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).as_ref()
        ),
        (Some(124), "Password: ")
    );
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("timed out")
            && begun.elapsed() < Duration::from_secs(20)
    );
    // Without -i the command reads end-of-file at once.
    assert_eq!(
        cli.run_with(
            &[
                "session",
                "exec",
                &id,
                "--",
                "sh",
                "-c",
                "read answer || echo nobody"
            ],
            b"here\n"
        )?
        .success()?,
        "nobody\n"
    );
    // All processes that it started are gone too.
    assert_eq!(
        cli.run(&[
            "session",
            "exec",
            &id,
            "--timeout",
            "300ms",
            "--",
            "sh",
            "-c",
            "sleep 4242 & sleep 4242"
        ])?
        .code,
        Some(124)
    );
    eventually("no process is left", Duration::from_secs(10), async || {
        Ok(!cli
            .sh(&id, "ps -o args")?
            .lines()
            .any(|line| line == "sleep 4242"))
    })
    .await
}

#[tokio::test]
async fn input_is_forwarded_to_its_end() -> Result<()> {
    let cli = Cli::new().await?;
    let id = cli.create(&[])?;
    let input: Vec<u8> = (0..3_000_000_u32)
        .flat_map(|number| [number.to_le_bytes()[0], number.to_le_bytes()[1] ^ 0x5a])
        .collect();
    let expected = hex::encode(Sha256::digest(&input));
    assert_eq!(
        cli.run_with(&["session", "exec", &id, "-i", "sha256sum"], &input)?
            .success()?,
        format!("{expected}  -\n")
    );
    let echoed = cli.run_with(&["session", "exec", &id, "-i", "cat"], &input)?;
    assert!(
        echoed.code == Some(0) && echoed.stdout == input,
        "{} bytes came back",
        echoed.stdout.len()
    );
    let json = cli
        .run_with(
            &["session", "exec", &id, "-i", "--output", "json", "wc", "-c"],
            &input[..1_000_000],
        )?
        .json()?;
    assert_eq!(json["stdout"].as_str().map(str::trim), Some("1000000"));
    // A command that stops reading its input ends normally.
    assert_eq!(
        cli.run_with(
            &["session", "exec", &id, "-i", "head", "-c", "3"],
            b"abcdef"
        )?
        .success()?,
        "abc"
    );
    assert_eq!(
        cli.run_with(&["session", "exec", &id, "-i", "true"], &input)?
            .code,
        Some(0)
    );
    Ok(())
}

#[tokio::test]
async fn a_signal_or_a_reader_that_leaves_reaches_the_command() -> Result<()> {
    let cli = Cli::new().await?;
    let id = cli.create(&[])?;
    let begin = |script: &str| begin_exec(cli.command()?, &id, script);
    let signal = |child: &std::process::Child, signal: Signal| -> Result<()> {
        Ok(kill_process(
            Pid::from_raw(child.id().cast_signed()).context("a pid")?,
            signal,
        )?)
    };

    // Ctrl-C interrupts the command once and lets it end.
    let (mut child, mut stdout) =
        begin("trap 'echo interrupted; exit 42' INT; echo begun; while :; do sleep 0.05; done")?;
    signal(&child, Signal::INT)?;
    assert_eq!(child.wait()?.code(), Some(42));
    let mut rest = String::new();
    stdout.read_to_string(&mut rest)?;
    assert_eq!(rest, "interrupted\n");
    // TERM kills the whole command.
    let (mut child, _stdout) = begin("echo begun; sleep 4343 & sleep 4343")?;
    signal(&child, Signal::TERM)?;
    assert_eq!(child.wait()?.code(), Some(143));
    // A reader that closes the pipe early, like `head`.
    let (mut child, stdout) = begin("echo begun; while :; do echo more; done")?;
    drop(stdout);
    assert_eq!(child.wait()?.code(), Some(141));
    eventually(
        "the signalled processes are gone",
        Duration::from_secs(20),
        async || {
            let left = run(
                cli.command()?
                    .args(["session", "exec", &id, "--", "ps", "-o", "args"]),
                b"",
            )?
            .success()?;
            Ok(!left.contains("sleep 4343") && !left.contains("echo more"))
        },
    )
    .await
}
