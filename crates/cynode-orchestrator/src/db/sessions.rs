//! Sessions: their node, their request, and their last reported state.

use std::{collections::HashMap, time::Duration};

use cynode_api::{
    ImageVersionId, Limits, NodeId, Page, RepositoryId, SeedNotes, Session, SessionCreate,
    SessionEnd, SessionId, SessionState, TaskId, UserSessionCreate, WorkspaceDisposal, WorkspaceId,
    session_limits,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::{Row as _, postgres::PgRow};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    Db, Error, Missing, NewEvent, PageRequest, decode, events, quotas, sandboxes::NewSandbox,
    to_json,
};
use crate::caller::Scope;

#[derive(Clone, Debug)]
pub(crate) struct SessionRow {
    pub(crate) session_id: SessionId,
    pub(crate) task_id: TaskId,
    pub(crate) node_id: NodeId,
    pub(crate) state: SessionState,
    pub(crate) body: Value,
    pub(crate) request: SessionCreate,
    /// As last reported by the node; before the first report, derived from the request.
    pub(crate) object: Session,
    pub(crate) ending: Option<SessionEnd>,
    /// When the row was read, by the database's clock.
    pub(crate) read_at: OffsetDateTime,
}

/// The sessions to list.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SessionQuery<'a> {
    /// Any of these; all if there are none.
    pub(crate) states: &'a [SessionState],
    pub(crate) task_id: Option<TaskId>,
    /// A label, with a value or with any.
    pub(crate) label: Option<(&'a str, Option<&'a str>)>,
    pub(crate) name: Option<&'a str>,
}

#[derive(Clone, Debug)]
pub(crate) struct NewSession<'a> {
    pub(crate) body: &'a UserSessionCreate,
    pub(crate) name: Option<&'a str>,
    pub(crate) request: &'a SessionCreate,
    pub(crate) node_id: NodeId,
    pub(crate) image_version_id: ImageVersionId,
    pub(crate) created_by: &'a str,
    pub(crate) source: Option<&'a SessionSource>,
}

/// The repository that a session's workspace was seeded from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SessionSource {
    pub(crate) repository_id: RepositoryId,
    pub(crate) base_commit: String,
    pub(crate) notes: SeedNotes,
}

fn session(row: &PgRow) -> Result<SessionRow, Error> {
    let get = |name: &str| row.try_get::<Option<Value>, _>(name).map_err(Error::from);
    let id = |name: &str| row.try_get::<Uuid, _>(name).map_err(Error::from);
    let node_id = NodeId::from_uuid(id("node_id")?);
    let state = super::state(row)?;
    let request: SessionCreate = decode(get("request")?.unwrap_or_default())?;
    let end_reason: Option<String> = row.try_get("end_reason")?;
    let object = if let Some(object) = get("object")? {
        decode(object)?
    } else {
        let ended_at: Option<OffsetDateTime> = if is_final(state) {
            row.try_get("updated_at")?
        } else {
            None
        };
        Session {
            ended_at,
            ..unreported(&request, node_id, row.try_get("created_at")?)
        }
    };
    Ok(SessionRow {
        session_id: SessionId::from_uuid(id("session_id")?),
        task_id: TaskId::from_uuid(id("task_id")?),
        node_id,
        state,
        body: get("body")?.unwrap_or_default(),
        request,
        // Decisions of the orchestrator override the node's last report.
        object: with_source(
            Session {
                name: row.try_get("name")?,
                state,
                end_reason: end_reason.or(object.end_reason.clone()),
                ..object
            },
            get("source")?.map(decode).transpose()?,
        ),
        ending: get("ending")?.map(decode).transpose()?,
        read_at: row.try_get("read_at")?,
    })
}

/// A session with the source of its workspace, of which nodes know nothing.
fn with_source(session: Session, source: Option<SessionSource>) -> Session {
    let Some(source) = source else {
        return Session {
            repository_id: None,
            base_commit: None,
            seed_notes: None,
            ..session
        };
    };
    Session {
        repository_id: Some(source.repository_id),
        base_commit: Some(source.base_commit),
        seed_notes: Some(source.notes),
        ..session
    }
}

/// The work that is assigned to a node.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Load {
    pub(crate) sandboxes: i64,
    /// The sum of their memory limits.
    pub(crate) memory_bytes: u64,
}

