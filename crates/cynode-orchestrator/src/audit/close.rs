//! Closes calls whose outcome nobody wrote: by asking the node what became of them, or by looking whether what they were to make
//! is there. Done, failed, not started; where nobody can know any more: unknown.
//!
//! What must stay true: `not_started` needs evidence. The node was asked for this call's id, never saw it, bars it from now on, and
//! remembers every call since before this one was made; or the row that the call makes first is not in the database.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_api::{
    AuditBody, AuditDecision, AuditKind, AuditResult, CallId, CallState, ErrorCode, ExecState,
    NodeId,
};
use cynode_service::ApiError;
use serde_json::{Map, Value, json};
use time::OffsetDateTime;
use tokio::sync::{Semaphore, mpsc};

use crate::{
    Orchestrator,
    db::{OpenCall, to_json},
    fleet::Failed,
};

/// How long a node may take to say what became of a call.
const ASK: Duration = Duration::from_secs(5);
/// How often it is asked about a call that goes on.
const FIRST_LOOK: Duration = Duration::from_millis(100);
const LONGEST_LOOK: Duration = Duration::from_secs(5);
/// A call that came to a node this long after its intent would be a wonder; clocks differ.
const CLOCKS: time::Duration = time::Duration::seconds(5);
/// So many answers of a node are waited for at once.
const ASKED_AT_ONCE: usize = 32;
/// So many are looked at together.
const BATCH: i64 = 1_000;

/// Where calls go whose caller went away before the outcome was known.
#[derive(Clone, Debug)]
pub(crate) struct Abandoned(mpsc::UnboundedSender<OpenCall>);

impl Abandoned {
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<OpenCall>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self(sender), receiver)
    }

    pub(crate) fn leave(&self, intent: AuditBody, since: Instant) {
        drop(self.0.send(OpenCall {
            at: OffsetDateTime::now_utc() - since.elapsed(),
            since: Some(since),
            intent,
        }));
    }
}

