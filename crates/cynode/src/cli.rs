//! The command line.

mod agents;
mod audit;
mod git;
mod identity;
mod orchestrator;
mod results;

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{
    Args, CommandFactory as _, Parser, Subcommand, ValueEnum,
    error::{ContextKind, ContextValue},
};
use cynode_api::{LimitsRequest, NetworkPolicy, SessionId, SessionState, SignalName, WorkspaceRef};

pub use agents::{Connect, Mcp};
pub use audit::{
    Audit, AuditExport, AuditFilterArgs, AuditSubject, AuditTail, ExportFormat, Policy,
    PolicyTestArgs,
};
pub use git::{Credential, Decision, Promote, Promotion, Repository, RepositoryAdd};
pub use identity::{Group, Project, Token, User};
pub use orchestrator::{
    Artifact, ArtifactGet, ArtifactPut, Backup, Event, EventFilter, Image, ImageCheck, ImageName,
    Job, JobList, JobRun, Node, NodeKey, Preference, PreferenceScopeArg, Run, Setting, Task,
};
pub use results::{Diff, Pull, Watch};

use crate::parse;

#[derive(Debug, Parser)]
#[command(
    name = "cynode",
    version,
    about = "Sandboxes for AI agents, on your own machines",
    disable_help_subcommand = true
)]
pub struct Cli {
    #[command(flatten)]
    pub globals: Globals,
    #[command(subcommand)]
    pub command: Command,
}

/// The command line of the processes that `up` starts. A separate parser, because clap completes
/// and suggests hidden subcommands too.
#[derive(Debug, Parser)]
#[command(
    name = "cynode",
    version,
    about = "Run a role of CyNode; 'cynode up' does this",
    disable_help_subcommand = true
)]
pub struct RoleCli {
    #[command(flatten)]
    pub globals: Globals,
    #[command(subcommand)]
    pub role: RoleCommand,
}

#[derive(Debug, Subcommand)]
pub enum RoleCommand {
    /// Run the worker; `up` does this
    Worker(RoleArgs),
    /// Run the orchestrator; `up` does this
    Orchestrator(RoleArgs),
    /// Run an egress role; `up` does this
    Egress(EgressArgs),
    /// Run the private PostgreSQL; `up` does this
    Postgres {
        #[arg(long, value_name = "PID")]
        parent: Option<i32>,
    },
}

/// A parsed command line: a command of the user, or a role that `up` starts.
#[derive(Debug)]
pub enum Invocation {
    Command(Cli),
    Role(RoleCli),
}

impl Invocation {
    pub const fn globals(&self) -> &Globals {
        match self {
            Self::Command(cli) => &cli.globals,
            Self::Role(cli) => &cli.globals,
        }
    }

    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let arguments: Vec<OsString> = arguments.into_iter().collect();
        let error = match Cli::try_parse_from(&arguments) {
            Ok(cli) => return cli.with_session_of_directory(&arguments).map(Self::Command),
            Err(error) => error,
        };
        let unknown = match error.get(ContextKind::InvalidSubcommand) {
            Some(ContextValue::String(name)) => name.as_str(),
            _ => return Err(error),
        };
        if RoleCli::command()
            .get_subcommands()
            .any(|role| role.get_name() == unknown)
        {
            RoleCli::try_parse_from(&arguments).map(Self::Role)
        } else {
            Err(error)
        }
    }
}

