//! Records that nodes and egress roles write by themselves, as they arrive.
//!
//! Invariant: such a record names no call, request, project or exec: so its writer can neither act
//! in somebody's name nor close a call.

use cynode_api::{
    AUDIT_VERSION, AuditBody, AuditKind, NODE_REFUSED_ACTION, NODE_STREAM_ACTION, NodeAuditRecord,
    NodeAuditRefusal, node_audit_limits,
};
use cynode_audit::Link;
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

/// A batch that can't be stored, and that repeating does not repair.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct MalformedBatch(String);

/// What a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Topic {
    /// The writer itself: the first record of a stream, or a refused one.
    Writer,
    /// One of the given actions.
    Action,
}

/// The records of a batch in their stream. Their hashes are verified against the stored head.
pub(crate) fn links(
    stream: Uuid,
    records: Vec<NodeAuditRecord>,
) -> Result<Vec<Link>, MalformedBatch> {
    if records.is_empty() || records.len() > node_audit_limits::MAX_RECORDS {
        return Err(MalformedBatch(format!(
            "records: must have 1 to {} records",
            node_audit_limits::MAX_RECORDS
        )));
    }
    let mut links: Vec<Link> = Vec::with_capacity(records.len());
    for (index, record) in records.into_iter().enumerate() {
        let link = Link::from_node_record(stream, record)
            .map_err(|error| MalformedBatch(format!("records[{index}]: {error}")))?;
        let expected = links
            .last()
            .map_or(Some(link.seq), |last| last.seq.checked_add(1));
        // The database counts in signed numbers.
        let is_countable = (1..i64::MAX.unsigned_abs()).contains(&link.seq);
        if expected != Some(link.seq) || !is_countable {
            return Err(MalformedBatch(format!(
                "records[{index}].seq: the numbers must be consecutive and begin at 1 or later"
            )));
        }
        links.push(link);
    }
    Ok(links)
}

/// The body of a record, if its time, size and members are those of a record of this kind.
pub(super) fn body(link: &Link, now: OffsetDateTime) -> Result<AuditBody, &'static str> {
    if link.at > now + Duration::seconds(node_audit_limits::MAX_AHEAD_SECONDS) {
        return Err("its time is in the future");
    }
    if link.at < now - Duration::days(node_audit_limits::MAX_AGE_DAYS) {
        return Err("it is too old");
    }
    let canonical = cynode_audit::canonical(&link.body).map_err(|_| "its body is malformed")?;
    if canonical.len() > node_audit_limits::MAX_BODY_BYTES {
        return Err("its body is too large");
    }
    let body: AuditBody =
        serde_json::from_value(link.body.clone()).map_err(|_| "its body is malformed")?;
    // Parsing drops what it does not know.
    if serde_json::to_value(&body).ok().as_ref() != Some(&link.body) {
        return Err("its body has unknown members");
    }
    let AuditBody {
        version,
        call_id: None,
        request_id: None,
        subject: Some(_),
        project_id: None,
        exec_id: None,
        stage: None,
        ..
    } = body
    else {
        return Err("its body has members that its writer may not set");
    };
    if version != AUDIT_VERSION {
        return Err("its version is unknown");
    }
    Ok(body)
}

/// What the record is about, if it may be where it is.
pub(super) fn topic(
    link: &Link,
    body: &AuditBody,
    actions: &[&str],
) -> Result<Topic, &'static str> {
    let is_first = link.seq == 1;
    match (body.kind, body.action.as_str()) {
        (AuditKind::Stream, NODE_STREAM_ACTION) if is_first => Ok(Topic::Writer),
        (AuditKind::Event, NODE_REFUSED_ACTION) if !is_first => Ok(Topic::Writer),
        (AuditKind::Event, action) if !is_first && actions.contains(&action) => Ok(Topic::Action),
        _ => Err("its kind or action is not one that its writer writes there"),
    }
}

/// A record about the writer itself concerns nothing else.
pub(super) fn names_nothing(body: &AuditBody) -> Result<(), &'static str> {
    match (body.task_id, body.session_id, body.job_id) {
        (None, None, None) => Ok(()),
        _ => Err("it names a session, job or task, but concerns its writer"),
    }
}

/// The refusal of a record with a reason against it.
pub(super) fn refusal(seq: u64, reason: Option<&'static str>) -> Option<NodeAuditRefusal> {
    Some(NodeAuditRefusal {
        seq,
        reason: reason?.to_owned(),
    })
}
