//! The commands that speak with the orchestrator.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use cynode_api::{
    ArtifactId, JobId, JobState, PreferenceScope, ProjectId, SessionId, TaskId, TokenId, TokenKind,
};

use crate::parse;

#[derive(Debug, Args)]
pub struct Backup {
    /// The file to write; with --restore the file to read
    pub file: PathBuf,
    /// Bring back what is in the file, into an empty state directory
    #[arg(long)]
    pub restore: bool,
    /// Replace the file when it exists
    #[arg(long, conflicts_with = "restore")]
    pub force: bool,
    #[command(flatten)]
    pub settings: super::Settings,
}

#[derive(Debug, Args)]
pub struct Run {
    /// Image [default: the system's default image]
    #[arg(long, value_name = "REF")]
    pub image: Option<String>,
    /// Task that the job belongs to [default: a new one]
    #[arg(long, value_name = "UUID")]
    pub task: Option<TaskId>,
    /// Directory whose files the job begins with, in /workspace
    #[arg(long, value_name = "DIR")]
    pub workspace: Option<PathBuf>,
    /// Environment variable; may be repeated
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = parse::key_value)]
    pub env: Vec<(String, String)>,
    /// End the job after this time [default: 1h]
    #[arg(long, short, value_name = "TIME", value_parser = parse::duration)]
    pub timeout: Option<Duration>,
    /// Memory, such as 512m or 2g
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    pub memory: Option<u64>,
    /// Processors, such as 1.5
    #[arg(long, value_name = "N", value_parser = parse::cpus)]
    pub cpus: Option<f64>,
    /// Only on a node with this label; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse::key_value)]
    pub node_label: Vec<(String, String)>,
    /// Run again on another node when the node is lost
    #[arg(long)]
    pub retry: bool,
    /// Print the job's id and don't wait for its end
    #[arg(long, short)]
    pub detach: bool,
    /// Print control characters as they are, also to a terminal
    #[arg(long)]
    pub raw: bool,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub enum Job {
    /// Run a job as a file of JSON has it, and end as it ended
    Run(JobRun),
    /// List jobs
    List {
        /// Only jobs in this state
        #[arg(long)]
        state: Option<JobState>,
        /// Only jobs of this task
        #[arg(long, value_name = "UUID")]
        task: Option<TaskId>,
    },
    /// Show one job
    Show { id: JobId },
    /// Print a job's output
    Logs(JobLogs),
    /// Stop jobs
    Stop {
        #[arg(required = true)]
        ids: Vec<JobId>,
    },
}

#[derive(Debug, Args)]
pub struct JobRun {
    /// What `POST /v1/jobs` takes; `-` is standard input
    pub file: PathBuf,
    /// Print the job's id and don't wait for its end
    #[arg(long, short)]
    pub detach: bool,
    /// Print control characters as they are, also to a terminal
    #[arg(long)]
    pub raw: bool,
}

#[derive(Debug, Args)]
pub struct JobLogs {
    pub id: JobId,
    /// Go on until the job has ended
    #[arg(long, short)]
    pub follow: bool,
    /// Print control characters as they are, also to a terminal
    #[arg(long)]
    pub raw: bool,
}

#[derive(Debug, Subcommand)]
pub enum Task {
    /// Create a task and print its id
    Create(TaskCreate),
    /// List tasks
    List {
        /// Only tasks of this project
        #[arg(long, value_name = "UUID")]
        project: Option<ProjectId>,
    },
    /// Show one task
    Show { id: TaskId },
}

