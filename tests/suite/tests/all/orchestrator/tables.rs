//! The tables whose names and columns are part of the specification.

use std::collections::BTreeSet;

use anyhow::Result;
use cynode_tests::ControlPlane;

/// A table, its columns with their types ('?' if nullable), its unique columns, and its indexes.
const TABLES: &[(&str, &[&str], &str, &[&str])] = &[
    (
        "sandbox_images",
        &[
            "id uuid",
            "name text",
            "description text?",
            "created_at timestamptz",
            "updated_at timestamptz",
            "updated_by text",
        ],
        "name",
        &["name"],
    ),
    (
        "sandbox_image_versions",
        &[
            "id uuid",
            "sandbox_image_id uuid",
            "version text",
            "image_ref text",
            "image_digest text?",
            "capabilities jsonb",
            "is_allowed bool",
            "created_at timestamptz",
            "updated_at timestamptz",
        ],
        "sandbox_image_id, version",
        &["sandbox_image_id", "is_allowed"],
    ),
    (
        "node_sandbox_image_availability",
        &[
            "id uuid",
            "node_id uuid",
            "sandbox_image_version_id uuid",
            "status text",
            "last_checked_at timestamptz",
            "details jsonb?",
        ],
        "node_id, sandbox_image_version_id",
        &["node_id"],
    ),
];

// proves: CYNAI.SANDBX.AllowedImagesCapabilities
#[tokio::test]
async fn the_image_tables_match_their_specification() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    control_plane.orchestrator("", &[]).await?;
    let query = |statement: String| -> Result<BTreeSet<String>> {
        Ok(control_plane
            .postgres
            .query(&statement)?
            .lines()
            .map(str::to_owned)
            .collect())
    };
    for (table, columns, unique, indexes) in TABLES {
        let found = query(format!(
            "select column_name || ' ' || udt_name || case when is_nullable = 'YES' then '?' else \
             '' end from information_schema.columns where table_name = '{table}'"
        ))?;
        assert_eq!(
            found,
            columns.iter().map(ToString::to_string).collect(),
            "{table}"
        );
        let found = query(format!(
            "select indexdef from pg_indexes where tablename = '{table}'"
        ))?;
        let has = |columns: &str, kind: &str| {
            found
                .iter()
                .any(|index| index.starts_with(kind) && index.ends_with(&format!("({columns})")))
        };
        assert!(
            has("id", "CREATE UNIQUE INDEX") && has(unique, "CREATE UNIQUE INDEX"),
            "{table}: {found:?}"
        );
        for columns in *indexes {
            assert!(
                has(columns, "CREATE INDEX") || has(columns, "CREATE UNIQUE INDEX"),
                "{table} by {columns}: {found:?}"
            );
        }
    }
    let foreign = query(
        "select conrelid::regclass || ' ' || pg_get_constraintdef(oid) from \
         pg_constraint where contype = 'f'"
            .to_owned(),
    )?;
    for expected in [
        "sandbox_image_versions FOREIGN KEY (sandbox_image_id) REFERENCES sandbox_images(id)",
        "node_sandbox_image_availability FOREIGN KEY (node_id)",
    ] {
        assert!(
            foreign.iter().any(|found| found.starts_with(expected)),
            "{expected}: {foreign:?}"
        );
    }
    Ok(())
}

/// Names that foreign programs read.
#[tokio::test]
async fn the_specified_tables_exist() -> Result<()> {
    let control_plane = ControlPlane::new().await?;
    control_plane.orchestrator("", &[]).await?;
    let found = control_plane
        .postgres
        .query("select table_name from information_schema.tables where table_schema = 'public'")?;
    let found: BTreeSet<&str> = found.lines().collect();
    for table in [
        "system_settings",
        "users",
        "groups",
        "group_members",
        "api_tokens",
        "projects",
        "tasks",
        "jobs",
        "sessions",
        "nodes",
        "artifacts",
        "preferences",
    ] {
        assert!(found.contains(table), "{table} is missing among {found:?}");
    }
    Ok(())
}
