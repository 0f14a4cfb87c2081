//! Shows, writes or removes the entry of one client.

use std::path::PathBuf;

use serde::Serialize;
use serde_json::Value;

use super::{
    edit::{EditError, Spot},
    entry::{ConfigValue, EntrySpec},
    file::{ConfigFile, FileError},
    journal::{Before, ClientChange, Journal},
    table::{Client, Place},
};
use crate::mcp;

/// The entry for one client, and the file it belongs in.
#[derive(Debug)]
pub struct ClientEntry<'a> {
    pub client: &'static Client,
    pub place: &'static Place,
    pub path: PathBuf,
    /// The directory of the project, if the file is in it.
    pub project: Option<PathBuf>,
    pub target: EntrySpec,
    pub journal: &'a Journal,
    pub is_detected: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The entry is not in the file.
    Shown,
    /// The entry is in the file.
    Present,
    Written,
    /// The entry was already there.
    Unchanged,
    Removed,
    /// There was no entry to remove.
    Absent,
    Refused,
}

/// The result for one client, as it is printed.
#[derive(Debug, Serialize)]
pub struct ClientReport {
    pub client: &'static str,
    pub name: &'static str,
    pub detected: bool,
    pub file: String,
    pub state: State,
    /// The entry by itself.
    pub entry: Value,
    /// A complete file with only this entry.
    pub snippet: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub diff: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<&'static str>,
}

