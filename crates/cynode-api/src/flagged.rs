//! Content with the shape of a credential that was let into a sandbox.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub mod flagged_limits {
    /// Files that an answer and a record name; `flagged_total` counts all.
    pub const MAX_FILES: usize = 100;
    /// What their paths may take together.
    pub const MAX_PATH_BYTES: usize = 8 * 1024;
}

/// A file whose content looks like a credential. The content itself is never repeated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FlaggedFile {
    /// As the request names it: the path of a file, an entry of an archive, a file of a diff; or the field that holds it, such as
    /// `env.NAME`.
    pub path: String,
    /// What it looks like, such as `a GitHub token`.
    pub shape: String,
}

/// Part of the answer to a call that brought content with the shape of a credential.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Flags {
    /// At most 100 files; absent when there is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flagged: Vec<FlaggedFile>,
    /// All of them, named or not; absent when there is none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub flagged_total: u64,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl Flags {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.flagged_total == 0
    }

    /// Counts a file, and names it while there is room.
    pub fn add(&mut self, path: &str, shape: &str) {
        self.flagged_total += 1;
        let named: usize = self.flagged.iter().map(|file| file.path.len()).sum();
        if self.flagged.len() < flagged_limits::MAX_FILES
            && named + path.len() <= flagged_limits::MAX_PATH_BYTES
        {
            // Neither the database nor a record can hold the character NUL.
            self.flagged.push(FlaggedFile {
                path: path.replace('\0', "\u{fffd}"),
                shape: shape.to_owned(),
            });
        }
    }
}

/// The answer to an import that brought flagged content; one without answers 204.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImportResult {
    #[serde(flatten)]
    pub flags: Flags,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_bounded_in_number_and_in_bytes_and_counted_whole() {
        let mut flags = Flags::default();
        for number in 0..=flagged_limits::MAX_FILES {
            flags.add(&format!("f{number}"), "a GitHub token");
        }
        assert_eq!((flags.flagged.len(), flags.flagged_total), (100, 101));
        let mut flags = Flags::default();
        flags.add(
            &"x".repeat(flagged_limits::MAX_PATH_BYTES - 1),
            "a private key",
        );
        flags.add("yy", "a private key");
        flags.add("y", "a private key");
        flags.add("z", "a private key");
        assert_eq!((flags.flagged.len(), flags.flagged_total), (2, 4));
        assert_eq!(
            serde_json::to_value(Flags::default()).expect("serialises"),
            serde_json::json!({})
        );
    }
}