/// A session before its node's first report.
fn unreported(request: &SessionCreate, node_id: NodeId, created_at: OffsetDateTime) -> Session {
    let after = |seconds: Option<u64>, default: u64| {
        let seconds = i64::try_from(seconds.unwrap_or(default)).unwrap_or(i64::MAX);
        created_at
            .checked_add(time::Duration::seconds(seconds))
            .unwrap_or(created_at)
    };
    Session {
        session_id: request.session_id,
        name: None,
        task_id: request.task_id,
        state: SessionState::Creating,
        end_reason: None,
        image_ref: request.image_ref.clone(),
        image_digest: None,
        workspace_id: WorkspaceId::from_uuid(Uuid::nil()),
        node_id,
        warm: false,
        limits: request.limits.unwrap_or_default().or_default(),
        unenforced: Vec::new(),
        network_policy: request.network_policy.unwrap_or_default(),
        pty_allowed: request.pty_allowed.unwrap_or(false),
        labels: request.labels.clone(),
        created_at,
        expires_at: after(
            request.max_lifetime_seconds,
            session_limits::DEFAULT_LIFETIME_SECONDS,
        ),
        idle_expires_at: after(
            request.idle_timeout_seconds,
            session_limits::DEFAULT_IDLE_SECONDS,
        ),
        ended_at: None,
        create_duration_ms: None,
        running_execs: 0,
        repository_id: None,
        base_commit: None,
        seed_notes: None,
    }
}

impl Db {
    /// Inserts a session, and its task if that is new. `None` when the id is taken; fails with
    /// `NameTaken` when another live session of the owner has the name.
    pub(crate) async fn insert_session(
        &self,
        new: &NewSession<'_>,
        task: Option<&cynode_api::Task>,
        scope: &Scope,
    ) -> Result<Option<SessionRow>, Error> {
        let insert = sqlx::query(
            "insert into sessions (session_id, task_id, node_id, state, body, request, image_version_id, owner_id, created_by, name, source, lease_until)
             values ($1, $2, $3, 'creating', $4, $5, $6, $7, $8, $9, $10, now() + interval '75 seconds') on conflict (session_id) do nothing returning *, clock_timestamp() as read_at",
        )
        .bind(new.request.session_id.as_uuid())
        .bind(new.request.task_id.as_uuid())
        .bind(new.node_id.as_uuid())
        .bind(to_json(new.body))
        .bind(to_json(new.request))
        .bind(new.image_version_id.as_uuid())
        .bind(scope.user_id.as_uuid())
        .bind(new.created_by)
        .bind(new.name)
        .bind(new.source.map(to_json));
        let new = NewSandbox {
            insert,
            task,
            limits: new.request.limits,
            event: NewEvent::session(
                new.request.task_id,
                new.request.session_id,
                SessionState::Creating,
            ),
        };
        let row = self.insert_sandbox(new, scope).await?;
        row.as_ref().map(session).transpose()
    }

    /// A session that the caller may see.
    pub(crate) async fn session(&self, scope: &Scope, id: SessionId) -> Result<SessionRow, Error> {
        let query = concat!(
            "select *, clock_timestamp() as read_at from sessions s where session_id = $1 and ",
            visible_by_task!("s")
        );
        let row = self.visible_row(query, id.as_uuid(), scope).await?;
        row.as_ref()
            .map(session)
            .transpose()?
            .ok_or(Error::NotFound(Missing::Session(id)))
    }

    pub(crate) async fn any_session(&self, id: SessionId) -> Result<Option<SessionRow>, Error> {
        let row = self
            .row(
                "select *, clock_timestamp() as read_at from sessions where session_id = $1",
                id.as_uuid(),
            )
            .await?;
        row.as_ref().map(session).transpose()
    }