impl Cli {
    /// Tells `session exec -- CMD` from `session exec SESSION CMD`: when every word of a command
    /// stands after `--`, none of them is a session.
    fn with_session_of_directory(mut self, arguments: &[OsString]) -> Result<Self, clap::Error> {
        let (session, command, needs_command) = match &mut self.command {
            Command::Session {
                command: Session::Exec(args),
            } => (&mut args.session, &mut args.command, true),
            Command::Session {
                command: Session::Shell(args),
            } => (&mut args.session, &mut args.command, false),
            _ => return Ok(self),
        };
        let after_dashes = arguments
            .iter()
            .position(|argument| argument == "--")
            .map(|dashes| arguments.len() - dashes - 1);
        if let Some(first) = session.take_if(|_| after_dashes == Some(1 + command.len())) {
            command.insert(0, first);
        }
        if needs_command && command.is_empty() {
            return Err(Self::command().error(
                clap::error::ErrorKind::MissingRequiredArgument,
                "no command given; write 'cynode session exec [SESSION] -- CMD...'",
            ));
        }
        Ok(self)
    }
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Global options")]
pub struct Globals {
    /// Output format
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        value_name = "FORMAT"
    )]
    pub output: OutputFormat,
    /// State directory [default: /var/lib/cynode as root, else ~/.local/state/cynode]
    #[arg(long, global = true, env = "CYNODE_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Configuration file (TOML)
    #[arg(long, global = true, env = "CYNODE_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Additional CA certificates to trust (PEM)
    #[arg(long, global = true, env = "CYNODE_CA_FILE", value_name = "FILE")]
    pub ca: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    #[default]
    Table,
    Json,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start CyNode on this machine
    Up(Up),
    /// Stop CyNode on this machine and end its sandboxes
    Down(Down),
    /// Show whether CyNode runs here and is ready
    Status,
    /// Check whether this machine can run CyNode
    Doctor(Doctor),
    /// Save the state of the control plane to a file, or restore it
    Backup(Backup),
    /// Give MCP clients on this machine a sandbox: print or write their configuration
    Connect(Connect),
    /// Serve an MCP client on standard input and output
    Mcp(Mcp),
    /// Run one command in a new sandbox and exit with its exit code
    Run(Run),
    /// Manage sessions: sandboxes that run many commands
    Session {
        #[command(subcommand)]
        command: Session,
    },
    /// Manage jobs: single commands that run to completion
    Job {
        #[command(subcommand)]
        command: Job,
    },
    /// Manage tasks, which group jobs, sessions and artifacts
    Task {
        #[command(subcommand)]
        command: Task,
    },
    /// Manage images and which of them are allowed
    Image {
        #[command(subcommand)]
        command: Image,
    },
    /// Manage the nodes that run sandboxes
    Node {
        #[command(subcommand)]
        command: Node,
    },
    /// Manage projects, which group tasks
    Project {
        #[command(subcommand)]
        command: Project,
    },
    /// Manage users
    User {
        #[command(subcommand)]
        command: User,
    },
    /// Manage groups of users
    Group {
        #[command(subcommand)]
        command: Group,
    },
    /// Create, list, renew and revoke tokens
    Token {
        #[command(subcommand)]
        command: Token,
    },
    /// Read and change system settings
    Setting {
        #[command(subcommand)]
        command: Setting,
    },
    /// Read and change preferences of tasks, projects, users, groups and the system
    Preference {
        #[command(subcommand)]
        command: Preference,
    },
    /// Store and fetch files of tasks
    Artifact {
        #[command(subcommand)]
        command: Artifact,
    },
    /// Manage git repositories that sessions begin with and changes are promoted to
    Repository {
        #[command(subcommand)]
        command: Repository,
    },
    /// Manage the credentials of repositories
    Credential {
        #[command(subcommand)]
        command: Credential,
    },
    /// Turn the changes of a session into a commit on a branch, and open a pull request
    Promote(Box<Promote>),
    /// List, show and decide promotions
    Promotion {
        #[command(subcommand)]
        command: Promotion,
    },
    /// List and follow events of jobs and sessions
    Event {
        #[command(subcommand)]
        command: Event,
    },
    /// Read, export and verify the audit trail
    Audit {
        #[command(subcommand)]
        command: Audit,
    },
    /// Manage and test policies
    Policy {
        #[command(subcommand)]
        command: Policy,
    },
    /// Print a shell completion script
    Completions { shell: clap_complete::Shell },
}

