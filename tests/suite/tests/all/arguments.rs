//! Long commands and long input: up to the kernel's limits, and not beyond.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use cynode_api::{
    ErrorCode, ExecRequest, ExecResult, SessionId,
    exec_limits::{MAX_ARGUMENT_BYTES, MAX_ARGUMENT_LENGTH, MAX_FORM_STDIN_BYTES, POINTER_BYTES},
};
use cynode_client::{Error, SessionClient};
use cynode_tests::{Answer, Http, Options, World, exec, session, sh};
use futures_util::stream;
use http::Method;
use serde_json::json;
use sha2::{Digest as _, Sha256};

/// An allowance for the sandbox's own environment and the program's path.
const ENVIRONMENT_ALLOWANCE: usize = 8 * 1024;

fn cost(request: &ExecRequest) -> usize {
    let argv = request
        .argv
        .iter()
        .map(|word| word.len() + 1 + POINTER_BYTES)
        .sum::<usize>();
    argv + request
        .env
        .iter()
        .map(|(name, value)| name.len() + value.len() + 2 + POINTER_BYTES)
        .sum::<usize>()
}

/// A command that counts its arguments and their bytes, padded with one-letter arguments up to a
/// cost.
fn counting(total: usize, length: usize, letter: &str) -> ExecRequest {
    let mut request = exec(["/bin/sh", "-c", "echo $#; printf %s \"$*\" | wc -c", "sh"]);
    let each = length + 1 + POINTER_BYTES;
    request
        .argv
        .extend(vec![letter.repeat(length); (total - cost(&request)) / each]);
    let left = total - cost(&request);
    match left.checked_sub(1 + POINTER_BYTES) {
        Some(last) => request.argv.push(letter.repeat(last)),
        // Too little room for another argument: extend the name instead.
        None => request.argv[3].push_str(&"h".repeat(left)),
    }
    assert_eq!(cost(&request), total);
    request
}

fn problem(result: Result<ExecResult, Error>) -> Result<Box<cynode_api::Problem>> {
    match result {
        Err(Error::Problem(problem)) => Ok(problem),
        other => anyhow::bail!("{other:?}"),
    }
}

async fn assert_counted(
    client: &SessionClient,
    id: SessionId,
    request: &ExecRequest,
) -> Result<()> {
    let words: Vec<usize> = request.argv[4..].iter().map(String::len).collect();
    let counted = client.exec(id, request).await?.stdout;
    assert_eq!(
        counted,
        format!(
            "{}\n{}\n",
            words.len(),
            words.iter().sum::<usize>() + words.len() - 1
        )
    );
    Ok(())
}

#[tokio::test]
async fn a_command_may_be_as_long_as_the_kernel_allows() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let id = client.create_session(&session()).await?.session_id;
    let longest = MAX_ARGUMENT_LENGTH - 1;

    // Long arguments, many arguments, and characters that JSON escapes with six bytes.
    assert_counted(
        &client,
        id,
        &counting(MAX_ARGUMENT_BYTES - ENVIRONMENT_ALLOWANCE, longest, "x"),
    )
    .await?;
    let many = counting(MAX_ARGUMENT_BYTES - ENVIRONMENT_ALLOWANCE, 1, "x");
    ensure!(many.argv.len() > 200_000, "{}", many.argv.len());
    assert_counted(&client, id, &many).await?;
    assert_counted(
        &client,
        id,
        &counting(MAX_ARGUMENT_BYTES - ENVIRONMENT_ALLOWANCE, longest, "\u{1}"),
    )
    .await?;
    // Lists show no more of the arguments than before.
    let shown = client.list_execs(id).await?.items;
    ensure!(
        shown
            .iter()
            .all(|exec| exec.argv_truncated && exec.argv.len() <= 4_096),
        "{}",
        shown.len()
    );

    // This fits by our count but not by the kernel's, which includes the sandbox's own variables.
    let refused = problem(
        client
            .exec(id, &counting(MAX_ARGUMENT_BYTES, longest, "x"))
            .await,
    )?;
    assert_eq!(
        (refused.code.as_str(), &refused.extensions["errno"]),
        ("exec_failed", &json!("E2BIG")),
        "{refused:?}"
    );
    let refused = problem(
        client
            .exec(id, &counting(MAX_ARGUMENT_BYTES + 1, longest, "x"))
            .await,
    )?;
    ensure!(
        refused.is(ErrorCode::TooLarge) && refused.detail.contains("argv and env"),
        "{refused:?}"
    );

    // One argument, one variable.
    let mut request = sh("printf %s \"$LONG\" | wc -c");
    request
        .env
        .insert("LONG".to_owned(), "v".repeat(longest - "LONG=".len()));
    assert_eq!(
        client.exec(id, &request).await?.stdout,
        format!("{}\n", longest - 5)
    );
    request
        .env
        .insert("LONG".to_owned(), "v".repeat(longest - 4));
    let refused = problem(client.exec(id, &request).await)?;
    ensure!(
        refused.is(ErrorCode::TooLarge) && refused.detail.starts_with("env.LONG: "),
        "{refused:?}"
    );
    let refused = problem(
        client
            .exec(id, &exec(["echo".to_owned(), "w".repeat(longest + 1)]))
            .await,
    )?;
    ensure!(
        refused.is(ErrorCode::TooLarge) && refused.detail.starts_with("argv[1]: "),
        "{refused:?}"
    );
    Ok(())
}