    pub(crate) async fn list_sessions(
        &self,
        scope: &Scope,
        filter: &SessionQuery<'_>,
        page: &PageRequest,
    ) -> Result<Page<Session>, Error> {
        let (label, value) = filter
            .label
            .map_or((None, None), |(name, value)| (Some(name), value));
        let states: Vec<String> = filter.states.iter().map(ToString::to_string).collect();
        let query = |after: Option<Uuid>, count: i64| {
            sqlx::query(page_of!(
                page.order,
                [
                    "select *, clock_timestamp() as read_at from sessions s where ",
                    visible_by_task!("s"),
                    " and (cardinality($4::text[]) = 0 or s.state = any($4)) and ($5::uuid is null or s.task_id = $5)
                      and ($6::text is null or coalesce(s.object->'labels', s.request->'labels', '{}') ? $6)
                      and ($7::text is null or coalesce(s.object->'labels', s.request->'labels')->>$6 = $7)
                      and ($8::text is null or s.name = $8)"
                ],
                "s.session_id",
                "$1",
                "$9",
                "$10"
            ))
            .bind(after)
            .bind(scope.sees_all)
            .bind(scope.user_id.as_uuid())
            .bind(states.clone())
            .bind(filter.task_id.map(|id| *id.as_uuid()))
            .bind(label.map(ToOwned::to_owned))
            .bind(value.map(ToOwned::to_owned))
            .bind(filter.name.map(ToOwned::to_owned))
            .bind(page.id_part.clone())
            .bind(count)
        };
        self.read_page_of(
            page,
            query,
            |row| session(row).map(|row| row.object),
            |session: &Session| *session.session_id.as_uuid(),
        )
        .await
    }

    /// Stores a node's report that was requested at `as_of` (by the database's clock). Returns
    /// false, and changes nothing, when the row was written since: then it is newer. A changed
    /// state adds an event. A lost session that comes back after another one took its name has
    /// none.
    pub(crate) async fn observe_session(
        &self,
        object: &Session,
        as_of: OffsetDateTime,
    ) -> Result<bool, Error> {
        let id = object.session_id;
        let mut transaction = self.begin().await?;
        let before = sqlx::query("select *, clock_timestamp() as read_at, updated_at > $2 as is_newer from sessions where session_id = $1 for update")
            .bind(id.as_uuid())
            .bind(as_of)
            .fetch_optional(&mut *transaction)
            .await?;
        let Some(before) = before else {
            return Ok(true);
        };
        let is_newer = before.try_get::<bool, _>("is_newer")?;
        let before = session(&before)?;
        // A list may have shown the session while it was creating: that it runs is newer in any
        // case.
        let has_come_up =
            before.state == SessionState::Creating && object.state == SessionState::Running;
        if is_newer && !has_come_up {
            return Ok(false);
        }
        // A session that has ended runs again only by a resume, which is stored first. A late
        // create request is not a resume.
        if matches!(before.state, SessionState::Ended | SessionState::Failed)
            && !is_final(object.state)
        {
            return Ok(true);
        }
        if !before.differs_from(object) {
            return Ok(true);
        }
        let state = before.effective_state(object);
        let over = is_final(object.state);
        // A lost session may come back; it is ended then.
        let ended = over && object.state != SessionState::Lost;
        sqlx::query(
            "update sessions s set object = $2, state = $3, end_reason = case when $5 then coalesce($4, end_reason) end,
                 ending = case when $6 then null else ending end, updated_at = clock_timestamp(),
                 name = case when $7 and exists (select from sessions other where other.owner_id = s.owner_id and other.name = s.name
                                                 and other.state in ('creating', 'running', 'ending')) then null else name end
             where session_id = $1",
        )
        .bind(id.as_uuid())
        .bind(to_json(object))
        .bind(state.to_string())
        .bind(&object.end_reason)
        .bind(over)
        .bind(ended)
        .bind(before.state == SessionState::Lost && !is_final(state))
        .execute(&mut *transaction)
        .await?;
        if before.state != state {
            events::add(
                &mut transaction,
                &NewEvent::session(before.task_id, id, state),
            )
            .await?;
        }
        super::commit(transaction).await?;
        Ok(true)
    }

    /// Sets the state without a report of the node: the session failed, or its node is gone.
    pub(crate) async fn set_session_state(
        &self,
        id: SessionId,
        from: &[SessionState],
        state: SessionState,
        reason: &str,
    ) -> Result<bool, Error> {
        let from: Vec<String> = from.iter().map(ToString::to_string).collect();
        let mut transaction = self.begin().await?;
        let row = sqlx::query(
            "update sessions set state = $3, end_reason = $4, updated_at = clock_timestamp(),
                 ending = case when $3 in ('ended', 'failed') then null else ending end,
                 object = case when object is null then null else object || jsonb_build_object('state', $3::text, 'end_reason', $4::text) end
             where session_id = $1 and state = any($2) returning task_id",
        )
        .bind(id.as_uuid())
        .bind(from)
        .bind(state.to_string())
        .bind(reason)
        .fetch_optional(&mut *transaction)
        .await?;
        let Some(row) = row else { return Ok(false) };
        let task_id = TaskId::from_uuid(row.try_get("task_id")?);
        events::add(&mut transaction, &NewEvent::session(task_id, id, state)).await?;
        super::commit(transaction).await?;
        Ok(true)
    }

