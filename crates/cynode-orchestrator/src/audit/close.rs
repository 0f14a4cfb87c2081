//! Closes calls without an outcome, by asking the node or by looking for the object that the call
//! creates: done, failed, not started, or unknown if nobody can tell any more.
//!
//! Invariant: `not_started` needs evidence. Either the node was asked for the call's id, never saw
//! it, bars it from now on, and remembers every call since before this one; or the row that the
//! call creates first does not exist.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_api::{
    AuditBody, AuditDecision, AuditKind, AuditResult, CallId, CallState, ErrorCode, ExecState,
    NodeId,
};
use serde_json::{Map, Value, json};
use time::OffsetDateTime;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use super::{Audit, Error, EventPump};
use crate::{
    db::{Db, OpenCallRow, to_json},
    fleet::{CallError, Fleet},
};

/// How long a node may take to report on a call.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval between queries for a call in flight: the first one, and the longest.
const FIRST_QUERY_INTERVAL: Duration = Duration::from_millis(100);
const MAX_QUERY_INTERVAL: Duration = Duration::from_secs(5);
/// The tolerance for clock differences and delivery times.
const CLOCK_TOLERANCE: time::Duration = time::Duration::seconds(5);
/// Concurrent queries per node.
const MAX_QUERIES_PER_NODE: usize = 32;
/// Open calls per statement.
const BATCH: i64 = 1_000;

/// Receives calls whose caller disconnected before the outcome was known.
#[derive(Clone, Debug)]
pub(crate) struct AbandonedCalls(mpsc::UnboundedSender<OpenCallRow>);

impl AbandonedCalls {
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<OpenCallRow>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self(sender), receiver)
    }

    /// Hands an open call to the closer.
    pub(crate) fn add(&self, intent: AuditBody, since: Instant) {
        drop(self.0.send(OpenCallRow {
            at: OffsetDateTime::now_utc() - since.elapsed(),
            since: Some(since),
            intent,
        }));
    }
}

/// Records that a background exec outlives its call, so that its exit is recorded too.
pub(crate) async fn follow_exec(db: &Db, intent: &AuditBody) {
    let (Some(exec_id), Some(session_id), Some(call_id)) =
        (intent.exec_id, intent.session_id, intent.call_id)
    else {
        return;
    };
    let created_by = intent
        .subject
        .as_ref()
        .and_then(|subject| subject.name.clone())
        .unwrap_or_default();
    if let Err(error) = db
        .insert_exec(exec_id, session_id, call_id, &created_by)
        .await
    {
        tracing::warn!(%exec_id, %error, "The exit of a background exec will not be recorded.");
    }
}

/// Closes calls without an outcome. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct CallCloser {
    pub(crate) db: Db,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) audit: Audit,
    pub(crate) pump: EventPump,
}

impl CallCloser {
    /// Follows abandoned calls until they are closed. Another orchestrator closes the calls that
    /// are open when the process ends.
    pub(crate) async fn follow_abandoned(
        self,
        mut left: mpsc::UnboundedReceiver<OpenCallRow>,
        closing: CancellationToken,
    ) {
        let mut rooms: HashMap<NodeId, Arc<Semaphore>> = HashMap::new();
        while let Some(Some(call)) = closing.run_until_cancelled(left.recv()).await {
            // Per node, so that one that hangs does not delay the others.
            let node = match call.intent.session_id {
                Some(id) => self
                    .db
                    .any_session(id)
                    .await
                    .ok()
                    .flatten()
                    .map(|row| row.node_id),
                None => None,
            };
            let room = rooms
                .entry(node.unwrap_or(NodeId::from_uuid(uuid::Uuid::nil())))
                .or_insert_with(|| Arc::new(Semaphore::new(MAX_QUERIES_PER_NODE)));
            let (closer, room, closing) = (self.clone(), Arc::clone(room), closing.clone());
            tokio::spawn(async move {
                let mut pause = FIRST_QUERY_INTERVAL;
                loop {
                    let permit = room.acquire().await;
                    let settled = closer.determine_outcome(&call).await;
                    drop(permit);
                    if let Ok(Some(outcome)) = settled {
                        // An outcome that can't be written in time is written later.
                        if closer.audit.outcome(outcome).await.is_err() {
                            tracing::debug!("An outcome is waiting for the database.");
                        }
                        return;
                    }
                    if closing
                        .run_until_cancelled(tokio::time::sleep(pause))
                        .await
                        .is_none()
                    {
                        return;
                    }
                    pause = (pause * 2).min(MAX_QUERY_INTERVAL);
                }
            });
        }
    }

    /// Closes the open calls of dead writers.
    pub(crate) async fn close_dead_streams(&self) -> Result<(), Error> {
        while let Some(stream) = self
            .db
            .take_dead_stream(&[self.audit.stream(), self.pump.stream()])
            .await?
        {
            let mut left = false;
            let mut queried = HashSet::new();
            loop {
                let calls = self.db.open_calls(stream, BATCH).await?;
                let new: Vec<_> = calls
                    .into_iter()
                    .filter(|call| call.intent.call_id.is_some_and(|id| queried.insert(id)))
                    .collect();
                if new.is_empty() {
                    break;
                }
                for call in new {
                    self.db.extend_stream_lease(stream).await?;
                    match self.determine_outcome(&call).await {
                        // An outcome that can't be written now is written later; the call is not
                        // queried again.
                        Ok(Some(outcome)) => left |= self.audit.outcome(outcome).await.is_err(),
                        Ok(None) | Err(_) => left = true,
                    }
                }
            }
            self.db.settle_stream(stream, !left).await?;
            if left {
                break;
            }
        }
        Ok(())
    }

