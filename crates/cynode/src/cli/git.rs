//! Arguments of the commands for credentials, repositories and promotions.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use cynode_api::{AllowedAddress, ChangesetFormat, ForgeKind, PromotionStage, RepositoryCheck};

use super::ListArgs;
use crate::parse;

#[derive(Debug, Subcommand)]
#[command(
    after_help = "Values are read from standard input, or asked for without echo at a terminal. \
                  They are sealed to the role that uses them and never shown again."
)]
pub enum Credential {
    /// Store a password or token; its value comes from standard input
    Add(CredentialAdd),
    /// List credentials, without their values, the newest first
    List {
        /// Only credentials of this project
        #[arg(long)]
        project: Option<String>,
        #[command(flatten)]
        list: ListArgs,
    },
    /// Replace the value of a credential, from standard input
    Rotate {
        /// Name, id or part of the id
        credential: String,
        /// Project of the credential, if several have one of this name
        #[arg(long)]
        project: Option<String>,
        /// New user name of basic authentication [default: as before]
        #[arg(long, value_name = "NAME")]
        username: Option<String>,
    },
    /// Stop using credentials; this can't be undone
    Disable {
        /// Names, ids or parts of ids
        #[arg(required = true, value_name = "CREDENTIAL")]
        credentials: Vec<String>,
        /// Project of the credentials, if several have one of this name
        #[arg(long)]
        project: Option<String>,
    },
}

