//! Shows, writes or removes the entry of one client.

use std::path::{Path, PathBuf};

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

const TOKEN_PREFIX: &str = "cyn_";
/// Shorter words with that prefix are no tokens.
const MIN_TOKEN_LETTERS: usize = 8;
const MASKED_TOKEN: &str = "cyn_…";

/// The entry for one client, and the file it belongs in.
#[derive(Debug)]
pub struct ClientEntry<'a> {
    pub client: &'static Client,
    pub place: &'static Place,
    pub path: PathBuf,
    /// The directory that the entry is for.
    pub directory: PathBuf,
    /// The directory of the project, if the file is in it.
    pub project: Option<PathBuf>,
    pub target: EntrySpec,
    pub journal: &'a Journal,
    pub is_detected: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The entry is not in the file.
    #[default]
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
    /// A token that the file had and that is still valid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// What to do about the problem or the warning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<&'static str>,
    /// Tokens that the file no longer has.
    #[serde(skip)]
    pub removed_tokens: Vec<String>,
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
    #[error("the entry '{name}' in {} is for {directory}", .path.display())]
    OtherDirectory {
        path: PathBuf,
        name: String,
        directory: String,
    },
    #[error("{0} can't call a server with a token from its file")]
    NoHttp(&'static str),
    #[error("what was written can't be remembered: {0}")]
    Journal(std::io::Error),
}

impl EntryError {
    fn remedy(&self, client: &Client, is_removal: bool) -> Option<String> {
        match self {
            Self::Foreign { .. } if !is_removal => {
                Some("Choose another name for this entry with --name.".to_owned())
            }
            Self::OtherDirectory { .. } if is_removal => {
                Some("Run the command there, or name that directory with --workspace.".to_owned())
            }
            Self::OtherDirectory { directory, .. } => Some(format!(
                "Choose another name for this entry with --name, or remove that one with 'cynode \
                 connect {} --remove --workspace {directory}'.",
                client.id
            )),
            _ => None,
        }
    }
}

/// The state after a change, and its diff.
#[derive(Default)]
struct ClientOutcome {
    state: State,
    diff: String,
    /// Tokens that the file no longer has.
    tokens: Vec<String>,
}

impl ClientOutcome {
    fn unchanged(state: State) -> Self {
        Self {
            state,
            ..Self::default()
        }
    }
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
            Ok(ClientOutcome::unchanged(state))
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
            return Ok(ClientOutcome::unchanged(State::Unchanged));
        }
        let known = self.known_change()?;
        self.check_owner(text, known.as_ref())?;
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
        change.directory = self.directory.to_str().map(str::to_owned);
        self.journal.put(change).map_err(EntryError::Journal)?;
        Ok(ClientOutcome {
            state: State::Written,
            diff: self.diff(text, &after),
            tokens: removed_tokens(text, &after),
        })
    }

    fn try_remove(&self) -> Result<ClientOutcome, EntryError> {
        let file = self.open()?;
        let known = self.known_change()?;
        let absent = ClientOutcome::unchanged(State::Absent);
        let Some(text) = file.text() else {
            self.forget()?;
            return Ok(absent);
        };
        self.check_owner(text, known.as_ref())?;
        let undone = known.as_ref().and_then(|change| change.undone(text));
        let before = if let Some(Before(before)) = undone {
            before
        } else {
            let spot = self.spot(text);
            let entry = spot.entry(text).map_err(|error| self.edit_error(error))?;
            if entry.is_none() {
                self.forget()?;
                return Ok(absent);
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
        let after = before.as_deref().unwrap_or_default();
        Ok(ClientOutcome {
            state: State::Removed,
            diff: self.diff(text, after),
            tokens: removed_tokens(text, after),
        })
    }

    /// Refuses to touch an entry of somebody else, or in a file of the user one for another
    /// directory.
    fn check_owner(&self, text: &str, known: Option<&ClientChange>) -> Result<(), EntryError> {
        let entry = self.spot(text).entry(text);
        let Some(entry) = entry.map_err(|error| self.edit_error(error))? else {
            return Ok(());
        };
        let (path, name) = (self.path.clone(), self.target.name.clone());
        let is_as_written = known.is_some_and(|change| change.undone(text).is_some());
        if !is_as_written && !is_ours(&entry) {
            return Err(EntryError::Foreign { path, name });
        }
        let directory = workspace_of(&entry)
            .or_else(|| known.and_then(|change| change.directory.as_deref()))
            .filter(|directory| Path::new(directory) != self.directory);
        match directory {
            // The file of a project is for the project, even if that has moved.
            Some(directory) if self.project.is_none() => Err(EntryError::OtherDirectory {
                path,
                name,
                directory: directory.to_owned(),
            }),
            _ => Ok(()),
        }
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
        masked(&options.create_patch(before, after).to_string())
    }

    fn report(&self, with_token: bool, done: Result<ClientOutcome, EntryError>) -> ClientReport {
        let entry = self.entry(with_token).ok();
        let spot = self.spot("");
        let snippet = entry
            .as_ref()
            .and_then(|entry| spot.set("", entry).ok())
            .unwrap_or_default();
        let entry = entry.map(|entry| entry.value()).unwrap_or_default();
        let is_for_removal = self.target.program.is_empty();
        let (outcome, problem, remedy) = match done {
            Ok(outcome) => (outcome, None, None),
            Err(error) => (
                ClientOutcome::unchanged(State::Refused),
                Some(error.to_string()),
                error.remedy(self.client, is_for_removal),
            ),
        };
        let ClientOutcome {
            state,
            diff,
            tokens,
        } = outcome;
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
                serde_json::from_str(&masked(&entry.to_string())).unwrap_or_default()
            },
            snippet: masked(&snippet),
            diff,
            problem,
            warning: None,
            remedy,
            note: self.client.note,
            removed_tokens: tokens,
        }
    }
}

