//! Replaces an exact text in the bytes of a file.
//!
//! Every step takes time linear in the file and the text: both come from callers.

use cynode_api::{
    ErrorCode,
    file_limits::{MAX_EDIT_LINES, MAX_EDITED_FILE_BYTES},
};
use cynode_service::ApiError;
use memchr::{memchr_iter, memmem};

/// The replacements in one file.
#[derive(Debug)]
pub struct Edit<'a> {
    content: &'a [u8],
    old: &'a [u8],
    new: &'a [u8],
    /// The replaced occurrences, which do not overlap.
    pub replaced: u64,
    /// The size of the result in bytes.
    pub size: u64,
}

impl<'a> Edit<'a> {
    /// Plans the replacement of the only occurrence of `old`, or of all of them.
    pub fn plan(
        content: &'a [u8],
        old: &'a str,
        new: &'a str,
        all: bool,
    ) -> Result<Self, ApiError> {
        check_texts(old, new)?;
        let (old, new) = (old.as_bytes(), new.as_bytes());
        let finder = memmem::Finder::new(old);
        let mut occurrences = 0_u64;
        let mut places = Vec::new();
        for place in finder.find_iter(content) {
            occurrences += 1;
            if places.len() < MAX_EDIT_LINES {
                places.push(place);
            }
        }
        match (occurrences, all) {
            (0, _) => return Err(missing(content, old)),
            (1, false) => {
                // In "aaa" the text "aa" has two places.
                let after = places[0] + 1;
                let end = content.len().min(places[0] + 2 * old.len() - 1);
                if let Some(overlap) = finder.find(&content[after..end]) {
                    return Err(ambiguous(content, 2, &[places[0], after + overlap]));
                }
            }
            (_, false) => return Err(ambiguous(content, occurrences, &places)),
            (_, true) => {}
        }
        // No sum overflows: a file has at most 2^25 bytes and a text 2^24.
        let size =
            content.len() as u64 - occurrences * old.len() as u64 + occurrences * new.len() as u64;
        if size > MAX_EDITED_FILE_BYTES {
            return Err(too_large());
        }
        Ok(Self {
            content,
            old,
            new,
            replaced: occurrences,
            size,
        })
    }

    /// The pieces of the result in order.
    pub fn pieces(&self) -> impl Iterator<Item = &'a [u8]> {
        let (content, old, new) = (self.content, self.old, self.new);
        let (mut end, last) = (0, content.len());
        memmem::find_iter(content, old)
            .map(move |place| (place, place + old.len(), new))
            .chain([(last, last, &[][..])])
            .flat_map(move |(begin, next, new)| {
                let kept = &content[end..begin];
                end = next;
                [kept, new]
            })
    }
}

/// Refuses texts that no file could be edited with.
pub fn check_texts(old: &str, new: &str) -> Result<(), ApiError> {
    if old.is_empty() {
        return Err(ApiError::invalid("old: must not be empty"));
    }
    if old == new {
        return Err(ApiError::invalid(
            "new: is the same as old, so nothing would change",
        ));
    }
    Ok(())
}

/// The error for a file that is too large to be edited, or would be afterwards.
#[must_use]
pub fn too_large() -> ApiError {
    ApiError::new(
        ErrorCode::TooLarge,
        format!("an edited file may have {MAX_EDITED_FILE_BYTES} bytes before and after"),
    )
    .with_remedy("Change the file with a command in the sandbox, or write it whole.")
}

fn missing(content: &[u8], old: &[u8]) -> ApiError {
    let error = |detail: &str| {
        ApiError::new(ErrorCode::EditRejected, detail)
            .with("occurrences", 0)
            .with("lines", Vec::<u64>::new())
    };
    let crlf = String::from_utf8_lossy(old).replace('\n', "\r\n");
    if old.contains(&b'\n')
        && !old.contains(&b'\r')
        && memmem::find(content, crlf.as_bytes()).is_some()
    {
        return error("old: does not occur in the file, whose lines end with CR LF")
            .with_remedy("End the lines of old and new with \\r\\n.");
    }
    error("old: does not occur in the file").with_remedy(
        "Read the file again and copy the text exactly, with its spaces, tabs and line ends.",
    )
}