#[derive(Debug, Args)]
pub struct TaskCreate {
    pub name: String,
    #[arg(long, value_name = "UUID")]
    pub project: Option<ProjectId>,
    #[arg(long, value_name = "TEXT")]
    pub description: Option<String>,
    /// What must be met; may be repeated
    #[arg(long = "requirement", value_name = "TEXT")]
    pub requirements: Vec<String>,
    /// By what its end is known; may be repeated
    #[arg(long = "criterion", value_name = "TEXT")]
    pub criteria: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub enum Image {
    /// Add a version of an image to those that are known, and ask the nodes for it; once more, to use what is loaded there now
    Add(ImageAdd),
    /// Allow an image
    Allow(ImageName),
    /// Deny an image
    Deny(ImageName),
    /// List images
    List,
    /// Show one image
    Show { image: String },
}

#[derive(Debug, Args)]
pub struct ImageAdd {
    /// Such as registry.example/team/tools:1.2, or localhost/… for one that is loaded on the nodes
    #[arg(value_name = "REF")]
    pub reference: String,
    #[arg(long)]
    pub name: Option<String>,
    #[arg(long, value_name = "TEXT")]
    pub description: Option<String>,
    /// `sha256:…`
    #[arg(long)]
    pub digest: Option<String>,
    /// And allow it
    #[arg(long)]
    pub allow: bool,
}

#[derive(Debug, Args)]
pub struct ImageName {
    /// The image's name or id, or the reference of one of its versions
    pub image: String,
    /// Only this version
    #[arg(long, value_name = "VERSION")]
    pub version: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum Node {
    /// List nodes
    List,
    /// Show one node
    Show {
        /// Name or id
        node: String,
    },
    /// Give a node no new work; what runs goes on
    Drain {
        /// Name or id
        node: String,
        /// Give it work again
        #[arg(long)]
        undo: bool,
    },
    /// Keys by which nodes register
    Key {
        #[command(subcommand)]
        command: NodeKey,
    },
}

#[derive(Debug, Subcommand)]
pub enum NodeKey {
    /// Make a key and print it; it is shown once
    Create(NodeKeyCreate),
}

#[derive(Debug, Args)]
pub struct NodeKeyCreate {
    /// Good for more than one node
    #[arg(long)]
    pub reusable: bool,
    /// How long it is good [default: 24h]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub expires: Option<Duration>,
}

#[derive(Debug, Subcommand)]
pub enum Token {
    /// Make a token and print it; it is shown once
    Create(TokenCreate),
    /// List tokens; the tokens themselves are nowhere
    List,
    /// Revoke tokens, at once
    Revoke {
        #[arg(required = true)]
        ids: Vec<TokenId>,
    },
}

#[derive(Debug, Args)]
pub struct TokenCreate {
    /// user, project_manager, project_analyst or sandbox
    #[arg(long, default_value = "user")]
    pub kind: TokenKind,
    /// In whose name it speaks: name or id [default: one's own]
    #[arg(long)]
    pub user: Option<String>,
    #[arg(long, value_name = "UUID")]
    pub project: Option<ProjectId>,
    /// May be repeated
    #[arg(long = "task", value_name = "UUID")]
    pub tasks: Vec<TaskId>,
    #[arg(long, value_name = "UUID")]
    pub job: Option<JobId>,
    #[arg(long, value_name = "UUID")]
    pub session: Option<SessionId>,
    /// How long it is good [default: 24h]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub expires: Option<Duration>,
}

#[derive(Debug, Subcommand)]
pub enum Setting {
    /// Print a setting's value
    Get { key: String },
    /// Change a setting: JSON, or else a text
    Set { key: String, value: String },
    /// List settings
    List,
}

#[derive(Debug, Subcommand)]
pub enum Preference {
    /// Print the value that counts
    Get {
        key: String,
        /// For this task
        #[arg(long, value_name = "UUID")]
        task: Option<TaskId>,
        /// For this project
        #[arg(long, value_name = "UUID")]
        project: Option<ProjectId>,
    },
    /// Change a preference: JSON, or else a text
    Set {
        /// Whose: system, or task:ID, project:ID, user:ID, group:ID
        #[arg(long, value_name = "SCOPE")]
        scope: PreferenceScopeArg,
        key: String,
        value: String,
    },
    /// List the preferences that count, or those of one scope
    List {
        #[arg(long, value_name = "UUID")]
        task: Option<TaskId>,
        #[arg(long, value_name = "UUID")]
        project: Option<ProjectId>,
        /// Whose: system, or task:ID, project:ID, user:ID, group:ID
        #[arg(long, value_name = "SCOPE", conflicts_with_all = ["task", "project"])]
        scope: Option<PreferenceScopeArg>,
    },
}

/// `system`, `task:ID`, ….
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreferenceScopeArg {
    pub scope: PreferenceScope,
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
            (PreferenceScope::System, _) => Err("the system has no id".to_owned()),
            (_, id) if id.parse::<uuid::Uuid>().is_ok() => Ok(Self {
                scope,
                id: id.to_owned(),
            }),
            _ => Err(format!("write it as {}:ID", scope.as_str())),
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum Artifact {
    /// Store a file as a new version of a path
    Put(ArtifactPut),
    /// Print an artifact, or write it to a file
    Get(ArtifactGet),
    /// List the artifacts of a task
    List {
        #[arg(long, value_name = "UUID")]
        task: TaskId,
    },
}

#[derive(Debug, Args)]
pub struct ArtifactPut {
    #[arg(long, value_name = "UUID")]
    pub task: TaskId,
    /// `-` is standard input
    pub file: PathBuf,
    /// Its path within the task [default: the file's name]
    pub path: Option<String>,
    /// Such as text/plain
    #[arg(long = "type", value_name = "TYPE")]
    pub media_type: Option<String>,
}

#[derive(Debug, Args)]
pub struct ArtifactGet {
    /// A path within the task, or without --task an artifact's id
    pub artifact: String,
    #[arg(long, value_name = "UUID")]
    pub task: Option<TaskId>,
    /// [default: the newest]
    #[arg(long, value_name = "N", requires = "task")]
    pub version: Option<i64>,
    /// Write it here; `-` is standard output
    #[arg(long, short, value_name = "FILE", default_value = "-")]
    pub to: PathBuf,
    /// Print control characters as they are, also to a terminal
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
    /// List what is kept
    List(EventFilter),
    /// Print what happens as it happens
    Follow(EventFilter),
}

#[derive(Debug, Args)]
pub struct EventFilter {
    /// Only what came after this cursor [default: all that is kept]
    #[arg(long, value_name = "CURSOR", default_value_t = 0)]
    pub after: i64,
    /// Only of this task
    #[arg(long, value_name = "UUID")]
    pub task: Option<TaskId>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_names_what_it_is_of() {
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
        for bad in ["task", "task:x", "system:1", "world", ""] {
            assert!(bad.parse::<PreferenceScopeArg>().is_err(), "{bad}");
        }
    }
}