/// The places of tokens of this system in a text.
fn token_places(text: &str) -> Vec<std::ops::Range<usize>> {
    let is_letter = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    let mut places: Vec<std::ops::Range<usize>> = Vec::new();
    for (start, prefix) in text.match_indices(TOKEN_PREFIX) {
        let letters = &text.as_bytes()[start + prefix.len()..];
        let count = letters.iter().take_while(|byte| is_letter(byte)).count();
        let is_inside = places.last().is_some_and(|last| start < last.end);
        if count >= MIN_TOKEN_LETTERS && !is_inside {
            places.push(start..start + prefix.len() + count);
        }
    }
    places
}

/// A text without tokens, whoever wrote them.
fn masked(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut end = 0;
    for place in token_places(text) {
        shown.push_str(&text[end..place.start]);
        shown.push_str(MASKED_TOKEN);
        end = place.end;
    }
    shown.push_str(&text[end..]);
    shown
}

/// The tokens of a text that another does not have.
fn removed_tokens(before: &str, after: &str) -> Vec<String> {
    let tokens = token_places(before).into_iter().map(|place| &before[place]);
    let gone = tokens.filter(|token| !after.contains(token));
    gone.map(str::to_owned).collect()
}

/// The directory that an entry of the bridge brings in.
fn workspace_of(entry: &ConfigValue) -> Option<&str> {
    let texts = texts_of(entry);
    let option = texts.iter().position(|text| *text == "--workspace")?;
    texts.get(option + 1).copied()
}

/// All texts of an entry.
fn texts_of(entry: &ConfigValue) -> Vec<&str> {
    fn add<'a>(node: &'a ConfigValue, found: &mut Vec<&'a str>) {
        match node {
            ConfigValue::Text(text) => found.push(text),
            ConfigValue::Word(_) => {}
            ConfigValue::List(items) => items.iter().for_each(|item| add(item, found)),
            ConfigValue::Map(fields) => fields.iter().for_each(|(_, node)| add(node, found)),
        }
    }
    let mut found = Vec::new();
    add(entry, &mut found);
    found
}

/// Whether an entry starts the bridge or calls the gateway.
fn is_ours(entry: &ConfigValue) -> bool {
    let found = texts_of(entry);
    let is_program = |text: &&str| *text == "cynode" || text.ends_with("/cynode");
    found.iter().any(is_program) && found.contains(&"mcp")
        || found.iter().any(|text| text.ends_with(mcp::PATH))
}
