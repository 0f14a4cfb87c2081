//! The world of an ordinary user, who owns everything in it and runs all its processes.

use std::{
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use crate::{Engine, TEST_USER, World, world::IMAGES};

impl World {
    pub(crate) fn is_rootless(&self) -> bool {
        matches!(
            self.engine(),
            Engine::Rootless | Engine::RootlessWithoutSession
        )
    }

    /// The user's id.
    pub fn user(&self) -> Result<u32> {
        Ok(std::os::unix::fs::MetadataExt::uid(&fs_err::metadata(
            self.directory().join("home"),
        )?))
    }

    /// Gives the directory to the user, with copies of the programs (the build may lie where the
    /// user has no access) and of the images.
    pub(crate) fn prepare_user(&self) -> Result<()> {
        let binaries = self.directory().join("bin");
        let cynode = Self::cynode()?;
        let agent = ["../sba/cynode-sba", "cynode-sba"]
            .iter()
            .map(|name| cynode.with_file_name(name))
            .find(|path| path.is_file());
        fs_err::create_dir_all(&binaries)?;
        fs_err::copy(&cynode, binaries.join("cynode"))?;
        fs_err::copy(
            agent.context("the agent is not built; run 'make test', which builds it first")?,
            binaries.join("cynode-sba"),
        )?;
        if self.engine() == Engine::RootlessWithoutSession {
            // Tells the watcher to remove directories outside the world too.
            fs_err::write(self.directory().join("without-session"), "")?;
        }
        for name in ["home", "xdg", "root", "run", "state/worker/podman"] {
            fs_err::create_dir_all(self.directory().join(name))?;
        }
        fs_err::set_permissions(
            self.directory().join("xdg"),
            std::fs::Permissions::from_mode(0o700),
        )?;
        let chown = Command::new("chown")
            .args(["--recursive", &format!("{TEST_USER}:{TEST_USER}")])
            .arg(self.directory())
            .status()?;
        ensure!(
            chown.success(),
            "the world could not be given to {TEST_USER}"
        );
        // Creates the user namespace that all of this user's Podman commands share.
        let made = self
            .as_user(Path::new("podman"))
            .arg("--root")
            .arg(self.directory().join("root"))
            .arg("--runroot")
            .arg(self.directory().join("run"))
            .args(["--storage-driver", "overlay", "unshare", "true"])
            .output()?;
        ensure!(
            made.status.success(),
            "podman unshare: {}",
            String::from_utf8_lossy(&made.stderr)
        );
        IMAGES
            .iter()
            .try_for_each(|image| self.load_for_user(image))
    }

    pub(crate) fn load_for_user(&self, image: &str) -> Result<()> {
        let archive = self.save_image(image)?;
        let loaded = self
            .podman()
            .args(["load", "--quiet", "--input"])
            .arg(&archive)
            .output()?;
        ensure!(
            loaded.status.success(),
            "podman load: {}",
            String::from_utf8_lossy(&loaded.stderr)
        );
        Ok(fs_err::remove_file(archive)?)
    }

    /// A command that runs as the user, with only `PATH` from our environment.
    #[must_use]
    pub fn as_user(&self, program: &Path) -> Command {
        let mut command = Command::new("setpriv");
        command
            .args([
                format!("--reuid={TEST_USER}"),
                format!("--regid={TEST_USER}"),
            ])
            .args(["--clear-groups", "env", "--ignore-environment"]);
        command.arg("--chdir").arg(self.working_directory());
        command.arg(format!(
            "PATH={}:/usr/sbin:/sbin",
            std::env::var("PATH").unwrap_or_default()
        ));
        command.arg(format!("HOME={}", self.directory().join("home").display()));
        if self.engine() == Engine::Rootless {
            command.arg(format!(
                "XDG_RUNTIME_DIR={}",
                self.directory().join("xdg").display()
            ));
        }
        command.arg("CYNODE_LOG=debug").arg(program);
        command
    }

    /// A command prefix that enters the user's namespace, like the worker's own commands do.
    pub(crate) fn in_namespace(&self) -> Command {
        let pause = fs_err::read_to_string(self.pause_file()).unwrap_or_default();
        let mut command = self.as_user(Path::new("nsenter"));
        command.args([
            "--user",
            "--mount",
            "--preserve-credentials",
            "--target",
            pause.trim(),
            "--",
            "env",
            "_CONTAINERS_USERNS_CONFIGURED=done",
        ]);
        let user = self.user().unwrap_or_default();
        command.args([
            format!("_CONTAINERS_ROOTLESS_UID={user}"),
            format!("_CONTAINERS_ROOTLESS_GID={user}"),
        ]);
        command
    }

    /// The file in which Podman records the process that keeps the namespace alive.
    fn pause_file(&self) -> PathBuf {
        let runtime = match self.engine() {
            Engine::RootlessWithoutSession => PathBuf::from(format!(
                "/tmp/podman-run-{}",
                self.user().unwrap_or_default()
            )),
            _ => self.directory().join("xdg"),
        };
        runtime.join("libpod/tmp/pause.pid")
    }
}
