//! Arguments of the commands that call the orchestrator.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use cynode_api::{ArtifactId, JobState, PreferenceScope};

use super::{LimitArgs, ListArgs};
use crate::parse;

#[derive(Debug, Args)]
pub struct Backup {
    /// File to write, or to read with --restore
    pub file: PathBuf,
    /// Restore the file into an empty state directory. Restore only backups that you made yourself:
    /// a backup can run code as PostgreSQL's user
    #[arg(long)]
    pub restore: bool,
    /// Replace an existing file
    #[arg(long, conflicts_with = "restore")]
    pub force: bool,
    #[command(flatten)]
    pub settings: super::Settings,
}

#[derive(Debug, Args)]
#[command(
    after_help = "With --get, the command runs in a session that ends with it; otherwise it is a \
                  job."
)]
pub struct Run {
    /// Image name or reference [default: the system's default image]
    #[arg(long, value_name = "REF")]
    pub image: Option<String>,
    /// Task of the job [default: a new one]
    #[arg(long)]
    pub task: Option<String>,
    /// Directory to bring in: its files become the workspace, but for those that hold secrets
    #[arg(long, value_name = "DIR")]
    pub workspace: Option<PathBuf>,
    /// Leave out what git ignores
    #[arg(long, requires = "workspace")]
    pub gitignore: bool,
    /// Repository to begin with, by name, id or part of the id: at a branch, a tag or one of their
    /// commits [default: the default branch]
    #[arg(long, value_name = "REPOSITORY[@REF]", conflicts_with = "workspace")]
    pub repo: Option<String>,
    /// Commits of the repository's history to bring [default: all]
    #[arg(long, value_name = "N", requires = "repo")]
    pub depth: Option<u32>,
    /// File or directory of the workspace to fetch when the command has ended, whatever its exit
    /// code; may be repeated. It goes to the same path below the directory that was brought in, or
    /// else the current one
    #[arg(long, value_name = "PATH", conflicts_with_all = ["detach", "retry"])]
    pub get: Vec<PathBuf>,
    /// Environment variable; may be repeated
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = parse::key_value)]
    pub env: Vec<(String, String)>,
    /// Timeout [default: 1h]
    #[arg(long, short, value_name = "TIME", value_parser = parse::duration)]
    pub timeout: Option<Duration>,
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Require a node with this label; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse::key_value)]
    pub node_label: Vec<(String, String)>,
    /// Retry on another node if the node is lost
    #[arg(long)]
    pub retry: bool,
    /// Print the job's id and don't wait for it
    #[arg(long, short)]
    pub detach: bool,
    /// Don't escape control characters on a terminal
    #[arg(long)]
    pub raw: bool,
    /// Command and arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub enum Job {
    /// Run a job from a JSON file and exit with its exit code
    Run(Box<JobRun>),
    /// List jobs: what runs first, then the newest
    List(JobList),
    /// Show one job, with a line for each step
    Show(JobShow),
    /// Print a job's output
    Logs(JobLogs),
    /// Stop jobs
    Stop {
        /// Ids, or parts of them
        #[arg(required = true, value_name = "JOB")]
        jobs: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub struct JobList {
    /// Only jobs in this state
    #[arg(long)]
    pub state: Option<JobState>,
    /// Only jobs of this task
    #[arg(long)]
    pub task: Option<String>,
    /// Also jobs that have ended
    #[arg(long, conflicts_with = "state")]
    pub all: bool,
    #[command(flatten)]
    pub list: ListArgs,
}

#[derive(Debug, Args)]
pub struct JobShow {
    /// Id, or a part of it
    pub job: String,
    /// Wait for the end and print each step as it begins
    #[arg(long, short)]
    pub follow: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "A job specification is checked before it is sent; its job_id and task_id may be \
                  left out. While the job runs, its output goes to standard output and, on a \
                  terminal, its progress to standard error."
)]
pub struct JobRun {
    /// Job specification of cynode-sba, or body of `POST /v1/jobs`; `-` is standard input
    pub file: PathBuf,
    /// Task of the job [default: that of the file, or a new one]
    #[arg(long)]
    pub task: Option<String>,
    /// Image name or reference [default: that of the file, or the system's default image]
    #[arg(long, value_name = "REF")]
    pub image: Option<String>,
    /// Directory to bring in: its files become the workspace, but for those that hold secrets
    #[arg(long, value_name = "DIR")]
    pub workspace: Option<PathBuf>,
    /// Leave out what git ignores
    #[arg(long, requires = "workspace")]
    pub gitignore: bool,
    /// Repository to begin with, by name, id or part of the id: at a branch, a tag or one of their
    /// commits [default: the default branch]
    #[arg(long, value_name = "REPOSITORY[@REF]", conflicts_with = "workspace")]
    pub repo: Option<String>,
    /// Commits of the repository's history to bring [default: all]
    #[arg(long, value_name = "N", requires = "repo")]
    pub depth: Option<u32>,
    /// Print the job's id and don't wait for it
    #[arg(long, short)]
    pub detach: bool,
    /// Don't escape control characters on a terminal
    #[arg(long)]
    pub raw: bool,
}

