//! A request for a promotion: checked, and what it changes about one that there is.

use cynode_api::{
    Artifact, ForgeKind, Promotion, PromotionCreate, PromotionId, PromotionStage, PromotionState,
    Repository, TaskId, is_git_reference, promotion_limits,
};
use time::OffsetDateTime;

use super::{Error, Progress};
use crate::{caller::Caller, db::PromotionRow};

/// The longest last part of a branch that is made from a title.
const MAX_SLUG: usize = 48;

/// The promotion that a request asks for, as it would be stored.
pub(super) fn wanted(
    caller: &Caller,
    repository: &Repository,
    changeset: &Artifact,
    body: PromotionCreate,
    target: String,
) -> Result<Promotion, Error> {
    let base = body.base.or_else(|| changeset.base_commit.clone());
    let base = base.ok_or(Error::NoBase)?;
    if !is_commit(&base) {
        return Err(Error::Invalid(
            "base: must be a whole commit id, of 40 or 64 hexadecimal digits".to_owned(),
        ));
    }
    if u64::try_from(changeset.size).unwrap_or(u64::MAX) > promotion_limits::MAX_CHANGESET_BYTES {
        return Err(Error::TooLarge {
            size: changeset.size,
        });
    }
    if !is_git_reference(&target) {
        return Err(Error::Invalid(
            "target: must be the name of a branch".to_owned(),
        ));
    }
    let now = OffsetDateTime::now_utc();
    Ok(Promotion {
        id: PromotionId::generate(),
        task_id: body.task_id,
        project_id: repository.project_id,
        repository_id: repository.id,
        repository: repository.name.clone(),
        state: PromotionState::Working,
        until: reachable(repository, body.until),
        reached: None,
        changeset: changeset.id,
        changeset_sha256: changeset.sha256.clone(),
        format: body.format,
        session_id: changeset.session_id,
        base: Some(base.to_ascii_lowercase()),
        target,
        branch: branch(body.task_id, body.branch.as_deref(), &body.title)?,
        message: body.message.unwrap_or_else(|| body.title.clone()),
        title: body.title,
        body: body.body,
        commit: None,
        pull_request: None,
        files: Vec::new(),
        verdicts: Vec::new(),
        checks: Vec::new(),
        approved_by: None,
        error: None,
        created_by: caller.user_name.clone(),
        created_at: now,
        updated_at: now,
    })
}

/// Plain git has no pull requests: a promotion ends when its branch is pushed.
fn reachable(repository: &Repository, until: PromotionStage) -> PromotionStage {
    if repository.provider == ForgeKind::Git {
        until.min(PromotionStage::Pushed)
    } else {
        until
    }
}

fn is_commit(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Changes an ended promotion to what is asked for now. False if it stays as it is.
pub(super) fn continues(row: &mut PromotionRow, wanted: &Promotion, progress: Progress) -> bool {
    let promotion = &mut row.promotion;
    match promotion.state {
        PromotionState::Done if wanted.until > promotion.until => {
            promotion.until = wanted.until;
            promotion.state = PromotionState::Working;
            promotion.title.clone_from(&wanted.title);
            promotion.body.clone_from(&wanted.body);
            row.progress.principal = progress.principal;
            true
        }
        // Built anew, with the date of the first build: unchanged, it is the same commit.
        PromotionState::Failed | PromotionState::Canceled => {
            promotion.until = promotion.until.max(wanted.until);
            promotion.base.clone_from(&wanted.base);
            promotion.target.clone_from(&wanted.target);
            promotion.format = wanted.format;
            promotion.title.clone_from(&wanted.title);
            promotion.message.clone_from(&wanted.message);
            promotion.body.clone_from(&wanted.body);
            row.progress.principal = progress.principal;
            row.progress.author = progress.author;
            row.start_over();
            true
        }
        _ => false,
    }
}

/// `cynode/<task>/<last part>`: the role pushes to no other branches.
fn branch(task: TaskId, wanted: Option<&str>, title: &str) -> Result<String, Error> {
    let last = wanted.map_or_else(|| slug(title), str::to_owned);
    let branch = format!("cynode/{task}/{last}");
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '/' | '-');
    if branch.len() > promotion_limits::MAX_BRANCH_BYTES
        || !last.chars().all(is_plain)
        || !is_git_reference(&last)
    {
        return Err(Error::Invalid(format!(
            "branch: must be the last part of a branch, of letters, digits, '.', '_', '-' and \
             '/', with the rest of its name at most {} bytes",
            promotion_limits::MAX_BRANCH_BYTES
        )));
    }
    Ok(branch)
}

/// A title as a part of a branch's name.
fn slug(title: &str) -> String {
    let mut slug = String::new();
    for c in title.chars() {
        if slug.len() >= MAX_SLUG {
            break;
        }
        if c.is_ascii_alphanumeric() {
            slug.push(c.to_ascii_lowercase());
        } else if !slug.is_empty() && !slug.ends_with('-') {
            slug.push('-');
        }
    }
    let slug = slug.trim_end_matches('-');
    if slug.is_empty() {
        "change".to_owned()
    } else {
        slug.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_branch_is_made_from_the_task_and_the_title() {
        let task: TaskId = "01890000-0000-7000-8000-000000000001"
            .parse()
            .expect("an id");
        let made = |wanted, title| branch(task, wanted, title).ok();
        for (title, last) in [
            ("Fix the parser", "fix-the-parser"),
            ("  ---  ", "change"),
            ("\u{e9}t\u{e9} /.. x", "t-x"),
            ("../../etc", "etc"),
        ] {
            assert_eq!(made(None, title), Some(format!("cynode/{task}/{last}")));
        }
        let long_title = "a".repeat(1_000);
        assert!(made(None, &long_title).is_some_and(|branch| branch.len() < 100));
        assert_eq!(
            made(Some("fix/1.2"), ""),
            Some(format!("cynode/{task}/fix/1.2"))
        );
        let long = "a".repeat(promotion_limits::MAX_BRANCH_BYTES);
        for wanted in ["", "-x", "a b", "../main", "a.lock", "a..b", "@{1}", &long] {
            assert_eq!(made(Some(wanted), "title"), None, "{wanted}");
        }
    }

    #[test]
    fn only_whole_commit_ids_are_bases() {
        for text in ["", "main", "abc", &"g".repeat(40), &"a".repeat(41)] {
            assert!(!is_commit(text), "{text}");
        }
        assert!(is_commit(&"a".repeat(40)) && is_commit(&"0".repeat(64)));
    }
}
