//! Strips Podman's attach error from a program's output. If a program exits before reading all of
//! its input, Podman appends an error about its broken socket to conmon to the program's own
//! output.

use bytes::Bytes;
use cynode_api::Stream;
use futures_util::{StreamExt as _, stream};

use super::{ExecOutput, RuntimeError};

/// The output without the error. Text that looks like it is held back until more output follows.
pub(super) fn strip(output: ExecOutput) -> ExecOutput {
    Box::pin(
        stream::unfold(
            (output, None),
            async |(mut output, held): (ExecOutput, Option<(Stream, Bytes)>)| {
                let pieces: Vec<Result<(Stream, Bytes), RuntimeError>> = match output.next().await {
                    None => return None,
                    Some(Err(error)) => vec![Err(error)],
                    Some(Ok((stream, mut data))) => {
                        let suspect = data.split_off(error_start(&data).unwrap_or(data.len()));
                        let pieces = held
                            .into_iter()
                            .chain([(stream, data)])
                            .filter(|(_, data)| !data.is_empty())
                            .map(Ok)
                            .collect();
                        return Some((
                            pieces,
                            (output, (!suspect.is_empty()).then_some((stream, suspect))),
                        ));
                    }
                };
                Some((pieces, (output, None)))
            },
        )
        .flat_map(stream::iter),
    )
}

/// The position at which the error would start in a piece of output.
fn error_start(data: &[u8]) -> Option<usize> {
    let start = [
        &b"Error: read unixpacket @->"[..],
        b"Error: write unixpacket @->",
    ]
    .iter()
    .find_map(|prefix| {
        data.windows(prefix.len())
            .rposition(|window| window == *prefix)
    })?;
    // The error is one line; a terminal's lines end in "\r\n".
    let line = data[start..].strip_suffix(b"\n")?;
    (!line.contains(&b'\n') && !line.contains(&b'\r')).then_some(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTACH_ERROR: &str =
        "Error: read unixpacket @->/proc/self/fd/13/attach: read: connection reset by peer\n";

    async fn stripped(pieces: &[&str]) -> String {
        let pieces: Vec<_> = pieces
            .iter()
            .map(|piece| Ok((Stream::Stderr, Bytes::from((*piece).to_owned()))))
            .collect();
        let output = strip(Box::pin(stream::iter(pieces)));
        output
            .map(|piece| String::from_utf8(piece.expect("no error").1.to_vec()).expect("text"))
            .collect::<Vec<_>>()
            .await
            .concat()
    }

    #[tokio::test]
    async fn the_attach_error_is_stripped_from_the_output() {
        for (data, expected) in [
            (ATTACH_ERROR.to_owned(), ""),
            (format!("$ {ATTACH_ERROR}"), "$ "),
            (
                format!("a\r\n{}", ATTACH_ERROR.replace("read", "write")),
                "a\r\n",
            ),
            (
                "Error: read unixpacket @-> was printed\r\n".to_owned(),
                "Error: read unixpacket @-> was printed\r\n",
            ),
            ("plain\n".to_owned(), "plain\n"),
            (String::new(), ""),
        ] {
            assert_eq!(
                stripped(&["before\n", &data]).await,
                format!("before\n{expected}"),
                "{data:?}"
            );
        }
    }

    #[tokio::test]
    async fn the_same_text_is_retained_if_output_follows() {
        assert_eq!(
            stripped(&[ATTACH_ERROR, "after\n"]).await,
            format!("{ATTACH_ERROR}after\n")
        );
        assert_eq!(stripped(&[ATTACH_ERROR, ATTACH_ERROR]).await, ATTACH_ERROR);
    }
}
