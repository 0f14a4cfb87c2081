//! Reads the journal at startup and repairs what a crash or a bad disk damaged.

use std::{io, os::unix::fs::MetadataExt as _, path::Path};

use cynode_api::WorkspaceId;
use time::OffsetDateTime;

use super::validate;
use crate::{
    idrange::{AGENT_ID, IdBlocks},
    journal::{Disposal, Journal, SessionRecord, WorkspaceRecord},
};

/// Reads the sessions and reserves every id block that may still be in use. Must run before
/// anything is created.
pub(super) fn recover(
    journal: &Journal,
    ids: &IdBlocks,
    grace_seconds: u64,
) -> io::Result<Vec<SessionRecord>> {
    let sessions = journal.sessions()?;
    for directory in journal.unrecorded_sessions()? {
        journal.discard(&directory)?;
    }
    // Reading them sets unreadable records aside.
    drop(journal.workspaces()?);
    for directory in journal.unrecorded_workspaces()? {
        recover_workspace(journal, ids, &sessions, &directory, grace_seconds)?;
    }
    for workspace in journal.workspaces()? {
        ids.reserve(workspace.id_block);
    }
    for record in sessions.iter().filter(|record| record.is_live()) {
        ids.reserve(record.id_block);
    }
    Ok(sessions)
}

/// Handles a workspace without a record. If a session refers to it, the record is recreated. If its
/// record was set aside as unreadable, its ids are reserved and an operator decides. Otherwise it
/// was never used and is discarded.
fn recover_workspace(
    journal: &Journal,
    ids: &IdBlocks,
    sessions: &[SessionRecord],
    directory: &Path,
    grace_seconds: u64,
) -> io::Result<()> {
    let id = directory
        .file_name()
        .and_then(|name| name.to_str())
        .and_then(|name| name.parse::<WorkspaceId>().ok());
    let referrer = sessions
        .iter()
        .filter(|record| Some(record.session.workspace_id) == id)
        .max_by_key(|record| record.is_live());
    let has_files =
        directory.join("data/workspace").is_dir() || directory.join("disk.img").is_file();
    if let Some(record) = referrer.filter(|record| record.is_live() || has_files) {
        tracing::warn!(
            workspace_id = %record.session.workspace_id,
            "A workspace has no record; recreating it from its session."
        );
        return journal.write_workspace(&WorkspaceRecord {
            workspace_id: record.session.workspace_id,
            task_id: record.session.task_id,
            id_block: record.id_block,
            delete_at: is_for_a_while(record)
                .then(|| validate::after(OffsetDateTime::now_utc(), grace_seconds)),
            disk_bytes: fs_err::metadata(directory.join("disk.img"))
                .ok()
                .map(|image| image.len()),
        });
    }
    if directory.join("workspace.unreadable").exists() && has_files {
        tracing::warn!(
            path = %directory.display(),
            "A workspace's record is unreadable and no session refers to it; left for an operator."
        );
        if let Ok(metadata) = fs_err::symlink_metadata(directory.join("data/workspace")) {
            ids.reserve(metadata.uid().saturating_sub(AGENT_ID));
        }
        return Ok(());
    }
    journal.discard(directory)
}

/// Returns whether a session's workspace has a deletion date. One retained on request has none,
/// even if its end was interrupted; one in use has none yet.
fn is_for_a_while(record: &SessionRecord) -> bool {
    match record.disposal {
        Some(Disposal::Keep) => false,
        Some(Disposal::KeepForAWhile) => true,
        Some(Disposal::Delete) | None => !record.is_live(),
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::{
        Limits, NodeId, SandboxId, Session, SessionCreate, SessionId, SessionState, TaskId,
    };

    use super::*;
    use crate::runtime::IdSpace;

    fn record(state: SessionState, disposal: Option<Disposal>) -> SessionRecord {
        let request = SessionCreate::new(TaskId::generate(), SessionId::generate(), "default");
        let now = OffsetDateTime::now_utc();
        SessionRecord {
            session: Session {
                session_id: request.session_id,
                name: None,
                task_id: request.task_id,
                state,
                end_reason: None,
                image_ref: request.image_ref.clone(),
                image_digest: None,
                workspace_id: WorkspaceId::generate(),
                node_id: NodeId::generate(),
                warm: false,
                limits: Limits::default(),
                unenforced: Vec::new(),
                network_policy: cynode_api::NetworkPolicy::default(),
                pty_allowed: false,
                labels: std::collections::BTreeMap::new(),
                created_at: now,
                expires_at: now,
                idle_expires_at: now,
                ended_at: None,
                create_duration_ms: None,
                running_execs: 0,
                repository_id: None,
                base_commit: None,
                seed_notes: None,
            },
            request,
            sandbox_id: SandboxId::generate(),
            image_id: String::new(),
            image_env: Vec::new(),
            id_block: 65_536,
            idle_timeout_seconds: 1,
            init: None,
            disposal,
            resumed: false,
            has_job_directory: true,
            has_proxies: true,
            job_id: None,
        }
    }

    #[test]
    fn a_workspace_retained_on_request_gets_no_deletion_date_even_if_its_end_was_interrupted() {
        let directory = tempfile::tempdir().expect("a directory");
        let journal = Journal::open(directory.path().join("worker")).expect("a journal");
        let ids = IdBlocks::new(
            IdSpace::Own,
            &directory.path().join("ids"),
            directory.path(),
        )
        .expect("a range");
        let cases = [
            (SessionState::Running, None, false),
            (SessionState::Lost, None, true),
            (SessionState::Ending, Some(Disposal::Keep), false),
            (SessionState::Ended, Some(Disposal::Keep), false),
            (SessionState::Ending, Some(Disposal::KeepForAWhile), true),
            (SessionState::Ended, Some(Disposal::KeepForAWhile), true),
        ]
        .map(|(state, disposal, dated)| (record(state, disposal), dated));
        for (record, _) in &cases {
            journal.write_session(record).expect("a session");
            let workspace = journal.workspace_directory(record.session.workspace_id);
            fs_err::create_dir_all(&workspace).expect("a directory");
            // The workspace's own record was never written, or was lost.
            fs_err::write(workspace.join("disk.img"), "files").expect("a disk");
        }
        recover(&journal, &ids, 60).expect("recovers");
        for (record, dated) in cases {
            let found = journal
                .workspace(record.session.workspace_id)
                .expect("readable")
                .expect("there");
            assert_eq!(
                found.delete_at.is_some(),
                dated,
                "{:?} {:?}",
                record.session.state,
                record.disposal
            );
        }
    }

    #[test]
    fn records_of_earlier_versions_are_readable() {
        for (text, disposal) in [
            ("\"keep\"", Disposal::Keep),
            ("\"delete\"", Disposal::Delete),
        ] {
            assert_eq!(
                serde_json::from_str::<Disposal>(text).expect("known"),
                disposal
            );
        }
    }
}
