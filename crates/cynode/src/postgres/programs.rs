//! The programs of an installed PostgreSQL server.

use std::{
    io,
    path::{Path, PathBuf},
    process::Command,
};

use super::Server;
use crate::failure::{Failure, USAGE};

const INSTALL_REMEDY: &str = "Install the PostgreSQL server (Debian and Ubuntu: apt-get install \
     postgresql; Fedora: dnf install postgresql-server; Arch: pacman -S postgresql), set PG_BIN to \
     the directory of its programs, or set DATABASE_URL to use another server.";

/// A directory with `postgres` and `initdb` of one version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    directory: PathBuf,
    /// The major version, which must match the cluster's.
    pub major: u32,
}

impl Programs {
    /// Programs of the cluster's version; the preferred ones if there is no cluster.
    pub fn find(server: &Server) -> Result<Self, Failure> {
        let installed = installed();
        let Some(first) = installed.first() else {
            return Err(Failure::new(
                USAGE,
                "postgres_missing",
                "no PostgreSQL server is installed on this machine",
            )
            .remedy(INSTALL_REMEDY));
        };
        let Some(major) = cluster_version(server)? else {
            return Ok(first.clone());
        };
        installed
            .iter()
            .find(|programs| programs.major == major)
            .cloned()
            .ok_or_else(|| version_mismatch(server, major, first))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// A client program of the same version, which some distributions install elsewhere.
    pub fn client(&self, name: &str) -> Result<Command, Failure> {
        if self.path(name).is_file() {
            Ok(self.command(name))
        } else {
            newest_client(name)
        }
    }

    /// A command with a minimal environment.
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place that starts PostgreSQL programs"
    )]
    pub fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.path(name));
        command
            .env_clear()
            .env(
                "PATH",
                std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into()),
            )
            .env("LC_ALL", "C");
        command
    }
}

/// A client program for an external server: the newest, which supports all older servers.
pub fn newest_client(name: &str) -> Result<Command, Failure> {
    let mut servers = installed();
    servers.sort_by_key(|programs| std::cmp::Reverse(programs.major));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = servers
        .into_iter()
        .map(|programs| programs.directory)
        .chain(std::env::split_paths(&path));
    let newest = directories
        .map(|directory| Programs {
            directory,
            major: 0,
        })
        .find(|programs| programs.path(name).is_file());
    newest
        .map(|programs| programs.command(name))
        .ok_or_else(|| {
            Failure::new(
                USAGE,
                "postgres_missing",
                format!("the PostgreSQL program {name} is not installed on this machine"),
            )
            .remedy(
                "Install the PostgreSQL client (Debian and Ubuntu: apt-get install \
             postgresql-client), or set PG_BIN to its directory.",
            )
        })
}

/// The major version of the cluster, if it exists.
fn cluster_version(server: &Server) -> Result<Option<u32>, Failure> {
    let path = server.data().join("PG_VERSION");
    match fs_err::read_to_string(&path) {
        Ok(text) => {
            let unreadable = || {
                Failure::internal(format!(
                    "{} does not contain a PostgreSQL version",
                    path.display()
                ))
            };
            text.trim()
                .split('.')
                .next()
                .unwrap_or_default()
                .parse()
                .map(Some)
                .map_err(|_| unreadable())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn version_mismatch(server: &Server, major: u32, installed: &Programs) -> Failure {
    let message = format!(
        "{} needs PostgreSQL {major}; this machine has PostgreSQL {}, in {}",
        server.data().display(),
        installed.major,
        installed.directory.display()
    );
    Failure::new(USAGE, "postgres_version", message).remedy(format!(
        "Install PostgreSQL {major} as well, or set PG_BIN to its programs. To upgrade: run \
         'cynode backup FILE' with version {major}, then 'cynode backup --restore FILE' into an \
         empty state directory."
    ))
}

/// Installed programs in order of preference: only `PG_BIN` if it is set, else those in `PATH`,
/// then others by version.
fn installed() -> Vec<Programs> {
    if let Some(directory) = std::env::var_os("PG_BIN").filter(|value| !value.is_empty()) {
        return probe(&PathBuf::from(directory)).into_iter().collect();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut programs: Vec<Programs> = std::env::split_paths(&path)
        .filter_map(|directory| probe(&directory))
        .collect();
    let mut versioned: Vec<Programs> = install_directories()
        .iter()
        .filter_map(|directory| probe(directory))
        .collect();
    versioned.sort_by_key(|programs| std::cmp::Reverse(programs.major));
    programs.extend(versioned);
    programs
}

/// Directories of the programs of each version: Debian and Ubuntu, PostgreSQL's packages for
/// Fedora, Gentoo, builds from source.
fn install_directories() -> Vec<PathBuf> {
    let below = |parent: &str, prefix: &'static str| {
        let entries = fs_err::read_dir(parent).into_iter().flatten().flatten();
        entries
            .filter(move |entry| entry.file_name().to_string_lossy().starts_with(prefix))
            .map(|entry| entry.path().join("bin"))
            .collect::<Vec<_>>()
    };
    let mut directories = below("/usr/lib/postgresql", "");
    directories.extend(below("/usr", "pgsql-"));
    directories.extend(below("/usr/lib64", "postgresql-"));
    directories.extend(["/usr/local/pgsql/bin", "/usr/local/bin", "/usr/bin"].map(PathBuf::from));
    directories
}

fn probe(directory: &Path) -> Option<Programs> {
    let programs = Programs {
        directory: directory.to_owned(),
        major: 0,
    };
    if !programs.path("initdb").is_file() || !programs.path("postgres").is_file() {
        return None;
    }
    let output = programs
        .command("postgres")
        .arg("--version")
        .output()
        .ok()?;
    Some(Programs {
        major: major(&String::from_utf8_lossy(&output.stdout))?,
        ..programs
    })
}

/// `postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)`, `postgres (PostgreSQL) 18beta1`.
fn major(output: &str) -> Option<u32> {
    let version = output.split_whitespace().nth(2)?;
    let digits = version
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(version.len());
    version[..digits].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_major_version_is_read_in_every_form() {
        for (output, expected) in [
            (
                "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n",
                Some(15),
            ),
            ("postgres (PostgreSQL) 18beta1", Some(18)),
            ("postgres (PostgreSQL) 9.6.24", Some(9)),
            ("bash: postgres: not found", None),
            ("", None),
        ] {
            assert_eq!(major(output), expected, "{output}");
        }
    }
}
