//! The commands of the audit and of policies.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use cynode_api::{AuditDecision, JobId, ProjectId, SessionId, TaskId, TokenId, TokenKind};
use cynode_audit::PublicKey;
use cynode_client::AuditFilter;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::parse;

#[derive(Debug, Subcommand)]
pub enum Audit {
    /// Print records, a line each
    Tail(AuditTail),
    /// Tell what happened in a session, a job or a task
    Show {
        /// Its id, or session:ID, job:ID, task:ID
        #[arg(value_name = "ID")]
        of: AuditSubjectId,
    },
    /// Verify that nothing was changed, removed or added; ends with 1 when something was
    Verify(AuditVerify),
    /// Print all records, one JSON object a line
    Export(AuditExport),
}

#[derive(Clone, Debug, Default, Args)]
pub struct AuditFilterArgs {
    /// Only of this task
    #[arg(long, value_name = "UUID")]
    pub task: Option<TaskId>,
    /// Only of this session
    #[arg(long, value_name = "UUID")]
    pub session: Option<SessionId>,
    /// Only of this job
    #[arg(long, value_name = "UUID")]
    pub job: Option<JobId>,
    /// Only what this user, agent or node did: name or id
    #[arg(long, value_name = "NAME")]
    pub subject: Option<String>,
    /// Only what was allowed, or denied: allow or deny
    #[arg(long)]
    pub decision: Option<AuditDecision>,
    /// Only this action, such as session.exec
    #[arg(long)]
    pub action: Option<String>,
    /// Only from then on: a time ago, such as 90m, or 2026-01-02T03:04:05Z
    #[arg(long, value_name = "TIME", value_parser = parse::since)]
    pub since: Option<OffsetDateTime>,
    /// Only until then
    #[arg(long, value_name = "TIME", value_parser = parse::since)]
    pub until: Option<OffsetDateTime>,
}

impl AuditFilterArgs {
    /// Whether they name something whose records are few.
    pub const fn is_narrow(&self) -> bool {
        self.task.is_some() || self.session.is_some() || self.job.is_some()
    }

    pub fn filter(&self) -> AuditFilter {
        AuditFilter {
            task: self.task,
            session: self.session,
            job: self.job,
            call: None,
            subject: self.subject.clone(),
            decision: self.decision,
            action: self.action.clone(),
            since: self.since,
            until: self.until,
        }
    }
}

#[derive(Debug, Args)]
#[command(
    after_help = "Without --since: the last hour; all that is kept of a task, session or job that is named."
)]
pub struct AuditTail {
    /// Go on with what comes
    #[arg(long, short, conflicts_with = "until")]
    pub follow: bool,
    #[command(flatten)]
    pub filter: AuditFilterArgs,
}

/// What a story is told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuditSubjectId {
    Session(SessionId),
    Job(JobId),
    Task(TaskId),
    /// One of those.
    Any(Uuid),
}

impl std::str::FromStr for AuditSubjectId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (kind, id) = text.split_once(':').unwrap_or(("", text));
        let id: Uuid = id.parse().map_err(|_| format!("'{id}' is not an id"))?;
        match kind {
            "" => Ok(Self::Any(id)),
            "session" => Ok(Self::Session(SessionId::from_uuid(id))),
            "job" => Ok(Self::Job(JobId::from_uuid(id))),
            "task" => Ok(Self::Task(TaskId::from_uuid(id))),
            _ => Err(format!(
                "unknown kind '{kind}'; write it as session:ID, job:ID or task:ID"
            )),
        }
    }
}

#[derive(Debug, Args)]
pub struct AuditVerify {
    /// Verify what `audit export --proof` wrote, without speaking with anybody; `-` is standard input
    #[arg(long, value_name = "FILE", requires = "key")]
    pub file: Option<PathBuf>,
    /// The key that must have signed, as it was noted when the system was new: ed25519:…
    #[arg(long)]
    pub key: Option<PublicKey>,
}

#[derive(Debug, Args)]
pub struct AuditExport {
    #[arg(long, value_enum, default_value_t)]
    pub format: ExportFormat,
    /// Begin with the signed checkpoints, so that the file can be verified anywhere
    #[arg(long, conflicts_with_all = ["task", "session", "job", "subject", "decision", "action", "since", "until"])]
    pub proof: bool,
    #[command(flatten)]
    pub filter: AuditFilterArgs,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// As they are
    #[default]
    Jsonl,
    /// As events of the Open Cybersecurity Schema Framework
    Ocsf,
}

#[derive(Debug, Subcommand)]
pub enum Policy {
    /// List policies
    List,
    /// Print a policy
    Show { id: String },
    /// Store a policy; it counts at once
    Put {
        id: String,
        /// Its rules, in Cedar; `-` is standard input
        file: PathBuf,
        /// Only when its revision is this one; 0 when there must be none yet
        #[arg(long, value_name = "N")]
        if_revision: Option<i64>,
    },
    /// Delete a policy
    Delete { id: String },
    /// Say what would be decided, and by which rules; nothing is done. Ends with 77 when denied
    Test(Box<PolicyTestArgs>),
}

#[derive(Debug, Args)]
pub struct PolicyTestArgs {
    /// Who asks: name or id [default: oneself]
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Who asks: by which token
    #[arg(long, value_name = "UUID", conflicts_with = "user")]
    pub token: Option<TokenId>,
    /// Such as session.exec
    #[arg(long)]
    pub action: String,
    #[arg(long, value_name = "UUID")]
    pub project: Option<ProjectId>,
    #[arg(long, value_name = "UUID")]
    pub task: Option<TaskId>,
    #[arg(long, value_name = "UUID")]
    pub session: Option<SessionId>,
    #[arg(long, value_name = "UUID")]
    pub job: Option<JobId>,
    #[arg(long, value_name = "REF")]
    pub image: Option<String>,
    /// The file that is read or written
    #[arg(long)]
    pub path: Option<String>,
    /// The program that is run
    #[arg(long)]
    pub program: Option<String>,
    /// The network policy that a session or a job asks for
    #[arg(long, value_name = "POLICY")]
    pub network: Option<String>,
    /// The session asks for terminals
    #[arg(long)]
    pub pty: bool,
    /// The memory that a session or a job asks for, such as 512m or 2g
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    pub memory: Option<u64>,
    /// The processors that it asks for, such as 1.5
    #[arg(long, value_name = "N", value_parser = parse::cpus)]
    pub cpus: Option<f64>,
    /// The processes that it asks for
    #[arg(long, value_name = "N")]
    pub pids: Option<u32>,
    /// What kind of token is to be made
    #[arg(long, value_name = "KIND")]
    pub token_kind: Option<TokenKind>,
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn a_story_is_told_of_a_thing_that_may_say_what_it_is() {
        let id = "01890000-0000-7000-8000-000000000001";
        assert_eq!(id.parse(), Ok(AuditSubjectId::Any(id.parse().expect("id"))));
        assert_eq!(
            format!("job:{id}").parse(),
            Ok(AuditSubjectId::Job(id.parse().expect("id")))
        );
        for bad in ["", "job", "job:", "world:x", &format!("world:{id}")] {
            assert!(bad.parse::<AuditSubjectId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_file_is_verified_with_a_key_and_a_proof_is_of_everything() {
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
