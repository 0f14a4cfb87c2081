//! Sessions: on which node they are, what was asked for, what the node last said.

use std::collections::HashMap;

use cynode_api::{
    ErrorCode, ImageVersionId, Limits, NodeId, Page, Session, SessionCreate, SessionEnd, SessionId,
    SessionState, TaskId, UserSessionCreate, WorkspaceId, session_limits,
};
use cynode_service::ApiError;
use serde_json::Value;
use sqlx::{Row as _, postgres::PgRow};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{Db, NewEvent, PageReader, events, problem, quotas, stored, to_json};
use crate::caller::Scope;

#[derive(Clone, Debug)]
pub(crate) struct SessionRow {
    pub(crate) session_id: SessionId,
    pub(crate) task_id: TaskId,
    pub(crate) node_id: NodeId,
    pub(crate) state: SessionState,
    pub(crate) body: Value,
    pub(crate) request: SessionCreate,
    /// As its node last described it; before that, as its request has it.
    pub(crate) object: Session,
    pub(crate) ending: Option<SessionEnd>,
    /// When this was read, by the database's clock.
    pub(crate) read_at: OffsetDateTime,
}

#[derive(Clone, Debug)]
pub(crate) struct NewSession<'a> {
    pub(crate) body: &'a UserSessionCreate,
    pub(crate) request: &'a SessionCreate,
    pub(crate) node_id: NodeId,
    pub(crate) image_version_id: ImageVersionId,
    pub(crate) created_by: &'a str,
}

fn session(row: &PgRow) -> Result<SessionRow, ApiError> {
    let get = |name: &str| row.try_get::<Option<Value>, _>(name).map_err(problem);
    let id = |name: &str| row.try_get::<Uuid, _>(name).map_err(problem);
    let node_id = NodeId::from_uuid(id("node_id")?);
    let state = parsed(row)?;
    let request: SessionCreate = stored(get("request")?.unwrap_or_default())?;
    let end_reason: Option<String> = row.try_get("end_reason").map_err(problem)?;
    let object = if let Some(object) = get("object")? {
        stored(object)?
    } else {
        let ended_at: Option<OffsetDateTime> = if is_over(state) {
            row.try_get("updated_at").map_err(problem)?
        } else {
            None
        };
        Session {
            ended_at,
            ..undescribed(
                &request,
                node_id,
                row.try_get("created_at").map_err(problem)?,
            )
        }
    };
    Ok(SessionRow {
        session_id: SessionId::from_uuid(id("session_id")?),
        task_id: TaskId::from_uuid(id("task_id")?),
        node_id,
        state,
        body: get("body")?.unwrap_or_default(),
        request,
        // What is decided here stands above what the node said before.
        object: Session {
            state,
            end_reason: end_reason.or(object.end_reason.clone()),
            ..object
        },
        ending: get("ending")?.map(stored).transpose()?,
        read_at: row.try_get("read_at").map_err(problem)?,
    })
}

pub(super) fn parsed(row: &PgRow) -> Result<SessionState, ApiError> {
    row.try_get::<String, _>("state")
        .map_err(problem)?
        .parse()
        .map_err(|error: String| ApiError::new(ErrorCode::Internal, error))
}

/// What a node was given.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Load {
    pub(crate) sandboxes: i64,
    /// What their memory limits add up to.
    pub(crate) memory_bytes: u64,
}

/// A session of which its node has not said anything.
fn undescribed(request: &SessionCreate, node_id: NodeId, created_at: OffsetDateTime) -> Session {
    let after = |seconds: Option<u64>, default: u64| {
        let seconds = i64::try_from(seconds.unwrap_or(default)).unwrap_or(i64::MAX);
        created_at
            .checked_add(time::Duration::seconds(seconds))
            .unwrap_or(created_at)
    };
    Session {
        session_id: request.session_id,
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
    }
}

fn told(task_id: TaskId, session_id: SessionId, state: SessionState) -> NewEvent {
    NewEvent {
        kind: "session.state",
        task_id,
        job_id: None,
        session_id: Some(session_id),
        state: state.to_string(),
        result_ref: Some(format!("/v1/sessions/{session_id}")),
    }
}

fn no_session(id: SessionId) -> ApiError {
    ApiError::new(
        ErrorCode::SessionNotFound,
        format!("there is no session {id}"),
    )
}