#[derive(Debug, Args)]
pub struct CredentialAdd {
    /// Name of the credential: a-z, 0-9, '.', '_' and '-'
    pub name: String,
    /// Project whose repositories may use it
    #[arg(long)]
    pub project: String,
    /// Where it is valid: `https://HOST[:PORT][/PATH]`. It is presented nowhere else
    #[arg(long)]
    pub url: String,
    /// User name of basic authentication [default: x-access-token]
    #[arg(long, value_name = "NAME")]
    pub username: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum Repository {
    /// Register a repository for a project and print its id
    Add(Box<RepositoryAdd>),
    /// List repositories, the newest first
    List {
        /// Only repositories of this project
        #[arg(long)]
        project: Option<String>,
        #[command(flatten)]
        list: ListArgs,
    },
    /// Show one repository with its rules and checks
    Show {
        /// Name, id or part of the id
        repository: String,
        /// Project of the repository, if several have one of this name
        #[arg(long)]
        project: Option<String>,
    },
    /// Remove repositories; what was pushed to them stays
    Remove {
        /// Names, ids or parts of ids
        #[arg(required = true, value_name = "REPOSITORY")]
        repositories: Vec<String>,
        /// Project of the repositories, if several have one of this name
        #[arg(long)]
        project: Option<String>,
    },
}

#[derive(Debug, Args)]
#[command(
    after_help = "The file of --rules has the fields of `rules` in POST /v1/repositories, as TOML \
                  or JSON, and may have `checks` besides: a list of {name, argv, image_ref, \
                  timeout_seconds}. See docs/git.md."
)]
pub struct RepositoryAdd {
    /// Name of the repository: a-z, 0-9, '.', '_' and '-'
    pub name: String,
    /// Project whose tasks may use it
    #[arg(long)]
    pub project: String,
    /// Kind of the server
    #[arg(long, value_enum)]
    pub provider: Provider,
    /// Where it is: `https://HOST[:PORT]/PATH`, without user name and password
    #[arg(long)]
    pub url: String,
    /// API of the server [default: derived from the URL]
    #[arg(long, value_name = "URL")]
    pub api_url: Option<String>,
    /// Credential of the same project, by name, id or part of the id
    #[arg(long, value_name = "CREDENTIAL")]
    pub credential: Option<String>,
    /// Default branch [default: that of the repository]
    #[arg(long, value_name = "BRANCH")]
    pub default_branch: Option<String>,
    /// Certificates (PEM) to trust for this host, and no others
    #[arg(long, value_name = "FILE")]
    pub host_ca: Option<PathBuf>,
    /// Addresses that are not public and that the host may have, such as 10.1.0.0/16:443; may be
    /// repeated
    #[arg(long = "address", value_name = "CIDR:PORT", value_parser = parse::address)]
    pub addresses: Vec<AllowedAddress>,
    /// What may be promoted (TOML or JSON)
    #[arg(long, value_name = "FILE")]
    pub rules: Option<PathBuf>,
    /// Command that must succeed on the commit before it is pushed, such as test='pytest -q'; may
    /// be repeated
    #[arg(long = "check", value_name = "NAME='CMD…'", value_parser = parse::check)]
    pub checks: Vec<RepositoryCheck>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Provider {
    Github,
    Gitlab,
    /// Gitea and Forgejo
    Gitea,
    /// Git over HTTPS, without pull requests
    Git,
}

impl From<Provider> for ForgeKind {
    fn from(provider: Provider) -> Self {
        match provider {
            Provider::Github => Self::Github,
            Provider::Gitlab => Self::Gitlab,
            Provider::Gitea => Self::Gitea,
            Provider::Git => Self::Git,
        }
    }
}

#[derive(Debug, Args)]
#[command(
    after_help = "Without SESSION and --changeset, the session of this directory is meant. Its \
                  changes since it began become an artifact, the git role makes one commit of \
                  them, and inspects it by the repository's rules. Ends with 0 when the stage of \
                  --until is reached or a person has to approve, with 77 when a rule or a person \
                  refuses, and with 64 when the change does not apply."
)]
pub struct Promote {
    /// Name, id or part of the id [default: the session of this directory]
    pub session: Option<String>,
    /// Artifact to promote instead, by id; with --task also by part of the id
    #[arg(long, value_name = "ARTIFACT", conflicts_with = "session")]
    pub changeset: Option<String>,
    /// Task of the artifact
    #[arg(long, requires = "changeset")]
    pub task: Option<String>,
    /// Form of the artifact
    #[arg(long, value_enum, default_value_t, requires = "changeset")]
    pub format: Changeset,
    /// Repository of the task's project, by name, id or part of the id
    #[arg(long, value_name = "REPOSITORY")]
    pub repo: String,
    /// Title of the pull request, and of the commit without --message
    #[arg(long)]
    pub title: String,
    /// Commit message
    #[arg(long, value_name = "TEXT")]
    pub message: Option<String>,
    /// Description of the pull request; `-` is standard input
    #[arg(long, value_name = "FILE")]
    pub body_file: Option<PathBuf>,
    /// Last part of the branch's name, cynode/TASK/BRANCH [default: made from the title]
    #[arg(long)]
    pub branch: Option<String>,
    /// Branch that the pull request targets [default: the default branch]
    #[arg(long, value_name = "BRANCH")]
    pub target: Option<String>,
    /// Commit that the changes were made against [default: the one that the session began with]
    #[arg(long, value_name = "COMMIT")]
    pub base: Option<String>,
    /// How far to go
    #[arg(long, value_enum, default_value_t)]
    pub until: Until,
    /// Build and inspect the commit, and push nothing
    #[arg(long, conflicts_with_all = ["detach", "wait"])]
    pub dry_run: bool,
    /// Print the promotion's id and don't wait for it
    #[arg(long, short, conflicts_with = "wait")]
    pub detach: bool,
    /// Also wait for a person's approval
    #[arg(long)]
    pub wait: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Changeset {
    /// A unified diff
    #[default]
    Patch,
    /// A git bundle
    Bundle,
    /// A tar of files
    Files,
}

impl From<Changeset> for ChangesetFormat {
    fn from(format: Changeset) -> Self {
        match format {
            Changeset::Patch => Self::Patch,
            Changeset::Bundle => Self::Bundle,
            Changeset::Files => Self::Files,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Until {
    /// The changes apply and every rule permits them
    Applied,
    /// The commit is built
    Committed,
    /// The branch is pushed
    Pushed,
    /// The pull request is open
    #[default]
    Opened,
}

impl From<Until> for PromotionStage {
    fn from(until: Until) -> Self {
        match until {
            Until::Applied => Self::Applied,
            Until::Committed => Self::Committed,
            Until::Pushed => Self::Pushed,
            Until::Opened => Self::Opened,
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum Promotion {
    /// List promotions that have not ended, the newest first
    List {
        /// Only promotions of this task
        #[arg(long)]
        task: Option<String>,
        /// Also promotions that have ended
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        list: ListArgs,
    },
    /// Show one promotion: its commit, files, rules and checks
    Show {
        /// Id, or a part of it
        promotion: String,
        /// Wait until it ends or needs a person
        #[arg(long, short)]
        follow: bool,
    },
    /// Approve the commit of a promotion that waits for it
    Approve(Decision),
    /// Reject a promotion that waits for approval; nothing is pushed
    Reject(Decision),
    /// Stop promotions; what is pushed already stays
    Cancel {
        /// Ids, or parts of them
        #[arg(required = true, value_name = "PROMOTION")]
        promotions: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub struct Decision {
    /// Id, or a part of it
    pub promotion: String,
    /// Commit that was looked at, or its first digits; another one is not decided on [default: the
    /// promotion's commit]
    #[arg(long, value_name = "COMMIT")]
    pub commit: Option<String>,
    /// Reason to record
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}
