//! Seeds of workspaces that are in the store, so that the same commit is not built twice.

use cynode_api::{CredentialId, Flags, RepositoryId, SeedNotes};
use sqlx::{Row as _, types::Json};
use uuid::Uuid;

use super::{Db, Error, artifacts::lock_blobs_shared, commit, to_json};
use crate::blobs::{Blobs, StagedBlob};

/// What a seed depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeedKey<'a> {
    pub(crate) repository_id: RepositoryId,
    pub(crate) credential_id: Option<CredentialId>,
    pub(crate) reference: &'a str,
    pub(crate) commit: &'a str,
    pub(crate) depth: Option<u32>,
    /// How shapes of secrets were treated when it was scanned.
    pub(crate) shapes: &'a str,
}

#[derive(Clone, Debug)]
pub(crate) struct StoredSeed {
    pub(crate) sha256: String,
    pub(crate) size: i64,
    pub(crate) notes: SeedNotes,
    pub(crate) flags: Flags,
}

impl Db {
    /// A seed that was scanned for every credential that is held now.
    pub(crate) async fn find_seed(&self, key: &SeedKey<'_>) -> Result<Option<StoredSeed>, Error> {
        let row = sqlx::query(
            "update git_seeds set used_at = now()
             where repository_id = $1 and credential_id = $2 and reference = $3 and commit = $4 and depth = $5 and shapes = $6
               and not exists (select from credentials c where c.rotated_at >= git_seeds.created_at)
             returning sha256, size, notes, flagged",
        )
        .bind(key.repository_id.as_uuid())
        .bind(key.credential())
        .bind(key.reference)
        .bind(key.commit)
        .bind(key.depth())
        .bind(key.shapes)
        .fetch_optional(&self.pool)
        .await?;
        row.map(|row| {
            Ok(StoredSeed {
                sha256: row.try_get("sha256")?,
                size: row.try_get("size")?,
                notes: row.try_get::<Json<_>, _>("notes")?.0,
                flags: row.try_get::<Json<_>, _>("flagged")?.0,
            })
        })
        .transpose()
    }

    /// Places a staged seed, and remembers it. `scanned_at` is from before its scan began.
    pub(crate) async fn store_seed(
        &self,
        key: &SeedKey<'_>,
        staged: &StagedBlob,
        seed: &StoredSeed,
        scanned_at: time::OffsetDateTime,
        blobs: &Blobs,
    ) -> Result<(), Error> {
        let mut transaction = self.begin().await?;
        lock_blobs_shared(&mut transaction).await?;
        sqlx::query(
            "insert into git_seeds (repository_id, credential_id, reference, commit, depth, shapes, sha256, size, notes, flagged, created_at)
             values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
             on conflict (repository_id, credential_id, reference, commit, depth, shapes)
             do update set sha256 = excluded.sha256, size = excluded.size, notes = excluded.notes, flagged = excluded.flagged,
                 created_at = excluded.created_at, used_at = now()",
        )
        .bind(key.repository_id.as_uuid())
        .bind(key.credential())
        .bind(key.reference)
        .bind(key.commit)
        .bind(key.depth())
        .bind(key.shapes)
        .bind(&seed.sha256)
        .bind(seed.size)
        .bind(to_json(&seed.notes))
        .bind(to_json(&seed.flags))
        .bind(scanned_at)
        .execute(&mut *transaction)
        .await?;
        blobs.place(staged).await?;
        commit(transaction).await
    }

    /// The database's clock.
    pub(crate) async fn now(&self) -> Result<time::OffsetDateTime, Error> {
        sqlx::query_scalar("select clock_timestamp()")
            .fetch_one(&self.pool)
            .await
            .map_err(Error::from)
    }

    /// Forgets seeds that nothing was started from for `days`. Their artifacts stay.
    pub(crate) async fn expire_seeds(&self, days: i32) -> Result<u64, Error> {
        let gone =
            sqlx::query("delete from git_seeds where used_at < now() - make_interval(days => $1)")
                .bind(days)
                .execute(&self.pool)
                .await?;
        Ok(gone.rows_affected())
    }
}

impl SeedKey<'_> {
    fn credential(&self) -> Uuid {
        self.credential_id.map_or(Uuid::nil(), |id| *id.as_uuid())
    }

    fn depth(&self) -> i64 {
        self.depth.map_or(0, i64::from)
    }
}