fn ambiguous(content: &[u8], occurrences: u64, places: &[usize]) -> ApiError {
    let mut lines = Vec::new();
    let (mut line, mut from) = (1_u64, 0);
    for place in places {
        line += memchr_iter(b'\n', &content[from..*place]).count() as u64;
        from = *place;
        lines.push(line);
    }
    let shown: Vec<String> = lines.iter().map(u64::to_string).collect();
    let more = if occurrences > places.len() as u64 {
        ", …"
    } else {
        ""
    };
    ApiError::new(
        ErrorCode::EditRejected,
        format!(
            "old: occurs {occurrences} times, at lines {}{more}",
            shown.join(", ")
        ),
    )
    .with("occurrences", occurrences)
    .with("lines", lines)
    .with_remedy("Add lines around the text until it occurs once, or replace all with all: true.")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edit(content: &str, old: &str, new: &str, all: bool) -> Result<(String, u64), String> {
        let edit = Edit::plan(content.as_bytes(), old, new, all)
            .map_err(|error| error.into_problem().detail)?;
        let bytes = edit.pieces().collect::<Vec<_>>().concat();
        assert_eq!(bytes.len() as u64, edit.size);
        Ok((String::from_utf8(bytes).expect("text"), edit.replaced))
    }

    #[test]
    fn a_text_is_replaced_where_it_occurs_once() {
        for (content, old, new, expected) in [
            ("abc", "b", "x", "axc"),
            ("abc", "abc", "", ""),
            ("abc", "a", "aa", "aabc"),
            ("abc", "c", "\n", "ab\n"),
            ("a\nb\n", "a\nb", "c", "c\n"),
        ] {
            assert_eq!(
                edit(content, old, new, false),
                Ok((expected.to_owned(), 1)),
                "{content} {old}"
            );
        }
    }

    #[test]
    fn several_occurrences_are_replaced_only_on_request() {
        assert_eq!(
            edit("a\nb\na\n", "a", "x", true),
            Ok(("x\nb\nx\n".to_owned(), 2))
        );
        assert_eq!(edit("aaa", "aa", "b", true), Ok(("ba".to_owned(), 1)));
        for (content, old, detail) in [
            ("a\nb\na\n", "a", "old: occurs 2 times, at lines 1, 3"),
            ("aaa", "aa", "old: occurs 2 times, at lines 1, 1"),
            ("x\nx\nx", "x\nx", "old: occurs 2 times, at lines 1, 2"),
        ] {
            assert_eq!(
                edit(content, old, "c", false),
                Err(detail.to_owned()),
                "{content}"
            );
        }
        let many = "a\n".repeat(MAX_EDIT_LINES + 1);
        let detail = edit(&many, "a", "b", false).expect_err("ambiguous");
        assert!(
            detail.ends_with("at lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …"),
            "{detail}"
        );
        let detail = edit(&many[2..], "a", "b", false).expect_err("ambiguous");
        assert!(detail.ends_with("9, 10"), "{detail}");
    }

    #[test]
    fn a_missing_text_is_rejected_and_line_ends_are_explained() {
        assert_eq!(
            edit("abc", "x", "y", true),
            Err("old: does not occur in the file".to_owned())
        );
        let detail = edit("a\r\nb\r\n", "a\nb", "c", false).expect_err("missing");
        assert!(detail.contains("CR LF"), "{detail}");
        assert!(edit("abc", "", "y", false).is_err());
        assert!(edit("abc", "b", "b", false).is_err());
    }

    #[test]
    fn the_result_has_at_most_the_size_of_an_edited_file() {
        let limit = usize::try_from(MAX_EDITED_FILE_BYTES).expect("small");
        let content = "a".repeat(16);
        let new = "b".repeat(limit / 16);
        assert!(Edit::plan(content.as_bytes(), "a", &new, true).is_ok());
        let error = Edit::plan(content.as_bytes(), "a", &(new + "b"), true).expect_err("large");
        assert!(error.is(ErrorCode::TooLarge));
    }

    #[test]
    fn repetitive_texts_take_linear_time() {
        let content = "a".repeat(4 * 1024 * 1024);
        let old = "a".repeat(1024 * 1024);
        let (result, replaced) = edit(&content, &old, "b", true).expect("edited");
        assert_eq!((result.as_str(), replaced), ("bbbb", 4));
        edit(&content[..old.len() + 9], &old, "b", false).expect_err("ambiguous");
    }
}
