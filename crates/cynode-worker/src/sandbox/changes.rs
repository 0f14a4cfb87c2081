//! The changes that the agent reports for a file operation. They may be hostile, so they are
//! bounded and validated.

use cynode_api::{FileChange, FileChanges, FileType, file_limits::MAX_PATH_BYTES};
use cynode_sba_proto::FileOp;

pub(crate) fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Drops invalid hashes and changes without a path.
pub(crate) fn validate_changes(reported: FileChanges) -> FileChanges {
    let hash = |sha256: Option<String>| {
        sha256
            .filter(|text| is_sha256(text))
            .map(|text| text.to_ascii_lowercase())
    };
    let mut changes = FileChanges::default();
    for FileChange {
        path,
        path_b64,
        sha256_before,
        sha256_after,
        kind,
    } in reported.changes
    {
        let path = path.map_or_else(
            || path_b64.map(|bytes| bytes.0),
            |path| Some(path.into_bytes()),
        );
        // An archive member with a path of maximum length may be below a directory whose path is as
        // long.
        if let Some(path) =
            path.filter(|path| !path.is_empty() && path.len() <= 2 * MAX_PATH_BYTES + 1)
        {
            let change = FileChange::new(&path)
                .before(hash(sha256_before))
                .after(hash(sha256_after));
            changes.add(change.of_kind(kind.unwrap_or(FileType::File)));
        }
    }
    changes.more = changes.more.saturating_add(reported.more);
    changes
}

/// The changes that follow from the request itself: agents of earlier versions don't report them.
pub(crate) fn changes_of_request(op: &FileOp) -> FileChanges {
    match op {
        FileOp::Delete { path, .. } => FileChanges::from_iter([FileChange::new(&path.0)]),
        FileOp::Move { from, to, .. } => {
            FileChanges::from_iter([FileChange::new(&from.0), FileChange::new(&to.0)])
        }
        FileOp::Mkdir { path, .. } | FileOp::Import { path } => {
            FileChanges::from_iter([FileChange::new(&path.0).of_kind(FileType::Dir)])
        }
        _ => FileChanges::default(),
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::{Base64Bytes, ascii_json, call_limits::MAX_RESULT_BYTES};

    use super::*;

    #[test]
    fn changes_reported_by_a_hostile_agent_are_bounded_and_validated() {
        let hash = "AB".repeat(32);
        let change = |path: &str, sha256: &str| FileChange {
            path: Some(path.to_owned()),
            sha256_after: Some(sha256.to_owned()),
            ..FileChange::default()
        };
        let nameless = FileChange {
            sha256_after: Some(hash.clone()),
            ..FileChange::default()
        };
        let both = FileChange {
            path_b64: Some(Base64Bytes(b"other".to_vec())),
            ..change("one", "<script>")
        };
        let huge = change(&"x".repeat(100_000), &hash);
        let reported = FileChanges {
            changes: vec![
                nameless,
                change("", &hash),
                huge,
                change("good", &hash),
                both,
            ],
            more: u64::MAX,
        };
        let checked = validate_changes(reported);
        let expected = [
            FileChange::new(b"good").after(Some(hash.to_ascii_lowercase())),
            FileChange::new(b"one"),
        ];
        assert_eq!(
            (checked.changes.as_slice(), checked.more),
            (&expected[..], u64::MAX)
        );
        let many = FileChanges {
            changes: vec![change("many", &hash); 10_000],
            more: 0,
        };
        let many = validate_changes(many);
        assert!(ascii_json(&many).len() <= MAX_RESULT_BYTES);
        assert_eq!(many.changes.len() as u64 + many.more, 10_000);
    }
}