    /// The outcome of a call; `None` while it is in flight or its node does not answer.
    async fn determine_outcome(&self, call: &OpenCallRow) -> Result<Option<AuditBody>, Error> {
        let Some((result, status, detail)) = self.resolve(call).await? else {
            return Ok(None);
        };
        let code = None;
        Ok(Some(AuditBody {
            kind: AuditKind::Outcome,
            result: Some(result),
            status,
            code,
            detail,
            decision: None,
            rules: Vec::new(),
            ..call.intent.clone()
        }))
    }

    async fn resolve(&self, call: &OpenCallRow) -> Result<Option<Resolution>, Error> {
        let made = |row: Option<bool>| match row {
            Some(true) => resolved(AuditResult::Done, "it is there"),
            Some(false) => resolved(
                AuditResult::Unknown,
                "its id is taken, perhaps by another call",
            ),
            None => resolved(AuditResult::NotStarted, "it is not there"),
        };
        let intent = &call.intent;
        if intent.decision == Some(AuditDecision::Deny) {
            return Ok(Some(resolved(AuditResult::Refused, "it was denied")));
        }
        let user = intent
            .subject
            .as_ref()
            .and_then(|subject| subject.user_id)
            .map(|id| *id.as_uuid());
        match (intent.action.as_str(), intent.session_id, intent.job_id) {
            // Callers may choose ids: an object that is older or belongs to someone else was not
            // created by this call.
            ("session.create", Some(id), _) => Ok(Some(made(
                self.db
                    .was_created("sessions", *id.as_uuid(), user, call.at - CLOCK_TOLERANCE)
                    .await?,
            ))),
            ("job.create", _, Some(id)) => Ok(Some(made(
                self.db
                    .was_created("jobs", *id.as_uuid(), user, call.at - CLOCK_TOLERANCE)
                    .await?,
            ))),
            ("session.end", Some(id), _) => {
                let row = self.db.any_session(id).await?;
                let ends =
                    row.is_some_and(|row| row.ending.is_some() || crate::db::is_final(row.state));
                // It may have ended and been resumed since.
                Ok(Some(if ends {
                    resolved(AuditResult::Done, "it ends")
                } else {
                    resolved(AuditResult::Unknown, "it does not end now")
                }))
            }
            (action, Some(id), _) if crate::gate::runs_on_node(action) => {
                let Some(row) = self.db.any_session(id).await? else {
                    return Ok(Some(resolved(AuditResult::Unknown, "its session is gone")));
                };
                if self.db.node(row.node_id).await?.is_lost {
                    return Ok(Some(resolved(AuditResult::Unknown, "its node is lost")));
                }
                self.query_node(call, row.node_id).await
            }
            _ => Ok(Some(resolved(AuditResult::Unknown, "nothing tells"))),
        }
    }

    async fn query_node(
        &self,
        call: &OpenCallRow,
        node_id: NodeId,
    ) -> Result<Option<Resolution>, Error> {
        let intent = &call.intent;
        let (Some(call_id), Some(session_id)) = (intent.call_id, intent.session_id) else {
            return Ok(Some(resolved(AuditResult::Unknown, "nothing tells")));
        };
        let client = self.fleet.client(&self.db, node_id).await?;
        let Ok(known) = self
            .fleet
            .call(
                node_id,
                QUERY_TIMEOUT,
                client.bar_call(CallId::from_uuid(call_id)),
            )
            .await
        else {
            return Ok(None);
        };
        if known.state == CallState::Answered {
            let status = known.status.unwrap_or_default();
            let mut detail = known
                .result
                .and_then(|result| result.as_object().cloned())
                .unwrap_or_default();
            detail.insert("found_out".to_owned(), json!("the node remembers it"));
            if status == 202 {
                follow_exec(&self.db, intent).await;
            }
            return Ok(Some((
                AuditResult::from_status(status),
                Some(status),
                detail,
            )));
        }
        // How far the node's clock is ahead, if it reports the time.
        let ahead = known.now.map(|now| now - OffsetDateTime::now_utc());
        // An exec outlives the node's memory of the call that started it.
        if intent.action == "session.exec"
            && let Some(exec_id) = intent.exec_id
        {
            match self
                .fleet
                .call(node_id, QUERY_TIMEOUT, client.get_exec(session_id, exec_id))
                .await
            {
                Ok(exec) if !is_same(&exec, call, ahead) => {
                    return Ok(Some(resolved(
                        AuditResult::Refused,
                        "another command has that id",
                    )));
                }
                Ok(exec) if exec.state == ExecState::Running && !exec.background => {
                    return Ok(None);
                }
                Ok(exec) if exec.state == ExecState::Lost => {
                    return Ok(Some(resolved(AuditResult::Unknown, "the node lost it")));
                }
                Ok(exec) => {
                    if exec.background {
                        follow_exec(&self.db, intent).await;
                    }
                    let mut detail = exec
                        .exit
                        .as_ref()
                        .map(to_json)
                        .and_then(|exit| exit.as_object().cloned())
                        .unwrap_or_default();
                    detail.insert("found_out".to_owned(), json!("the node has it"));
                    return Ok(Some((AuditResult::Done, None, detail)));
                }
                Err(CallError::Refused(problem))
                    if problem.is(ErrorCode::ExecNotFound)
                        || problem.status == 404
                        || problem.status == 410 => {}
                Err(_) => return Ok(None),
            }
        }
        Ok(match known.state {
            CallState::Running => None,
            CallState::Abandoned | CallState::Answered => Some(resolved(
                AuditResult::Unknown,
                "the node left it unanswered",
            )),
            CallState::NotFound if remembers(&known, call) => Some(resolved(
                AuditResult::NotStarted,
                "it never came to the node",
            )),
            CallState::NotFound => Some(resolved(
                AuditResult::Unknown,
                "the node does not remember so far back",
            )),
        })
    }
}

