//! Quotas: how much a user and a project may have. They are preferences whose keys begin with `quota.`; where several scopes
//! set one, the narrowest counts. Checked in the transaction of what would use them up, one after another.

use cynode_api::{ErrorCode, QUOTA_ARTIFACT_BYTES, QUOTA_CPU_SECONDS, QUOTA_SANDBOXES, TaskId, UserId};
use cynode_service::ApiError;
use sqlx::{PgConnection, Row as _};
use uuid::Uuid;

use super::problem;

/// What is about to be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Uses {
    Sandbox,
    Artifact,
}

#[derive(Debug)]
struct Limit {
    key: String,
    most: i64,
    is_project: bool,
}

/// Refuses when, with what this transaction has added, a quota of the user or of the task's project is exceeded.
pub(super) async fn check(connection: &mut PgConnection, user: UserId, task: TaskId, uses: Uses) -> Result<(), ApiError> {
    let project: Option<Uuid> =
        sqlx::query_scalar("select project_id from tasks where id = $1").bind(task.as_uuid()).fetch_one(&mut *connection).await.map_err(problem)?;
    for limit in limits(&mut *connection, user, project).await? {
        if (limit.key == QUOTA_ARTIFACT_BYTES) != (uses == Uses::Artifact) {
            continue;
        }
        let (who, id) = match project.filter(|_| limit.is_project) {
            Some(project) => ("project", project),
            None => ("user", *user.as_uuid()),
        };
        // Others who would use it up wait until this is decided, and see it then.
        sqlx::query("select pg_advisory_xact_lock(hashtextextended($1, 0))")
            .bind(format!("quota {who} {id}"))
            .execute(&mut *connection)
            .await
            .map_err(problem)?;
        let used = used(&mut *connection, &limit, id).await?;
        // Time is used up before anything is begun; of the rest, what is begun counts already.
        let is_over = if limit.key == QUOTA_CPU_SECONDS { used >= limit.most } else { used > limit.most };
        if is_over {
            let detail = format!("{}: the {who} has {} and would have {used}", limit.key, limit.most);
            return Err(ApiError::new(ErrorCode::QuotaExceeded, detail));
        }
    }
    Ok(())
}

async fn limits(connection: &mut PgConnection, user: UserId, project: Option<Uuid>) -> Result<Vec<Limit>, ApiError> {
    let rows = sqlx::query(
        "select distinct on (p.key, p.scope = 'project') p.key, (p.value #>> '{}')::bigint as most, p.scope = 'project' as is_project from preferences p
         where p.key like 'quota.%' and jsonb_typeof(p.value) = 'number'
           and ((p.scope = 'project' and p.scope_id = $2) or (p.scope = 'user' and p.scope_id = $1) or p.scope = 'system'
                or (p.scope = 'group' and exists (select from group_members m where m.group_id = p.scope_id and m.user_id = $1)))
         order by p.key, p.scope = 'project', array_position(array['user', 'group', 'system'], p.scope), (p.value #>> '{}')::bigint",
    )
    .bind(user.as_uuid())
    .bind(project)
    .fetch_all(connection)
    .await
    .map_err(problem)?;
    let limit = |row: &sqlx::postgres::PgRow| -> Result<Limit, sqlx::Error> {
        Ok(Limit { key: row.try_get("key")?, most: row.try_get("most")?, is_project: row.try_get("is_project")? })
    };
    rows.iter().map(limit).collect::<Result<_, _>>().map_err(problem)
}

/// How much there is. Processor time is what sandboxes had reserved in the last 24 hours.
async fn used(connection: &mut PgConnection, limit: &Limit, id: Uuid) -> Result<i64, ApiError> {
    let statement = match limit.key.as_str() {
        QUOTA_SANDBOXES => {
            "select (select count(*) from sessions s join tasks t on t.id = s.task_id
                     where s.state in ('creating', 'running', 'ending') and case when $2 then t.project_id else s.owner_id end = $1)
                  + (select count(*) from jobs j join tasks t on t.id = j.task_id
                     where j.state in ('accepted', 'in_progress') and case when $2 then t.project_id else j.owner_id end = $1)"
        }
        QUOTA_CPU_SECONDS => {
            "select coalesce(sum(cpus * extract(epoch from greatest(till - greatest(since, now() - interval '1 day'), interval '0'))), 0)::bigint from (
                 select coalesce((coalesce(s.object, s.request) #>> '{limits,cpus}')::float8, 1) as cpus, s.created_at as since,
                        case when s.state in ('ended', 'failed') then s.updated_at else now() end as till
                 from sessions s join tasks t on t.id = s.task_id
                 where case when $2 then t.project_id else s.owner_id end = $1 and (s.state in ('creating', 'running', 'ending', 'lost') or s.updated_at > now() - interval '1 day')
                 union all
                 select coalesce((j.request #>> '{sandbox,limits,cpus}')::float8, 1), coalesce((j.object ->> 'started_at')::timestamptz, now()),
                        coalesce((j.object ->> 'ended_at')::timestamptz, now())
                 from jobs j join tasks t on t.id = j.task_id
                 where case when $2 then t.project_id else j.owner_id end = $1 and (j.state in ('accepted', 'in_progress') or j.updated_at > now() - interval '1 day')
             ) work"
        }
        QUOTA_ARTIFACT_BYTES => {
            "select coalesce(sum(a.size), 0)::bigint from artifacts a join tasks t on t.id = a.task_id where case when $2 then t.project_id else t.owner_id end = $1"
        }
        // One that is not known limits nothing.
        _ => return Ok(0),
    };
    sqlx::query_scalar(statement).bind(id).bind(limit.is_project).fetch_one(connection).await.map_err(problem)
}
