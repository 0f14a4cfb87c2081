//! Changes on their way out: commits, pushes and pull requests.
//!
//! Invariant: what a call says of paths, contents and branches decides nothing. Paths and contents
//! come from objects, at the commit and again at the push; the branch is checked against the task.

use axum::{
    Json,
    extract::{Request, State},
};
use bytes::{Bytes, BytesMut};
use cynode_api::{
    ErrorCode, GitCommit, GitCommitted, GitPull, GitPulled, GitPush, GitPushed, PromotionId,
    PromotionVerdict, promotion_limits,
};
use cynode_policy::{Action, CallContext};
use cynode_service::{ApiError, JsonBody, edge, multipart};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio::sync::Semaphore;

use super::{Api, check_version, errors, to_the_end};
use crate::{
    audit::RoleAction,
    git::{
        change::{
            self, BranchNames, BuiltChange, ChangeRequest, CommitText, Inspection, Inspector,
            ObjectId, RuleSet, defuse,
        },
        forge::{self, ForgeApi, PullDraft},
        push::{self, RemoteBranch},
    },
    operation::{GitRole, OpenedRepository, Operation},
};

/// The part `request` of a commit.
const MAX_REQUEST_BYTES: usize = 256 * 1024;
/// Changesets that are in memory at once; others wait.
const MAX_CONCURRENT_COMMITS: usize = 4;
/// Paths that an answer about a stale base lists.
const MAX_STALE_PATHS: usize = 100;

static COMMITS: Semaphore = Semaphore::const_new(MAX_CONCURRENT_COMMITS);

pub(super) async fn commit(
    State(api): State<Api>,
    request: Request,
) -> Result<Json<GitCommitted>, ApiError> {
    let permit = COMMITS
        .acquire()
        .await
        .map_err(|_| ApiError::new(ErrorCode::ShuttingDown, "the git role is shutting down"))?;
    let (request, changeset) = read_form(request).await?;
    check_version(request.version)?;
    to_the_end(async move {
        let _permit = permit;
        build(&api, &request, changeset).await
    })
    .await
    .map(Json)
}

/// The parts `request` and `changeset`, in this order.
async fn read_form(request: Request) -> Result<(GitCommit, Bytes), ApiError> {
    let boundary = multipart::boundary(request.headers())?.ok_or_else(|| {
        ApiError::new(
            ErrorCode::UnsupportedMediaType,
            "expected multipart/form-data",
        )
    })?;
    let mut form = multipart::Multipart::new(request.into_body(), &boundary);
    let most = usize::try_from(promotion_limits::MAX_CHANGESET_BYTES).unwrap_or(usize::MAX);
    let head = read_part(&mut form, "request", MAX_REQUEST_BYTES).await?;
    let changeset = read_part(&mut form, "changeset", most).await?;
    if form.next_part().await?.is_some() {
        return Err(ApiError::invalid("the form has another part"));
    }
    let request: GitCommit = edge::parse(&head)?;
    // An artifact that was changed meanwhile is another changeset.
    if hex::encode(Sha256::digest(&changeset)) != request.sha256 {
        return Err(ApiError::invalid(
            "sha256: the changeset is another than the promotion names",
        ));
    }
    Ok((request, changeset))
}

async fn read_part(
    form: &mut multipart::Multipart,
    name: &str,
    most: usize,
) -> Result<Bytes, ApiError> {
    if form.next_part().await?.as_deref() != Some(name) {
        return Err(ApiError::invalid(format!("expected the part '{name}'")));
    }
    let mut content = BytesMut::new();
    while let Some(piece) = form.next_piece().await? {
        if content.len() + piece.len() > most {
            return Err(ApiError::new(
                ErrorCode::TooLarge,
                format!("{name}: has more than {most} bytes"),
            ));
        }
        content.extend_from_slice(&piece);
    }
    Ok(content.freeze())
}

