//! The audit trail from a test's view: read whole, grouped by call, and compared with the responses
//! that callers received.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use cynode_api::{
    AuditKind, AuditRecord, AuditVerdict, AuditVerifyLine, CALL_HEADER, event_limits,
};
use cynode_client::{AuditFilter, UserClient};
use http::Method;
use serde_json::Value;
use uuid::Uuid;

use crate::Answer;

/// The interval between two verifications of the trail.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The client-side timeout of a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// Reads all records in order. The read itself is recorded too, so the trail always grows by a few
/// records.
pub async fn whole_trail(client: &UserClient) -> Result<Vec<AuditRecord>> {
    let mut records: Vec<AuditRecord> = Vec::new();
    loop {
        let page = client
            .audit(
                records.last().map_or(0, |record| record.cursor),
                &AuditFilter::default(),
                Duration::ZERO,
            )
            .await?;
        let is_last = page.items.len() < event_limits::MAX_PAGE as usize;
        records.extend(page.items);
        if is_last {
            return Ok(records);
        }
    }
}

/// Waits until every call has its outcome. The trail must be intact at every verification.
pub async fn wait_until_settled(client: &UserClient, limit: Duration) -> Result<AuditVerdict> {
    let deadline = Instant::now() + limit;
    loop {
        let mut verification = client.verify_audit().await?;
        let verdict = loop {
            match verification.next().await? {
                Some(AuditVerifyLine::Verdict { verdict }) => break verdict,
                Some(AuditVerifyLine::Progress { .. }) => {}
                None => bail!("no verdict"),
            }
        };
        // After an outage the next checkpoint is overdue until it is signed.
        let is_overdue = !verdict.problems.is_empty()
            && verdict
                .problems
                .iter()
                .all(|problem| problem.what == "checkpoint_overdue");
        ensure!(
            is_overdue || (verdict.intact && verdict.problems.is_empty()),
            "{verdict:?}"
        );
        if verdict.open == 0 && !is_overdue {
            return Ok(verdict);
        }
        ensure!(
            Instant::now() < deadline,
            "not within {limit:?}: every call has its outcome: {verdict:?}"
        );
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// The records of one call.
#[derive(Clone, Debug, Default)]
pub struct CallRecords {
    pub intents: Vec<AuditRecord>,
    pub outcomes: Vec<AuditRecord>,
}

/// The trail, grouped by call.
#[derive(Clone, Debug, Default)]
pub struct AuditTrail(BTreeMap<Uuid, CallRecords>);

impl AuditTrail {
    #[must_use]
    pub fn new(records: Vec<AuditRecord>) -> Self {
        let mut calls: BTreeMap<Uuid, CallRecords> = BTreeMap::new();
        for record in records {
            let Some(id) = record.body.call_id else {
                continue;
            };
            match record.body.kind {
                AuditKind::Intent => calls.entry(id).or_default().intents.push(record),
                AuditKind::Outcome => calls.entry(id).or_default().outcomes.push(record),
                AuditKind::Event | AuditKind::Authentication | AuditKind::Stream => {}
            }
        }
        Self(calls)
    }

    /// Returns the intent and the outcome of every call. Fails unless each call has exactly one
    /// intent, followed by exactly one outcome.
    pub fn pairs(&self) -> Result<Vec<(&AuditRecord, &AuditRecord)>> {
        self.0.keys().map(|id| self.call(*id)).collect()
    }

    /// Returns the only intent and the only outcome of a call.
    pub fn call(&self, id: Uuid) -> Result<(&AuditRecord, &AuditRecord)> {
        let records = self
            .0
            .get(&id)
            .with_context(|| format!("call {id} has no records"))?;
        let (intents, outcomes) = (records.intents.as_slice(), records.outcomes.as_slice());
        match (intents, outcomes) {
            ([intent], [outcome])
                if intent.cursor < outcome.cursor && intent.body.action == outcome.body.action =>
            {
                Ok((intent, outcome))
            }
            _ => bail!("call {id} has the intents {intents:?} and the outcomes {outcomes:?}"),
        }
    }

    /// Checks that every answered call has one intent and one outcome, and that the outcome carries
    /// the response's status. A call may lack records only if the database was unavailable.
    pub fn check(&self, answered: &[RecordedAnswer]) -> Result<()> {
        for answer in answered {
            let without_database = answer.code == "store_unavailable";
            let Some(id) = answer.call_id else {
                ensure!(without_database, "without the id of its call: {answer:?}");
                continue;
            };
            if without_database && !self.0.contains_key(&id) {
                continue;
            }
            let (_, outcome) = self.call(id).with_context(|| format!("{answer:?}"))?;
            // The outcome was unknown when these responses were sent.
            if !matches!(
                answer.code.as_str(),
                "store_unavailable" | "outcome_pending" | "node_unreachable"
            ) {
                ensure!(
                    outcome.body.status == Some(answer.status),
                    "{answer:?} is recorded as {outcome:?}"
                );
            }
        }
        Ok(())
    }
}

/// The response to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedAnswer {
    pub route: String,
    pub call_id: Option<Uuid>,
    pub status: u16,
    /// The problem code of a refusal, or empty.
    pub code: String,
}

impl RecordedAnswer {
    fn new(route: String, answer: &Answer) -> Self {
        let (status, code) = answer.outcome();
        Self {
            route,
            call_id: answer.header(CALL_HEADER).parse().ok(),
            status,
            code,
        }
    }
}

/// A caller that records the response to each call. Calls whose connection broke are not recorded.
#[derive(Clone, Debug)]
pub struct RecordingCaller {
    client: UserClient,
    answers: Arc<Mutex<Vec<RecordedAnswer>>>,
}

impl RecordingCaller {
    #[must_use]
    pub fn new(client: UserClient) -> Self {
        Self {
            client,
            answers: Arc::default(),
        }
    }

    /// Sends a call, without a body if `body` is null. Returns `None` if the connection broke.
    pub async fn call(&self, method: Method, path: &str, body: &Value) -> Option<Answer> {
        let route = format!("{method} {path}");
        let mut request = self
            .client
            .sessions()
            .request(method, path)
            .timeout(CALL_TIMEOUT);
        if !body.is_null() {
            request = request.json(body);
        }
        let answer = Answer::of(request).await.ok()?;
        self.answers
            .lock()
            .expect("not poisoned")
            .push(RecordedAnswer::new(route, &answer));
        Some(answer)
    }

    /// The responses so far.
    #[must_use]
    pub fn answers(&self) -> Vec<RecordedAnswer> {
        self.answers.lock().expect("not poisoned").clone()
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::{AuditBody, AuditResult};
    use time::OffsetDateTime;

    use super::*;

    fn record(cursor: i64, id: Uuid, kind: AuditKind, status: Option<u16>) -> AuditRecord {
        let result = status.map(|_| AuditResult::Done);
        let body = AuditBody {
            call_id: Some(id),
            status,
            result,
            ..AuditBody::new(kind, "session.exec")
        };
        AuditRecord {
            cursor,
            stream: Uuid::nil(),
            seq: cursor.unsigned_abs(),
            at: OffsetDateTime::UNIX_EPOCH,
            body,
            hash: String::new(),
        }
    }

    fn answered(call_id: Option<Uuid>, status: u16, code: &str) -> [RecordedAnswer; 1] {
        [RecordedAnswer {
            route: "POST /v1/sessions".to_owned(),
            call_id,
            status,
            code: code.to_owned(),
        }]
    }

    #[test]
    fn a_call_with_duplicate_missing_or_wrong_records_is_found() {
        let id = Uuid::now_v7();
        let (intent, outcome) = (
            record(1, id, AuditKind::Intent, None),
            record(2, id, AuditKind::Outcome, Some(200)),
        );
        let trail = AuditTrail::new(vec![intent.clone(), outcome.clone()]);
        assert!(
            trail.pairs().is_ok_and(|pairs| pairs.len() == 1)
                && trail.check(&answered(Some(id), 200, "")).is_ok()
        );
        assert!(
            trail.check(&answered(Some(id), 404, "not_found")).is_err(),
            "a record with another status passed"
        );
        assert!(
            trail
                .check(&answered(Some(id), 503, "outcome_pending"))
                .is_ok()
        );
        assert!(
            trail
                .check(&answered(Some(Uuid::now_v7()), 200, ""))
                .is_err()
                && trail.check(&answered(None, 200, "")).is_err(),
            "a call without a record passed"
        );
        assert!(
            trail
                .check(&answered(Some(Uuid::now_v7()), 503, "store_unavailable"))
                .is_ok(),
            "a call without effect needs a record"
        );
        for broken in [
            vec![intent.clone()],
            vec![outcome.clone()],
            vec![
                intent.clone(),
                outcome.clone(),
                record(3, id, AuditKind::Outcome, Some(200)),
            ],
            vec![
                intent.clone(),
                record(2, id, AuditKind::Intent, None),
                record(3, id, AuditKind::Outcome, Some(200)),
            ],
            vec![record(3, id, AuditKind::Intent, None), outcome],
        ] {
            let trail = AuditTrail::new(broken);
            assert!(trail.pairs().is_err() && trail.check(&answered(Some(id), 200, "")).is_err());
        }
    }
}
