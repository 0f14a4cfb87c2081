//! Builds the agent: static, stripped, and small.

use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use crate::root;

/// The agent must stay small: every sandbox maps it.
const MAX_BYTES: u64 = 5 * 1024 * 1024;

pub(crate) fn build() -> Result<()> {
    let host = host_target()?;
    // musl if its target is installed; otherwise static glibc, which needs only the C toolchain.
    let musl = host.replace("-gnu", "-musl");
    let target = if installed_targets().contains(&musl) {
        musl
    } else {
        host
    };
    let status = Command::new(env!("CARGO"))
        .args([
            "build",
            "--quiet",
            "--package",
            "cynode-sba",
            "--profile",
            "agent",
            "--target",
            &target,
        ])
        .env(
            "RUSTFLAGS",
            "-C target-feature=+crt-static -C relocation-model=static",
        )
        .current_dir(root())
        .status()
        .context("running cargo")?;
    ensure!(status.success(), "building cynode-sba failed");
    let built = root().join("target").join(&target).join("agent/cynode-sba");
    let directory = root().join("target/sba");
    fs_err::create_dir_all(&directory)?;
    let binary = directory.join("cynode-sba");
    let staged = directory.join(format!(".cynode-sba.{}", std::process::id()));
    fs_err::copy(&built, &staged)?;
    fs_err::rename(&staged, &binary)?;
    let size = fs_err::metadata(&binary)?.len();
    if size > MAX_BYTES {
        bail!("cynode-sba has {size} bytes, more than the limit of {MAX_BYTES}");
    }
    eprintln!("cynode-sba: {size} bytes, static, for {target}");
    println!("{}", binary.display());
    Ok(())
}

fn host_target() -> Result<String> {
    let output = Command::new("rustc")
        .arg("-vV")
        .output()
        .context("running rustc")?;
    let text = String::from_utf8(output.stdout)?;
    text.lines()
        .find_map(|line| line.strip_prefix("host: "))
        .map(str::to_owned)
        .context("rustc does not name its host")
}

fn installed_targets() -> Vec<String> {
    let Ok(output) = Command::new("rustup")
        .args(["target", "list", "--installed"])
        .output()
    else {
        return Vec::new();
    };
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(str::to_owned)
        .collect()
}
