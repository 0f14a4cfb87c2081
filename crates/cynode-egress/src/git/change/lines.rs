//! What a new version of a file adds, line by line.
//!
//! A line counts as added unless the old version has it as often: a moved line adds nothing. This
//! is linear in the contents, whatever they are.

use std::collections::HashMap;

/// The lines of one version that the other does not have.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct LineDelta {
    /// The added lines, joined.
    pub(crate) added: Vec<u8>,
    pub(crate) added_lines: u32,
    pub(crate) removed_lines: u32,
}

pub(crate) fn delta(old: &[u8], new: &[u8]) -> LineDelta {
    let mut left: HashMap<&[u8], u32> = HashMap::new();
    for line in lines(old) {
        *left.entry(line).or_default() += 1;
    }
    let mut delta = LineDelta::default();
    for line in lines(new) {
        match left.get_mut(line) {
            Some(count) if *count > 0 => *count -= 1,
            _ => {
                delta.added.extend_from_slice(line);
                delta.added.push(b'\n');
                delta.added_lines = delta.added_lines.saturating_add(1);
            }
        }
    }
    delta.removed_lines = left.into_values().fold(0, u32::saturating_add);
    delta
}

fn lines(content: &[u8]) -> impl Iterator<Item = &[u8]> {
    content
        .split_inclusive(|byte| *byte == b'\n')
        .map(|line| line.strip_suffix(b"\n").unwrap_or(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_that_were_not_there_are_added() {
        let delta = delta(b"a\nb\nb\nc\n", b"c\nb\nx\na\nb\nb");
        assert_eq!(delta.added, b"x\nb\n");
        assert_eq!((delta.added_lines, delta.removed_lines), (2, 0));
        let deleted = super::delta(b"a\nb\n", b"");
        assert_eq!((deleted.added_lines, deleted.removed_lines), (0, 2));
    }
}
