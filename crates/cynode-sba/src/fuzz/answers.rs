//! Answers of models, as an agent reads them.

use crate::runner::{Answer, EventReader, events_of};

/// Events do not depend on how a stream is split, and are those that a plain second reader finds.
/// Whatever they say, the answer that they add up to stays within its bounds.
pub fn answers(input: &[u8]) {
    let (cut, stream) = super::split(input);
    let cut = usize::from(cut % 16) + 1;
    let (mut reader, mut events) = (EventReader::default(), Vec::new());
    for piece in stream.chunks(cut) {
        match reader.feed(piece) {
            Ok(found) => events.extend(found),
            Err(_) => return,
        }
    }
    match reader.end() {
        Ok(last) => events.extend(last),
        Err(_) => return,
    }
    assert_eq!(
        events,
        events_of(stream),
        "the events depend on how the stream is split"
    );
    let mut answer = Answer::default();
    for event in &events {
        if answer.add(event).is_err() {
            return;
        }
        assert!(answer.is_bounded(), "an answer exceeds its bounds");
    }
    let (text, calls) = (answer.text.clone(), answer.calls.len());
    if let Ok(finished) = answer.finished() {
        assert_eq!((finished.text, finished.calls.len()), (text, calls));
    }
}