/// A section of the configuration; each belongs to one role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    Egress,
    Orchestrator,
    Worker,
}

impl Section {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Egress => "egress",
            Self::Orchestrator => "orchestrator",
            Self::Worker => "worker",
        }
    }
}

/// Role settings that flags can override.
#[derive(Clone, Debug, Default, Args)]
pub struct Settings {
    /// Address of the user API [default: 127.0.0.1:12080]
    #[arg(long, value_name = "ADDR")]
    pub api_listen: Option<String>,
    /// Address at which nodes reach the orchestrator [default: 127.0.0.1:12082]
    #[arg(long, value_name = "ADDR")]
    pub control_listen: Option<String>,
    /// Address of the Worker API [default: 127.0.0.1:12090]
    #[arg(long, value_name = "ADDR")]
    pub worker_listen: Option<String>,
    /// Address of the git egress role [default: 127.0.0.1:12086]
    #[arg(long, value_name = "ADDR")]
    pub git_listen: Option<String>,
    /// Listen beyond loopback without TLS
    #[arg(long)]
    pub insecure_listen: bool,
    /// Any other configuration setting: worker.KEY (or KEY), orchestrator.KEY or egress.git.KEY;
    /// may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = parse::key_value)]
    pub set: Vec<(String, String)>,
}

impl Settings {
    /// The overrides of one section, as keys and values of the configuration.
    #[must_use]
    pub fn overrides(&self, section: Section) -> Vec<(String, String)> {
        let in_section = |(key, value): &(String, String)| {
            let (name, key) = match key.split_once('.') {
                Some((name @ ("egress" | "worker" | "orchestrator"), key)) => (name, key),
                _ => ("worker", key.as_str()),
            };
            (name == section.name()).then(|| (key.to_owned(), value.clone()))
        };
        let mut overrides: Vec<_> = self.set.iter().filter_map(in_section).collect();
        let addresses: &[(&str, &Option<String>)] = match section {
            Section::Egress => &[("git.listen", &self.git_listen)],
            Section::Worker => &[("listen", &self.worker_listen)],
            Section::Orchestrator => &[
                ("listen", &self.api_listen),
                ("control_listen", &self.control_listen),
            ],
        };
        overrides.extend(
            addresses
                .iter()
                .filter_map(|(key, address)| Some(((*key).to_owned(), address.as_ref()?.clone()))),
        );
        let insecure_listen = match section {
            Section::Egress => "git.insecure_listen",
            Section::Orchestrator | Section::Worker => "insecure_listen",
        };
        overrides.extend(
            self.insecure_listen
                .then(|| (insecure_listen.to_owned(), "true".to_owned())),
        );
        overrides
    }
}

#[derive(Clone, Debug, Args)]
pub struct Up {
    /// Start in the background and return when CyNode is ready
    #[arg(long, short)]
    pub detach: bool,
    /// Run only the worker: standalone, or as a node of an orchestrator on another machine
    #[arg(long)]
    pub worker_only: bool,
    #[command(flatten)]
    pub settings: Settings,
    /// Marks the background process of `--detach`
    #[arg(long, hide = true, conflicts_with = "detach")]
    pub background: bool,
}

#[derive(Clone, Debug, Args)]
pub struct Down {
    /// Keep sandboxes running for the next `up`
    #[arg(long)]
    pub keep_sessions: bool,
    #[command(flatten)]
    pub settings: Settings,
}

#[derive(Clone, Debug, Args)]
pub struct Doctor {
    /// Check only the requirements of a worker
    #[arg(long)]
    pub worker_only: bool,
    #[command(flatten)]
    pub settings: Settings,
}

/// Arguments of a role that `up` starts.
#[derive(Clone, Debug, Args)]
pub struct RoleArgs {
    #[command(flatten)]
    pub settings: Settings,
    /// Exit when the process with this id exits
    #[arg(long, value_name = "PID")]
    pub parent: Option<i32>,
}

