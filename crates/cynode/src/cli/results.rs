//! Arguments of the commands that show and fetch what changed in a session.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[command(
    after_help = "A watch covers 1,000 directories. It prints a line for each change: created, \
                  modified, deleted or moved, and the path; 'overflow' means that some are missing."
)]
pub struct Watch {
    /// Name, id or part of the id [default: the session of this directory]
    pub session: Option<String>,
    /// File or directory to watch
    #[arg(default_value = ".")]
    pub path: PathBuf,
}

#[derive(Debug, Args)]
pub struct Diff {
    /// Name, id or part of the id [default: the session of this directory]
    pub session: Option<String>,
    /// Print the changed files with their added and removed lines instead
    #[arg(long)]
    pub stat: bool,
    /// What to compare with: `brought` for what the session began with, or a commit of the
    /// repository in the workspace
    #[arg(long, value_name = "BASE", default_value = "brought")]
    pub base: String,
    /// Don't escape control characters on a terminal
    #[arg(long, conflicts_with = "stat")]
    pub raw: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "The changes come from a sandbox, so look at them first: files that are \
                  executable, or that a shell, an editor or git runs by itself, are marked. With \
                  --apply, the listed changes are made, all or none. Nothing is written through \
                  symbolic links, outside of DIR, or to a .git directory. Files of repositories \
                  within the workspace come out like others, without their .git."
)]
pub struct Pull {
    /// Name, id or part of the id [default: the session of this directory]
    pub session: Option<String>,
    /// Directory to change [default: the one that was brought in, else the current one]
    #[arg(value_name = "DIR")]
    pub directory: Option<PathBuf>,
    /// Make the changes
    #[arg(long)]
    pub apply: bool,
    /// What to compare with, as in `session diff`
    #[arg(long, value_name = "BASE", default_value = "brought")]
    pub base: String,
    /// File or directory to leave as it is, relative to DIR (repeatable)
    #[arg(long, value_name = "PATH")]
    pub exclude: Vec<PathBuf>,
}
