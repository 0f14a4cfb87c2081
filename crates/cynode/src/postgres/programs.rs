//! The programs of an installed PostgreSQL server.

use std::{
    io,
    path::{Path, PathBuf},
    process::Command,
};

use super::Server;
use crate::failure::{Failure, USAGE};

const INSTALL: &str = "Install the PostgreSQL server (Debian and Ubuntu: apt-get install postgresql; Fedora: dnf install postgresql-server; Arch: \
     pacman -S postgresql), name the directory of its programs by PG_BIN, or use another server by DATABASE_URL.";

/// A directory with `postgres` and `initdb` of one version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    directory: PathBuf,
    /// The major version: clusters of another can't be opened.
    pub major: u32,
}

impl Programs {
    /// Those that fit the cluster; the newest when there is none yet.
    pub fn find(server: &Server) -> Result<Self, Failure> {
        let found = installed();
        let Some(first) = found.first() else {
            return Err(Failure::new(
                USAGE,
                "postgres_missing",
                "the programs of a PostgreSQL server are not to be found on this machine",
            )
            .remedy(INSTALL));
        };
        let Some(major) = made_by(server)? else {
            return Ok(first.clone());
        };
        found
            .iter()
            .find(|programs| programs.major == major)
            .cloned()
            .ok_or_else(|| other_version(server, major, first))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// A client's program of the same version; some distributions put those elsewhere.
    pub fn client(&self, name: &str) -> Result<Command, Failure> {
        if self.path(name).is_file() {
            Ok(self.command(name))
        } else {
            newest_client(name)
        }
    }

    /// A program of these, with nothing of our environment but what programs need.
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place that starts programs of PostgreSQL"
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

/// A client's program for a server that is somebody else's: the newest, which can speak with every older one.
pub fn newest_client(name: &str) -> Result<Command, Failure> {
    let mut servers = installed();
    servers.sort_by_key(|programs| std::cmp::Reverse(programs.major));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = servers
        .into_iter()
        .map(|programs| programs.directory)
        .chain(std::env::split_paths(&path));
    let found = directories
        .map(|directory| Programs {
            directory,
            major: 0,
        })
        .find(|programs| programs.path(name).is_file());
    found.map(|programs| programs.command(name)).ok_or_else(|| {
        Failure::new(USAGE, "postgres_missing", format!("PostgreSQL's program {name} is not to be found on this machine"))
            .remedy("Install the PostgreSQL client (Debian and Ubuntu: apt-get install postgresql-client), or name its directory by PG_BIN.")
    })
}

/// The major version that made the cluster, when there is one.
fn made_by(server: &Server) -> Result<Option<u32>, Failure> {
    let path = server.data().join("PG_VERSION");
    match fs_err::read_to_string(&path) {
        Ok(text) => {
            let unreadable = || {
                Failure::internal(format!(
                    "{} does not name a version of PostgreSQL",
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

fn other_version(server: &Server, major: u32, found: &Programs) -> Failure {
    let what = format!(
        "{} was made by PostgreSQL {major}; on this machine is PostgreSQL {}, in {}",
        server.data().display(),
        found.major,
        found.directory.display()
    );
    Failure::new(USAGE, "postgres_version", what).remedy(format!(
        "Install PostgreSQL {major} beside it, or name its programs by PG_BIN. To move to the newer one: with version {major} 'cynode backup FILE', then \
         'cynode backup --restore FILE' into an empty state directory."
    ))
}

/// What is there, the best first: what `PG_BIN` names and nothing else, else what the PATH has and then by version.
fn installed() -> Vec<Programs> {
    if let Some(directory) = std::env::var_os("PG_BIN").filter(|value| !value.is_empty()) {
        return look(&PathBuf::from(directory)).into_iter().collect();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut found: Vec<Programs> = std::env::split_paths(&path)
        .filter_map(|directory| look(&directory))
        .collect();
    let mut versioned: Vec<Programs> = places()
        .iter()
        .filter_map(|directory| look(directory))
        .collect();
    versioned.sort_by_key(|programs| std::cmp::Reverse(programs.major));
    found.extend(versioned);
    found
}

/// Where distributions put the programs of each version: Debian and Ubuntu, PostgreSQL's own packages for Fedora, Gentoo, what
/// was built by hand.
fn places() -> Vec<PathBuf> {
    let below = |parent: &str, prefix: &'static str| {
        let entries = fs_err::read_dir(parent).into_iter().flatten().flatten();
        entries
            .filter(move |entry| entry.file_name().to_string_lossy().starts_with(prefix))
            .map(|entry| entry.path().join("bin"))
            .collect::<Vec<_>>()
    };
    let mut places = below("/usr/lib/postgresql", "");
    places.extend(below("/usr", "pgsql-"));
    places.extend(below("/usr/lib64", "postgresql-"));
    places.extend(["/usr/local/pgsql/bin", "/usr/local/bin", "/usr/bin"].map(PathBuf::from));
    places
}

fn look(directory: &Path) -> Option<Programs> {
    let programs = Programs {
        directory: directory.to_owned(),
        major: 0,
    };
    if !programs.path("initdb").is_file() || !programs.path("postgres").is_file() {
        return None;
    }
    let said = programs
        .command("postgres")
        .arg("--version")
        .output()
        .ok()?;
    Some(Programs {
        major: major(&String::from_utf8_lossy(&said.stdout))?,
        ..programs
    })
}

/// `postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)`, `postgres (PostgreSQL) 18beta1`.
fn major(said: &str) -> Option<u32> {
    let version = said.split_whitespace().nth(2)?;
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
        for (said, expected) in [
            (
                "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n",
                Some(15),
            ),
            ("postgres (PostgreSQL) 18beta1", Some(18)),
            ("postgres (PostgreSQL) 9.6.24", Some(9)),
            ("bash: postgres: not found", None),
            ("", None),
        ] {
            assert_eq!(major(said), expected, "{said}");
        }
    }
}
