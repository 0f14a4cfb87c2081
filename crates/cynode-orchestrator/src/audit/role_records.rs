//! What an egress role may write into the trail.
//!
//! Invariant: a role's record names that instance of the role as its subject, one of the role's
//! actions, a task that exists, and a session only if it is that task's.

use cynode_api::{
    AuditSubject, EGRESS_GIT_ACTIONS, EGRESS_SUBJECT, NodeAuditRefusal, SessionId, TaskId,
};
use cynode_audit::Link;
use time::OffsetDateTime;
use uuid::Uuid;

use super::received::{self, Topic};
use crate::db::{Db, Error, ExistingTasks};

/// What a record concerns.
type Concern = (TaskId, Option<SessionId>);

/// The records that an instance of a role may not write, each with the reason.
pub(super) async fn refusals(
    db: &Db,
    role: &str,
    instance: Uuid,
    links: &[Link],
    now: OffsetDateTime,
) -> Result<Vec<NodeAuditRefusal>, Error> {
    let checked: Vec<(u64, Result<Option<Concern>, &'static str>)> = links
        .iter()
        .map(|link| (link.seq, check(role, instance, link, now)))
        .collect();
    let named = || checked.iter().filter_map(|(_, named)| named.ok().flatten());
    let mut tasks: Vec<TaskId> = named().map(|(task, _)| task).collect();
    let mut sessions: Vec<SessionId> = named().filter_map(|(_, session)| session).collect();
    tasks.sort_unstable();
    tasks.dedup();
    sessions.sort_unstable();
    sessions.dedup();
    let existing = db.existing_tasks(&tasks, &sessions).await?;
    let refusal = |(seq, named): (u64, Result<Option<Concern>, &'static str>)| {
        let reason = match named {
            Ok(Some(named)) if !is_in(named, &existing) => {
                Some("its task does not exist, or its session is not of that task")
            }
            Ok(_) => None,
            Err(reason) => Some(reason),
        };
        received::refusal(seq, reason)
    };
    Ok(checked.into_iter().filter_map(refusal).collect())
}

fn is_in((task, session): Concern, existing: &ExistingTasks) -> bool {
    existing.tasks.contains(&task)
        && session.is_none_or(|session| existing.sessions.get(&session) == Some(&task))
}

fn check(
    role: &str,
    instance: Uuid,
    link: &Link,
    now: OffsetDateTime,
) -> Result<Option<Concern>, &'static str> {
    let body = received::body(link, now)?;
    if body.subject.as_ref() != Some(&subject(role, instance)) {
        return Err("its subject is not this instance of the role");
    }
    match received::topic(link, &body, &EGRESS_GIT_ACTIONS)? {
        Topic::Writer => received::names_nothing(&body).map(|()| None),
        Topic::Action => match (body.task_id, body.job_id) {
            (Some(task), None) => Ok(Some((task, body.session_id))),
            _ => Err("it does not name a task, or names a job"),
        },
    }
}

/// The subject of a role's records.
pub(super) fn subject(role: &str, instance: Uuid) -> AuditSubject {
    AuditSubject {
        kind: EGRESS_SUBJECT.to_owned(),
        name: Some(role.to_owned()),
        instance: Some(instance),
        ..AuditSubject::default()
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::{JobId, NodeId};
    use cynode_audit::Chain;
    use serde_json::{Value, json};

    use super::*;

    fn link(first: bool, body: Value) -> Link {
        let mut chain = Chain::new(Uuid::now_v7());
        if !first {
            chain.append(OffsetDateTime::now_utc(), json!({}));
        }
        chain.append(OffsetDateTime::now_utc(), body)
    }

    fn push(instance: Uuid) -> Value {
        json!({
            "version": 1, "kind": "event", "action": "git.push",
            "subject": {"kind": "egress", "name": "git", "instance": instance},
            "task_id": TaskId::generate(), "session_id": SessionId::generate(),
            "resource": "repository:web", "decision": "allow", "rules": ["default/owners"],
            "detail": {"stage": "intent", "branch": "cynode/1/fix"},
        })
    }

    #[test]
    fn a_role_writes_about_itself_and_its_operations_and_nothing_else() {
        let (instance, now) = (Uuid::now_v7(), OffsetDateTime::now_utc());
        let check = |link: &Link| check("git", instance, link, now);
        let first = json!({
            "version": 1, "kind": "stream", "action": "audit.stream",
            "subject": {"kind": "egress", "name": "git", "instance": instance},
        });
        assert_eq!(check(&link(true, first.clone())), Ok(None));
        assert!(matches!(
            check(&link(false, push(instance))),
            Ok(Some((_, Some(_))))
        ));
        let mut of_task = push(instance);
        of_task
            .as_object_mut()
            .expect("an object")
            .remove("session_id");
        assert!(matches!(check(&link(false, of_task)), Ok(Some((_, None)))));
        assert!(check(&link(true, push(instance))).is_err());
        assert!(check(&link(false, first)).is_err());
        for (member, value) in [
            ("version", json!(2)),
            ("kind", json!("intent")),
            ("kind", json!("outcome")),
            ("action", json!("session.exec")),
            ("action", json!("proxy.connect")),
            ("call_id", json!(Uuid::now_v7())),
            ("request_id", json!("r")),
            ("project_id", json!(Uuid::now_v7())),
            ("job_id", json!(JobId::generate())),
            ("task_id", Value::Null),
            ("weather", json!("rain")),
            ("subject", json!({"kind": "user", "name": "git"})),
            ("subject", json!({"kind": "egress", "name": "git"})),
            (
                "subject",
                json!({"kind": "egress", "name": "web", "instance": instance}),
            ),
            (
                "subject",
                json!({"kind": "egress", "name": "git", "instance": Uuid::now_v7()}),
            ),
            (
                "subject",
                json!({"kind": "node", "node_id": NodeId::from_uuid(instance)}),
            ),
            ("detail", json!({"text": "x".repeat(9_000)})),
        ] {
            let mut body = push(instance);
            body[member] = value;
            let checked = check(&link(false, body));
            assert!(checked.is_err(), "{member}: {checked:?}");
        }
    }
}
