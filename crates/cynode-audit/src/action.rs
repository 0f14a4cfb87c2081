//! What kind of thing an action is, told from its words: `session.exec`, `file.write`, `files:patch`, `artifact.put`.

use cynode_api::AuditBody;

/// What is done to whatever the action is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Create,
    Read,
    Update,
    Delete,
    Move,
    Other,
}

/// What an action is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum About {
    /// A command is run.
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
            | "resume" | "drain" | "allow" | "deny" | "apply" | "rotate" => Some(Verb::Update),
            "delete" | "revoke" | "end" | "destroy" | "stop" | "remove" => Some(Verb::Delete),
            "move" | "rename" => Some(Verb::Move),
            _ => None,
        })
        .unwrap_or(Verb::Other)
}

pub(crate) fn about(body: &AuditBody) -> About {
    let has = |wanted: &[&str]| words(&body.action).any(|word| wanted.contains(&word));
    if has(&["artifact", "artifacts"]) {
        About::Artifact
    } else if words(&body.action).next_back() == Some("exec") {
        About::Exec
    } else if has(&["file", "files", "workspace"]) || body.detail.contains_key("changes") {
        About::File
    } else {
        About::Other
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::AuditKind;

    use super::*;

    #[test]
    fn actions_are_told_apart_by_their_words() {
        for (action, expected) in [
            ("session.exec", (About::Exec, Verb::Create)),
            ("exec.signal", (About::Other, Verb::Create)),
            ("file.read", (About::File, Verb::Read)),
            ("session.files:patch", (About::File, Verb::Update)),
            ("sandbox.workspace.write_file", (About::File, Verb::Update)),
            ("file.move", (About::File, Verb::Move)),
            ("artifact.put", (About::Artifact, Verb::Update)),
            ("token.revoke", (About::Other, Verb::Delete)),
            ("weather", (About::Other, Verb::Other)),
            ("", (About::Other, Verb::Other)),
        ] {
            assert_eq!(
                (
                    about(&AuditBody::new(AuditKind::Intent, action)),
                    verb(action)
                ),
                expected,
                "{action}"
            );
        }
    }
}
