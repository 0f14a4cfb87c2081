//! Arguments of `audit` and `policy`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use cynode_api::{AuditDecision, TokenKind};
use cynode_audit::PublicKey;
use time::OffsetDateTime;

use super::LimitArgs;
use crate::parse;

#[derive(Debug, Subcommand)]
pub enum Audit {
    /// Print records, one per line
    Tail(AuditTail),
    /// Summarize what happened in a session, a job or a task
    Show {
        /// Name, id or part of an id; or session:ID, job:ID, task:ID
        #[arg(value_name = "ID")]
        subject: AuditSubject,
    },
    /// Verify that no record was changed, removed or added; exit with 1 if one was
    Verify(AuditVerify),
    /// Print records as JSON, one per line
    Export(AuditExport),
}

#[derive(Clone, Debug, Default, Args)]
pub struct AuditFilterArgs {
    /// Only records of this task
    #[arg(long)]
    pub task: Option<String>,
    /// Only records of this session
    #[arg(long)]
    pub session: Option<String>,
    /// Only records of this job
    #[arg(long)]
    pub job: Option<String>,
    /// Only records of this user, agent or node: name, id or part of the id
    #[arg(long, value_name = "NAME")]
    pub subject: Option<String>,
    /// Only records with this decision: allow or deny
    #[arg(long)]
    pub decision: Option<AuditDecision>,
    /// Only records of this action, such as session.exec
    #[arg(long)]
    pub action: Option<String>,
    /// Start time: a duration ago, such as 90m, or 2026-01-02T03:04:05Z
    #[arg(long, value_name = "TIME", value_parser = parse::since)]
    pub since: Option<OffsetDateTime>,
    /// End time, in the same forms
    #[arg(long, value_name = "TIME", value_parser = parse::since)]
    pub until: Option<OffsetDateTime>,
}

impl AuditFilterArgs {
    /// Whether the filter selects one task, session or job, which has few records.
    pub const fn is_narrow(&self) -> bool {
        self.task.is_some() || self.session.is_some() || self.job.is_some()
    }
}

#[derive(Debug, Args)]
#[command(
    after_help = "Without --since: the last hour, or all records of the given task, session or job."
)]
pub struct AuditTail {
    /// Keep printing new records
    #[arg(long, short, conflicts_with = "until")]
    pub follow: bool,
    #[command(flatten)]
    pub filter: AuditFilterArgs,
}

/// The session, job or task that `audit show` summarizes, by name, id or part of the id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditSubject {
    Session(String),
    Job(String),
    Task(String),
    /// Of unknown kind.
    Any(String),
}

impl std::str::FromStr for AuditSubject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (kind, id) = text.split_once(':').unwrap_or(("", text));
        let id = id.to_owned();
        if id.is_empty() {
            return Err("an id is missing".to_owned());
        }
        match kind {
            "" => Ok(Self::Any(id)),
            "session" => Ok(Self::Session(id)),
            "job" => Ok(Self::Job(id)),
            "task" => Ok(Self::Task(id)),
            _ => Err(format!(
                "unknown kind '{kind}'; write session:ID, job:ID or task:ID"
            )),
        }
    }
}

#[derive(Debug, Args)]
pub struct AuditVerify {
    /// Verify the output of `audit export --proof` offline; `-` is standard input
    #[arg(long, value_name = "FILE", requires = "key")]
    pub file: Option<PathBuf>,
    /// Expected signing key, noted when the system was set up: ed25519:…
    #[arg(long)]
    pub key: Option<PublicKey>,
}

#[derive(Debug, Args)]
pub struct AuditExport {
    /// Export format
    #[arg(long, value_enum, default_value_t)]
    pub format: ExportFormat,
    /// Start with the signed checkpoints, so that the file can be verified offline
    #[arg(
        long,
        conflicts_with_all = [
            "task", "session", "job", "subject", "decision", "action", "since", "until",
        ],
    )]
    pub proof: bool,
    #[command(flatten)]
    pub filter: AuditFilterArgs,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// Records as stored
    #[default]
    Jsonl,
    /// Events of the Open Cybersecurity Schema Framework
    Ocsf,
}

#[derive(Debug, Subcommand)]
pub enum Policy {
    /// List policies
    List,
    /// Print a policy
    Show { id: String },
    /// Store a policy; it takes effect at once
    Put {
        id: String,
        /// Cedar rules; `-` is standard input
        file: PathBuf,
        /// Require this current revision; 0 requires that the policy is new
        #[arg(long, value_name = "N")]
        if_revision: Option<i64>,
    },
    /// Delete a policy
    Delete { id: String },
    /// Evaluate a request without running it; exit with 77 if denied
    Test(Box<PolicyTestArgs>),
}

#[derive(Debug, Args)]
pub struct PolicyTestArgs {
    /// Caller, by user name, id or part of the id [default: yourself]
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Caller, by token id or a part of it
    #[arg(long, conflicts_with = "user")]
    pub token: Option<String>,
    /// Action, such as session.exec
    #[arg(long)]
    pub action: String,
    /// Project of the request
    #[arg(long)]
    pub project: Option<String>,
    /// Task of the request
    #[arg(long)]
    pub task: Option<String>,
    /// Session of the request
    #[arg(long)]
    pub session: Option<String>,
    /// Job of the request
    #[arg(long)]
    pub job: Option<String>,
    /// Requested image
    #[arg(long, value_name = "REF")]
    pub image: Option<String>,
    /// File to read or write
    #[arg(long)]
    pub path: Option<String>,
    /// Program to run
    #[arg(long)]
    pub program: Option<String>,
    /// Requested network policy
    #[arg(long, value_name = "POLICY")]
    pub network: Option<String>,
    /// Request a session with terminals
    #[arg(long)]
    pub pty: bool,
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Kind of the requested token
    #[arg(long, value_name = "KIND")]
    pub token_kind: Option<TokenKind>,
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn a_subject_is_an_id_with_or_without_its_kind() {
        let id = "01890000-0000-7000-8000-000000000001";
        assert_eq!(id.parse(), Ok(AuditSubject::Any(id.to_owned())));
        assert_eq!(
            format!("job:{id}").parse(),
            Ok(AuditSubject::Job(id.to_owned()))
        );
        for bad in ["", "job:", "world:x", &format!("world:{id}")] {
            assert!(bad.parse::<AuditSubject>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_file_needs_a_key_and_a_proof_excludes_filters() {
        let accepts = |arguments: &[&str]| {
            Cli::try_parse_from(["cynode", "audit"].iter().chain(arguments)).is_ok()
        };
        assert!(
            accepts(&["verify"])
                && !accepts(&["verify", "--file", "x"])
                && !accepts(&["verify", "--key", "rsa:x"])
        );
        assert!(
            accepts(&["export", "--proof"]) && !accepts(&["export", "--proof", "--action", "x"])
        );
        assert!(
            accepts(&["tail", "-f", "--decision", "deny", "--since", "2d"])
                && !accepts(&["tail", "--decision", "maybe"])
        );
        assert!(!accepts(&["tail", "-f", "--until", "1h"]));
    }
}
