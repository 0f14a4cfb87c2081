//! Content that looks like a credential and was allowed into a sandbox.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub mod flagged_limits {
    /// Files listed in a response or a record; `flagged_total` counts all of them.
    pub const MAX_FILES: usize = 100;
    /// Total length of the listed paths.
    pub const MAX_PATH_BYTES: usize = 8 * 1024;
}

/// A file whose content looks like a credential. The content itself is never shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FlaggedFile {
    /// As in the request: the path of a file, of an archive entry or of a file in a diff; or the
    /// name of a field, such as `env.NAME`.
    pub path: String,
    /// The kind of credential, such as `a GitHub token`.
    pub shape: String,
}

/// Part of the response to a request with content that looks like a credential.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Flags {
    /// At most 100 files; absent if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flagged: Vec<FlaggedFile>,
    /// The number of flagged files, listed or not; absent if there are none.
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

    /// Counts a file, and lists it while the list has room.
    pub fn add(&mut self, path: &str, shape: &str) {
        self.flagged_total += 1;
        let named: usize = self.flagged.iter().map(|file| file.path.len()).sum();
        if self.flagged.len() < flagged_limits::MAX_FILES
            && named + path.len() <= flagged_limits::MAX_PATH_BYTES
        {
            // Neither the database nor audit records can store NUL.
            self.flagged.push(FlaggedFile {
                path: path.replace('\0', "\u{fffd}"),
                shape: shape.to_owned(),
            });
        }
    }
}

/// The response to an import with flagged content; other imports answer 204.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImportResult {
    #[serde(flatten)]
    pub flags: Flags,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_bounded_in_number_and_bytes_and_all_are_counted() {
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