async fn build(api: &Api, request: &GitCommit, changeset: Bytes) -> Result<GitCommitted, ApiError> {
    let role = &api.role;
    let base = object_id("base", &request.base)?;
    let promotion = promotion_of(request.call.promotion_id)?;
    let subject = [
        ("base", request.base.as_str()),
        ("target", request.target.as_str()),
        ("branch", request.branch.as_str()),
        ("changeset_sha256", request.sha256.as_str()),
    ];
    let mut operation = role
        .begin(
            &request.call,
            RoleAction::Commit,
            &CallContext::default(),
            &subject,
        )
        .await?;
    let built = async {
        let opened = role.open(&operation).await?;
        check_base(role, &opened, base, &request.target).await?;
        let change = ChangeRequest {
            format: request.format,
            bytes: changeset,
            base,
            commit: CommitText {
                task: request.call.task_id,
                promotion,
                author: &request.author,
                message: &request.message,
                at: request.at,
            },
        };
        let mirrors = &role.mirrors;
        let built = change::build(mirrors.runner(), &opened.access.mirror, &change)
            .await
            .map_err(errors::change)?;
        check_overlap(role, &opened, &built, base, &request.target).await?;
        let names = Names {
            branch: &request.branch,
            target: &request.target,
        };
        let inspection = inspect(&operation, &opened, &built, names).await?;
        Ok((built, inspection))
    };
    let built = built.await;
    if let Ok((built, inspection)) = &built {
        operation.note("commit", built.commit.to_string());
        operation.note("accepted", inspection.allowed);
    }
    let (built, inspection) = role.end(&operation, built).await?;
    Ok(GitCommitted {
        commit: built.commit.to_string(),
        tree: built.tree.to_string(),
        base: request.base.clone(),
        files: built
            .change
            .files()
            .take(promotion_limits::MAX_LISTED)
            .collect(),
        files_total: built.change.entries.len() as u64,
        verdicts: inspection.verdicts,
        allowed: inspection.allowed,
        revision: operation.repository.revision,
    })
}

pub(super) async fn push(
    State(api): State<Api>,
    JsonBody(request): JsonBody<GitPush>,
) -> Result<Json<GitPushed>, ApiError> {
    check_version(request.version)?;
    to_the_end(async move { publish(&api, &request).await })
        .await
        .map(Json)
}

async fn publish(api: &Api, request: &GitPush) -> Result<GitPushed, ApiError> {
    let role = &api.role;
    let base = object_id("base", &request.base)?;
    let commit = object_id("commit", &request.commit)?;
    let promotion = promotion_of(request.call.promotion_id)?;
    let context = CallContext {
        branch: Some(request.branch.clone()),
        ..CallContext::default()
    };
    let subject = [
        ("base", request.base.as_str()),
        ("target", request.target.as_str()),
        ("branch", request.branch.as_str()),
        ("commit", request.commit.as_str()),
    ];
    let mut operation = role
        .begin(&request.call, RoleAction::Push, &context, &subject)
        .await?;
    let pushed = async {
        if operation.repository.revision != request.revision {
            return Err(ApiError::new(
                ErrorCode::ApprovalStale,
                "the repository's rules have changed since the commit was inspected",
            ));
        }
        let opened = role.open(&operation).await?;
        check_base(role, &opened, base, &request.target).await?;
        let mirror = &opened.access.mirror;
        let task = request.call.task_id;
        let runner = role.mirrors.runner();
        let built = change::read_built(runner, mirror, commit, base, task, promotion)
            .await
            .map_err(errors::change)?;
        let names = Names {
            branch: &request.branch,
            target: &request.target,
        };
        let inspection = inspect(&operation, &opened, &built, names).await?;
        if !inspection.allowed {
            return Err(refused(&inspection));
        }
        let to = RemoteBranch {
            access: &opened.access.remote,
            url: opened.access.location.url(),
            branch: &request.branch,
        };
        let current = push::tip(runner, mirror, &to).await.map_err(errors::push)?;
        let previous = match current {
            Some(current) if current != commit => {
                is_earlier(role, &opened, current, task, promotion)
                    .await
                    .then_some(current)
            }
            _ => None,
        };
        push::push(runner, mirror, &to, commit, previous)
            .await
            .map_err(errors::push)
    };
    let pushed = pushed.await;
    if let Ok(outcome) = &pushed {
        operation.note("pushed", outcome.pushed);
    }
    let outcome = role.end(&operation, pushed).await?;
    Ok(GitPushed {
        branch: request.branch.clone(),
        commit: request.commit.clone(),
        pushed: outcome.pushed,
    })
}