/// How a list is printed.
#[derive(Clone, Copy, Debug, Args)]
pub struct ListArgs {
    /// Print whole ids and columns. This is the default when standard output is not a terminal
    #[arg(long)]
    pub wide: bool,
    /// Print at most N items, the newest
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = parse::count)]
    pub limit: usize,
}

/// Arguments of an egress role.
#[derive(Clone, Debug, Args)]
pub struct EgressArgs {
    #[arg(long, value_enum)]
    pub role: EgressKind,
    #[command(flatten)]
    pub common: RoleArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EgressKind {
    Git,
}

#[derive(Debug, Subcommand)]
#[command(
    after_help = "SESSION is a name, an id, any part of an id that no other session has, or '.' \
                  for the session of this directory: the one that 'session create' made last in it \
                  or in the nearest directory above. Without SESSION, that one is meant."
)]
pub enum Session {
    /// Create a session and print its id
    Create(Box<Create>),
    /// Run a command in a session
    Exec(Exec),
    /// Open a terminal in a session
    Shell(Shell),
    /// List sessions: what runs first, then the newest
    List(List),
    /// Show one session
    Show(SessionArg),
    /// End sessions
    End(End),
    /// Resume a lost or ended session on its workspace
    Resume(SessionArg),
    /// Copy files into or out of a session
    Cp(Cp),
    /// Print the output of a command, such as one of `exec --detach`
    Logs(Logs),
    /// Follow a running command: print its output, forward input and signals, exit with its code
    Attach(Attach),
    /// Signal a command, or everything in a session
    Kill(Kill),
    /// Extend the lifetime or the idle timeout of a session, counted from now
    Extend(Extend),
    /// Print changes of files as they happen
    Watch(Watch),
    /// Print what changed in a session's workspace, as a patch
    Diff(Diff),
    /// Show what the changes of a session would do to a local directory, or apply them
    Pull(Pull),
}

#[derive(Debug, Args)]
pub struct SessionArg {
    /// Name, id or part of the id [default: the session of this directory]
    pub session: Option<String>,
}

#[derive(Debug, Args)]
pub struct Logs {
    /// Name, id or part of the id [default: the session of this directory]
    pub session: Option<String>,
    /// Id of the exec, or a part of it [default: the newest]
    pub exec: Option<String>,
    /// Keep printing until the command ends
    #[arg(long, short)]
    pub follow: bool,
    /// Don't escape control characters on a terminal
    #[arg(long)]
    pub raw: bool,
}

#[derive(Debug, Args)]
pub struct Attach {
    /// Name, id or part of the id [default: the session of this directory]
    pub session: Option<String>,
    /// Id of the exec, or a part of it [default: the newest that runs]
    pub exec: Option<String>,
    /// Don't forward standard input
    #[arg(long)]
    pub no_stdin: bool,
    /// Don't escape control characters on a terminal
    #[arg(long)]
    pub raw: bool,
}

#[derive(Debug, Args)]
pub struct Kill {
    /// Name, id or part of the id [default: the session of this directory]
    pub session: Option<String>,
    /// Id of the exec, or a part of it [default: the newest that runs]
    pub exec: Option<String>,
    /// Signal every process in the session
    #[arg(long, conflicts_with = "exec")]
    pub all: bool,
    /// Signal to send, such as INT
    #[arg(long, short, value_name = "NAME", default_value = "TERM")]
    pub signal: SignalName,
}

#[derive(Debug, Args)]
pub struct Extend {
    /// Name, id or part of the id [default: the session of this directory]
    pub session: Option<String>,
    /// The same as --lifetime
    #[arg(value_name = "TIME", value_parser = parse::duration, conflicts_with = "lifetime")]
    pub time: Option<Duration>,
    /// Lifetime from now on, such as 2h
    #[arg(long, value_name = "TIME", value_parser = parse::duration, required_unless_present_any = ["idle", "time"])]
    pub lifetime: Option<Duration>,
    /// Idle timeout from now on, such as 1h
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub idle: Option<Duration>,
}

