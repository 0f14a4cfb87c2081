//! Quotas of users and projects. They are preferences whose keys begin with `quota.`; the narrowest
//! scope wins. They are checked, serialized, in the transaction of the insert that consumes them.

use cynode_api::{
    Limits, LimitsRequest, QUOTA_ARTIFACT_BYTES, QUOTA_CPU_SECONDS, QUOTA_SANDBOX_CPUS,
    QUOTA_SANDBOX_DISK_BYTES, QUOTA_SANDBOX_MEMORY_BYTES, QUOTA_SANDBOX_NOFILE, QUOTA_SANDBOX_PIDS,
    QUOTA_SANDBOXES, TaskId, UserId,
};
use sqlx::{PgConnection, Row as _};
use uuid::Uuid;

use super::Error;

#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum QuotaExceeded {
    /// A sandbox is larger than the quota allows for one.
    #[error("{key}: a sandbox of the {owner} has at most {max}, and would have {value}")]
    Sandbox {
        key: String,
        owner: &'static str,
        max: i64,
        value: String,
        /// The field of the request's limits.
        field: &'static str,
    },
    #[error("{key}: the {owner} has {max} and would have {used}")]
    Total {
        key: String,
        owner: &'static str,
        max: i64,
        used: i64,
    },
}

/// The resource that a transaction consumes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Usage {
    /// A sandbox with its effective limits.
    Sandbox(Limits),
    /// Stored bytes: an artifact, or the output of a job.
    Bytes,
}

impl Usage {
    pub(super) fn sandbox(requested: Option<LimitsRequest>) -> Self {
        Self::Sandbox(requested.unwrap_or_default().or_default())
    }
}

#[derive(Debug)]
struct Quota {
    key: String,
    max: i64,
    is_project: bool,
}

impl Quota {
    /// Fails for a sandbox that is larger than the quota allows.
    fn check_sandbox(&self, requested: &Limits) -> Result<(), QuotaExceeded> {
        #[expect(clippy::cast_precision_loss, reason = "processors are few")]
        let (exceeds, field, value) = match self.key.as_str() {
            QUOTA_SANDBOX_MEMORY_BYTES => (
                i64::try_from(requested.memory_bytes).unwrap_or(i64::MAX) > self.max,
                "memory_bytes",
                requested.memory_bytes.to_string(),
            ),
            QUOTA_SANDBOX_CPUS => (
                requested.cpus > self.max as f64,
                "cpus",
                requested.cpus.to_string(),
            ),
            QUOTA_SANDBOX_PIDS => (
                i64::from(requested.pids) > self.max,
                "pids",
                requested.pids.to_string(),
            ),
            QUOTA_SANDBOX_DISK_BYTES => (
                i64::try_from(requested.disk_bytes).unwrap_or(i64::MAX) > self.max,
                "disk_bytes",
                requested.disk_bytes.to_string(),
            ),
            QUOTA_SANDBOX_NOFILE => (
                i64::try_from(requested.nofile).unwrap_or(i64::MAX) > self.max,
                "nofile",
                requested.nofile.to_string(),
            ),
            _ => return Ok(()),
        };
        if !exceeds {
            return Ok(());
        }
        Err(QuotaExceeded::Sandbox {
            key: self.key.clone(),
            owner: if self.is_project { "project" } else { "user" },
            max: self.max,
            value,
            field,
        })
    }
}

/// Fails when, including this transaction's changes, a quota of the user or of the task's project
/// is exceeded.
pub(super) async fn check(
    connection: &mut PgConnection,
    user: UserId,
    task: TaskId,
    usage: Usage,
) -> Result<(), Error> {
    let project: Option<Uuid> = sqlx::query_scalar("select project_id from tasks where id = $1")
        .bind(task.as_uuid())
        .fetch_one(&mut *connection)
        .await?;
    for quota in limits(&mut *connection, user, project).await? {
        if (quota.key == QUOTA_ARTIFACT_BYTES) != (usage == Usage::Bytes) {
            continue;
        }
        if let Usage::Sandbox(requested) = usage {
            quota.check_sandbox(&requested)?;
        }
        let (who, id) = match project.filter(|_| quota.is_project) {
            Some(project) => ("project", project),
            None => ("user", *user.as_uuid()),
        };
        // Serializes transactions that consume the same quota.
        sqlx::query("select pg_advisory_xact_lock(hashtextextended($1, 0))")
            .bind(format!("quota {who} {id}"))
            .execute(&mut *connection)
            .await?;
        let used = used(&mut *connection, &quota, id).await?;
        // The new work is already counted, except for its processor time.
        let exceeds = if quota.key == QUOTA_CPU_SECONDS {
            used >= quota.max
        } else {
            used > quota.max
        };
        if exceeds {
            return Err(QuotaExceeded::Total {
                key: quota.key,
                owner: who,
                max: quota.max,
                used,
            }
            .into());
        }
    }
    Ok(())
}

async fn limits(
    connection: &mut PgConnection,
    user: UserId,
    project: Option<Uuid>,
) -> Result<Vec<Quota>, Error> {
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
    .await?;
    let quota = |row: &sqlx::postgres::PgRow| -> Result<Quota, sqlx::Error> {
        Ok(Quota {
            key: row.try_get("key")?,
            max: row.try_get("most")?,
            is_project: row.try_get("is_project")?,
        })
    };
    rows.iter()
        .map(quota)
        .collect::<Result<_, _>>()
        .map_err(Error::from)
}

/// The current usage. Processor time is what sandboxes reserved in the last 24 hours.
async fn used(connection: &mut PgConnection, quota: &Quota, id: Uuid) -> Result<i64, Error> {
    let statement = match quota.key.as_str() {
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
        // Unknown quotas limit nothing.
        _ => return Ok(0),
    };
    sqlx::query_scalar(statement)
        .bind(id)
        .bind(quota.is_project)
        .fetch_one(connection)
        .await
        .map_err(Error::from)
}
