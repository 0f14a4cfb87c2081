//! `image check`: which images meet the requirements of sandbox images.

use anyhow::{Context as _, Result, ensure};
use cynode_tests::{IMAGE, RUNNER, UNLABELLED};
use serde_json::{Value, json};

use super::cluster::Cluster;
use crate::cli::{CommandResult, cynode, run};

fn check(cluster: &Cluster, arguments: &[&str]) -> Result<CommandResult> {
    let mut command = cynode(&cluster.control_plane.world)?;
    command
        .env("CYNODE_URL", cluster.orchestrator.url()?)
        .env("CYNODE_TOKEN", cluster.orchestrator.token()?);
    run(command.args(["image", "check"]).args(arguments), b"")
}

/// The names of what an image lacks.
fn missing(report: &Value) -> Result<Vec<&str>> {
    let checks = report["checks"].as_array().context("checks")?;
    let missing = checks.iter().filter(|check| check["result"] == "missing");
    Ok(missing.filter_map(|check| check["name"].as_str()).collect())
}

// proves: REQ-SANDBX-0126, CYNAI.SANDBX.MinimumRequiredSoftware
// part of: CYNAI.SBAGNT.SbaContainerImage
// invariant: images
#[tokio::test]
async fn the_runner_image_meets_every_requirement() -> Result<()> {
    let cluster = Cluster::with_image(RUNNER).await?;
    let table = check(&cluster, &[RUNNER])?;
    assert_eq!(table.code, Some(0), "{table:?}");
    assert!(table.text().starts_with("CHECK "), "{table:?}");
    assert!(
        table
            .stderr
            .contains("meets the requirements of images for agents"),
        "{table:?}"
    );
    let report = check(&cluster, &[RUNNER, "--output", "json"])?.json()?;
    assert_eq!(
        (&report["passed"], &report["is_runner"]),
        (&json!(true), &json!(true))
    );
    assert!(missing(&report)?.is_empty());
    let checks = report["checks"].as_array().context("checks")?;
    let names: Vec<&str> = checks
        .iter()
        .filter_map(|check| check["name"].as_str())
        .collect();
    for name in [
        "agent label",
        "purpose label",
        "/bin/sh",
        "non-root user",
        "cat",
        "cp",
        "mv",
        "rm",
        "mkdir",
        "chmod",
        "chown",
        "find",
        "tar",
        "gzip",
        "unzip",
        "zip",
        "ps",
        "env or printenv",
        "TLS trust store",
        "/workspace",
        "/tmp",
        "date",
        "bash",
        "diff",
        "jq",
        "git",
        "python3",
        "/job",
        "non-root entrypoint",
        "exit codes",
        "stdout and stderr",
    ] {
        ensure!(names.contains(&name), "{name} was not checked: {names:?}");
    }
    Ok(())
}

// part of: REQ-SANDBX-0126, CYNAI.SBAGNT.SbaContainerImage
// invariant: images
#[tokio::test]
async fn the_small_images_of_the_tests_lack_what_they_lack() -> Result<()> {
    let cluster = Cluster::start().await?;
    let failed = check(&cluster, &[IMAGE])?;
    assert_eq!(failed.code, Some(1), "{failed:?}");
    assert!(failed.stderr.contains("does not meet"), "{failed:?}");
    let row = |name: &str| {
        let table = failed.text();
        let found = table.lines().find(|line| line.starts_with(name));
        found.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    assert_eq!(
        row("zip ").as_deref(),
        Some("zip baseline missing not in the PATH")
    );
    let report = check(&cluster, &[IMAGE, "--output", "json"])?;
    assert_eq!(report.code, Some(1));
    let report: Value = serde_json::from_slice(&report.stdout)?;
    assert_eq!(
        missing(&report)?,
        [
            "zip",
            "TLS trust store",
            "bash",
            "jq",
            "git",
            "python3",
            "bash runs",
            "python3 runs",
            "jq runs",
            "git runs"
        ]
    );
    let report = check(&cluster, &[IMAGE, "--baseline", "--output", "json"])?;
    let report: Value = serde_json::from_slice(&report.stdout)?;
    assert_eq!(missing(&report)?, ["zip", "TLS trust store"]);

    // An image without the label has no sessions, and can be checked all the same.
    let refused = check(&cluster, &[UNLABELLED])?;
    assert_eq!(refused.failure(), (64, "not_found".to_owned()));
    let admin = cluster.orchestrator.token()?;
    let image = json!({"image_ref": UNLABELLED, "is_allowed": false});
    cluster.make(&admin, "/v1/images", &image).await?;
    let refused = check(&cluster, &[UNLABELLED])?;
    assert_eq!(refused.failure().1, "image_not_allowed", "{refused:?}");
    let image = json!({"image_ref": UNLABELLED, "is_allowed": true});
    cluster.make(&admin, "/v1/images", &image).await?;
    for (arguments, is_runner) in [
        (vec![UNLABELLED], false),
        (vec![UNLABELLED, "--runner"], true),
    ] {
        let report = check(&cluster, &[arguments, vec!["--output", "json"]].concat())?;
        let report: Value = serde_json::from_slice(&report.stdout)?;
        assert_eq!(report["is_runner"], is_runner);
        assert_eq!(
            missing(&report)?.contains(&"agent label"),
            is_runner,
            "{report}"
        );
    }
    Ok(())
}