    /// Requests that a session in a final state run again. Returns the previous state. Fails with
    /// `NameTaken` when another live session has the name now.
    pub(crate) async fn request_resume(
        &self,
        id: SessionId,
    ) -> Result<Option<SessionState>, Error> {
        let mut transaction = self.begin().await?;
        let row = sqlx::query(
            "update sessions s set state = 'creating', updated_at = clock_timestamp(), lease_until = now() + interval '75 seconds'
             from (select session_id, state from sessions where session_id = $1 for update) before
             where s.session_id = before.session_id and before.state in ('ended', 'lost') and s.ending is null returning s.task_id, s.owner_id, s.object, before.state",
        )
        .bind(id.as_uuid())
        .fetch_optional(&mut *transaction)
        .await?;
        let Some(row) = row else { return Ok(None) };
        let task_id = TaskId::from_uuid(row.try_get("task_id")?);
        let owner = cynode_api::UserId::from_uuid(row.try_get("owner_id")?);
        let object: Session = decode(row.try_get("object")?)?;
        quotas::check(
            &mut transaction,
            owner,
            task_id,
            quotas::Usage::Sandbox(object.limits),
        )
        .await?;
        events::add(
            &mut transaction,
            &NewEvent::session(task_id, id, SessionState::Creating),
        )
        .await?;
        let was = super::state(&row)?;
        super::commit(transaction).await?;
        Ok(Some(was))
    }

    /// Requests the end of a session, durably, so that it outlives its caller. The first request
    /// wins, but a workspace that was to be kept can still be deleted.
    pub(crate) async fn request_end(&self, id: SessionId, end: &SessionEnd) -> Result<(), Error> {
        let mut transaction = self.begin().await?;
        let row = sqlx::query(
            "update sessions s set ending = case when $3 and s.ending is not null then s.ending || jsonb_build_object('workspace', 'delete') else coalesce(s.ending, $2) end, state = case when s.state = 'lost' then 'lost' else 'ending' end,
                 updated_at = clock_timestamp(), lease_until = now() + interval '20 seconds'
             from (select session_id, state from sessions where session_id = $1 for update) before
             where s.session_id = before.session_id and before.state in ('creating', 'running', 'lost') returning s.task_id, s.state <> before.state as is_new",
        )
        .bind(id.as_uuid())
        .bind(to_json(end))
        .bind(end.workspace == Some(WorkspaceDisposal::Delete))
        .fetch_optional(&mut *transaction)
        .await?;
        if let Some(row) = row
            && row.try_get("is_new")?
        {
            let task_id = TaskId::from_uuid(row.try_get("task_id")?);
            events::add(
                &mut transaction,
                &NewEvent::session(task_id, id, SessionState::Ending),
            )
            .await?;
        }
        super::commit(transaction).await
    }