impl Db {
    /// Writes a new session down, and its task when that is new. `None` when the id is taken.
    pub(crate) async fn insert_session(
        &self,
        new: &NewSession<'_>,
        task: Option<&cynode_api::Task>,
        scope: &Scope,
    ) -> Result<Option<SessionRow>, ApiError> {
        let mut transaction = self.begin().await?;
        if let Some(task) = task {
            super::work::insert_task(&mut *transaction, task, scope).await?;
        }
        let row = sqlx::query(
            "insert into sessions (session_id, task_id, node_id, state, body, request, image_version_id, owner_id, created_by, lease_until)
             values ($1, $2, $3, 'creating', $4, $5, $6, $7, $8, now() + interval '75 seconds') on conflict do nothing returning *, clock_timestamp() as read_at",
        )
        .bind(new.request.session_id.as_uuid())
        .bind(new.request.task_id.as_uuid())
        .bind(new.node_id.as_uuid())
        .bind(to_json(new.body))
        .bind(to_json(new.request))
        .bind(new.image_version_id.as_uuid())
        .bind(scope.user_id.as_uuid())
        .bind(new.created_by)
        .fetch_optional(&mut *transaction)
        .await
        .map_err(problem)?;
        let Some(row) = row else { return Ok(None) };
        quotas::check(
            &mut transaction,
            scope.user_id,
            new.request.task_id,
            quotas::Uses::sandbox(new.request.limits),
        )
        .await?;
        events::add(
            &mut transaction,
            &told(
                new.request.task_id,
                new.request.session_id,
                SessionState::Creating,
            ),
        )
        .await?;
        super::commit(transaction).await?;
        session(&row).map(Some)
    }

    /// A session that the caller may know of.
    pub(crate) async fn session(
        &self,
        scope: &Scope,
        id: SessionId,
    ) -> Result<SessionRow, ApiError> {
        let row = sqlx::query(concat!(
            "select *, clock_timestamp() as read_at from sessions s where session_id = $1 and ",
            visible_by_task!("s")
        ))
        .bind(id.as_uuid())
        .bind(scope.sees_all)
        .bind(scope.user_id.as_uuid())
        .fetch_optional(&self.pool)
        .await
        .map_err(problem)?;
        row.as_ref()
            .map(session)
            .transpose()?
            .ok_or_else(|| no_session(id))
    }

    pub(crate) async fn any_session(&self, id: SessionId) -> Result<Option<SessionRow>, ApiError> {
        let row = sqlx::query(
            "select *, clock_timestamp() as read_at from sessions where session_id = $1",
        )
        .bind(id.as_uuid())
        .fetch_optional(&self.pool)
        .await
        .map_err(problem)?;
        row.as_ref().map(session).transpose()
    }

    pub(crate) async fn list_sessions(
        &self,
        scope: &Scope,
        state: Option<SessionState>,
        task_id: Option<TaskId>,
        label: Option<(&str, Option<&str>)>,
        after: Option<Uuid>,
        limit: u32,
    ) -> Result<Page<Session>, ApiError> {
        let (name, value) = label.map_or((None, None), |(name, value)| (Some(name), value));
        let mut pages = PageReader::new(limit, after);
        while let Some(count) = pages.wanted().await {
            let rows = sqlx::query(concat!(
                "select *, clock_timestamp() as read_at from sessions s where ($1::uuid is null or s.session_id > $1) and ",
                visible_by_task!("s"),
                " and ($4::text is null or s.state = $4) and ($5::uuid is null or s.task_id = $5)
                  and ($6::text is null or coalesce(s.object->'labels', s.request->'labels', '{}') ? $6)
                  and ($7::text is null or coalesce(s.object->'labels', s.request->'labels')->>$6 = $7)
                  order by s.session_id limit $8"
            ))
            .bind(pages.after())
            .bind(scope.sees_all)
            .bind(scope.user_id.as_uuid())
            .bind(state.map(|state| state.to_string()))
            .bind(task_id.map(|id| *id.as_uuid()))
            .bind(name)
            .bind(value)
            .bind(count)
            .fetch_all(&self.pool)
            .await
            .map_err(problem)?;
            pages.add(
                rows.iter()
                    .map(|row| session(row).map(|row| row.object))
                    .collect::<Result<Vec<_>, _>>()?,
                |session: &Session| *session.session_id.as_uuid(),
            );
        }
        Ok(pages.finish())
    }

