//! The orchestrator's database by PostgreSQL's own programs: the private server's, or another's.

use std::{path::Path, process::Command};

use crate::{
    failure::{Failure, INTERNAL},
    postgres::{self, Programs, Server, Temporary},
    state::StateDir,
};

/// A database that takes connections while this lives.
#[derive(Debug)]
pub struct Database {
    url: String,
    server: Option<Server>,
    _temporary: Option<Temporary>,
}

impl Database {
    /// The configured one, else the private one, started for as long as it is needed when `up` does not run it. The caller holds the
    /// lock of `up` when `may_start`.
    pub fn open(
        state: &StateDir,
        configured: Option<&str>,
        may_start: bool,
    ) -> Result<Self, Failure> {
        if let Some(url) = configured {
            return Ok(Self {
                url: url.to_owned(),
                server: None,
                _temporary: None,
            });
        }
        let server = Server::of(state);
        server.secure_sockets()?;
        let temporary = may_start.then(|| Temporary::start(state)).transpose()?;
        Ok(Self {
            url: server.url(),
            server: Some(server),
            _temporary: temporary,
        })
    }

    pub fn dump(&self, to: &Path) -> Result<(), Failure> {
        let mut command = self.command("pg_dump")?;
        command
            .args(["--format=custom", "--no-owner", "--no-privileges", "--file"])
            .arg(to);
        run(&mut command, "saving the database")
    }

    /// Into an empty database; all of it or nothing.
    pub fn restore(&self, from: &Path) -> Result<(), Failure> {
        let mut command = self.command("pg_restore")?;
        command
            .args([
                "--no-owner",
                "--no-privileges",
                "--exit-on-error",
                "--single-transaction",
            ])
            .arg(from);
        run(&mut command, "restoring the database, which must be empty")
    }

    fn command(&self, name: &str) -> Result<Command, Failure> {
        let mut command = if let Some(server) = &self.server {
            Programs::find(server)?.client(name)?
        } else {
            let mut command = postgres::newest_client(name)?;
            // How other servers are reached may be in these.
            command.envs(
                std::env::vars_os()
                    .filter(|(variable, _)| variable.to_string_lossy().starts_with("PG")),
            );
            command
        };
        let (url, password) = without_password(&self.url);
        if let Some(password) = password {
            command.env("PGPASSWORD", password);
        }
        command.arg("--dbname").arg(url);
        Ok(command)
    }
}

fn run(command: &mut Command, what: &str) -> Result<(), Failure> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = said.lines().take(4).collect();
    Err(Failure::new(
        INTERNAL,
        "database",
        format!("{what} failed: {}", lines.join("; ")),
    ))
}

/// An address whose password is apart: everybody on a machine can read the arguments of a program.
fn without_password(url: &str) -> (String, Option<String>) {
    let Some((scheme, rest)) = url.split_once("://") else {
        return (url.to_owned(), None);
    };
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, rest) = rest.split_at(end);
    let Some((user, host)) = authority.rsplit_once('@') else {
        return (url.to_owned(), None);
    };
    let Some((user, password)) = user.split_once(':') else {
        return (url.to_owned(), None);
    };
    (
        format!("{scheme}://{user}@{host}{rest}"),
        Some(decoded(password)),
    )
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, more @ ..] = rest {
        let hex = more
            .get(..2)
            .and_then(|two| std::str::from_utf8(two).ok())
            .and_then(|two| u8::from_str_radix(two, 16).ok());
        if let (b'%', Some(byte)) = (first, hex) {
            bytes.push(byte);
            rest = &more[2..];
        } else {
            bytes.push(*first);
            rest = more;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_goes_by_the_environment() {
        for (url, expected, password) in [
            (
                "postgres://u:p%40ss@host:5432/db?sslmode=require",
                "postgres://u@host:5432/db?sslmode=require",
                Some("p@ss"),
            ),
            ("postgres://u@host/db", "postgres://u@host/db", None),
            (
                "postgres:///db?host=/a@b:c",
                "postgres:///db?host=/a@b:c",
                None,
            ),
            ("postgres://u:p@w@host", "postgres://u@host", Some("p@w")),
        ] {
            assert_eq!(
                without_password(url),
                (expected.to_owned(), password.map(Into::into)),
                "{url}"
            );
        }
    }
}