/// Limits that sessions, jobs and policy tests share.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct LimitArgs {
    /// Memory limit, such as 512m or 2g
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    pub memory: Option<u64>,
    /// CPU limit, such as 1.5
    #[arg(long, value_name = "N", value_parser = parse::cpus)]
    pub cpus: Option<f64>,
    /// Limit of processes
    #[arg(long, value_name = "N")]
    pub pids: Option<u32>,
}

impl LimitArgs {
    pub fn request(self) -> LimitsRequest {
        LimitsRequest {
            memory_bytes: self.memory,
            cpus: self.cpus,
            pids: self.pids,
            ..LimitsRequest::default()
        }
    }
}

#[derive(Debug, Args)]
#[command(
    after_help = "Files that hold secrets stay out of the session and are named: .env, .netrc, \
                  .aws, .ssh, private keys and the like, by name or by content. Tokens inside of \
                  other files go in, and the files are named."
)]
pub struct Create {
    /// Directory to bring in: its files become the workspace, and the session is the one of this
    /// directory
    #[arg(value_name = "DIR", conflicts_with = "workspace")]
    pub directory: Option<PathBuf>,
    /// Repository to begin with, by name, id or part of the id: at a branch, a tag or one of their
    /// commits [default: the default branch]
    #[arg(long, value_name = "REPOSITORY[@REF]", conflicts_with_all = ["directory", "workspace"])]
    pub repo: Option<String>,
    /// Commits of the repository's history to bring [default: all]
    #[arg(long, value_name = "N", requires = "repo")]
    pub depth: Option<u32>,
    /// Leave out what git ignores
    #[arg(long, requires = "directory")]
    pub gitignore: bool,
    /// Name of the session: a-z, 0-9 and '-', with a hyphen [default: one like brave-otter]
    #[arg(long)]
    pub name: Option<String>,
    /// Task of the session [default: a new one]
    #[arg(long)]
    pub task: Option<String>,
    /// Session id; repeating it with the same options returns the same session [default: a new id]
    #[arg(long, value_name = "UUID")]
    pub id: Option<SessionId>,
    /// Image name or reference
    #[arg(long, value_name = "REF", default_value = "default")]
    pub image: String,
    /// Workspace: `new`, or `workspace:UUID` kept by an earlier session of the task
    #[arg(long, value_name = "REF")]
    pub workspace: Option<WorkspaceRef>,
    /// Environment variable; may be repeated
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = parse::key_value)]
    pub env: Vec<(String, String)>,
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Disk limit, such as 10g
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    pub disk: Option<u64>,
    /// Limit of open files per process
    #[arg(long, value_name = "N")]
    pub nofile: Option<u64>,
    /// Network policy [default: restricted]
    #[arg(long, value_enum)]
    pub network: Option<Network>,
    /// Maximum lifetime, such as 24h
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub lifetime: Option<Duration>,
    /// Idle timeout, such as 30m
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub idle: Option<Duration>,
    /// Allow `session shell`
    #[arg(long)]
    pub pty: bool,
    /// Label; may be repeated
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = parse::key_value)]
    pub label: Vec<(String, String)>,
    /// Require a node with this label; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse::key_value)]
    pub node_label: Vec<(String, String)>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Network {
    None,
    Restricted,
}

impl From<Network> for NetworkPolicy {
    fn from(network: Network) -> Self {
        match network {
            Network::None => Self::None,
            Network::Restricted => Self::Restricted,
        }
    }
}