pub(super) async fn pull(
    State(api): State<Api>,
    JsonBody(request): JsonBody<GitPull>,
) -> Result<Json<GitPulled>, ApiError> {
    check_version(request.version)?;
    to_the_end(async move { open(&api, &request).await })
        .await
        .map(Json)
}

async fn open(api: &Api, request: &GitPull) -> Result<GitPulled, ApiError> {
    let role = &api.role;
    let commit = object_id("commit", &request.commit)?;
    promotion_of(request.call.promotion_id)?;
    let context = CallContext {
        branch: Some(request.branch.clone()),
        ..CallContext::default()
    };
    let subject = [
        ("target", request.target.as_str()),
        ("branch", request.branch.as_str()),
        ("commit", request.commit.as_str()),
    ];
    let mut operation = role
        .begin(&request.call, RoleAction::PullRequest, &context, &subject)
        .await?;
    let opened = async {
        let repository = &operation.repository;
        let rules = RuleSet::new(&repository.rules).map_err(|error| errors::rules(&error))?;
        let names = BranchNames {
            task: request.call.task_id,
            branch: &request.branch,
            target: &request.target,
            default: repository.default_branch.as_deref(),
        };
        if let Some(reason) = names.refuse(&rules) {
            return Err(ApiError::new(ErrorCode::ChangeRefused, reason));
        }
        check_target(&request.target)?;
        let api = ForgeApi::derive(repository).map_err(|error| errors::forge_url(&error))?;
        let opened = role.open(&operation).await?;
        let to = RemoteBranch {
            access: &opened.access.remote,
            url: opened.access.location.url(),
            branch: &request.branch,
        };
        let mirrors = &role.mirrors;
        mirrors
            .prepare(&opened.access)
            .await
            .map_err(errors::repository)?;
        let tip = push::tip(mirrors.runner(), &opened.access.mirror, &to)
            .await
            .map_err(errors::push)?;
        if tip != Some(commit) {
            return Err(ApiError::new(
                ErrorCode::BranchExists,
                "the branch is not at the promotion's commit",
            ));
        }
        let credential = opened.credential.as_ref().ok_or_else(|| {
            ApiError::new(
                ErrorCode::CredentialUnusable,
                "a pull request needs a credential, and the repository has none",
            )
        })?;
        let addresses = role.addresses(&operation, api.host(), api.port()).await?;
        let forge = forge::connect(api, &addresses, repository.ca.as_deref(), credential)
            .map_err(|error| errors::forge(&error))?;
        let (title, body) = (
            defuse::title(&request.title),
            defuse::body(request.body.as_deref().unwrap_or_default()),
        );
        let draft = PullDraft {
            branch: &request.branch,
            target: &request.target,
            title: &title,
            body: &body,
            draft: repository.rules.draft,
        };
        forge::open_pull(forge.as_ref(), &draft)
            .await
            .map_err(|error| errors::forge(&error))
    };
    let opened = opened.await;
    if let Ok(opened) = &opened {
        operation.note("number", opened.pull.number);
        operation.note("created", opened.created);
    }
    let opened = role.end(&operation, opened).await?;
    Ok(GitPulled {
        url: opened.pull.url,
        number: opened.pull.number,
        created: opened.created,
    })
}

/// The branches that a call names.
#[derive(Clone, Copy)]
struct Names<'a> {
    branch: &'a str,
    target: &'a str,
}

fn object_id(field: &str, text: &str) -> Result<ObjectId, ApiError> {
    ObjectId::parse(text)
        .ok_or_else(|| ApiError::invalid(format!("{field}: must be a whole id, in lower case")))
}

fn promotion_of(promotion: Option<PromotionId>) -> Result<PromotionId, ApiError> {
    promotion.ok_or_else(|| ApiError::invalid("call.promotion_id: is required"))
}

fn check_target(target: &str) -> Result<(), ApiError> {
    if change::is_branch_name(target) {
        Ok(())
    } else {
        Err(ApiError::invalid("target: is not the name of a branch"))
    }
}

