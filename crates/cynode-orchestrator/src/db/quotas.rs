//! Quotas: how much a user and a project may have. They are preferences whose keys begin with `quota.`; where several scopes
//! set one, the narrowest counts. Checked in the transaction of what would use them up, one after another.

use cynode_api::{
    ErrorCode, Limits, LimitsRequest, Problem, QUOTA_ARTIFACT_BYTES, QUOTA_CPU_SECONDS,
    QUOTA_SANDBOX_CPUS, QUOTA_SANDBOX_MEMORY_BYTES, QUOTA_SANDBOX_PIDS, QUOTA_SANDBOXES, TaskId,
    UserId,
};
use cynode_service::ApiError;
use sqlx::{PgConnection, Row as _};
use uuid::Uuid;

use super::problem;

/// What is about to be used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Uses {
    /// With the limits that it will have.
    Sandbox(Limits),
    /// Bytes that are kept: an artifact, or the output of a job.
    Bytes,
}

impl Uses {
    pub(super) fn sandbox(asked: Option<LimitsRequest>) -> Self {
        Self::Sandbox(asked.unwrap_or_default().or_default())
    }
}

#[derive(Debug)]
struct Limit {
    key: String,
    most: i64,
    is_project: bool,
}

impl Limit {
    /// Refuses a sandbox that is larger than one may be.
    fn check_largest(&self, asked: &Limits) -> Result<(), ApiError> {
        #[expect(clippy::cast_precision_loss, reason = "processors are few")]
        let (is_over, field, value) = match self.key.as_str() {
            QUOTA_SANDBOX_MEMORY_BYTES => (
                i64::try_from(asked.memory_bytes).unwrap_or(i64::MAX) > self.most,
                "memory_bytes",
                asked.memory_bytes.to_string(),
            ),
            QUOTA_SANDBOX_CPUS => (
                asked.cpus > self.most as f64,
                "cpus",
                asked.cpus.to_string(),
            ),
            QUOTA_SANDBOX_PIDS => (
                i64::from(asked.pids) > self.most,
                "pids",
                asked.pids.to_string(),
            ),
            _ => return Ok(()),
        };
        if !is_over {
            return Ok(());
        }
        let who = if self.is_project { "project" } else { "user" };
        let detail = format!(
            "{}: a sandbox of the {who} has at most {}, and would have {value}",
            self.key, self.most
        );
        let remedy = format!(
            "Ask for at most {} in limits.{field}, or have an administrator raise the quota.",
            self.most
        );
        Err(Problem::new(ErrorCode::QuotaExceeded, detail)
            .with_remedy(remedy)
            .into())
    }
}

/// Refuses when, with what this transaction has added, a quota of the user or of the task's project is exceeded.
pub(super) async fn check(
    connection: &mut PgConnection,
    user: UserId,
    task: TaskId,
    uses: Uses,
) -> Result<(), ApiError> {
    let project: Option<Uuid> = sqlx::query_scalar("select project_id from tasks where id = $1")
        .bind(task.as_uuid())
        .fetch_one(&mut *connection)
        .await
        .map_err(problem)?;
    for limit in limits(&mut *connection, user, project).await? {
        if (limit.key == QUOTA_ARTIFACT_BYTES) != (uses == Uses::Bytes) {
            continue;
        }
        if let Uses::Sandbox(asked) = uses {
            limit.check_largest(&asked)?;
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
        let is_over = if limit.key == QUOTA_CPU_SECONDS {
            used >= limit.most
        } else {
            used > limit.most
        };
        if is_over {
            let detail = format!(
                "{}: the {who} has {} and would have {used}",
                limit.key, limit.most
            );
            return Err(ApiError::new(ErrorCode::QuotaExceeded, detail));
        }
    }
    Ok(())
}

async fn limits(
    connection: &mut PgConnection,
    user: UserId,
    project: Option<Uuid>,
) -> Result<Vec<Limit>, ApiError> {
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
        Ok(Limit {
            key: row.try_get("key")?,
            most: row.try_get("most")?,
            is_project: row.try_get("is_project")?,
        })
    };
    rows.iter()
        .map(limit)
        .collect::<Result<_, _>>()
        .map_err(problem)
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
            "select (coalesce((select sum(a.size) from artifacts a join tasks t on t.id = a.task_id
                     where case when $2 then t.project_id else t.owner_id end = $1), 0)
                 + coalesce((select sum(j.output_bytes) from jobs j join tasks t on t.id = j.task_id
                     where case when $2 then t.project_id else t.owner_id end = $1), 0))::bigint"
        }
        // One that is not known limits nothing.
        _ => return Ok(0),
    };
    sqlx::query_scalar(statement)
        .bind(id)
        .bind(limit.is_project)
        .fetch_one(connection)
        .await
        .map_err(problem)
}