#[derive(Debug, Args)]
#[command(
    override_usage = "cynode session exec [OPTIONS] [SESSION] [--] CMD...",
    after_help = "Without SESSION, write '--' before the command: the first word before it is the \
                  session."
)]
pub struct Exec {
    /// Name, id or part of the id [default: the session of this directory]
    pub session: Option<String>,
    /// Working directory [default: /workspace]
    #[arg(long, short = 'w', value_name = "DIR")]
    pub cwd: Option<String>,
    /// Environment variable; may be repeated
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = parse::key_value)]
    pub env: Vec<(String, String)>,
    /// Timeout [default: 10m; none with --detach]
    #[arg(long, short, value_name = "TIME", value_parser = parse::duration)]
    pub timeout: Option<Duration>,
    /// Forward standard input; with --detach, keep it open for `attach`
    #[arg(long, short = 'i')]
    pub stdin: bool,
    /// Start in the background and print the exec's id
    #[arg(long, short)]
    pub detach: bool,
    /// Don't escape control characters on a terminal
    #[arg(long)]
    pub raw: bool,
    /// Command and arguments
    #[arg(trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
#[command(override_usage = "cynode session shell [OPTIONS] [SESSION] [--] [CMD]...")]
pub struct Shell {
    /// Name, id or part of the id [default: the session of this directory]
    pub session: Option<String>,
    /// Accepted for convenience: a shell always has a terminal. Its session needs --pty
    #[arg(long, hide = true)]
    pub pty: bool,
    /// Command to run instead of a shell
    #[arg(trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
pub struct List {
    /// Only sessions in this state
    #[arg(long)]
    pub state: Option<SessionState>,
    /// Only sessions of this task
    #[arg(long)]
    pub task: Option<String>,
    /// Only sessions with this label; may be repeated
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = parse::key_value)]
    pub label: Vec<(String, String)>,
    /// Also sessions that have ended or failed
    #[arg(long, conflicts_with = "state")]
    pub all: bool,
    #[command(flatten)]
    pub list: ListArgs,
}

#[derive(Debug, Args)]
pub struct End {
    /// Names, ids or parts of ids [default: the session of this directory]
    #[arg(value_name = "SESSION", conflicts_with = "all")]
    pub sessions: Vec<String>,
    /// End all sessions
    #[arg(long)]
    pub all: bool,
    /// Reason to record
    #[arg(long)]
    pub reason: Option<String>,
    /// Keep the workspace for a later session
    #[arg(long)]
    pub keep_workspace: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "One side is SESSION:PATH, or :PATH for the session of this directory; the other \
                  is a local path, or '-' for standard input or output. SESSION is a name, an id, \
                  or at least 4 digits of one; write ./NAME:PATH for a local file.\nRelative paths \
                  in a session start at /workspace. Local files are replaced without a question. \
                  Out of a session, .git directories are not copied, nor is anything to one: git \
                  runs programs that are named there."
)]
pub struct Cp {
    /// Copy directories recursively
    #[arg(long, short)]
    pub recursive: bool,
    /// Don't escape control characters on a terminal
    #[arg(long)]
    pub raw: bool,
    #[arg(value_name = "SRC")]
    pub source: OsString,
    #[arg(value_name = "DST")]
    pub target: OsString,
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "01890000-0000-7000-8000-000000000001";

    fn exec(arguments: &[&str]) -> Exec {
        match parsed(&[&["session", "exec", ID], arguments].concat()) {
            Ok(Invocation::Command(Cli {
                command:
                    Command::Session {
                        command: Session::Exec(exec),
                    },
                ..
            })) => exec,
            other => panic!("not exec: {other:?}"),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
        RoleCli::command().debug_assert();
    }

    fn parsed(arguments: &[&str]) -> Result<Invocation, clap::Error> {
        Invocation::parse(["cynode"].iter().chain(arguments).map(OsString::from))
    }

    #[test]
    // invariant: supervisor
    fn roles_are_neither_suggested_nor_listed_nor_completed() {
        let roles = ["postgres", "orchestrator", "worker", "egress"];
        for mistyped in [
            "egres",
            "ps",
            "pos",
            "postgre",
            "postgress",
            "orchestrate",
            "workers",
            "work",
            "orch",
        ] {
            let message = parsed(&[mistyped])
                .expect_err(mistyped)
                .render()
                .to_string();
            let suggested = message.replace(&format!("'{mistyped}'"), "");
            assert!(
                !roles.iter().any(|role| suggested.contains(role)),
                "{message}"
            );
        }
        let help = Cli::command().render_long_help().to_string();
        let listed = |text: &str, role: &str| {
            text.lines()
                .any(|line| line.split_whitespace().next() == Some(role))
        };
        assert!(
            listed(&help, "session") && !roles.iter().any(|role| listed(&help, role)),
            "{help}"
        );
        for shell in <clap_complete::Shell as ValueEnum>::value_variants() {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "cynode", &mut script);
            let script = String::from_utf8(script).expect("text");
            assert!(
                !script.contains("postgres") && !script.contains("--parent"),
                "{shell}"
            );
        }
    }

