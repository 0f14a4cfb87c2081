//! What is on this machine: which clients, and where their files are.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use cynode_service::config;

use super::table::{Client, Location, Place};
use crate::{cli::Globals, failure::Failure, state::StateDir};

/// The directories of the user, from the environment.
#[derive(Clone, Debug)]
pub struct Machine {
    variables: Vec<(&'static str, PathBuf)>,
    path: OsString,
}

/// The variables that name directories.
const VARIABLES: [&str; 5] = [
    "HOME",
    "XDG_CONFIG_HOME",
    STATE_HOME,
    "CODEX_HOME",
    "COPILOT_HOME",
];
/// Where the client commands and the bridge remember things.
pub const STATE_HOME: &str = "XDG_STATE_HOME";

impl Machine {
    pub fn of_environment() -> Self {
        let variable = |name| Some((name, PathBuf::from(std::env::var_os(name)?)));
        Self {
            variables: VARIABLES
                .into_iter()
                .filter_map(variable)
                .filter(|(_, path)| path.is_absolute())
                .collect(),
            path: std::env::var_os("PATH").unwrap_or_default(),
        }
    }

    fn variable(&self, name: &str) -> Option<&Path> {
        let found = self.variables.iter().find(|(known, _)| *known == name);
        found.map(|(_, path)| path.as_path())
    }

    pub fn is_home(&self, directory: &Path) -> bool {
        let home = self.variable("HOME");
        home.is_some_and(|home| fs_err::canonicalize(home).is_ok_and(|home| home == directory))
    }

    /// Whether a client is found.
    pub fn has(&self, client: &Client) -> bool {
        let has_program = client.programs.iter().any(|program| {
            std::env::split_paths(&self.path)
                .filter(|directory| directory.is_absolute())
                .any(|directory| directory.join(program).is_file())
        });
        let has_marker = client
            .markers
            .iter()
            .filter_map(|marker| self.resolve(*marker, Path::new("/")))
            .any(|marker| marker.is_dir());
        has_program || has_marker
    }

    fn resolve(&self, location: Location, project: &Path) -> Option<PathBuf> {
        let home = || self.variable("HOME").map(Path::to_owned);
        Some(match location {
            Location::Project(path) => project.join(path),
            Location::Home(path) => home()?.join(path),
            Location::Config(path) => match self.variable("XDG_CONFIG_HOME") {
                Some(directory) => directory.join(path),
                None => home()?.join(".config").join(path),
            },
            Location::Variable(name, default, path) => {
                let directory = match self.variable(name) {
                    Some(directory) => directory.to_owned(),
                    None => home()?.join(default),
                };
                if path.is_empty() {
                    directory
                } else {
                    directory.join(path)
                }
            }
        })
    }

    /// The file of a place: the one that exists, or else the first.
    pub fn path(&self, place: &Place, project: &Path) -> Result<PathBuf, Failure> {
        let paths: Option<Vec<PathBuf>> = place
            .files
            .iter()
            .map(|location| self.resolve(*location, project))
            .collect();
        let paths = paths.unwrap_or_default();
        let exists = |path: &&PathBuf| path.symlink_metadata().is_ok();
        let path = paths.iter().find(exists).or(paths.first());
        path.cloned().ok_or_else(|| {
            Failure::usage("no home directory: HOME is not set")
                .remedy("Set HOME to an absolute path.")
        })
    }

    /// The directory of the user's state, if it is not the one that every process of the user finds.
    pub fn state_home(&self) -> Option<&Path> {
        let usual = self.variable("HOME").map(|home| home.join(".local/state"));
        self.variable(STATE_HOME)
            .filter(|directory| Some(*directory) != usual.as_deref())
    }

    /// The state directory, if the bridge would not find it without the variables of this process.
    pub fn state_directory(&self, globals: &Globals) -> Result<Option<PathBuf>, Failure> {
        let own = StateDir::new(globals)?.path().to_owned();
        let home = |name: &str| match name {
            "HOME" => self.variable("HOME")?.to_str().map(str::to_owned),
            _ => None,
        };
        let is_root = rustix::process::geteuid().is_root();
        let found = config::default_state_dir(is_root, home);
        Ok((own != found).then_some(own))
    }
}

/// The place of a client's entry, and whether it belongs to the project.
pub fn place(client: &'static Client, of_user: bool) -> Option<(&'static Place, bool)> {
    let project = client.project.as_ref().map(|place| (place, true));
    let user = client.user.as_ref().map(|place| (place, false));
    if of_user {
        user.or(project)
    } else {
        project.or(user)
    }
}

#[cfg(test)]
impl Machine {
    /// A machine of a test.
    pub fn new(variables: &[(&'static str, &Path)], path: &str) -> Self {
        Self {
            variables: variables
                .iter()
                .map(|(name, path)| (*name, (*path).to_owned()))
                .collect(),
            path: path.into(),
        }
    }
}
