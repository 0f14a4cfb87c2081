//! The actions of callers. Every call on every API is one of these, and rules name them as
//! `CyNode::Action::"session.exec"`.
//!
//! Invariants: action names are published with the schema and never change their meaning; an action
//! belongs to exactly one of the groups `read` and `write`. The other groups are orthogonal.

use std::{fmt, str::FromStr};

macro_rules! actions {
    ($($variant:ident = $name:literal in $($group:literal)+;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Action { $($variant,)* }

        impl Action {
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The name in rules, in the audit trail and in every API.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The groups that a rule can name instead of the action.
            #[must_use]
            pub const fn groups(self) -> &'static [&'static str] {
                match self { $(Self::$variant => &[$($group),*],)* }
            }
        }

        impl FromStr for Action {
            type Err = UnknownAction;

            fn from_str(text: &str) -> Result<Self, UnknownAction> {
                match text {
                    $($name => Ok(Self::$variant),)*
                    _ => Err(UnknownAction(text.to_owned())),
                }
            }
        }
    };
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown action '{0}'")]
pub struct UnknownAction(String);

impl fmt::Display for Action {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.as_str())
    }
}

actions! {
    ProjectCreate = "project.create" in "write";
    ProjectList = "project.list" in "read";
    ProjectShow = "project.show" in "read";
    ProjectUpdate = "project.update" in "write";
    TaskCreate = "task.create" in "write";
    TaskList = "task.list" in "read";
    TaskShow = "task.show" in "read";
    TaskUpdate = "task.update" in "write";

    UserCreate = "user.create" in "write" "administer";
    UserList = "user.list" in "read";
    UserShow = "user.show" in "read";
    GroupCreate = "group.create" in "write" "administer";
    GroupList = "group.list" in "read";
    GroupShow = "group.show" in "read";
    TokenCreate = "token.create" in "write";
    TokenList = "token.list" in "read";
    TokenShow = "token.show" in "read";
    TokenRenew = "token.renew" in "write";
    TokenRevoke = "token.revoke" in "write";

    SettingList = "setting.list" in "read";
    SettingShow = "setting.show" in "read";
    SettingPut = "setting.put" in "write" "administer";
    PreferenceList = "preference.list" in "read";
    PreferencePut = "preference.put" in "write";
    PreferenceEffective = "preference.effective" in "read";

    CredentialAdd = "credential.add" in "write" "administer";
    CredentialList = "credential.list" in "read";
    CredentialShow = "credential.show" in "read";
    CredentialRotate = "credential.rotate" in "write" "administer";
    CredentialDisable = "credential.disable" in "write" "administer";
    RepositoryAdd = "repository.add" in "write" "administer";
    RepositoryList = "repository.list" in "read";
    RepositoryShow = "repository.show" in "read";
    RepositoryRemove = "repository.remove" in "write" "administer";

    GitFetch = "git.fetch" in "write" "egress";
    GitCommit = "git.commit" in "write" "egress";
    GitPush = "git.push" in "write" "egress";
    GitPr = "git.pr" in "write" "egress";

    PromotionCreate = "promotion.create" in "write";
    PromotionList = "promotion.list" in "read";
    PromotionShow = "promotion.show" in "read";
    PromotionCancel = "promotion.cancel" in "write";
    PromotionApprove = "promotion.approve" in "write" "administer";

    ImageAdd = "image.add" in "write" "administer";
    ImageList = "image.list" in "read";
    ImageShow = "image.show" in "read";
    ImageUpdate = "image.update" in "write" "administer";
    ImageRemove = "image.remove" in "write" "administer";
    ImageUse = "image.use" in "write";
    NodeList = "node.list" in "read";
    NodeShow = "node.show" in "read";
    NodeDrain = "node.drain" in "write" "administer";
    NodeKey = "node.key" in "write" "administer";

    EventList = "event.list" in "read";

    JobCreate = "job.create" in "write" "run";
    JobList = "job.list" in "read";
    JobShow = "job.show" in "read";
    JobStop = "job.stop" in "write";
    JobOutput = "job.output" in "read";

    ArtifactList = "artifact.list" in "read";
    ArtifactShow = "artifact.show" in "read";
    ArtifactPut = "artifact.put" in "write";
    ArtifactGet = "artifact.get" in "read";

    SessionCreate = "session.create" in "write" "run";
    SessionList = "session.list" in "read";
    SessionShow = "session.show" in "read";
    SessionUpdate = "session.update" in "write";
    SessionEnd = "session.end" in "write";
    SessionResume = "session.resume" in "write" "run";
    SessionExport = "session.export" in "write";
    SessionSignal = "session.signal" in "write";
    SessionExec = "session.exec" in "write" "run";
    SessionPty = "session.pty" in "write" "run";
    ExecList = "exec.list" in "read";
    ExecShow = "exec.show" in "read";
    ExecOutput = "exec.output" in "read";
    ExecSignal = "exec.signal" in "write";
    ExecStdin = "exec.stdin" in "write" "run";

    FileRead = "file.read" in "read" "files";
    FileStat = "file.stat" in "read" "files";
    FileWrite = "file.write" in "write" "files";
    FileDelete = "file.delete" in "write" "files";
    FileList = "file.list" in "read" "files";
    FileSearch = "file.search" in "read" "files";
    FilePatch = "file.patch" in "write" "files";
    FileMove = "file.move" in "write" "files";
    FileMkdir = "file.mkdir" in "write" "files";
    FileImport = "file.import" in "write" "files";

    PolicyList = "policy.list" in "read" "administer";
    PolicyShow = "policy.show" in "read" "administer";
    PolicyPut = "policy.put" in "write" "administer";
    PolicyDelete = "policy.delete" in "write" "administer";
    PolicyTest = "policy.test" in "read" "administer";
    AuditRead = "audit.read" in "read" "administer";
    AuditVerify = "audit.verify" in "read" "administer";
}