/// Why a client's file was not changed.
#[derive(Debug, thiserror::Error)]
enum EntryError {
    #[error("{0}")]
    File(#[from] FileError),
    #[error("{}: {error}", .path.display())]
    Edit { path: PathBuf, error: EditError },
    #[error("the entry '{name}' in {} was not written by this command", .path.display())]
    Foreign { path: PathBuf, name: String },
    #[error("{0} can't call a server with a token from its file")]
    NoHttp(&'static str),
    #[error("what was written can't be remembered: {0}")]
    Journal(std::io::Error),
}

/// The state after a change, and its diff.
struct ClientOutcome {
    state: State,
    diff: String,
}

impl ClientEntry<'_> {
    /// Prints the configuration without writing it.
    pub fn show(self, with_token: bool) -> ClientReport {
        let shown = self.entry(with_token).and_then(|entry| {
            let file = self.open()?;
            let text = file.text().unwrap_or_default();
            let has = self.spot(text).has(text, &entry);
            let state = if has.map_err(|error| self.edit_error(error))? {
                State::Present
            } else {
                State::Shown
            };
            Ok(ClientOutcome {
                state,
                diff: String::new(),
            })
        });
        self.report(with_token, shown)
    }

    /// Writes the entry.
    pub fn write(self, with_token: bool) -> ClientReport {
        let written = self.try_write(with_token);
        self.report(with_token, written)
    }

    /// Removes the entry: exactly what was written if the file is still the same, or else the
    /// entry by itself.
    pub fn remove(self) -> ClientReport {
        let removed = self.try_remove();
        self.report(false, removed)
    }

    fn entry(&self, with_token: bool) -> Result<ConfigValue, EntryError> {
        let shape = if with_token {
            let http = self.client.http;
            http.ok_or(EntryError::NoHttp(self.client.name))?
        } else {
            self.client.stdio
        };
        Ok(self.target.entry(shape))
    }

    fn open(&self) -> Result<ConfigFile, EntryError> {
        Ok(ConfigFile::open(&self.path, self.project.as_deref())?)
    }

    fn spot<'a>(&'a self, text: &str) -> Spot<'a> {
        Spot::of(self.place, &self.target.name, text)
    }

    fn edit_error(&self, error: EditError) -> EntryError {
        EntryError::Edit {
            path: self.path.clone(),
            error,
        }
    }

    fn known_change(&self) -> Result<Option<ClientChange>, EntryError> {
        let found = self.journal.find(&self.path, &self.target.name);
        found.map_err(EntryError::Journal)
    }

    fn try_write(&self, with_token: bool) -> Result<ClientOutcome, EntryError> {
        let entry = self.entry(with_token)?;
        let file = self.open()?;
        let current = file.text();
        let text = current.unwrap_or_default();
        let spot = self.spot(text);
        let has = spot.has(text, &entry);
        if has.map_err(|error| self.edit_error(error))? {
            return Ok(ClientOutcome {
                state: State::Unchanged,
                diff: String::new(),
            });
        }
        let known = self.known_change()?;
        // A change of an entry counts from what was there before the first one.
        let before = match known.as_ref().and_then(|change| change.undone(text)) {
            Some(Before(before)) => before,
            None if known.is_some() => spot
                .remove(text)
                .map_err(|error| self.edit_error(error))?
                .or_else(|| current.map(str::to_owned)),
            None => current.map(str::to_owned),
        };
        let base = before.as_deref().unwrap_or_default();
        let after = self
            .spot(base)
            .set(base, &entry)
            .map_err(|error| self.edit_error(error))?;
        let mut change =
            ClientChange::between(&self.path, &self.target.name, before.as_deref(), &after);
        let directories = file.write(&after, with_token)?;
        change.directories = match known {
            Some(known) if before.is_none() => known.directories,
            _ => directories,
        };
        self.journal.put(change).map_err(EntryError::Journal)?;
        Ok(ClientOutcome {
            state: State::Written,
            diff: self.diff(text, &after),
        })
    }

    fn try_remove(&self) -> Result<ClientOutcome, EntryError> {
        let file = self.open()?;
        let known = self.known_change()?;
        let absent = ClientOutcome {
            state: State::Absent,
            diff: String::new(),
        };
        let Some(text) = file.text() else {
            self.forget()?;
            return Ok(absent);
        };
        let undone = known.as_ref().and_then(|change| change.undone(text));
        let before = if let Some(Before(before)) = undone {
            before
        } else {
            let spot = self.spot(text);
            let entry = spot.entry(text).map_err(|error| self.edit_error(error))?;
            let Some(entry) = entry else {
                self.forget()?;
                return Ok(absent);
            };
            if known.is_none() && !is_ours(&entry) {
                return Err(EntryError::Foreign {
                    path: self.path.clone(),
                    name: self.target.name.clone(),
                });
            }
            spot.remove(text).map_err(|error| self.edit_error(error))?
        };
        if let Some(before) = &before {
            file.write(before, false)?;
        } else {
            let directories = known.map(|change| change.directories);
            file.remove(&directories.unwrap_or_default())?;
        }
        self.forget()?;
        Ok(ClientOutcome {
            state: State::Removed,
            diff: self.diff(text, before.as_deref().unwrap_or_default()),
        })
    }

    fn forget(&self) -> Result<(), EntryError> {
        let forgotten = self.journal.forget(&self.path, &self.target.name);
        forgotten.map_err(EntryError::Journal)
    }

    /// The changed lines only: those around them may hold secrets of other servers.
    fn diff(&self, before: &str, after: &str) -> String {
        let path = self.path.display();
        let mut options = diffy::DiffOptions::new();
        options
            .set_context_len(0)
            .set_original_filename(path.to_string())
            .set_modified_filename(path.to_string());
        self.masked(&options.create_patch(before, after).to_string())
    }

    /// A text without the token.
    fn masked(&self, text: &str) -> String {
        match &self.target.http {
            Some((_, token)) if token.len() > 8 => text.replace(token, "cyn_…"),
            _ => text.to_owned(),
        }
    }

    fn report(&self, with_token: bool, done: Result<ClientOutcome, EntryError>) -> ClientReport {
        let entry = self.entry(with_token).ok();
        let spot = self.spot("");
        let snippet = entry
            .as_ref()
            .and_then(|entry| spot.set("", entry).ok())
            .unwrap_or_default();
        let entry = entry.map(|entry| entry.value()).unwrap_or_default();
        let (state, diff, problem) = match done {
            Ok(ClientOutcome { state, diff }) => (state, diff, None),
            Err(refusal) => (State::Refused, String::new(), Some(refusal.to_string())),
        };
        let is_removal = matches!(state, State::Removed | State::Absent);
        ClientReport {
            client: self.client.id,
            name: self.client.name,
            detected: self.is_detected,
            file: self.path.display().to_string(),
            state,
            entry: if is_removal {
                Value::Null
            } else {
                serde_json::from_str(&self.masked(&entry.to_string())).unwrap_or_default()
            },
            snippet: self.masked(&snippet),
            diff,
            problem,
            note: self.client.note,
        }
    }
}

/// Whether an entry starts the bridge or calls the gateway.
fn is_ours(entry: &ConfigValue) -> bool {
    fn texts<'a>(node: &'a ConfigValue, found: &mut Vec<&'a str>) {
        match node {
            ConfigValue::Text(text) => found.push(text),
            ConfigValue::Word(_) => {}
            ConfigValue::List(items) => items.iter().for_each(|item| texts(item, found)),
            ConfigValue::Map(fields) => fields.iter().for_each(|(_, node)| texts(node, found)),
        }
    }
    let mut found = Vec::new();
    texts(entry, &mut found);
    let is_program = |text: &&str| *text == "cynode" || text.ends_with("/cynode");
    found.iter().any(is_program) && found.contains(&"mcp")
        || found.iter().any(|text| text.ends_with(mcp::PATH))
}
