//! An incremental parser for server-sent events.
//!
//! Invariant: the events do not depend on how the bytes were split. Follows the WHATWG grammar:
//! lines end in LF, CR or CRLF, a blank line ends an event, an event without data is dropped,
//! comments are keepalives.

/// One event. `id` is the last id seen, possibly on an earlier event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// `message` by default.
    pub event: String,
    pub data: String,
    pub id: Option<String>,
}

/// A line or event in the stream exceeds the limit.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event is longer than {limit} bytes")]
pub struct TooLong {
    pub limit: usize,
}

const BOM: &[u8] = "\u{feff}".as_bytes();

#[derive(Debug)]
pub struct Parser {
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    event: Vec<u8>,
    id: Option<String>,
    /// The previous line ended in CR: an LF right after it belongs to it.
    after_cr: bool,
    first_line: bool,
    limit: usize,
}

impl Default for Parser {
    fn default() -> Self {
        // Pieces of output are far smaller; this only bounds a broken or hostile server.
        Self::with_limit(64 * 1024 * 1024)
    }
}

impl Parser {
    #[must_use]
    pub fn with_limit(limit: usize) -> Self {
        Self {
            line: Vec::new(),
            data: Vec::new(),
            has_data: false,
            event: Vec::new(),
            id: None,
            after_cr: false,
            first_line: true,
            limit,
        }
    }

    /// Consumes bytes and appends the events that they complete.
    pub fn push(&mut self, mut bytes: &[u8], events: &mut Vec<Event>) -> Result<(), TooLong> {
        while !bytes.is_empty() {
            if std::mem::take(&mut self.after_cr) && bytes[0] == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let part = &bytes[..end.unwrap_or(bytes.len())];
            if self.line.len() + self.data.len() + part.len() > self.limit {
                return Err(TooLong { limit: self.limit });
            }
            self.line.extend_from_slice(part);
            let Some(end) = end else { break };
            self.after_cr = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            let line = std::mem::take(&mut self.line);
            self.take_line(&line, events);
            // Reuse the allocation for the next line.
            self.line = line;
            self.line.clear();
        }
        Ok(())
    }

    fn take_line(&mut self, mut line: &[u8], events: &mut Vec<Event>) {
        if std::mem::take(&mut self.first_line) {
            line = line.strip_prefix(BOM).unwrap_or(line);
        }
        if line.is_empty() {
            self.dispatch(events);
            return;
        }
        let (field, value) = match line.iter().position(|byte| *byte == b':') {
            Some(colon) => {
                let value = &line[colon + 1..];
                (&line[..colon], value.strip_prefix(b" ").unwrap_or(value))
            }
            None => (line, &[][..]),
        };
        match field {
            b"data" => {
                if self.has_data {
                    self.data.push(b'\n');
                }
                self.data.extend_from_slice(value);
                self.has_data = true;
            }
            b"event" => self.event = value.to_vec(),
            b"id" if !value.contains(&0) => {
                self.id = Some(String::from_utf8_lossy(value).into_owned());
            }
            // Comments have an empty field name; `retry` is unsupported.
            _ => {}
        }
    }

    fn dispatch(&mut self, events: &mut Vec<Event>) {
        let event = std::mem::take(&mut self.event);
        let data = std::mem::take(&mut self.data);
        if std::mem::take(&mut self.has_data) {
            let event = if event.is_empty() {
                "message".to_owned()
            } else {
                String::from_utf8_lossy(&event).into_owned()
            };
            events.push(Event {
                event,
                data: String::from_utf8_lossy(&data).into_owned(),
                id: self.id.clone(),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(pieces: &[&[u8]]) -> Vec<Event> {
        let mut parser = Parser::default();
        let mut events = Vec::new();
        for piece in pieces {
            parser.push(piece, &mut events).expect("short");
        }
        events
    }

    fn event(event: &str, data: &str, id: Option<&str>) -> Event {
        Event {
            event: event.into(),
            data: data.into(),
            id: id.map(Into::into),
        }
    }

    #[test]
    fn events_have_names_ids_and_data_of_several_lines() {
        let text =
            b": hello\nid: 3\nevent: stdout\ndata: {\"a\":1}\n\n:keepalive\n\ndata:x\ndata: y\n\n";
        assert_eq!(
            parse(&[text]),
            [
                event("stdout", "{\"a\":1}", Some("3")),
                event("message", "x\ny", Some("3"))
            ]
        );
    }

    #[test]
    fn every_line_ending_counts_once() {
        let expected = [event("message", "a", None), event("message", "b", None)];
        for text in [
            "data: a\n\ndata: b\n\n",
            "data: a\r\n\r\ndata: b\r\n\r\n",
            "data: a\r\rdata: b\r\r",
            "\u{feff}data: a\r\n\ndata: b\n\r\n",
        ] {
            assert_eq!(parse(&[text.as_bytes()]), expected, "{text:?}");
        }
    }

    #[test]
    fn an_unfinished_event_is_not_yielded() {
        assert_eq!(parse(&[b"data: a\n"]), []);
        assert_eq!(parse(&[b"event: x\n\n"]), []);
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut parser = Parser::with_limit(16);
        assert_eq!(
            parser.push(b"data: 0123456789012345", &mut Vec::new()),
            Err(TooLong { limit: 16 })
        );
        let mut parser = Parser::with_limit(16);
        let mut out = Vec::new();
        assert!((0..10).any(|_| parser.push(b"data: 01\n", &mut out).is_err()));
    }

    fn splits(text: &[u8], cuts: &[prop::sample::Index]) -> Vec<Vec<u8>> {
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        at.sort_unstable();
        at.insert(0, 0);
        at.push(text.len());
        at.windows(2)
            .map(|pair| text[pair[0]..pair[1]].to_vec())
            .collect()
    }

    proptest! {
        #[test]
        fn events_parse_the_same_in_any_split(
            text in prop::collection::vec(prop::sample::select(b"data: id event\r\n\r\n\n:x\xef\xbb\xbf\xc3\xa9\0".to_vec()), 0..200),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let pieces = splits(&text, &cuts);
            let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            prop_assert_eq!(parse(&pieces), parse(&[&text]));
        }

        #[test]
        fn events_round_trip_in_any_split(
            sent in prop::collection::vec(("[a-z]{1,8}", "[^\r\n]{0,40}", 0u64..1000), 0..8),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
            ending in prop::sample::select(vec!["\n", "\r\n", "\r"]),
        ) {
            let lines = sent.iter().flat_map(|(name, data, id)| {
                [
                    format!("id: {id}"),
                    format!("event: {name}"),
                    format!("data: {data}"),
                    ":".into(),
                    String::new(),
                ]
            });
            let text: String = lines.flat_map(|line| [line, ending.to_owned()]).collect();
            let pieces = splits(text.as_bytes(), &cuts);
            let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            let expected: Vec<Event> = sent
                .iter()
                .map(|(name, data, id)| event(name, data, Some(&id.to_string())))
                .collect();
            prop_assert_eq!(parse(&pieces), expected);
        }
    }
}
