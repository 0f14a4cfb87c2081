//! Remedies for callers of a session that is not running.

use cynode_api::{ErrorCode, Problem, SessionState};
use cynode_service::ApiError;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{SessionEntry, Sessions};
use crate::journal::{Disposal, SessionRecord};

/// The state of the files of an ended or lost session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkspaceFiles {
    Gone,
    /// Mounted by another session.
    InUse,
    Retained {
        until: Option<OffsetDateTime>,
    },
}

impl Sessions {
    /// The error for a call on a session that is not running, with advice on whether it can be
    /// resumed.
    pub(crate) fn refusal(&self, code: ErrorCode, entry: &SessionEntry) -> ApiError {
        let record = entry.record();
        let (id, state) = (record.session.session_id, record.session.state);
        let detail = match state {
            SessionState::Ended | SessionState::Ending if code == ErrorCode::SessionEnded => {
                format!("session {id} has ended")
            }
            state => format!("session {id} is {state}"),
        };
        Problem::new(code, detail)
            .with_remedy(remedy(&record, self.files_of(&record)))
            .into()
    }

    fn files_of(&self, record: &SessionRecord) -> WorkspaceFiles {
        let id = record.session.workspace_id;
        let is_being_deleted = record.session.state == SessionState::Ending
            && record.disposal.unwrap_or_default() == Disposal::Delete;
        // An unreadable workspace counts as gone; a resume call reports the error.
        let Some(workspace) = self
            .journal
            .workspace(id)
            .ok()
            .flatten()
            .filter(|_| !is_being_deleted)
        else {
            return WorkspaceFiles::Gone;
        };
        let is_in_use = self.by_id.lock().values().any(|entry| {
            let other = entry.record.lock();
            other.session.workspace_id == id
                && other.session.session_id != record.session.session_id
                && other.is_live()
        });
        if is_in_use {
            WorkspaceFiles::InUse
        } else {
            WorkspaceFiles::Retained {
                until: workspace.delete_at,
            }
        }
    }
}

fn remedy(record: &SessionRecord, files: WorkspaceFiles) -> String {
    let session = &record.session;
    let resume = format!(
        "'cynode session resume {}' (POST …/{}/resume)",
        session.session_id, session.session_id
    );
    match (session.state, files) {
        (SessionState::Running | SessionState::Creating, _) => format!(
            "Wait until its state is running: 'cynode session show {}'.",
            session.session_id
        ),
        (SessionState::Failed, _) => {
            "It never ran and can't be resumed. Create a new session.".to_owned()
        }
        (_, WorkspaceFiles::Gone) => {
            "It can't be resumed: its workspace is deleted. Create a new session.".to_owned()
        }
        (_, WorkspaceFiles::InUse) => format!(
            "Another session uses its workspace: use that session, or end it and then resume \
             this one with {resume}."
        ),
        (_, WorkspaceFiles::Retained { until }) => {
            let until = until
                .and_then(|until| until.format(&Rfc3339).ok())
                .map(|until| format!(" before {until}"))
                .unwrap_or_default();
            format!(
                "Resume it{until} with {resume}, or create a session of the same task with \
                 workspace_ref \"workspace:{}\".",
                session.workspace_id
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;

    fn record(state: SessionState) -> SessionRecord {
        let id = "01890000-0000-7000-8000-000000000001";
        let at = "2026-01-02T03:04:05Z";
        let limits = serde_json::json!({
            "memory_bytes": 1, "cpus": 1.0, "pids": 1, "disk_bytes": 1, "nofile": 1,
        });
        serde_json::from_value(serde_json::json!({
            "request": {"task_id": id, "session_id": id, "image_ref": "x"},
            "session": {
                "session_id": id, "task_id": id, "state": state, "image_ref": "x",
                "workspace_id": id, "node_id": id, "warm": false, "limits": limits,
                "unenforced": [], "network_policy": "none", "pty_allowed": false, "labels": {},
                "created_at": at, "expires_at": at, "idle_expires_at": at, "ended_at": null,
                "running_execs": 0,
            },
            "sandbox_id": id, "image_id": "x", "image_env": [], "id_block": 0,
            "idle_timeout_seconds": 1, "init": null, "disposal": null,
        }))
        .expect("a record")
    }

    #[test]
    fn the_remedy_says_how_to_resume_or_that_it_is_impossible() {
        for state in [SessionState::Ended, SessionState::Lost] {
            let kept = remedy(
                &record(state),
                WorkspaceFiles::Retained {
                    until: Some(datetime!(2026-01-03 00:00 UTC)),
                },
            );
            assert!(
                kept.contains("'cynode session resume 01890000-0000-7000-8000-000000000001'")
                    && kept.contains("before 2026-01-03T00:00:00Z"),
                "{kept}"
            );
            assert!(
                remedy(&record(state), WorkspaceFiles::Retained { until: None })
                    .starts_with("Resume it with")
            );
            assert!(
                remedy(&record(state), WorkspaceFiles::Gone).starts_with("It can't be resumed")
            );
            assert!(
                remedy(&record(state), WorkspaceFiles::InUse)
                    .starts_with("Another session uses its workspace")
            );
        }
        assert!(
            remedy(&record(SessionState::Failed), WorkspaceFiles::Gone)
                .contains("can't be resumed")
        );
        assert!(
            remedy(
                &record(SessionState::Creating),
                WorkspaceFiles::Retained { until: None }
            )
            .starts_with("Wait until")
        );
    }
}