/// Follows calls that were left until they are closed. What is open when the process ends is closed by another one.
pub(crate) async fn follow_abandoned(
    orchestrator: Orchestrator,
    mut left: mpsc::UnboundedReceiver<OpenCall>,
) {
    let mut rooms: HashMap<NodeId, Arc<Semaphore>> = HashMap::new();
    while let Some(Some(call)) = orchestrator.closing.run_until_cancelled(left.recv()).await {
        // A node that does not answer keeps nobody from asking the others.
        let node = match call.intent.session_id {
            Some(id) => orchestrator
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
            .or_insert_with(|| Arc::new(Semaphore::new(ASKED_AT_ONCE)));
        let (orchestrator, room) = (orchestrator.clone(), Arc::clone(room));
        tokio::spawn(async move {
            let mut pause = FIRST_LOOK;
            loop {
                let permit = room.acquire().await;
                let settled = settle(&orchestrator, &call).await;
                drop(permit);
                if let Ok(Some(outcome)) = settled {
                    // One that can't be waited for is written later.
                    if orchestrator.audit.outcome(outcome).await.is_err() {
                        tracing::debug!("An outcome waits for the database.");
                    }
                    return;
                }
                if orchestrator
                    .closing
                    .run_until_cancelled(tokio::time::sleep(pause))
                    .await
                    .is_none()
                {
                    return;
                }
                pause = (pause * 2).min(LONGEST_LOOK);
            }
        });
    }
}

/// Closes what writers that are gone left open.
pub(crate) async fn round(orchestrator: &Orchestrator) -> Result<(), ApiError> {
    while let Some(stream) = orchestrator
        .db
        .take_dead_stream(&[orchestrator.audit.stream(), orchestrator.pump.stream()])
        .await?
    {
        let mut left = false;
        let mut asked = HashSet::new();
        loop {
            let calls = orchestrator.db.open_calls(stream, BATCH).await?;
            let new: Vec<_> = calls
                .into_iter()
                .filter(|call| call.intent.call_id.is_some_and(|id| asked.insert(id)))
                .collect();
            if new.is_empty() {
                break;
            }
            for call in new {
                orchestrator.db.hold_stream(stream).await?;
                match settle(orchestrator, &call).await {
                    // One that can't be written now is written later, and is not asked about again here.
                    Ok(Some(outcome)) => left |= orchestrator.audit.outcome(outcome).await.is_err(),
                    Ok(None) | Err(_) => left = true,
                }
            }
        }
        orchestrator.db.settle_stream(stream, !left).await?;
        if left {
            break;
        }
    }
    Ok(())
}

/// The outcome of a call; none while it goes on, or while its node does not answer.
async fn settle(
    orchestrator: &Orchestrator,
    call: &OpenCall,
) -> Result<Option<AuditBody>, ApiError> {
    let Some((result, status, detail)) = found_out(orchestrator, call).await? else {
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

type Found = (AuditResult, Option<u16>, Map<String, Value>);

fn said(result: AuditResult, how: &str) -> Found {
    let mut detail = Map::new();
    detail.insert("found_out".to_owned(), json!(how));
    (result, None, detail)
}

async fn found_out(
    orchestrator: &Orchestrator,
    call: &OpenCall,
) -> Result<Option<Found>, ApiError> {
    let made = |row: Option<bool>| match row {
        Some(true) => said(AuditResult::Done, "it is there"),
        Some(false) => said(
            AuditResult::Unknown,
            "its id is taken, perhaps by another call",
        ),
        None => said(AuditResult::NotStarted, "it is not there"),
    };
    let intent = &call.intent;
    if intent.decision == Some(AuditDecision::Deny) {
        return Ok(Some(said(AuditResult::Refused, "it was denied")));
    }
    let user = intent
        .subject
        .as_ref()
        .and_then(|subject| subject.user_id)
        .map(|id| *id.as_uuid());
    match (intent.action.as_str(), intent.session_id, intent.job_id) {
        // An id may be one that a caller chose: what was there before, or is somebody else's, was not made by this.
        ("session.create", Some(id), _) => Ok(Some(made(
            orchestrator
                .db
                .was_made("sessions", *id.as_uuid(), user, call.at - CLOCKS)
                .await?,
        ))),
        ("job.create", _, Some(id)) => Ok(Some(made(
            orchestrator
                .db
                .was_made("jobs", *id.as_uuid(), user, call.at - CLOCKS)
                .await?,
        ))),
        ("session.end", Some(id), _) => {
            let row = orchestrator.db.any_session(id).await?;
            let ends = row.is_some_and(|row| row.ending.is_some() || crate::db::is_over(row.state));
            // It may have ended, and have been resumed since.
            Ok(Some(if ends {
                said(AuditResult::Done, "it ends")
            } else {
                said(AuditResult::Unknown, "it does not end now")
            }))
        }
        (action, Some(id), _) if crate::gate::runs_on_node(action) => {
            let Some(row) = orchestrator.db.any_session(id).await? else {
                return Ok(Some(said(AuditResult::Unknown, "its session is gone")));
            };
            if orchestrator.db.node(row.node_id).await?.is_lost {
                return Ok(Some(said(AuditResult::Unknown, "its node is lost")));
            }
            ask(orchestrator, call, row.node_id).await
        }
        _ => Ok(Some(said(AuditResult::Unknown, "nothing tells"))),
    }
}

async fn ask(
    orchestrator: &Orchestrator,
    call: &OpenCall,
    node_id: NodeId,
) -> Result<Option<Found>, ApiError> {
    let intent = &call.intent;
    let (Some(call_id), Some(session_id)) = (intent.call_id, intent.session_id) else {
        return Ok(Some(said(AuditResult::Unknown, "nothing tells")));
    };
    let client = orchestrator.fleet.client(&orchestrator.db, node_id).await?;
    let Ok(known) = orchestrator
        .fleet
        .call(node_id, ASK, client.bar_call(CallId::from_uuid(call_id)))
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
            orchestrator.follow_exec(intent).await;
        }
        return Ok(Some((AuditResult::of_status(status), Some(status), detail)));
    }
    // By the node's own clock, as far as it says.
    let ahead = known.now.map(|now| now - OffsetDateTime::now_utc());
    // A command outlives the memory of the call that began it.
    if intent.action == "session.exec"
        && let Some(exec_id) = intent.exec_id
    {
        match orchestrator
            .fleet
            .call(node_id, ASK, client.get_exec(session_id, exec_id))
            .await
        {
            Ok(exec) if !is_same(&exec, call, ahead) => {
                return Ok(Some(said(
                    AuditResult::Refused,
                    "another command has that id",
                )));
            }
            Ok(exec) if exec.state == ExecState::Running && !exec.background => return Ok(None),
            Ok(exec) if exec.state == ExecState::Lost => {
                return Ok(Some(said(AuditResult::Unknown, "the node lost it")));
            }
            Ok(exec) => {
                if exec.background {
                    orchestrator.follow_exec(intent).await;
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
            Err(Failed::Refused(error))
                if error.0.is(ErrorCode::ExecNotFound)
                    || error.0.status == 404
                    || error.0.status == 410 => {}
            Err(_) => return Ok(None),
        }
    }
    Ok(match known.state {
        CallState::Running => None,
        CallState::Abandoned | CallState::Answered => {
            Some(said(AuditResult::Unknown, "the node left it unanswered"))
        }
        CallState::NotFound if remembers(&known, call) => {
            Some(said(AuditResult::NotStarted, "it never came to the node"))
        }
        CallState::NotFound => Some(said(
            AuditResult::Unknown,
            "the node does not remember so far back",
        )),
    })
}

/// Whether a node that does not know a call would know it if it had come.
fn remembers(known: &cynode_api::Call, call: &OpenCall) -> bool {
    let (Some(since), Some(now)) = (known.remembered_since, known.now) else {
        return false;
    };
    // How long ago, each by its own clock: clocks that differ don't count.
    let (remembered, ago) = (
        now - since,
        call.since.map_or_else(
            || OffsetDateTime::now_utc() - call.at,
            |since| time::Duration::try_from(since.elapsed()).unwrap_or(time::Duration::MAX),
        ),
    );
    // A call from the future was dated by a clock that has been set since, or that is wrong.
    !ago.is_negative() && remembered > ago.saturating_add(CLOCKS)
}

/// Whether a command is the one that was asked for. `ahead` is by how much the node's clock is, if it says so; it does not when it
/// knows the call, and then the command is that call's.
fn is_same(exec: &cynode_api::Exec, call: &OpenCall, ahead: Option<time::Duration>) -> bool {
    let asked = call.intent.detail.get("argv").and_then(Value::as_array);
    // A long word is in the record by its beginning only, and so is a long list.
    let is_word = |asked: &Value, word: &String| {
        asked
            .as_str()
            .is_none_or(|asked| asked == word || asked.contains('…'))
    };
    let is_argv = asked.is_none_or(|asked| {
        asked
            .iter()
            .zip(&exec.argv)
            .all(|(asked, word)| is_word(asked, word))
    });
    is_argv && ahead.is_none_or(|ahead| exec.started_at - ahead >= call.at - CLOCKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_node_that_remembers_back_to_before_a_call_says_that_it_never_came() {
        let now = OffsetDateTime::now_utc();
        let seconds = time::Duration::seconds;
        let call = |ago: i64| OpenCall {
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
        // The node's clock is right, an hour behind, an hour ahead: that changes nothing.
        for ahead in [0, -3_600, 3_600] {
            assert!(remembers(&known(Some(60), ahead), &call(30)));
            assert!(remembers(&known(Some(36), ahead), &call(30)));
            assert!(
                !remembers(&known(Some(35), ahead), &call(30)),
                "within what clocks and ways may differ by"
            );
            assert!(
                !remembers(&known(Some(10), ahead), &call(30)),
                "it was started, or has forgotten, since"
            );
        }
        assert!(
            !remembers(&known(None, 0), &call(30)),
            "it does not say since when"
        );
        assert!(
            !remembers(
                &cynode_api::Call {
                    now: None,
                    ..known(Some(60), 0)
                },
                &call(30)
            ),
            "it does not say its clock"
        );
        assert!(
            !remembers(&known(Some(3_600), 0), &call(-60)),
            "the clock that dated the call was set back"
        );
        // Of a call of this process the clock on the wall says nothing.
        let own = OpenCall {
            since: Instant::now().checked_sub(Duration::from_secs(30)),
            ..call(-3_600)
        };
        assert!(remembers(&known(Some(60), 0), &own) && !remembers(&known(Some(33), 0), &own));
    }
}
