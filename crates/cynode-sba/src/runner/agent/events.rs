//! Server-sent events, as model servers stream their answers.
//!
//! Invariants: the events do not depend on how the bytes are split; a line and an event have
//! bounds, so a server that streams without end takes no memory without end.

/// The data of one event.
const MAX_EVENT_BYTES: usize = 1024 * 1024;

#[derive(Debug, Default)]
pub(crate) struct EventReader {
    line: Vec<u8>,
    data: Vec<u8>,
    /// The event has data, possibly empty.
    has_data: bool,
    /// The last line ended with a carriage return, to which a line feed may belong.
    has_return: bool,
}

/// An event is longer than [`MAX_EVENT_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLong;

impl EventReader {
    /// Reads bytes; returns the data of the events that they complete.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, TooLong> {
        let mut events = Vec::new();
        for byte in bytes {
            let follows_return = std::mem::take(&mut self.has_return);
            match byte {
                b'\n' if follows_return => {}
                b'\n' | b'\r' => {
                    self.has_return = *byte == b'\r';
                    events.extend(self.end_line()?);
                }
                _ if self.line.len() == MAX_EVENT_BYTES => return Err(TooLong),
                _ => self.line.push(*byte),
            }
        }
        Ok(events)
    }

    /// The data of an event that the end of the stream completes.
    pub(crate) fn end(mut self) -> Result<Option<Vec<u8>>, TooLong> {
        // Some servers leave out the empty line at the end.
        let event = self.end_line()?;
        Ok(event.or_else(|| self.end_event()))
    }

    fn end_line(&mut self) -> Result<Option<Vec<u8>>, TooLong> {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            return Ok(self.end_event());
        }
        let (name, value) = match line.iter().position(|byte| *byte == b':') {
            Some(colon) => (&line[..colon], &line[colon + 1..]),
            None => (&line[..], &b""[..]),
        };
        if name == b"data" {
            if self.has_data {
                self.data.push(b'\n');
            }
            self.data
                .extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
            self.has_data = true;
            if self.data.len() > MAX_EVENT_BYTES {
                return Err(TooLong);
            }
        }
        Ok(None)
    }

    fn end_event(&mut self) -> Option<Vec<u8>> {
        let data = std::mem::take(&mut self.data);
        std::mem::take(&mut self.has_data).then_some(data)
    }
}

/// All events of a stream that arrives in one piece, by a plain second implementation.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn events_of(stream: &[u8]) -> Vec<Vec<u8>> {
    let text = String::from_utf8(stream.to_vec()).map_or_else(
        |_| {
            stream
                .iter()
                .map(|byte| char::from(*byte))
                .collect::<String>()
        },
        |text| text.bytes().map(char::from).collect(),
    );
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    let bytes = |text: &str| text.chars().map(|character| character as u8).collect();
    let (mut events, mut lines) = (Vec::new(), Vec::new());
    for line in text.split('\n').chain([""]) {
        if line.is_empty() {
            if !lines.is_empty() {
                events.push(bytes(&lines.join("\n")));
            }
            lines.clear();
        } else if let Some(data) = line.strip_prefix("data:") {
            lines.push(data.strip_prefix(' ').unwrap_or(data).to_owned());
        } else if line == "data" {
            lines.push(String::new());
        }
    }
    events
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(pieces: &[&[u8]]) -> Result<Vec<Vec<u8>>, TooLong> {
        let mut reader = EventReader::default();
        let mut events = Vec::new();
        for piece in pieces {
            events.extend(reader.feed(piece)?);
        }
        events.extend(reader.end()?);
        Ok(events)
    }

    #[test]
    fn events_have_lines_of_data_and_nothing_else_counts() {
        let stream = b": comment\n\nevent: x\ndata: one\r\ndata:two\r\rid: 4\n\ndata\n\ndata: last";
        let expected: [&[u8]; 3] = [b"one\ntwo", b"", b"last"];
        assert_eq!(read(&[stream]).expect("short"), expected);
        assert_eq!(read(&[b"data: x\r", b"\n\r\n"]).expect("short"), [b"x"]);
        assert!(read(&[b"{\"no\": \"event\"}"]).expect("short").is_empty());
    }

    #[test]
    fn an_event_has_a_bound() {
        let line = vec![b'x'; MAX_EVENT_BYTES];
        assert_eq!(read(&[b"data:", &line]), Err(TooLong));
        let piece = [b"data:", &line[..MAX_EVENT_BYTES / 2], b"\n"].concat();
        assert!(read(&[&piece, b"\n", &piece]).is_ok());
        assert_eq!(read(&[&piece, &piece, b"\n"]), Err(TooLong));
    }

    proptest! {
        #[test]
        fn events_do_not_depend_on_how_a_stream_is_split(
            stream in "(data|data:|data: |id:|:|x|\u{e4}|\n|\r|\r\n){0,40}",
            cut in 1_usize..9,
        ) {
            let pieces: Vec<&[u8]> = stream.as_bytes().chunks(cut).collect();
            prop_assert_eq!(read(&pieces).expect("short"), events_of(stream.as_bytes()));
        }
    }
}
