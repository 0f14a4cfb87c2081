//! Reads lines of a file.
//!
//! Invariant: content and hash come from one pass over the file.

use std::fs::File;

use rustix::{
    fs::{OFlags, fstat},
    io::Errno,
};
use serde_json::json;

use super::{
    super::{
        digest,
        error::{Failure, FailureContext, Outcome},
        path,
        read::MAX_HASHED_FOR_RANGE_BYTES,
    },
    Output, Workspace, failure,
};

/// Lines of a file, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LineRange {
    pub(crate) start: u64,
    /// Inclusive.
    pub(crate) end: Option<u64>,
}

impl Workspace {
    pub(super) fn read(
        &self,
        path: &[u8],
        lines: LineRange,
        max_bytes: u64,
    ) -> Outcome<(Output, Vec<u8>)> {
        let parts = self.parts(path)?;
        if parts.is_empty() || path.ends_with(b"/") {
            return Err(failure(Errno::ISDIR, "reading", path));
        }
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = self
            .open()?
            .open_below(&parts.join(&b'/'), flags)
            .map_err(|errno| failure(errno, "reading", path))?;
        let stat = fstat(&file).doing("inspecting", path)?;
        if path::kind(&stat) != cynode_api::FileType::File {
            return Err(path::not_a_file(super::as_path(path), path::kind(&stat)));
        }
        let file = File::from(file);
        let mut size = path::size(&stat);
        let mut hasher = (size <= MAX_HASHED_FOR_RANGE_BYTES).then(digest::Hasher::default);
        let mut selection = Selection::new(lines, max_bytes);
        let mut count = 0;
        let read = digest::for_each_chunk(&file, 0, size, |piece| {
            count += piece.len() as u64;
            selection.feed(piece);
            match &mut hasher {
                Some(hasher) => hasher.update(piece),
                None if selection.is_complete() => return Err(Stop::Complete),
                None => {}
            }
            Ok(())
        });
        match read {
            // It may have become shorter.
            Ok(()) => size = count,
            Err(Stop::Complete) => {}
            Err(Stop::Failed(error)) => return Err(Failure::io(&error, "reading", path)),
        }
        let value = json!({
            "path": String::from_utf8_lossy(&parts.join(&b'/')),
            "size": size,
            "sha256": hasher.map(digest::Hasher::hex),
            "truncated": selection.is_truncated,
        });
        let output = Output {
            value,
            truncated: selection.is_truncated,
        };
        Ok((output, selection.content))
    }
}

/// Why reading stops before the end of the file.
enum Stop {
    Complete,
    Failed(std::io::Error),
}

impl From<std::io::Error> for Stop {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(error)
    }
}

/// The requested lines, up to a size.
struct Selection {
    lines: LineRange,
    max_bytes: u64,
    line: u64,
    content: Vec<u8>,
    is_truncated: bool,
}

impl Selection {
    const fn new(lines: LineRange, max_bytes: u64) -> Self {
        Self {
            lines,
            max_bytes,
            line: 1,
            content: Vec::new(),
            is_truncated: false,
        }
    }

    fn is_complete(&self) -> bool {
        self.is_truncated || self.lines.end.is_some_and(|end| self.line > end)
    }

    fn feed(&mut self, piece: &[u8]) {
        for segment in piece.split_inclusive(|byte| *byte == b'\n') {
            if self.is_complete() {
                return;
            }
            if self.line >= self.lines.start {
                let room = self.max_bytes - self.content.len() as u64;
                let fits =
                    usize::try_from(room).map_or(segment.len(), |room| room.min(segment.len()));
                self.content.extend_from_slice(&segment[..fits]);
                self.is_truncated = fits < segment.len();
            }
            self.line += u64::from(segment.ends_with(b"\n"));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn select(pieces: &[&[u8]], lines: LineRange, max_bytes: u64) -> (Vec<u8>, bool) {
        let mut selection = Selection::new(lines, max_bytes);
        for piece in pieces {
            selection.feed(piece);
        }
        (selection.content, selection.is_truncated)
    }

    proptest! {
        #[test]
        fn a_selection_does_not_depend_on_how_a_file_is_read(
            text in "[a\n]{0,60}",
            start in 1_u64..10,
            length in proptest::option::of(0_u64..10),
            max_bytes in 0_u64..70,
            cut in 1_usize..20,
        ) {
            let lines = LineRange { start, end: length.map(|length| start + length) };
            let end = lines.end.unwrap_or(u64::MAX);
            let wanted: String = text
                .split_inclusive('\n')
                .zip(1_u64..)
                .filter(|(_, line)| (start..=end).contains(line))
                .map(|(text, _)| text)
                .collect();
            let fits = wanted.len().min(usize::try_from(max_bytes).expect("small"));
            let pieces: Vec<&[u8]> = text.as_bytes().chunks(cut).collect();
            let expected = (wanted.as_bytes()[..fits].to_vec(), fits < wanted.len());
            prop_assert_eq!(select(&pieces, lines, max_bytes), expected);
        }
    }
}
