//! Checks the direction of dependencies between crates, and that confined libraries stay confined.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::root;

/// Each workspace crate, and the workspace crates on which it may depend.
const ALLOWED: &[(&str, &[&str])] = &[
    ("cynode-api", &[]),
    ("cynode-archive", &[]),
    ("cynode-audit", &["cynode-api"]),
    ("cynode-inference", &["cynode-api"]),
    ("cynode-patch", &[]),
    ("cynode-policy", &[]),
    (
        "cynode-egress",
        &[
            "cynode-api",
            "cynode-archive",
            "cynode-audit",
            "cynode-patch",
            "cynode-policy",
            "cynode-service",
            "cynode-trail",
        ],
    ),
    ("cynode-trail", &["cynode-api", "cynode-audit", "cynode-service"]),
    ("cynode-sba-proto", &["cynode-api"]),
    ("cynode-client", &["cynode-api"]),
    ("cynode-service", &["cynode-api"]),
    (
        "cynode-sba",
        &[
            "cynode-api",
            "cynode-archive",
            "cynode-patch",
            "cynode-sba-proto",
        ],
    ),
    (
        "cynode-orchestrator",
        &[
            "cynode-api",
            "cynode-archive",
            "cynode-audit",
            "cynode-client",
            "cynode-inference",
            "cynode-patch",
            "cynode-policy",
            "cynode-service",
        ],
    ),
    (
        "cynode-worker",
        &[
            "cynode-api",
            "cynode-audit",
            "cynode-inference",
            "cynode-patch",
            "cynode-sba-proto",
            "cynode-service",
            "cynode-trail",
        ],
    ),
    (
        "cynode",
        &[
            "cynode-api",
            "cynode-archive",
            "cynode-audit",
            "cynode-client",
            "cynode-egress",
            "cynode-orchestrator",
            "cynode-patch",
            "cynode-policy",
            "cynode-service",
            "cynode-worker",
        ],
    ),
    ("xtask", &[]),
    (
        "cynode-tests",
        &[
            "cynode-api",
            "cynode-client",
            "cynode-orchestrator",
            "cynode-patch",
            "cynode-sba-proto",
            "cynode-service",
            "cynode-trail",
            "cynode-worker",
        ],
    ),
    (
        "cynode-bench",
        &["cynode-api", "cynode-client", "cynode-tests"],
    ),
    (
        "cynode-bench-audit",
        &[
            "cynode-api",
            "cynode-audit",
            "cynode-bench",
            "cynode-client",
            "cynode-tests",
        ],
    ),
];

/// A library, and the only crates that may use it directly. The audit benchmark fills the trail and
/// times bare commits.
const CONFINED: &[(&str, &[&str])] = &[
    ("bollard", &["cynode-worker"]),
    ("sqlx", &["cynode-orchestrator", "cynode-bench-audit"]),
    ("oci-client", &["cynode-orchestrator"]),
    ("cedar-policy", &["cynode-policy"]),
    ("rmcp", &["cynode-orchestrator", "cynode-worker"]),
];

pub(crate) fn check() -> Result<()> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps"])
        .current_dir(root())
        .output()
        .context("running cargo metadata")?;
    ensure!(
        output.status.success(),
        "cargo metadata failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata lists no packages")?;
    let allowed: BTreeMap<&str, BTreeSet<&str>> = ALLOWED
        .iter()
        .map(|(name, deps)| (*name, deps.iter().copied().collect()))
        .collect();
    let ours: BTreeSet<&str> = packages
        .iter()
        .filter_map(|package| package["name"].as_str())
        .collect();
    let mut faults = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let Some(allowed) = allowed.get(name) else {
            faults.push(format!(
                "{name}: unknown crate; add it to xtask/src/deps.rs with its allowed dependencies"
            ));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let target = dependency["name"].as_str().unwrap_or_default();
            if ours.contains(target) && !allowed.contains(target) {
                faults.push(format!("{name} must not depend on {target}"));
            }
            if let Some((_, users)) = CONFINED.iter().find(|(library, _)| *library == target)
                && !users.contains(&name)
            {
                faults.push(format!(
                    "{name} must not use {target}; only {} may",
                    users.join(", ")
                ));
            }
        }
        let manifest =
            fs_err::read_to_string(package["manifest_path"].as_str().unwrap_or_default())?;
        if !manifest.contains("[lints]\nworkspace = true") {
            faults.push(format!(
                "{name}: Cargo.toml must inherit the workspace's lints"
            ));
        }
        for line in manifest
            .lines()
            .filter(|line| line.contains("version = \"") && !line.starts_with("version"))
        {
            faults.push(format!(
                "{name}: versions belong in [workspace.dependencies]: {line}"
            ));
        }
    }
    for (name, _) in ALLOWED {
        if !ours.contains(name) {
            faults.push(format!(
                "{name}: in xtask/src/deps.rs but not in the workspace"
            ));
        }
    }
    ensure!(faults.is_empty(), "{}", faults.join("\n"));
    println!(
        "check-deps: {} crates, all dependencies point the right way",
        ours.len()
    );
    Ok(())
}