    /// Writes down what a node said of a session when it was asked at `as_of` (by the database's clock). What was written since
    /// then is newer, and stays: then this says false. Changed states are told as events.
    pub(crate) async fn observe_session(
        &self,
        object: &Session,
        as_of: OffsetDateTime,
    ) -> Result<bool, ApiError> {
        let id = object.session_id;
        let mut transaction = self.begin().await?;
        let before = sqlx::query("select *, clock_timestamp() as read_at, updated_at > $2 as is_newer from sessions where session_id = $1 for update")
            .bind(id.as_uuid())
            .bind(as_of)
            .fetch_optional(&mut *transaction)
            .await
            .map_err(problem)?;
        let Some(before) = before else {
            return Ok(true);
        };
        let is_newer = before.try_get::<bool, _>("is_newer").map_err(problem)?;
        let before = session(&before)?;
        // While it was being made, a list may have shown it so: that it runs is newer, whenever it was asked for.
        let has_come_up =
            before.state == SessionState::Creating && object.state == SessionState::Running;
        if is_newer && !has_come_up {
            return Ok(false);
        }
        // What has ended here comes back only when it is resumed, which is noted first. A request that came late is no such wish.
        if matches!(before.state, SessionState::Ended | SessionState::Failed)
            && !is_over(object.state)
        {
            return Ok(true);
        }
        if !before.is_news(object) {
            return Ok(true);
        }
        let state = before.state_by(object);
        let over = is_over(object.state);
        // A lost one may come back, and is ended then.
        let ended = over && object.state != SessionState::Lost;
        sqlx::query(
            "update sessions set object = $2, state = $3, end_reason = case when $5 then coalesce($4, end_reason) end,
                 ending = case when $6 then null else ending end, updated_at = clock_timestamp() where session_id = $1",
        )
        .bind(id.as_uuid())
        .bind(to_json(object))
        .bind(state.to_string())
        .bind(&object.end_reason)
        .bind(over)
        .bind(ended)
        .execute(&mut *transaction)
        .await
        .map_err(problem)?;
        if before.state != state {
            events::add(&mut transaction, &told(before.task_id, id, state)).await?;
        }
        super::commit(transaction).await?;
        Ok(true)
    }

    /// Sets the state of a session without its node: it failed, or its node is gone.
    pub(crate) async fn set_session_state(
        &self,
        id: SessionId,
        from: &[SessionState],
        state: SessionState,
        reason: &str,
    ) -> Result<bool, ApiError> {
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
        .await
        .map_err(problem)?;
        let Some(row) = row else { return Ok(false) };
        let task_id = TaskId::from_uuid(row.try_get("task_id").map_err(problem)?);
        events::add(&mut transaction, &told(task_id, id, state)).await?;
        super::commit(transaction).await?;
        Ok(true)
    }

    /// Notes that a session that is over shall run again. Says what it was.
    pub(crate) async fn ask_resume(&self, id: SessionId) -> Result<Option<SessionState>, ApiError> {
        let mut transaction = self.begin().await?;
        let row = sqlx::query(
            "update sessions s set state = 'creating', updated_at = clock_timestamp(), lease_until = now() + interval '75 seconds'
             from (select session_id, state from sessions where session_id = $1 for update) before
             where s.session_id = before.session_id and before.state in ('ended', 'lost') and s.ending is null returning s.task_id, s.owner_id, s.object, before.state",
        )
        .bind(id.as_uuid())
        .fetch_optional(&mut *transaction)
        .await
        .map_err(problem)?;
        let Some(row) = row else { return Ok(None) };
        let task_id = TaskId::from_uuid(row.try_get("task_id").map_err(problem)?);
        let owner = cynode_api::UserId::from_uuid(row.try_get("owner_id").map_err(problem)?);
        let object: Session = stored(row.try_get("object").map_err(problem)?)?;
        quotas::check(
            &mut transaction,
            owner,
            task_id,
            quotas::Uses::Sandbox(object.limits),
        )
        .await?;
        events::add(&mut transaction, &told(task_id, id, SessionState::Creating)).await?;
        let was = parsed(&row)?;
        super::commit(transaction).await?;
        Ok(Some(was))
    }

    /// Notes that a session shall end, whatever becomes of whoever asked.
    pub(crate) async fn ask_end(&self, id: SessionId, end: &SessionEnd) -> Result<(), ApiError> {
        let mut transaction = self.begin().await?;
        let row = sqlx::query(
            "update sessions s set ending = coalesce(s.ending, $2), state = case when s.state = 'lost' then 'lost' else 'ending' end,
                 updated_at = clock_timestamp(), lease_until = now() + interval '20 seconds'
             from (select session_id, state from sessions where session_id = $1 for update) before
             where s.session_id = before.session_id and before.state in ('creating', 'running', 'lost') returning s.task_id, s.state <> before.state as is_new",
        )
        .bind(id.as_uuid())
        .bind(to_json(end))
        .fetch_optional(&mut *transaction)
        .await
        .map_err(problem)?;
        if let Some(row) = row
            && row.try_get("is_new").map_err(problem)?
        {
            let task_id = TaskId::from_uuid(row.try_get("task_id").map_err(problem)?);
            events::add(&mut transaction, &told(task_id, id, SessionState::Ending)).await?;
        }
        super::commit(transaction).await
    }

