//! A private Docker daemon for one test: own directories, no network, no firewall rules.
//!
//! The daemon starts in less than a second, so every test has its own and tests can't affect one
//! another.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::{World, eventually, world::IMAGES};

/// The user whose subordinate ids the tests use; `scripts/setup test` creates it.
pub const TEST_USER: &str = "cynode-test";

/// A second name for an OCI runtime in the daemon's configuration.
pub const OTHER_RUNTIME: &str = "other-runc";

const START: Duration = Duration::from_secs(60);

impl World {
    #[must_use]
    pub fn docker_socket(&self) -> PathBuf {
        self.directory().join("docker/sock")
    }

    /// Starts the daemon and loads the tests' images into it.
    pub(crate) async fn start_docker(&self, remap: bool) -> Result<()> {
        let directory = self.directory().join("docker");
        fs_err::create_dir_all(&directory)?;
        // The machine's /etc/docker/daemon.json must not affect this daemon.
        fs_err::write(
            directory.join("daemon.json"),
            format!(r#"{{"runtimes": {{"{OTHER_RUNTIME}": {{"path": "runc"}}}}}}"#),
        )?;
        let path = |name: &str| directory.join(name).display().to_string();
        let group = format!(
            "/{}",
            self.directory()
                .file_name()
                .context("a name")?
                .to_string_lossy()
        );
        let log = fs_err::File::create(directory.join("log"))?.into_parts().0;
        let mut command = Command::new("/bin/sh");
        // Start through a shell that exits at once, so that init reaps the daemon.
        command.args([
            "-c",
            "\"$@\" &",
            "dockerd",
            "dockerd",
            "--bridge=none",
            "--iptables=false",
            "--ip6tables=false",
            "--ip-forward=false",
        ]);
        command.args([
            "--ip-masq=false",
            "--storage-driver=overlay2",
            "--exec-opt=native.cgroupdriver=cgroupfs",
        ]);
        command.args([
            format!("--host=unix://{}", path("sock")),
            format!("--cgroup-parent={group}"),
        ]);
        for (option, name) in [
            ("--data-root", "data"),
            ("--exec-root", "exec"),
            ("--pidfile", "pid"),
            ("--config-file", "daemon.json"),
        ] {
            command.args([option, &path(name)]);
        }
        if remap {
            command.arg(format!("--userns-remap={TEST_USER}"));
        }
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        ensure!(
            std::os::unix::process::CommandExt::process_group(&mut command, 0)
                .status()?
                .success(),
            "dockerd was not started"
        );
        let client = reqwest::Client::builder()
            .unix_socket(self.docker_socket())
            .timeout(START)
            .build()?;
        eventually("dockerd responds", START, async || Ok(matches!(client.get("http://docker/_ping").send().await, Ok(answer) if answer.status().is_success())))
            .await
            .with_context(|| fs_err::read_to_string(directory.join("log")).unwrap_or_default())?;
        for image in IMAGES {
            self.load_into_docker(image).await?;
        }
        Ok(())
    }

    pub(crate) async fn load_into_docker(&self, image: &str) -> Result<()> {
        let archive = self.save_image(image)?;
        let client = reqwest::Client::builder()
            .unix_socket(self.docker_socket())
            .timeout(START)
            .build()?;
        let loaded = client
            .post("http://docker/images/load?quiet=1")
            .body(fs_err::read(&archive)?)
            .send()
            .await?;
        ensure!(
            loaded.status().is_success(),
            "loading {image}: {}",
            loaded.text().await?
        );
        Ok(fs_err::remove_file(archive)?)
    }

    /// Saves an image of the tests' store as an archive that any engine can load.
    pub(crate) fn save_image(&self, image: &str) -> Result<PathBuf> {
        let archive = self
            .directory()
            .join(format!("{}.tar", uuid::Uuid::new_v4().simple()));
        // The world's run root may belong to an ordinary user, so this doesn't use it.
        let source = format!(
            "containers-storage:[overlay@{}+{}]{image}",
            Self::image_store().display(),
            self.directory().join("saving").display()
        );
        let saved = Command::new("skopeo")
            .args([
                "copy",
                "--quiet",
                &source,
                &format!("docker-archive:{}:{image}", archive.display()),
            ])
            .output()?;
        ensure!(
            saved.status.success(),
            "saving {image}: {}",
            String::from_utf8_lossy(&saved.stderr)
        );
        Ok(archive)
    }

    /// Sends a GET request to the daemon.
    pub(crate) fn docker_get(&self, path: &str) -> Result<Value> {
        let mut curl = Command::new("curl");
        curl.args([
            "--silent",
            "--show-error",
            "--fail",
            "--max-time",
            "30",
            "--unix-socket",
        ])
        .arg(self.docker_socket());
        let output = curl.arg(format!("http://docker/{path}")).output()?;
        ensure!(
            output.status.success(),
            "{path}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    pub(crate) fn docker_containers(&self) -> Result<Vec<String>> {
        let listed = self.docker_get("containers/json?all=1")?;
        Ok(listed
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|container| container["Id"].as_str().map(str::to_owned))
            .collect())
    }

    /// Tells a mount of the daemon itself from a container's.
    pub(crate) fn is_docker_mount(&self, mounted: &str) -> bool {
        let own = self.directory().join("docker").display().to_string();
        mounted.strip_prefix(&own).is_some_and(|rest| {
            rest == "/exec/netns/default"
                || (rest.starts_with("/data") && rest.matches('/').count() <= 2)
        })
    }
}

/// Tells the daemon's own processes and their helpers from a container's.
pub(crate) fn is_docker_file(command: &str) -> bool {
    command.split(' ').next().is_some_and(|program| {
        program.ends_with("dockerd") || program == "containerd" || program.ends_with("/containerd")
    })
}