    #[test]
    fn a_role_is_recognized_wherever_global_flags_stand() {
        for arguments in [
            &["postgres", "--state-dir", "/s", "--parent", "7"][..],
            &["--state-dir", "/s", "postgres", "--parent", "7"],
        ] {
            let Ok(Invocation::Role(cli)) = parsed(arguments) else {
                panic!("{arguments:?}")
            };
            assert!(
                matches!(cli.role, RoleCommand::Postgres { parent: Some(7) })
                    && cli.globals.state_dir.is_some()
            );
        }
        assert!(matches!(
            parsed(&["worker", "--set", "pool_size=2"]),
            Ok(Invocation::Role(RoleCli {
                role: RoleCommand::Worker(_),
                ..
            }))
        ));
        assert!(matches!(parsed(&["up"]), Ok(Invocation::Command(_))));
        let wrong = parsed(&["worker", "--nonsense"]).expect_err("an unknown flag");
        assert_eq!(wrong.kind(), clap::error::ErrorKind::UnknownArgument);
    }

    #[test]
    fn flags_after_the_command_belong_to_it() {
        let with_dashes = exec(&[
            "--cwd", "/tmp", "-e", "A=b=c", "--", "ls", "-la", "--output", "json",
        ]);
        assert_eq!(with_dashes.command, ["ls", "-la", "--output", "json"]);
        assert_eq!(
            (with_dashes.cwd.as_deref(), &with_dashes.env[..]),
            (Some("/tmp"), &[("A".to_owned(), "b=c".to_owned())][..])
        );
        assert_eq!(
            exec(&["ls", "-la", "--raw"]).command,
            ["ls", "-la", "--raw"]
        );
        assert_eq!(exec(&["--", "--odd"]).command, ["--odd"]);
    }

    #[test]
    fn words_after_the_dashes_are_the_command_and_the_word_before_them_is_the_session() {
        let split = |arguments: &[&str]| match parsed(&[&["session"], arguments].concat()) {
            Ok(Invocation::Command(Cli {
                command:
                    Command::Session {
                        command:
                            Session::Exec(Exec {
                                session, command, ..
                            })
                            | Session::Shell(Shell {
                                session, command, ..
                            }),
                    },
                ..
            })) => (session, command.join(" ")),
            other => panic!("{arguments:?}: {other:?}"),
        };
        let some = |session: &str, command: &str| (Some(session.to_owned()), command.to_owned());
        let none = |command: &str| (None, command.to_owned());
        for (arguments, expected) in [
            (&["exec", "--", "ls"][..], none("ls")),
            (&["exec", "--", "ls", "-la"], none("ls -la")),
            (&["exec", "-w", "/tmp", "--", "ls", "a"], none("ls a")),
            (&["exec", "--", "ls", "--", "a"], none("ls -- a")),
            (&["exec", "x-y", "--", "ls", "-la"], some("x-y", "ls -la")),
            (&["exec", "x-y", "ls", "-la"], some("x-y", "ls -la")),
            (
                &["exec", "x-y", "-w", "/tmp", "--", "ls"],
                some("x-y", "ls"),
            ),
            (
                &["exec", "-d", "x-y", "ls", "--", "a"],
                some("x-y", "ls -- a"),
            ),
            (&["exec", ".", "ls"], some(".", "ls")),
            (&["shell"], none("")),
            (&["shell", "x-y"], some("x-y", "")),
            (&["shell", "--", "top", "-b"], none("top -b")),
            (&["shell", "x-y", "--", "top"], some("x-y", "top")),
        ] {
            assert_eq!(split(arguments), expected, "{arguments:?}");
        }
        for arguments in [
            &["exec"][..],
            &["exec", ID],
            &["exec", ID, "--"],
            &["exec", "--"],
        ] {
            assert!(
                parsed(&[&["session"], arguments].concat()).is_err(),
                "{arguments:?}"
            );
        }
    }

