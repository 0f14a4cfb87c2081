//! Reads a secret: from a pipe or a file, or from a terminal without echo.
//!
//! Invariant: a secret is never an argument or a variable, which other processes can read, and is
//! in no message.

use std::io::{BufRead as _, Read as _};

use cynode_api::credential_limits;
use rustix::termios::LocalModes;

use crate::{failure::Failure, output, staged::unless_interrupted, terminal::TerminalMode};

/// A line end may follow the secret.
const LINE_END: usize = 2;

/// Reads one secret. A line end after it is not part of it.
pub async fn read(prompt: &str) -> Result<String, Failure> {
    unless_interrupted(async {
        let terminal = TerminalMode::change(|mode| {
            mode.local_modes.remove(LocalModes::ECHO);
            mode.local_modes.insert(LocalModes::ECHONL);
        })?;
        if terminal.is_some() {
            output::message(prompt);
        }
        let is_line = terminal.is_some();
        let bytes = tokio::task::spawn_blocking(move || read_bounded(is_line))
            .await
            .map_err(|error| Failure::internal(error.to_string()))?
            .map_err(|error| Failure::usage(format!("can't read the value: {error}")))?;
        drop(terminal);
        parse(bytes)
    })
    .await
}

fn read_bounded(is_line: bool) -> std::io::Result<Vec<u8>> {
    // One byte more than allowed tells a value that is too long.
    let limit = credential_limits::MAX_SECRET_BYTES + LINE_END + 1;
    let mut input = std::io::stdin().lock().take(limit as u64);
    let mut bytes = Vec::new();
    if is_line {
        input.read_until(b'\n', &mut bytes)?;
    } else {
        input.read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

fn parse(bytes: Vec<u8>) -> Result<String, Failure> {
    let refused = |why: &str| {
        Failure::usage(why.to_owned())
            .remedy("Pass the value alone on standard input, such as from a file.")
    };
    let mut value = String::from_utf8(bytes).map_err(|_| refused("the value is not UTF-8"))?;
    if value.ends_with('\n') {
        value.pop();
        if value.ends_with('\r') {
            value.pop();
        }
    }
    if value.is_empty() {
        return Err(refused("there is no value on standard input"));
    }
    if value.contains(['\n', '\r', '\0']) {
        return Err(refused("the value has more than one line"));
    }
    if value.len() > credential_limits::MAX_SECRET_BYTES {
        return Err(refused(&format!(
            "the value is longer than {} bytes",
            credential_limits::MAX_SECRET_BYTES
        )));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_end_is_not_part_of_the_value() {
        for text in ["correct horse", "correct horse\n", "correct horse\r\n"] {
            assert_eq!(parse(text.into()).expect("a value"), "correct horse");
        }
        let long = "x".repeat(credential_limits::MAX_SECRET_BYTES + 1);
        for bad in ["", "\n", "a\nb", "a\n\n", "a\0b", &long] {
            let refused = parse(bad.into()).expect_err(bad);
            assert!(
                bad.trim().is_empty() || !refused.message().contains(bad.trim()),
                "{refused:?}"
            );
        }
        assert!(parse(vec![0xff]).is_err());
    }
}
