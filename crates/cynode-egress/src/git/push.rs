//! Pushes one commit to one branch.
//!
//! Invariant: a push names exactly one refspec and the id that the branch must have. It never
//! overwrites what somebody else pushed, and repeating it pushes nothing twice.

use std::time::Duration;

use bytes::Bytes;

use super::{
    change::{ObjectId, UnexpectedOutput, remote_refs},
    command::{GitCommand, GitError, GitRunner, Mirror, RemoteAccess},
};

/// Asking a remote for one branch.
const ASK_TIMEOUT: Duration = Duration::from_secs(60);
/// Sending a change, which has at most a few hundred megabytes.
const PUSH_TIMEOUT: Duration = Duration::from_secs(300);
/// The answer of a remote about one branch, or about one push.
const MAX_ANSWER_BYTES: u64 = 1024 * 1024;

/// A branch at a remote.
#[derive(Clone, Debug)]
pub(crate) struct RemoteBranch<'a> {
    pub(crate) access: &'a RemoteAccess,
    /// Without credentials.
    pub(crate) url: &'a str,
    /// Checked by the rules of branches.
    pub(crate) branch: &'a str,
}

/// The end of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PushOutcome {
    /// False when the branch was there already, at this commit.
    pub(crate) pushed: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PushError {
    #[error("the branch exists at {current}, which this promotion did not push")]
    BranchExists { current: ObjectId },
    /// The remote has a branch whose name is a directory of this one, or refuses the push.
    #[error("the remote refused the push")]
    Rejected(#[source] GitError),
    #[error("asking the remote for the branch failed")]
    Unreachable(#[source] GitError),
    #[error("reading the output of git failed")]
    Output(#[from] UnexpectedOutput),
}

/// Pushes a commit. `previous` is an earlier commit of the same promotion, which it may replace.
pub(crate) async fn push(
    runner: &dyn GitRunner,
    mirror: &Mirror,
    to: &RemoteBranch<'_>,
    commit: ObjectId,
    previous: Option<ObjectId>,
) -> Result<PushOutcome, PushError> {
    let current = tip(runner, mirror, to).await?;
    if current == Some(commit) {
        return Ok(PushOutcome { pushed: false });
    }
    if let Some(current) = current
        && previous != Some(current)
    {
        return Err(PushError::BranchExists { current });
    }
    let name = format!("refs/heads/{}", to.branch);
    let expected = current.map_or_else(String::new, |current| current.to_string());
    let args = [
        "push".to_owned(),
        "--porcelain".to_owned(),
        "--no-verify".to_owned(),
        "--no-follow-tags".to_owned(),
        "--recurse-submodules=no".to_owned(),
        format!("--force-with-lease={name}:{expected}"),
        "--".to_owned(),
        to.url.to_owned(),
        format!("{commit}:{name}"),
    ];
    match runner
        .run(mirror, command(args, to.access, PUSH_TIMEOUT))
        .await
    {
        Ok(_) => Ok(PushOutcome { pushed: true }),
        Err(error) => match tip(runner, mirror, to).await? {
            // The remote took the push, and its answer was lost.
            Some(now) if now == commit => Ok(PushOutcome { pushed: true }),
            // Somebody was faster.
            Some(now) if current != Some(now) => Err(PushError::BranchExists { current: now }),
            _ => Err(PushError::Rejected(error)),
        },
    }
}

/// The commit of the branch at the remote.
pub(crate) async fn tip(
    runner: &dyn GitRunner,
    mirror: &Mirror,
    at: &RemoteBranch<'_>,
) -> Result<Option<ObjectId>, PushError> {
    let name = format!("refs/heads/{}", at.branch);
    let args = [
        "ls-remote".to_owned(),
        "--refs".to_owned(),
        "--".to_owned(),
        at.url.to_owned(),
        name.clone(),
    ];
    let output = runner
        .run(mirror, command(args, at.access, ASK_TIMEOUT))
        .await
        .map_err(PushError::Unreachable)?;
    // git matches the end of names.
    let refs = remote_refs(&output.stdout)?;
    Ok(refs
        .into_iter()
        .find(|found| found.name == name)
        .map(|found| found.id))
}

fn command(
    args: impl IntoIterator<Item = String>,
    access: &RemoteAccess,
    timeout: Duration,
) -> GitCommand {
    GitCommand {
        args: args.into_iter().map(Into::into).collect(),
        input: Bytes::new(),
        index: None,
        quarantine: None,
        max_output_bytes: MAX_ANSWER_BYTES,
        timeout,
        remote: Some(access.clone()),
    }
}
