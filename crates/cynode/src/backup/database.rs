//! Dumps and restores the orchestrator's database with `pg_dump` and `pg_restore`.

use std::{path::Path, process::Command};

use percent_encoding::percent_decode_str;

use crate::{
    failure::{Failure, INTERNAL},
    postgres::{self, Programs, Server, TemporaryServer},
    state::StateDir,
};

/// A database that accepts connections while this value lives.
#[derive(Debug)]
pub struct Database {
    url: String,
    server: Option<Server>,
    _temporary: Option<TemporaryServer>,
}

impl Database {
    /// Opens the configured database, or else the private one. With `may_start`, starts the private
    /// server until this is dropped; the caller then holds the lock of `up`.
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
        let server = Server::new(state);
        server.secure_sockets()?;
        let temporary = may_start
            .then(|| TemporaryServer::start(state))
            .transpose()?;
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

    /// Restores into an empty database, in one transaction.
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
            // PG* variables may configure the connection to an external server.
            command.envs(
                std::env::vars_os()
                    .filter(|(variable, _)| variable.to_string_lossy().starts_with("PG")),
            );
            command
        };
        let (url, password) = split_password(&self.url);
        if let Some(password) = password {
            command.env("PGPASSWORD", password);
        }
        command.arg("--dbname").arg(url);
        Ok(command)
    }
}

fn run(command: &mut Command, action: &str) -> Result<(), Failure> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = stderr.lines().take(4).collect();
    Err(Failure::new(
        INTERNAL,
        "database",
        format!("{action} failed: {}", lines.join("; ")),
    ))
}

/// Splits the password off a URL: every user of a machine can read the arguments of a program.
fn split_password(url: &str) -> (String, Option<String>) {
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
        Some(
            percent_decode_str(password)
                .decode_utf8_lossy()
                .into_owned(),
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_split_off_its_url() {
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
                split_password(url),
                (expected.to_owned(), password.map(Into::into)),
                "{url}"
            );
        }
    }
}