    /// Sessions that somebody left half way, for this orchestrator to bring forward.
    pub(crate) async fn lease_sessions(&self, count: usize) -> Result<Vec<SessionRow>, ApiError> {
        let rows = sqlx::query(
            "update sessions set lease_until = now() + interval '75 seconds' where session_id in (
                 select session_id from sessions where (state in ('creating', 'ending') or ending is not null) and lease_until < now()
                 order by lease_until limit $1 for update skip locked)
             returning *, clock_timestamp() as read_at",
        )
        .bind(i64::try_from(count).unwrap_or(i64::MAX))
        .fetch_all(&self.pool)
        .await
        .map_err(problem)?;
        rows.iter().map(session).collect()
    }

    /// Lets others, or a later round, try again.
    pub(crate) async fn release_session(
        &self,
        id: SessionId,
        seconds: i32,
    ) -> Result<(), ApiError> {
        sqlx::query("update sessions set lease_until = now() + make_interval(secs => $2) where session_id = $1")
            .bind(id.as_uuid())
            .bind(f64::from(seconds))
            .execute(&self.pool)
            .await
            .map(drop)
            .map_err(problem)
    }

    /// Sessions that a node has, or may have after all: one that was given up with its node comes back with it.
    pub(crate) async fn sessions_of(&self, node_id: NodeId) -> Result<Vec<SessionRow>, ApiError> {
        let rows = sqlx::query(
            "select *, clock_timestamp() as read_at from sessions
             where node_id = $1 and (state in ('creating', 'running', 'ending') or (state = 'lost' and updated_at > now() - interval '7 days'))",
        )
        .bind(node_id.as_uuid())
        .fetch_all(&self.pool)
        .await
        .map_err(problem)?;
        rows.iter().map(session).collect()
    }

    /// Which of these ended here before their node had said anything of them.
    pub(crate) async fn ended_unseen_of(
        &self,
        ids: &[SessionId],
    ) -> Result<Vec<SessionId>, ApiError> {
        let ids: Vec<Uuid> = ids.iter().map(|id| *id.as_uuid()).collect();
        let ended: Vec<Uuid> =
            sqlx::query_scalar("select session_id from sessions where session_id = any($1) and state in ('ended', 'failed') and object is null")
                .bind(ids)
                .fetch_all(&self.pool)
                .await
                .map_err(problem)?;
        Ok(ended.into_iter().map(SessionId::from_uuid).collect())
    }

    /// The node that holds a workspace which an earlier session of the task kept.
    pub(crate) async fn workspace_node(
        &self,
        task_id: TaskId,
        workspace: Uuid,
    ) -> Result<Option<NodeId>, ApiError> {
        let id: Option<Uuid> =
            sqlx::query_scalar("select node_id from sessions where task_id = $1 and object->>'workspace_id' = $2 order by created_at desc limit 1")
                .bind(task_id.as_uuid())
                .bind(workspace.to_string())
                .fetch_optional(&self.pool)
                .await
                .map_err(problem)?;
        Ok(id.map(NodeId::from_uuid))
    }

    /// What each node was given, whether or not it has said so yet.
    pub(crate) async fn load(&self) -> Result<HashMap<NodeId, Load>, ApiError> {
        let rows = sqlx::query(
            "select node_id, count(*) as sandboxes, least(sum(coalesce(memory, $1)), 9223372036854775807)::bigint as memory from (
                 select node_id, (object #>> '{limits,memory_bytes}')::bigint as memory from sessions where state in ('creating', 'running', 'ending')
                 union all select node_id, (request #>> '{sandbox,limits,memory_bytes}')::bigint from jobs
                     where state in ('accepted', 'in_progress') and node_id is not null) as work
             group by node_id",
        )
        .bind(i64::try_from(Limits::default().memory_bytes).unwrap_or(i64::MAX))
        .fetch_all(&self.pool)
        .await
        .map_err(problem)?;
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
            .map_err(problem)
    }
}

impl SessionRow {
    /// The state that it has by what its node says: an end that was asked for here may not have come there yet.
    pub(crate) fn state_by(&self, object: &Session) -> SessionState {
        if self.ending.is_some() && !is_over(object.state) {
            SessionState::Ending
        } else {
            object.state
        }
    }

    /// Whether a node's word says anything that is not written down.
    pub(crate) fn is_news(&self, object: &Session) -> bool {
        let state = self.state_by(object);
        // A reason that was decided here stays when the node gives none.
        let end_reason = object.end_reason.clone().or_else(|| {
            self.object
                .end_reason
                .clone()
                .filter(|_| is_over(object.state))
        });
        self.state != state
            || lasting(&self.object)
                != lasting(&Session {
                    state,
                    end_reason,
                    ..object.clone()
                })
    }
}

/// A session without what changes with every command.
fn lasting(session: &Session) -> Session {
    Session {
        running_execs: 0,
        idle_expires_at: OffsetDateTime::UNIX_EPOCH,
        ..session.clone()
    }
}

pub(crate) const fn is_over(state: SessionState) -> bool {
    matches!(
        state,
        SessionState::Ended | SessionState::Failed | SessionState::Lost
    )
}
