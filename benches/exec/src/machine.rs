//! Facts about the machine.

use std::process::Command;

use anyhow::{Context as _, Result};
use cynode_tests::World;
use serde_json::{Value, json};

#[derive(Clone, Debug)]
pub struct Facts {
    cores: usize,
    processor: String,
    kernel: String,
    podman: String,
    runtime: String,
    load: String,
    build: &'static str,
}

impl Facts {
    pub fn collect(world: &World) -> Result<Self> {
        let line = |command: &mut Command| -> Result<String> {
            let output = command
                .output()
                .with_context(|| format!("running {}", command.get_program().display()))?;
            Ok(String::from_utf8_lossy(&output.stdout)
                .lines()
                .next()
                .unwrap_or_default()
                .trim()
                .to_owned())
        };
        let processors = fs_err::read_to_string("/proc/cpuinfo")?;
        Ok(Self {
            cores: std::thread::available_parallelism()?.get(),
            processor: processors
                .lines()
                .find_map(|line| line.strip_prefix("model name")?.split(':').nth(1))
                .unwrap_or("unknown")
                .trim()
                .to_owned(),
            kernel: fs_err::read_to_string("/proc/sys/kernel/osrelease")?
                .trim()
                .to_owned(),
            podman: line(world.podman().arg("--version"))?,
            runtime: line(Command::new("runc").arg("--version"))?,
            load: fs_err::read_to_string("/proc/loadavg")?
                .split(' ')
                .take(3)
                .collect::<Vec<_>>()
                .join(" "),
            build: if cfg!(debug_assertions) {
                "debug: not worth comparing"
            } else {
                "release"
            },
        })
    }

    pub fn json(&self) -> Value {
        json!({
            "cores": self.cores, "processor": self.processor, "kernel": self.kernel,
            "podman": self.podman, "oci_runtime": self.runtime,
            "load_at_start": self.load, "build": self.build, "cynode": env!("CARGO_PKG_VERSION"),
        })
    }
}

impl std::fmt::Display for Facts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            cores,
            processor,
            kernel,
            podman,
            runtime,
            load,
            build,
        } = self;
        writeln!(
            f,
            "{cores} cores ({processor}), Linux {kernel}, {podman}, {runtime}"
        )?;
        write!(
            f,
            "cynode {} ({build}), load before the run {load}",
            env!("CARGO_PKG_VERSION")
        )
    }
}
