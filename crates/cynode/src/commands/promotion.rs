//! `promotion`: lists, follows and decides promotions.

use std::time::Duration;

use cynode_api::{
    API_VERSION, Promotion as ApiPromotion, PromotionDecision, PromotionId, PromotionState,
};
use cynode_client::UserClient;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::{CommandResult, age, newest, print_done, print_list, promotion_view};
use crate::{
    cli::{Decision, Globals, Promotion},
    connect,
    failure::{Failure, USAGE},
    output::{Progress, TableStyle},
    resolve,
};

/// The states of promotions that a list shows by default.
const UNFINISHED: &str = "working,checking,awaiting_approval";
const POLL_INTERVAL: Duration = Duration::from_millis(300);
/// How long the orchestrator may be unreachable while a promotion is followed.
const RETRY_TIMEOUT: Duration = Duration::from_mins(2);
/// The fewest digits that name a commit.
const MIN_COMMIT_DIGITS: usize = 7;

pub async fn run(globals: &Globals, command: Promotion) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Promotion::List { task, all, list } => {
            let task = resolve::optional(task.as_deref(), async |task| {
                resolve::task(&client, task).await
            })
            .await?;
            let mut query = Vec::from_iter(task.map(|id| ("task_id", id.to_string())));
            query.extend((!all).then(|| ("state", UNFINISHED.to_owned())));
            let promotions: Vec<ApiPromotion> = newest(&client, list, query, |_| true).await?;
            let style = TableStyle::new(list.wide);
            print_list(
                globals,
                style,
                &promotions,
                [
                    "PROMOTION",
                    "STATE",
                    "REPOSITORY",
                    "BRANCH",
                    "TITLE",
                    "AGE",
                    "BY",
                ],
                |promotion| {
                    [
                        style.id(&promotion.id),
                        promotion.state.as_str().to_owned(),
                        promotion.repository.clone(),
                        promotion.branch.clone(),
                        promotion.title.clone(),
                        age(promotion.created_at),
                        promotion.created_by.clone(),
                    ]
                },
            )
        }
        Promotion::Show { promotion, follow } => {
            let id = resolve::promotion(&client, &promotion).await?;
            let promotion = if follow {
                until_settled(&client, id, false).await?
            } else {
                client.promotion(id).await?
            };
            promotion_view::print(globals, &promotion, true)
        }
        Promotion::Approve(args) => {
            let (id, decision) = decision(&client, args).await?;
            let promotion = client.approve_promotion(id, &decision).await?;
            let note = format!("approved commit {} of promotion {id}", decision.commit);
            print_done(globals, &promotion, &note)
        }
        Promotion::Reject(args) => {
            let (id, decision) = decision(&client, args).await?;
            let promotion = client.reject_promotion(id, &decision).await?;
            let note = format!("rejected commit {} of promotion {id}", decision.commit);
            print_done(globals, &promotion, &note)
        }
        Promotion::Cancel { promotions } => {
            let mut ids = Vec::new();
            for promotion in &promotions {
                ids.push(resolve::promotion(&client, promotion).await?);
            }
            let mut canceled = Vec::new();
            for id in &ids {
                canceled.push(client.cancel_promotion(*id).await?);
            }
            let names: Vec<String> = ids.iter().map(ToString::to_string).collect();
            let note = format!("canceled: {}", names.join(", "));
            print_done(globals, &json!({ "items": canceled }), &note)
        }
    }
}

/// A decision on the commit that a promotion has now, if it is the one that the person names.
async fn decision(
    client: &UserClient,
    args: Decision,
) -> Result<(PromotionId, PromotionDecision), Failure> {
    let id = resolve::promotion(client, &args.promotion).await?;
    let promotion = client.promotion(id).await?;
    let show = format!("See 'cynode promotion show {id}'.");
    let Some(commit) = promotion.commit else {
        let message = format!("promotion {id} has no commit yet: there is nothing to decide on");
        return Err(Failure::new(USAGE, "no_commit", message).remedy(show));
    };
    if let Some(named) = &args.commit
        && (named.len() < MIN_COMMIT_DIGITS || !commit.starts_with(&named.to_ascii_lowercase()))
    {
        let message = format!("the commit of promotion {id} is {commit}, not '{named}'");
        return Err(Failure::new(USAGE, "commit_changed", message).remedy(show));
    }
    let decision = PromotionDecision {
        version: Some(API_VERSION),
        commit,
        reason: args.reason,
    };
    Ok((id, decision))
}

/// Follows a promotion until it ends or, unless `through_approval`, needs a person.
pub async fn until_settled(
    client: &UserClient,
    id: PromotionId,
    through_approval: bool,
) -> Result<ApiPromotion, Failure> {
    let progress = Progress::start("promoting");
    let mut deadline = Instant::now() + RETRY_TIMEOUT;
    loop {
        match client.promotion(id).await {
            Ok(promotion) => {
                let waits = promotion.state == PromotionState::AwaitingApproval;
                if promotion.state.is_final() || (waits && !through_approval) {
                    return Ok(promotion);
                }
                progress.set_message(activity(&promotion));
                deadline = Instant::now() + RETRY_TIMEOUT;
            }
            Err(error) if error.is_transient() && Instant::now() < deadline => {}
            Err(error) => return Err(error.into()),
        }
        sleep(POLL_INTERVAL).await;
    }
}

fn activity(promotion: &ApiPromotion) -> String {
    match promotion.state {
        PromotionState::Checking => {
            let running: Vec<&str> = promotion
                .checks
                .iter()
                .filter(|check| check.exit_code.is_none())
                .map(|check| check.name.as_str())
                .collect();
            format!("running checks: {}", running.join(", "))
        }
        PromotionState::AwaitingApproval => "waiting for a person's approval".to_owned(),
        _ if promotion.commit.is_none() => "building and inspecting the commit".to_owned(),
        _ => format!("pushing to {}", promotion.branch),
    }
}