/// The result, the status and the details of an outcome.
type Resolution = (AuditResult, Option<u16>, Map<String, Value>);

fn resolved(result: AuditResult, how: &str) -> Resolution {
    let mut detail = Map::new();
    detail.insert("found_out".to_owned(), json!(how));
    (result, None, detail)
}

/// Whether a node would know the call if it had received it.
fn remembers(known: &cynode_api::Call, call: &OpenCallRow) -> bool {
    let (Some(since), Some(now)) = (known.remembered_since, known.now) else {
        return false;
    };
    // Durations, each by one clock, so that clock differences cancel out.
    let (remembered, ago) = (
        now - since,
        call.since.map_or_else(
            || OffsetDateTime::now_utc() - call.at,
            |since| time::Duration::try_from(since.elapsed()).unwrap_or(time::Duration::MAX),
        ),
    );
    // A call from the future was dated by a wrong clock.
    !ago.is_negative() && remembered > ago.saturating_add(CLOCK_TOLERANCE)
}

/// Whether an exec belongs to the call. `ahead` is the lead of the node's clock, if it reports one;
/// it reports none when it knows the call, and then the exec is that call's.
fn is_same(exec: &cynode_api::Exec, call: &OpenCallRow, ahead: Option<time::Duration>) -> bool {
    let recorded = call.intent.detail.get("argv").and_then(Value::as_array);
    // The record truncates long arguments and long lists.
    let is_word = |recorded: &Value, word: &String| {
        recorded
            .as_str()
            .is_none_or(|recorded| recorded == word || recorded.contains('…'))
    };
    let is_argv = recorded.is_none_or(|recorded| {
        recorded
            .iter()
            .zip(&exec.argv)
            .all(|(recorded, word)| is_word(recorded, word))
    });
    is_argv && ahead.is_none_or(|ahead| exec.started_at - ahead >= call.at - CLOCK_TOLERANCE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_node_whose_memory_predates_a_call_can_report_it_as_never_received() {
        let now = OffsetDateTime::now_utc();
        let seconds = time::Duration::seconds;
        let call = |ago: i64| OpenCallRow {
            at: now - seconds(ago),
            since: None,
            intent: AuditBody::new(AuditKind::Intent, "session.exec"),
        };
        let known = |remembered: Option<i64>, ahead: i64| {
            let clock = now + seconds(ahead);
            cynode_api::Call {
                call_id: CallId::generate(),
                state: CallState::NotFound,
                status: None,
                result: None,
                remembered_since: remembered.map(|ago| clock - seconds(ago)),
                now: Some(clock),
            }
        };
        // The node's clock is right, an hour behind, or an hour ahead: the result is the same.
        for ahead in [0, -3_600, 3_600] {
            assert!(remembers(&known(Some(60), ahead), &call(30)));
            assert!(remembers(&known(Some(36), ahead), &call(30)));
            assert!(
                !remembers(&known(Some(35), ahead), &call(30)),
                "the tolerance for clocks and delays was ignored"
            );
            assert!(
                !remembers(&known(Some(10), ahead), &call(30)),
                "a memory younger than the call was trusted"
            );
        }
        assert!(
            !remembers(&known(None, 0), &call(30)),
            "a node without a start of its memory was trusted"
        );
        assert!(
            !remembers(
                &cynode_api::Call {
                    now: None,
                    ..known(Some(60), 0)
                },
                &call(30)
            ),
            "a node without a clock was trusted"
        );
        assert!(
            !remembers(&known(Some(3_600), 0), &call(-60)),
            "a call dated in the future was trusted"
        );
        // For a call of this process, only the monotonic clock counts.
        let own = OpenCallRow {
            since: Instant::now().checked_sub(Duration::from_secs(30)),
            ..call(-3_600)
        };
        assert!(remembers(&known(Some(60), 0), &own) && !remembers(&known(Some(33), 0), &own));
    }
}