    /// Leases sessions whose creation or end was left unfinished.
    pub(crate) async fn lease_sessions(&self, count: usize) -> Result<Vec<SessionRow>, Error> {
        let rows = sqlx::query(
            "update sessions set lease_until = now() + interval '75 seconds' where session_id in (
                 select session_id from sessions where (state in ('creating', 'ending') or ending is not null) and lease_until < now()
                 order by lease_until limit $1 for update skip locked)
             returning *, clock_timestamp() as read_at",
        )
        .bind(i64::try_from(count).unwrap_or(i64::MAX))
        .fetch_all(&self.pool)
        .await?;
        rows.iter().map(session).collect()
    }

    /// Schedules the next attempt, by any orchestrator.
    pub(crate) async fn release_session(
        &self,
        id: SessionId,
        delay: Duration,
    ) -> Result<(), Error> {
        sqlx::query("update sessions set lease_until = now() + make_interval(secs => $2) where session_id = $1")
            .bind(id.as_uuid())
            .bind(delay.as_secs_f64())
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(Error::from)
    }

    /// Sessions that a node has or may still have: one that was lost with its node comes back with
    /// it.
    pub(crate) async fn sessions_on(&self, node_id: NodeId) -> Result<Vec<SessionRow>, Error> {
        let rows = sqlx::query(
            "select *, clock_timestamp() as read_at from sessions
             where node_id = $1 and (state in ('creating', 'running', 'ending') or (state = 'lost' and updated_at > now() - interval '7 days'))",
        )
        .bind(node_id.as_uuid())
        .fetch_all(&self.pool)
        .await?;
        rows.iter().map(session).collect()
    }

    /// Those of `ids` that ended before their node reported them.
    pub(crate) async fn ended_before_report(
        &self,
        ids: &[SessionId],
    ) -> Result<Vec<SessionId>, Error> {
        let ids: Vec<Uuid> = ids.iter().map(|id| *id.as_uuid()).collect();
        let ended: Vec<Uuid> =
            sqlx::query_scalar("select session_id from sessions where session_id = any($1) and state in ('ended', 'failed') and object is null")
                .bind(ids)
                .fetch_all(&self.pool)
                .await?;
        Ok(ended.into_iter().map(SessionId::from_uuid).collect())
    }

    /// The node with a workspace that an earlier session of the task kept.
    pub(crate) async fn workspace_node(
        &self,
        task_id: TaskId,
        workspace: Uuid,
    ) -> Result<Option<NodeId>, Error> {
        let id: Option<Uuid> =
            sqlx::query_scalar("select node_id from sessions where task_id = $1 and object->>'workspace_id' = $2 order by created_at desc limit 1")
                .bind(task_id.as_uuid())
                .bind(workspace.to_string())
                .fetch_optional(&self.pool)
                .await?;
        Ok(id.map(NodeId::from_uuid))
    }

    /// The assigned work of each node, whether or not the node has reported it.
    pub(crate) async fn load(&self) -> Result<HashMap<NodeId, Load>, Error> {
        let rows = sqlx::query(
            "select node_id, count(*) as sandboxes, least(sum(coalesce(memory, $1)), 9223372036854775807)::bigint as memory from (
                 select node_id, (object #>> '{limits,memory_bytes}')::bigint as memory from sessions where state in ('creating', 'running', 'ending')
                 union all select node_id, (request #>> '{sandbox,limits,memory_bytes}')::bigint from jobs
                     where state in ('accepted', 'in_progress') and node_id is not null) as work
             group by node_id",
        )
        .bind(i64::try_from(Limits::default().memory_bytes).unwrap_or(i64::MAX))
        .fetch_all(&self.pool)
        .await?;
        let load = |row: &PgRow| -> Result<(NodeId, Load), sqlx::Error> {
            let load = Load {
                sandboxes: row.try_get("sandboxes")?,
                memory_bytes: u64::try_from(row.try_get::<i64, _>("memory")?).unwrap_or_default(),
            };
            Ok((NodeId::from_uuid(row.try_get("node_id")?), load))
        };
        rows.iter()
            .map(load)
            .collect::<Result<_, _>>()
            .map_err(Error::from)
    }
}

impl SessionRow {
    /// A node's report with the name, which nodes don't know.
    pub(crate) fn named(&self, report: Session) -> Session {
        Session {
            name: self.object.name.clone(),
            repository_id: self.object.repository_id,
            base_commit: self.object.base_commit.clone(),
            seed_notes: self.object.seed_notes.clone(),
            ..report
        }
    }

    /// The state that follows from a node's report: a requested end may not have reached the node
    /// yet.
    pub(crate) fn effective_state(&self, object: &Session) -> SessionState {
        if self.ending.is_some() && !is_final(object.state) {
            SessionState::Ending
        } else {
            object.state
        }
    }

    /// Whether a node's report differs from the stored session.
    pub(crate) fn differs_from(&self, object: &Session) -> bool {
        let state = self.effective_state(object);
        // A stored reason stays when the node gives none.
        let end_reason = object.end_reason.clone().or_else(|| {
            self.object
                .end_reason
                .clone()
                .filter(|_| is_final(object.state))
        });
        self.state != state
            || without_activity(&self.object)
                != without_activity(&Session {
                    state,
                    end_reason,
                    ..self.named(object.clone())
                })
    }
}

/// A session without the fields that change with every command.
fn without_activity(session: &Session) -> Session {
    Session {
        running_execs: 0,
        idle_expires_at: OffsetDateTime::UNIX_EPOCH,
        ..session.clone()
    }
}

pub(crate) const fn is_final(state: SessionState) -> bool {
    matches!(
        state,
        SessionState::Ended | SessionState::Failed | SessionState::Lost
    )
}
