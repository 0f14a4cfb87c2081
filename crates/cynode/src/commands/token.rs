//! `token`: creates, lists and revokes tokens.

use cynode_api::{API_VERSION, TokenCreate};
use serde_json::json;
use time::OffsetDateTime;

use super::{CommandResult, format_time, print_created, print_done, print_list, seconds};
use crate::{
    cli::{Globals, Token},
    connect,
};

pub async fn run(globals: &Globals, command: Token) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Token::Create(args) => {
            let request = TokenCreate {
                version: Some(API_VERSION),
                kind: args.kind,
                user: args.user,
                project_id: args.project,
                task_ids: args.tasks,
                job_id: args.job,
                session_id: args.session,
                expires_in_seconds: seconds(args.expires),
            };
            let token = client.create_token(&request).await?;
            print_created(
                globals,
                &token,
                &token.token,
                &format!(
                    "token {} is valid until {}; it is not shown again",
                    token.id,
                    format_time(token.expires_at)
                ),
            )
        }
        Token::List => {
            let tokens = client.tokens().await?;
            let now = OffsetDateTime::now_utc();
            print_list(
                globals,
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
                        .map(|id| format!("project {id}"))
                        .collect();
                    restrictions.extend(token.task_ids.iter().map(|id| format!("task {id}")));
                    restrictions.extend(token.job_id.iter().map(|id| format!("job {id}")));
                    restrictions.extend(token.session_id.iter().map(|id| format!("session {id}")));
                    [
                        token.id.to_string(),
                        token.kind.as_str().to_owned(),
                        token.user.clone(),
                        state.to_owned(),
                        format_time(token.expires_at),
                        restrictions.join(", "),
                    ]
                },
            )
        }
        Token::Revoke { ids } => {
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