#[derive(Debug, Args)]
pub struct JobLogs {
    /// Id, or a part of it
    pub job: String,
    /// Keep printing until the job ends
    #[arg(long, short)]
    pub follow: bool,
    /// Don't escape control characters on a terminal
    #[arg(long)]
    pub raw: bool,
}

#[derive(Debug, Subcommand)]
pub enum Task {
    /// Create a task and print its id
    Create(TaskCreate),
    /// List tasks, the newest first
    List {
        /// Only tasks of this project
        #[arg(long)]
        project: Option<String>,
        /// Also tasks that are done, failed or canceled
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        list: ListArgs,
    },
    /// Show one task
    Show {
        /// Name, id or part of the id
        task: String,
    },
}

#[derive(Debug, Args)]
pub struct TaskCreate {
    /// Name of the task
    pub name: String,
    /// Project of the task
    #[arg(long)]
    pub project: Option<String>,
    /// Description of the task
    #[arg(long, value_name = "TEXT")]
    pub description: Option<String>,
    /// Requirement; may be repeated
    #[arg(long = "requirement", value_name = "TEXT")]
    pub requirements: Vec<String>,
    /// Acceptance criterion; may be repeated
    #[arg(long = "criterion", value_name = "TEXT")]
    pub criteria: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub enum Image {
    /// Add a version of an image, or pin the one that nodes have now
    Add(ImageAdd),
    /// Allow an image
    Allow(ImageName),
    /// Deny an image
    Deny(ImageName),
    /// List images
    List {
        #[command(flatten)]
        list: ListArgs,
    },
    /// Show one image
    Show {
        /// Name, id or part of the id, or reference of a version
        image: String,
    },
    /// Check an allowed image against the requirements of sandbox images, in a sandbox
    Check(ImageCheck),
    /// Remove an image that nothing uses; nodes keep their copies
    Remove(ImageName),
}

#[derive(Debug, Args)]
pub struct ImageCheck {
    /// Name, id or part of the id, or reference of a version
    #[arg(value_name = "REF")]
    pub image: String,
    /// Also check what images for agents must have; the default for images with the agent label
    #[arg(long, conflicts_with = "baseline")]
    pub runner: bool,
    /// Check only what every image must have
    #[arg(long)]
    pub baseline: bool,
}

#[derive(Debug, Args)]
pub struct ImageAdd {
    /// Reference, such as registry.example/team/tools:1.2, or localhost/… for a local image
    #[arg(value_name = "REF")]
    pub reference: String,
    /// Name of the image
    #[arg(long)]
    pub name: Option<String>,
    /// Description of the image
    #[arg(long, value_name = "TEXT")]
    pub description: Option<String>,
    /// Digest to pin: `sha256:…`
    #[arg(long)]
    pub digest: Option<String>,
    /// Also allow the version
    #[arg(long)]
    pub allow: bool,
}

#[derive(Debug, Args)]
pub struct ImageName {
    /// Name, id or part of the id, or reference of a version
    pub image: String,
    /// Only this version
    #[arg(long, value_name = "VERSION")]
    pub version: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum Node {
    /// List nodes, the ready ones first
    List {
        #[command(flatten)]
        list: ListArgs,
    },
    /// Show one node
    Show {
        /// Name, id or part of the id
        node: String,
    },
    /// Stop scheduling work to a node; running work continues
    Drain {
        /// Name, id or part of the id
        node: String,
        /// Resume scheduling
        #[arg(long)]
        undo: bool,
    },
    /// Manage the registration keys of nodes
    Key {
        #[command(subcommand)]
        command: NodeKey,
    },
}

#[derive(Debug, Subcommand)]
pub enum NodeKey {
    /// Create a registration key and print it once
    Create(NodeKeyCreate),
}

#[derive(Debug, Args)]
pub struct NodeKeyCreate {
    /// Allow any number of nodes to use the key
    #[arg(long)]
    pub reusable: bool,
    /// Lifetime [default: 24h]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub expires: Option<Duration>,
}

#[derive(Debug, Subcommand)]
pub enum Setting {
    /// Print a setting's value
    Get { key: String },
    /// Change a setting to a JSON value, or to plain text
    Set { key: String, value: String },
    /// List settings
    List,
}

#[derive(Debug, Subcommand)]
pub enum Preference {
    /// Print the effective value of a preference
    Get {
        key: String,
        /// For this task
        #[arg(long)]
        task: Option<String>,
        /// For this project
        #[arg(long)]
        project: Option<String>,
    },
    /// Change a preference to a JSON value, or to plain text
    Set {
        /// Scope: system, task:ID, project:ID, user:ID or group:ID
        #[arg(long, value_name = "SCOPE")]
        scope: PreferenceScopeArg,
        key: String,
        value: String,
    },
    /// List the effective preferences, or those of one scope
    List {
        /// For this task
        #[arg(long)]
        task: Option<String>,
        /// For this project
        #[arg(long)]
        project: Option<String>,
        /// Scope: system, task:ID, project:ID, user:ID or group:ID
        #[arg(long, value_name = "SCOPE", conflicts_with_all = ["task", "project"])]
        scope: Option<PreferenceScopeArg>,
    },
}

/// `system`, `task:ID`, ….
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreferenceScopeArg {
    pub scope: PreferenceScope,
    /// A name, an id or a part of one.
    pub id: String,
}

impl std::str::FromStr for PreferenceScopeArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (scope, id) = text.split_once(':').unwrap_or((text, ""));
        let scope: PreferenceScope = scope.parse()?;
        match (scope, id) {
            (PreferenceScope::System, "") => Ok(Self {
                scope,
                id: "system".to_owned(),
            }),
            (PreferenceScope::System, _) => Err("the system scope takes no id".to_owned()),
            (_, id) if !id.is_empty() => Ok(Self {
                scope,
                id: id.to_owned(),
            }),
            _ => Err(format!("write {}:ID", scope.as_str())),
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum Artifact {
    /// Store a file as a new version of a path
    Put(ArtifactPut),
    /// Print an artifact, or write it to a file
    Get(ArtifactGet),
    /// List the artifacts of a task, the newest first
    List {
        /// Task of the artifacts
        #[arg(long)]
        task: String,
        #[command(flatten)]
        list: ListArgs,
    },
}

#[derive(Debug, Args)]
pub struct ArtifactPut {
    /// Task of the artifact
    #[arg(long)]
    pub task: String,
    /// File to store; `-` is standard input
    pub file: PathBuf,
    /// Path within the task [default: the file's name]
    pub path: Option<String>,
    /// Media type, such as text/plain
    #[arg(long = "type", value_name = "TYPE")]
    pub media_type: Option<String>,
}

#[derive(Debug, Args)]
pub struct ArtifactGet {
    /// Path within the task, or an artifact's id; with --task also a part of the id
    pub artifact: String,
    /// Task of the artifact
    #[arg(long)]
    pub task: Option<String>,
    /// Version [default: the newest]
    #[arg(long, value_name = "N", requires = "task")]
    pub version: Option<i64>,
    /// File to write; `-` is standard output
    #[arg(long, short, value_name = "FILE", default_value = "-")]
    pub to: PathBuf,
    /// Don't escape control characters on a terminal
    #[arg(long)]
    pub raw: bool,
}

impl ArtifactGet {
    pub fn id(&self) -> Option<ArtifactId> {
        self.artifact.parse().ok()
    }
}

#[derive(Debug, Subcommand)]
pub enum Event {
    /// List stored events
    List(EventFilter),
    /// Print events as they happen
    Follow(EventFilter),
}

#[derive(Debug, Args)]
pub struct EventFilter {
    /// Only events after this cursor [default: all stored events]
    #[arg(long, value_name = "CURSOR", default_value_t = 0)]
    pub after: i64,
    /// Only events of this task
    #[arg(long)]
    pub task: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_has_a_kind_and_an_id() {
        let id = "01890000-0000-7000-8000-000000000001";
        assert!(matches!(
            "system".parse(),
            Ok(PreferenceScopeArg {
                scope: PreferenceScope::System,
                ..
            })
        ));
        assert_eq!(
            format!("task:{id}").parse(),
            Ok(PreferenceScopeArg {
                scope: PreferenceScope::Task,
                id: id.to_owned()
            })
        );
        for bad in ["task", "task:", "system:1", "world", ""] {
            assert!(bad.parse::<PreferenceScopeArg>().is_err(), "{bad}");
        }
    }
}
