//! Classifies actions by the words of their names: `session.exec`, `file.write`, `files:patch`,
//! `artifact.put`.

use cynode_api::AuditBody;

/// The operation that an action performs on its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Create,
    Read,
    Update,
    Delete,
    Move,
    Other,
}

/// The kind of object that an action operates on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TargetKind {
    /// A command.
    Exec,
    /// Files in a sandbox.
    File,
    Artifact,
    Other,
}

fn words(action: &str) -> impl DoubleEndedIterator<Item = &str> {
    action
        .split(|character: char| !character.is_alphanumeric())
        .filter(|word| !word.is_empty())
}

pub(crate) fn verb(action: &str) -> Verb {
    words(action)
        .rev()
        .find_map(|word| match word {
            "create" | "add" | "register" | "run" | "start" | "mkdir" | "exec" | "login"
            | "begin" => Some(Verb::Create),
            "read" | "get" | "list" | "show" | "search" | "output" | "export" | "verify"
            | "stat" | "download" | "test" => Some(Verb::Read),
            "update" | "patch" | "set" | "put" | "write" | "import" | "upload" | "extend"
            | "resume" | "drain" | "allow" | "deny" | "apply" | "rotate" | "renew" => {
                Some(Verb::Update)
            }
            "delete" | "revoke" | "end" | "destroy" | "stop" | "remove" => Some(Verb::Delete),
            "move" | "rename" => Some(Verb::Move),
            _ => None,
        })
        .unwrap_or(Verb::Other)
}

pub(crate) fn target_kind(body: &AuditBody) -> TargetKind {
    let has = |wanted: &[&str]| words(&body.action).any(|word| wanted.contains(&word));
    if has(&["artifact", "artifacts"]) {
        TargetKind::Artifact
    } else if words(&body.action).next_back() == Some("exec") {
        TargetKind::Exec
    } else if has(&["file", "files", "workspace"]) || body.detail.contains_key("changes") {
        TargetKind::File
    } else {
        TargetKind::Other
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::AuditKind;

    use super::*;

    #[test]
    fn actions_are_classified_by_their_words() {
        for (action, expected) in [
            ("session.exec", (TargetKind::Exec, Verb::Create)),
            ("exec.signal", (TargetKind::Other, Verb::Create)),
            ("file.read", (TargetKind::File, Verb::Read)),
            ("session.files:patch", (TargetKind::File, Verb::Update)),
            (
                "sandbox.workspace.write_file",
                (TargetKind::File, Verb::Update),
            ),
            ("file.move", (TargetKind::File, Verb::Move)),
            ("artifact.put", (TargetKind::Artifact, Verb::Update)),
            ("token.renew", (TargetKind::Other, Verb::Update)),
            ("token.revoke", (TargetKind::Other, Verb::Delete)),
            ("weather", (TargetKind::Other, Verb::Other)),
            ("", (TargetKind::Other, Verb::Other)),
        ] {
            assert_eq!(
                (
                    target_kind(&AuditBody::new(AuditKind::Intent, action)),
                    verb(action)
                ),
                expected,
                "{action}"
            );
        }
    }
}
