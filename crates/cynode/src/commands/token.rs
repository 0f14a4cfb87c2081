//! `token`: creates, lists, renews and revokes tokens.

use cynode_api::{API_VERSION, Token as ApiToken, TokenCreate, TokenCreated, TokenRenew};
use serde_json::json;
use time::OffsetDateTime;

use super::{CommandResult, format_time, newest, print_created, print_done, print_list, seconds};
use crate::{
    cli::{Globals, Token},
    connect,
    output::TableStyle,
    resolve,
};

pub async fn run(globals: &Globals, command: Token) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Token::Create(args) => {
            let mut task_ids = Vec::new();
            for task in &args.tasks {
                task_ids.push(resolve::task(&client, task).await?);
            }
            // Names are valid in the request itself.
            let user = match args.user {
                Some(user) if resolve::id_part(&user).is_some() => {
                    Some(resolve::user(&client, &user).await?.to_string())
                }
                user => user,
            };
            let request = TokenCreate {
                version: Some(API_VERSION),
                kind: args.kind,
                user,
                project_id: resolve::optional(args.project.as_deref(), async |project| {
                    resolve::project(&client, project).await
                })
                .await?,
                task_ids,
                job_id: resolve::optional(args.job.as_deref(), async |job| {
                    resolve::job(&client, job).await
                })
                .await?,
                session_id: resolve::optional(args.session.as_deref(), async |session| {
                    resolve::session(client.sessions(), session).await
                })
                .await?,
                expires_in_seconds: seconds(args.expires),
            };
            print_secret(globals, &client.create_token(&request).await?)
        }
        Token::Renew { token, expires } => {
            let id = resolve::token(&client, &token).await?;
            let request = TokenRenew {
                version: Some(API_VERSION),
                expires_in_seconds: seconds(expires),
            };
            print_secret(globals, &client.renew_token(id, &request).await?)
        }
        Token::List { all, list } => {
            let now = OffsetDateTime::now_utc();
            let is_valid = |token: &ApiToken| token.revoked_at.is_none() && token.expires_at > now;
            let mut tokens: Vec<ApiToken> =
                newest(&client, list, Vec::new(), |token| all || is_valid(token)).await?;
            tokens.sort_by_key(|token| !is_valid(token));
            let style = TableStyle::new(list.wide);
            print_list(
                globals,
                style,
                &tokens,
                ["TOKEN", "KIND", "USER", "STATE", "UNTIL", "FOR"],
                |token| {
                    let state = match token.revoked_at {
                        Some(_) => "revoked",
                        None if token.expires_at <= now => "expired",
                        None => "valid",
                    };
                    let mut restrictions: Vec<String> = token
                        .project_id
                        .iter()
                        .map(|id| format!("project {}", style.id(id)))
                        .collect();
                    restrictions.extend(
                        token
                            .task_ids
                            .iter()
                            .map(|id| format!("task {}", style.id(id))),
                    );
                    restrictions.extend(
                        token
                            .job_id
                            .iter()
                            .map(|id| format!("job {}", style.id(id))),
                    );
                    restrictions.extend(
                        token
                            .session_id
                            .iter()
                            .map(|id| format!("session {}", style.id(id))),
                    );
                    [
                        style.id(&token.id),
                        token.kind.as_str().to_owned(),
                        token.user.clone(),
                        state.to_owned(),
                        format_time(token.expires_at),
                        restrictions.join(", "),
                    ]
                },
            )
        }
        Token::Revoke { tokens } => {
            let mut ids = Vec::new();
            for token in &tokens {
                ids.push(resolve::token(&client, token).await?);
            }
            for id in &ids {
                client.revoke_token(*id).await?;
            }
            let names: Vec<String> = ids.iter().map(ToString::to_string).collect();
            print_done(
                globals,
                &json!({ "revoked": names }),
                &format!("revoked: {}", names.join(", ")),
            )
        }
    }
}

fn print_secret(globals: &Globals, token: &TokenCreated) -> CommandResult {
    let note = format!(
        "token {} is valid until {}; it is not shown again",
        token.id,
        format_time(token.expires_at)
    );
    print_created(globals, token, &token.token, &note)
}
