//! What a node may write into the trail.
//!
//! Invariant: a node's record names the node as its subject's, a session or job only if it is that
//! node's, and no call: so a node can neither act in somebody's name nor close a call.

use cynode_api::{AuditSubject, JobId, NODE_ACTIONS, NodeAuditRefusal, NodeId, SessionId, TaskId};
use cynode_audit::Link;
use time::OffsetDateTime;

use super::received::{self, Topic};
use crate::db::{Db, Error, NodeSandboxes};

/// The sandbox that a record names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NamedSandbox {
    Session(SessionId, TaskId),
    Job(JobId, TaskId),
}

impl NamedSandbox {
    fn is_in(self, sandboxes: &NodeSandboxes) -> bool {
        match self {
            Self::Session(id, task) => sandboxes.sessions.get(&id) == Some(&task),
            Self::Job(id, task) => sandboxes.jobs.get(&id) == Some(&task),
        }
    }
}

/// The records that the node may not write, each with the reason.
pub(crate) async fn refusals(
    db: &Db,
    node: NodeId,
    links: &[Link],
    now: OffsetDateTime,
) -> Result<Vec<NodeAuditRefusal>, Error> {
    let checked: Vec<(u64, Result<Option<NamedSandbox>, &'static str>)> = links
        .iter()
        .map(|link| (link.seq, check(node, link, now)))
        .collect();
    let named = || checked.iter().filter_map(|(_, named)| named.ok().flatten());
    let mut sessions: Vec<SessionId> = named()
        .filter_map(|named| match named {
            NamedSandbox::Session(id, _) => Some(id),
            NamedSandbox::Job(..) => None,
        })
        .collect();
    let mut jobs: Vec<JobId> = named()
        .filter_map(|named| match named {
            NamedSandbox::Job(id, _) => Some(id),
            NamedSandbox::Session(..) => None,
        })
        .collect();
    sessions.sort_unstable();
    sessions.dedup();
    jobs.sort_unstable();
    jobs.dedup();
    let sandboxes = db.sandboxes_of_node(node, &sessions, &jobs).await?;
    let refusal = |(seq, named): (u64, Result<Option<NamedSandbox>, &'static str>)| {
        let reason = match named {
            Ok(Some(named)) if !named.is_in(&sandboxes) => {
                Some("its session or job is not this node's, or not of that task")
            }
            Ok(_) => None,
            Err(reason) => Some(reason),
        };
        received::refusal(seq, reason)
    };
    Ok(checked.into_iter().filter_map(refusal).collect())
}

fn check(
    node: NodeId,
    link: &Link,
    now: OffsetDateTime,
) -> Result<Option<NamedSandbox>, &'static str> {
    let body = received::body(link, now)?;
    let is_of = |kind: &str| {
        let expected = AuditSubject {
            kind: kind.to_owned(),
            node_id: Some(node),
            ..AuditSubject::default()
        };
        body.subject.as_ref() == Some(&expected)
    };
    match received::topic(link, &body, &NODE_ACTIONS)? {
        Topic::Action if !is_of("sandbox") => Err("its subject is not a sandbox of this node"),
        Topic::Action => match (body.task_id, body.session_id, body.job_id) {
            (Some(task), Some(id), None) => Ok(Some(NamedSandbox::Session(id, task))),
            (Some(task), None, Some(id)) => Ok(Some(NamedSandbox::Job(id, task))),
            _ => Err("it does not name one session or job, and its task"),
        },
        Topic::Writer if !is_of("node") => Err("its subject is not this node"),
        Topic::Writer => received::names_nothing(&body).map(|()| None),
    }
}

#[cfg(test)]
mod tests {
    use cynode_audit::Chain;
    use serde_json::{Value, json};
    use time::Duration;
    use uuid::Uuid;

    use super::*;

    fn link(first: bool, body: Value) -> Link {
        let mut chain = Chain::new(Uuid::now_v7());
        if !first {
            chain.append(OffsetDateTime::now_utc(), json!({}));
        }
        chain.append(OffsetDateTime::now_utc(), body)
    }

    fn denial(node: NodeId) -> Value {
        json!({
            "version": 1, "kind": "event", "action": "proxy.connect",
            "subject": {"kind": "sandbox", "node_id": node},
            "task_id": TaskId::generate(), "session_id": SessionId::generate(),
            "resource": "example.com:443", "decision": "deny", "rules": ["default/deny-all"],
            "result": "refused", "code": "denied", "detail": {"count": 3},
        })
    }

    #[test]
    fn a_node_writes_about_itself_and_its_sandboxes_and_nothing_else() {
        let (node, now) = (NodeId::generate(), OffsetDateTime::now_utc());
        let first = json!({
            "version": 1, "kind": "stream", "action": "audit.stream",
            "subject": {"kind": "node", "node_id": node},
        });
        assert_eq!(check(node, &link(true, first.clone()), now), Ok(None));
        assert!(matches!(
            check(node, &link(false, denial(node)), now),
            Ok(Some(NamedSandbox::Session(..)))
        ));
        assert!(check(node, &link(true, denial(node)), now).is_err());
        assert!(check(node, &link(false, first), now).is_err());
        for (member, value) in [
            ("version", json!(2)),
            ("kind", json!("intent")),
            ("kind", json!("outcome")),
            ("kind", json!("authentication")),
            ("action", json!("session.exec")),
            ("call_id", json!(Uuid::now_v7())),
            ("request_id", json!("r")),
            ("project_id", json!(Uuid::now_v7())),
            ("exec_id", json!(Uuid::now_v7())),
            ("job_id", json!(JobId::generate())),
            ("task_id", Value::Null),
            ("session_id", Value::Null),
            ("weather", json!("rain")),
            ("decision", json!("perhaps")),
            ("subject", json!({"kind": "user", "name": "ada"})),
            ("subject", json!({"kind": "node", "node_id": node})),
            (
                "subject",
                json!({"kind": "sandbox", "node_id": NodeId::generate()}),
            ),
            (
                "subject",
                json!({"kind": "sandbox", "node_id": node, "name": "ada"}),
            ),
            (
                "subject",
                json!({"kind": "sandbox", "node_id": node, "instance": Uuid::now_v7()}),
            ),
            ("detail", json!({"text": "x".repeat(9_000)})),
        ] {
            let mut body = denial(node);
            body[member] = value;
            let checked = check(node, &link(false, body), now);
            assert!(checked.is_err(), "{member}: {checked:?}");
        }
        for age in [Duration::days(31), Duration::hours(-2)] {
            let mut late = link(false, denial(node));
            late.at = now - age;
            assert!(check(node, &late, now).is_err(), "{age}");
        }
    }
}
