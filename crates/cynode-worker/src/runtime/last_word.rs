//! Podman's last word. When a program ends without reading all of its input, Podman writes of its broken socket into the
//! program's own output, as the last thing in it. That is between Podman and conmon, and nothing that the program said.

use bytes::Bytes;
use cynode_api::Stream;
use futures_util::{StreamExt as _, stream};

use super::{Error, ExecOutput};

/// The output without it. What looks like it is held back until it is known whether anything follows.
pub(super) fn dropped(output: ExecOutput) -> ExecOutput {
    Box::pin(
        stream::unfold(
            (output, None),
            async |(mut output, held): (ExecOutput, Option<(Stream, Bytes)>)| {
                let pieces: Vec<Result<(Stream, Bytes), Error>> = match output.next().await {
                    None => return None,
                    Some(Err(error)) => vec![Err(error)],
                    Some(Ok((stream, mut data))) => {
                        let word = data.split_off(starts(&data).unwrap_or(data.len()));
                        let pieces = held
                            .into_iter()
                            .chain([(stream, data)])
                            .filter(|(_, data)| !data.is_empty())
                            .map(Ok)
                            .collect();
                        return Some((
                            pieces,
                            (output, (!word.is_empty()).then_some((stream, word))),
                        ));
                    }
                };
                Some((pieces, (output, None)))
            },
        )
        .flat_map(stream::iter),
    )
}

/// Where it would start in a piece of output.
fn starts(data: &[u8]) -> Option<usize> {
    let start = [
        &b"Error: read unixpacket @->"[..],
        b"Error: write unixpacket @->",
    ]
    .iter()
    .find_map(|word| data.windows(word.len()).rposition(|window| window == *word))?;
    // It is one line; a terminal's own lines end in both.
    let line = data[start..].strip_suffix(b"\n")?;
    (!line.contains(&b'\n') && !line.contains(&b'\r')).then_some(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPLAINT: &str =
        "Error: read unixpacket @->/proc/self/fd/13/attach: read: connection reset by peer\n";

    async fn shown(pieces: &[&str]) -> String {
        let pieces: Vec<_> = pieces
            .iter()
            .map(|piece| Ok((Stream::Stderr, Bytes::from((*piece).to_owned()))))
            .collect();
        let output = dropped(Box::pin(stream::iter(pieces)));
        output
            .map(|piece| String::from_utf8(piece.expect("no error").1.to_vec()).expect("text"))
            .collect::<Vec<_>>()
            .await
            .concat()
    }

    #[tokio::test]
    async fn podmans_complaint_is_not_the_programs_output() {
        for (data, expected) in [
            (COMPLAINT.to_owned(), ""),
            (format!("$ {COMPLAINT}"), "$ "),
            (
                format!("a\r\n{}", COMPLAINT.replace("read", "write")),
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
                shown(&["before\n", &data]).await,
                format!("before\n{expected}"),
                "{data:?}"
            );
        }
    }

    #[tokio::test]
    async fn a_program_may_say_the_same_as_long_as_it_goes_on() {
        assert_eq!(
            shown(&[COMPLAINT, "after\n"]).await,
            format!("{COMPLAINT}after\n")
        );
        assert_eq!(shown(&[COMPLAINT, COMPLAINT]).await, COMPLAINT);
    }
}