    #[test]
    fn global_options_stand_apart() {
        let mut command = Cli::command();
        command.build();
        let list = command
            .find_subcommand_mut("session")
            .and_then(|session| session.find_subcommand_mut("list"))
            .expect("session list");
        let help = list.render_help().to_string();
        let (own, global) = help.split_once("Global options:").expect("a heading");
        assert!(
            own.contains("--label") && !own.contains("--output"),
            "{help}"
        );
        assert!(
            global.contains("--output") && !global.contains("--label"),
            "{help}"
        );
    }

    #[test]
    fn shell_accepts_the_pty_flag() {
        for arguments in [
            vec!["--pty", ID],
            vec![ID, "--pty"],
            vec![ID, "--pty", "--", "top", "-b"],
            vec![ID],
        ] {
            let cli = Cli::try_parse_from(["cynode", "session", "shell"].iter().chain(&arguments))
                .expect("valid");
            assert!(
                matches!(
                    cli.command,
                    Command::Session {
                        command: Session::Shell(_)
                    }
                ),
                "{arguments:?}"
            );
        }
    }

    #[test]
    fn global_flags_are_accepted_after_the_command() {
        let cli = Cli::try_parse_from([
            "cynode", "session", "list", "--output", "json", "--state", "running",
        ])
        .expect("valid");
        assert_eq!(cli.globals.output, OutputFormat::Json);
    }

    #[test]
    fn end_takes_ids_or_all() {
        assert!(Cli::try_parse_from(["cynode", "session", "end"]).is_ok());
        assert!(Cli::try_parse_from(["cynode", "session", "end", "--all"]).is_ok());
        assert!(Cli::try_parse_from(["cynode", "session", "end", ID, "--all"]).is_err());
        assert!(Cli::try_parse_from(["cynode", "session", "end", ID, ID]).is_ok());
    }

    #[test]
    fn settings_become_overrides_without_their_section() {
        let set = [
            ("worker.pool_size", "2"),
            ("tls.cert", "/c"),
            ("orchestrator.event_days", "3"),
            ("egress.git.git", "/usr/bin/git"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()));
        let settings = Settings {
            api_listen: Some("127.0.0.1:3".into()),
            worker_listen: Some("127.0.0.1:1".into()),
            git_listen: Some("127.0.0.1:6".into()),
            insecure_listen: true,
            set: set.to_vec(),
            ..Settings::default()
        };
        let owned = |pairs: &[(&str, &str)]| {
            pairs
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            settings.overrides(Section::Worker),
            owned(&[
                ("pool_size", "2"),
                ("tls.cert", "/c"),
                ("listen", "127.0.0.1:1"),
                ("insecure_listen", "true")
            ])
        );
        assert_eq!(
            settings.overrides(Section::Orchestrator),
            owned(&[
                ("event_days", "3"),
                ("listen", "127.0.0.1:3"),
                ("insecure_listen", "true")
            ])
        );
        assert_eq!(
            settings.overrides(Section::Egress),
            owned(&[
                ("git.git", "/usr/bin/git"),
                ("git.listen", "127.0.0.1:6"),
                ("git.insecure_listen", "true")
            ])
        );
    }
}