/// Deterministic bytes of a given length, and their hash.
fn input(size: usize) -> (Vec<Bytes>, String) {
    let block = Bytes::from(
        (0_u32..262_144)
            .flat_map(|number| (number.wrapping_mul(2_654_435_761)).to_be_bytes())
            .collect::<Vec<u8>>(),
    );
    let pieces: Vec<Bytes> = (0..size.div_ceil(block.len()))
        .map(|number| block.slice(..block.len().min(size - number * block.len())))
        .collect();
    let mut hash = Sha256::new();
    for piece in &pieces {
        hash.update(piece);
    }
    (pieces, hex::encode(hash.finalize()))
}

#[tokio::test]
async fn input_of_any_length_up_to_a_limit_is_one_call() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let id = client.create_session(&session()).await?.session_id;
    let send = async |size: usize, request: &ExecRequest| {
        let (pieces, sha256) = input(size);
        (
            client
                .exec_with_input(id, request, stream::iter(pieces.into_iter().map(Ok)))
                .await,
            sha256,
        )
    };
    for size in [0, 1, 300_000, usize::try_from(MAX_FORM_STDIN_BYTES)?] {
        let (result, sha256) = send(
            size,
            &ExecRequest {
                timeout_ms: 120_000,
                ..sh("sha256sum; echo end")
            },
        )
        .await;
        assert_eq!(result?.stdout, format!("{sha256}  -\nend\n"), "{size}");
    }
    let marked = sh("touch started; cat > /dev/null");
    let refused = problem(
        send(usize::try_from(MAX_FORM_STDIN_BYTES)? + 1, &marked)
            .await
            .0,
    )?;
    ensure!(
        refused.is(ErrorCode::TooLarge) && refused.detail.starts_with("stdin: "),
        "{refused:?}"
    );

    // A caller that disconnects has started nothing.
    let http = Http::new(&worker)?;
    let path = format!("/v1/worker/sessions/{id}/exec");
    let post = |body: &'static str| {
        http.request(Method::POST, &path)
            .header("content-type", "multipart/form-data; boundary=B")
            .body(body)
    };
    for (body, said) in [
        (
            "--B\r\nContent-Disposition: form-data; name=\"request\"\r\n\r\n{\"argv\":[\"touch\",\"started\"],\"timeout_ms\":1000}\r\n--B\r\nContent-Disposition: form-data; name=\"stdin\"\r\n\r\nhalf",
            "ends before its last boundary",
        ),
        (
            "--B\r\nContent-Disposition: form-data; name=\"stdin\"\r\n\r\nx\r\n--B--",
            "'request' must come first",
        ),
        (
            "--B\r\nContent-Disposition: form-data; name=\"request\"\r\n\r\n{\"argv\":[\"touch\",\"started\"],\"timeout_ms\":1000}\r\n--B--",
            "'stdin' is missing",
        ),
        (
            "--B\r\nContent-Disposition: form-data; name=\"request\"\r\n\r\n{\"argv\":[\"touch\",\"started\"],\"timeout_ms\":1000,\"stdin\":\"x\"}\r\n--B\r\nContent-Disposition: form-data; name=\"stdin\"\r\n\r\nx\r\n--B--",
            "stdin or stdin_b64",
        ),
        (
            "--B\r\nContent-Disposition: form-data; \
             name=\"request\"\r\n\r\n{\"argv\":[]}\r\n--B\r\nContent-Disposition: form-data; \
             name=\"stdin\"\r\n\r\nx\r\n--B--",
            "timeout_ms",
        ),
    ] {
        let answer = Answer::of(post(body)).await?;
        ensure!(
            answer.status == 400 && answer.problem()?.detail.contains(said),
            "{said}: {}",
            String::from_utf8_lossy(&answer.body)
        );
    }
    assert_eq!(client.exec(id, &sh("ls -A")).await?.stdout, "");

    // An identical request attaches to the same command; other input makes it another request.
    let once = ExecRequest {
        exec_id: Some(cynode_api::ExecId::generate()),
        ..sh("cat >> twice")
    };
    send(10, &once).await.0?;
    send(10, &once).await.0?;
    assert_eq!(client.exec(id, &sh("wc -c < twice")).await?.stdout, "10\n");
    let refused = problem(send(11, &once).await.0)?;
    ensure!(refused.is(ErrorCode::ExecIdInUse), "{refused:?}");

    // A command that reads nothing ends normally; its input is discarded.
    let (result, _) = send(
        50 << 20,
        &ExecRequest {
            timeout_ms: 30_000,
            ..sh("exit 7")
        },
    )
    .await;
    assert_eq!(result?.exit.exit_code, Some(7));
    cynode_tests::eventually("no input is kept", Duration::from_secs(30), async || {
        let open = std::process::Command::new("sh")
            .args([
                "-c",
                &format!("ls -l /proc/{}/fd | grep -c deleted", worker.pid()),
            ])
            .output()?;
        Ok(String::from_utf8_lossy(&open.stdout).trim() == "0")
    })
    .await
    .context("files without a name")
}