/// Applies the repository's rules and the policies to what the objects show.
async fn inspect(
    operation: &Operation,
    opened: &OpenedRepository,
    built: &BuiltChange,
    names: Names<'_>,
) -> Result<Inspection, ApiError> {
    let repository = &operation.repository;
    let rules = RuleSet::new(&repository.rules).map_err(|error| errors::rules(&error))?;
    let scanner = GitRole::scanner(opened.credential.as_ref());
    let inspector = Inspector {
        rules: &rules,
        scanner: &scanner,
        branches: BranchNames {
            task: operation.call.task_id,
            branch: names.branch,
            target: names.target,
            default: repository.default_branch.as_deref(),
        },
    };
    let mut inspection = inspector.inspect(&built.change).await;
    for entry in &built.change.entries {
        let context = CallContext {
            path: Some(String::from_utf8_lossy(&entry.path).into_owned()),
            ..CallContext::default()
        };
        let decision = operation.decide(Action::GitCommit, &context);
        if decision.allowed {
            continue;
        }
        inspection.allowed = false;
        inspection.verdicts_total += 1;
        if inspection.verdicts.len() < promotion_limits::MAX_LISTED {
            inspection.verdicts.push(PromotionVerdict {
                rule: "policy".to_owned(),
                allowed: false,
                path: context.path,
                reason: if decision.rules.is_empty() {
                    "no policy permits git.commit for the path".to_owned()
                } else {
                    format!("git.commit is denied by {}", decision.rules.join(", "))
                },
            });
        }
    }
    Ok(inspection)
}

fn refused(inspection: &Inspection) -> ApiError {
    let refusals: Vec<&PromotionVerdict> = inspection
        .verdicts
        .iter()
        .filter(|verdict| !verdict.allowed)
        .collect();
    ApiError::new(
        ErrorCode::ChangeRefused,
        format!("{} rules refuse the change", refusals.len()),
    )
    .with("verdicts", json!(refusals))
}

/// Fetches, and checks that the base is in the history of the target as it is now.
async fn check_base(
    role: &GitRole,
    opened: &OpenedRepository,
    base: ObjectId,
    target: &str,
) -> Result<(), ApiError> {
    check_target(target)?;
    let (mirrors, access) = (&role.mirrors, &opened.access);
    mirrors.fetch(access).await.map_err(errors::repository)?;
    let head = mirrors
        .head_of(&access.mirror, target)
        .await
        .map_err(errors::repository)?;
    let is_contained = mirrors
        .is_ancestor(&access.mirror, base, head)
        .await
        .map_err(errors::repository)?;
    if is_contained {
        return Ok(());
    }
    Err(ApiError::new(
        ErrorCode::BaseStale,
        format!("the base is not in the history of '{target}', which is at {head}"),
    )
    .with("base", head.to_string()))
}

/// Refuses a change whose files the target has changed since the base.
async fn check_overlap(
    role: &GitRole,
    opened: &OpenedRepository,
    built: &BuiltChange,
    base: ObjectId,
    target: &str,
) -> Result<(), ApiError> {
    let (mirrors, access) = (&role.mirrors, &opened.access);
    let head = mirrors
        .head_of(&access.mirror, target)
        .await
        .map_err(errors::repository)?;
    if head == base {
        return Ok(());
    }
    let changed = mirrors
        .changed_paths(&access.mirror, base, head)
        .await
        .map_err(errors::repository)?;
    let paths: Vec<String> = built
        .change
        .entries
        .iter()
        .filter(|entry| changed.contains(&entry.path))
        .take(MAX_STALE_PATHS)
        .map(|entry| String::from_utf8_lossy(&entry.path).into_owned())
        .collect();
    if paths.is_empty() {
        return Ok(());
    }
    Err(ApiError::new(
        ErrorCode::BaseStale,
        format!(
            "'{target}' is at {head}, where {} files of the change are different",
            paths.len()
        ),
    )
    .with("base", head.to_string())
    .with("paths", json!(paths)))
}

/// Whether a commit at the remote is one that the role built for this promotion, on whatever base.
async fn is_earlier(
    role: &GitRole,
    opened: &OpenedRepository,
    commit: ObjectId,
    task: cynode_api::TaskId,
    promotion: PromotionId,
) -> bool {
    let mirror = &opened.access.mirror;
    let Ok(Some(base)) = role.mirrors.parent_of(mirror, commit).await else {
        return false;
    };
    change::read_built(role.mirrors.runner(), mirror, commit, base, task, promotion)
        .await
        .is_ok()
}
