//! The audit trail as tests look at it: all of it, call by call, beside what callers were answered.

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

/// Between two looks at the whole trail.
const LOOK: Duration = Duration::from_millis(500);
/// No call of a test takes longer.
const LONGEST_CALL: Duration = Duration::from_secs(120);

/// Everything that is recorded, in order. Looking is recorded too, so that there is always a little more.
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

/// Waits until every call has its outcome. At no moment may the trail be anything but intact.
pub async fn until_settled(client: &UserClient, limit: Duration) -> Result<AuditVerdict> {
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
        tokio::time::sleep(LOOK).await;
    }
}

/// What is recorded of one call.
#[derive(Clone, Debug, Default)]
pub struct Told {
    pub intents: Vec<AuditRecord>,
    pub outcomes: Vec<AuditRecord>,
}

/// The trail, call by call.
#[derive(Clone, Debug, Default)]
pub struct Trail(BTreeMap<Uuid, Told>);

impl Trail {
    #[must_use]
    pub fn new(records: Vec<AuditRecord>) -> Self {
        let mut calls: BTreeMap<Uuid, Told> = BTreeMap::new();
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

    /// The intent and the outcome of each call. One that has not exactly one of both, in this order, is an error.
    pub fn pairs(&self) -> Result<Vec<(&AuditRecord, &AuditRecord)>> {
        self.0.keys().map(|id| self.call(*id)).collect()
    }

    /// The intent and the outcome of a call: one of each.
    pub fn call(&self, id: Uuid) -> Result<(&AuditRecord, &AuditRecord)> {
        let told = self
            .0
            .get(&id)
            .with_context(|| format!("nothing is recorded of call {id}"))?;
        let (intents, outcomes) = (told.intents.as_slice(), told.outcomes.as_slice());
        match (intents, outcomes) {
            ([intent], [outcome])
                if intent.cursor < outcome.cursor && intent.body.action == outcome.body.action =>
            {
                Ok((intent, outcome))
            }
            _ => bail!("call {id} has the intents {intents:?} and the outcomes {outcomes:?}"),
        }
    }

    /// Whether something that callers were answered is told: each answered call has one intent and one outcome, which says what
    /// was answered. Only a call for which there was no database may have none.
    pub fn check(&self, answered: &[Answered]) -> Result<()> {
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
            // What became of these was not known when they were answered.
            if !matches!(
                answer.code.as_str(),
                "store_unavailable" | "outcome_pending" | "node_unreachable"
            ) {
                ensure!(
                    outcome.body.status == Some(answer.status),
                    "{answer:?} is told as {outcome:?}"
                );
            }
        }
        Ok(())
    }
}

/// How a call was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answered {
    pub what: String,
    pub call_id: Option<Uuid>,
    pub status: u16,
    /// Of a refusal.
    pub code: String,
}

impl Answered {
    fn new(what: String, answer: &Answer) -> Self {
        let (status, code) = answer.outcome();
        Self {
            what,
            call_id: answer.header(CALL_HEADER).parse().ok(),
            status,
            code,
        }
    }
}

/// A caller who remembers how each call was answered. Those that broke off are not among them.
#[derive(Clone, Debug)]
pub struct Witness {
    client: UserClient,
    answered: Arc<Mutex<Vec<Answered>>>,
}

impl Witness {
    #[must_use]
    pub fn new(client: UserClient) -> Self {
        Self {
            client,
            answered: Arc::default(),
        }
    }

    /// Calls with a body, or with none if that is null. None when it broke off.
    pub async fn call(&self, method: Method, path: &str, body: &Value) -> Option<Answer> {
        let what = format!("{method} {path}");
        let mut request = self
            .client
            .sessions()
            .request(method, path)
            .timeout(LONGEST_CALL);
        if !body.is_null() {
            request = request.json(body);
        }
        let answer = Answer::of(request).await.ok()?;
        self.answered
            .lock()
            .expect("not poisoned")
            .push(Answered::new(what, &answer));
        Some(answer)
    }

    /// What was answered until now.
    #[must_use]
    pub fn answered(&self) -> Vec<Answered> {
        self.answered.lock().expect("not poisoned").clone()
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

    fn answered(call_id: Option<Uuid>, status: u16, code: &str) -> [Answered; 1] {
        [Answered {
            what: "POST /v1/sessions".to_owned(),
            call_id,
            status,
            code: code.to_owned(),
        }]
    }

    #[test]
    fn a_call_that_is_told_twice_or_half_or_otherwise_than_it_was_answered_is_found() {
        let id = Uuid::now_v7();
        let (intent, outcome) = (
            record(1, id, AuditKind::Intent, None),
            record(2, id, AuditKind::Outcome, Some(200)),
        );
        let trail = Trail::new(vec![intent.clone(), outcome.clone()]);
        assert!(
            trail.pairs().is_ok_and(|pairs| pairs.len() == 1)
                && trail.check(&answered(Some(id), 200, "")).is_ok()
        );
        assert!(
            trail.check(&answered(Some(id), 404, "not_found")).is_err(),
            "otherwise"
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
            "not at all"
        );
        assert!(
            trail
                .check(&answered(Some(Uuid::now_v7()), 503, "store_unavailable"))
                .is_ok(),
            "nothing was done"
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
            let trail = Trail::new(broken);
            assert!(trail.pairs().is_err() && trail.check(&answered(Some(id), 200, "")).is_err());
        }
    }
}
