//! What the journal says at a start, made whole where a crash or a disk left holes.

use std::{io, os::unix::fs::MetadataExt as _, path::Path};

use cynode_api::WorkspaceId;
use time::OffsetDateTime;

use super::validate;
use crate::{
    idrange::{AGENT_ID, IdBlocks},
    journal::{Journal, SessionRecord, WorkspaceRecord},
};

/// Reads the sessions and reserves every block of ids that something may still use. Runs before anything is made.
pub(super) fn recover(journal: &Journal, ids: &IdBlocks, grace_seconds: u64) -> io::Result<Vec<SessionRecord>> {
    let sessions = journal.sessions()?;
    for directory in journal.unrecorded_sessions()? {
        journal.discard(&directory)?;
    }
    // Reading them sets aside what can't be read.
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

/// A workspace without its record. One that a session names gets it again; of one that was set aside the ids are kept from
/// others, and a person decides; of the rest nothing was ever used.
fn recover_workspace(journal: &Journal, ids: &IdBlocks, sessions: &[SessionRecord], directory: &Path, grace_seconds: u64) -> io::Result<()> {
    let id = directory.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse::<WorkspaceId>().ok());
    let named = sessions.iter().filter(|record| Some(record.session.workspace_id) == id).max_by_key(|record| record.is_live());
    let has_files = directory.join("data/workspace").is_dir() || directory.join("disk.img").is_file();
    if let Some(record) = named.filter(|record| record.is_live() || has_files) {
        tracing::warn!(workspace_id = %record.session.workspace_id, "A workspace's record is gone; it is made again from its session.");
        return journal.write_workspace(&WorkspaceRecord {
            workspace_id: record.session.workspace_id,
            task_id: record.session.task_id,
            id_block: record.id_block,
            delete_at: (!record.is_live()).then(|| validate::after(OffsetDateTime::now_utc(), grace_seconds)),
            disk_bytes: fs_err::metadata(directory.join("disk.img")).ok().map(|image| image.len()),
        });
    }
    if directory.join("workspace.unreadable").exists() && has_files {
        tracing::warn!(path = %directory.display(), "A workspace's record can't be read and no session names it; it is left for a person to look at.");
        if let Ok(metadata) = fs_err::symlink_metadata(directory.join("data/workspace")) {
            ids.reserve(metadata.uid().saturating_sub(AGENT_ID));
        }
        return Ok(());
    }
    journal.discard(directory)
}
