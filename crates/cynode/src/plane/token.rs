//! `token`.

use cynode_api::{API_VERSION, TokenCreate};
use serde_json::json;
use time::OffsetDateTime;

use super::{Outcome, done, list, made, moment, seconds};
use crate::{
    cli::{Globals, Token},
    connect,
};

pub async fn run(globals: &Globals, command: Token) -> Outcome {
    let client = connect::plane(globals)?;
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
            made(
                globals,
                &token,
                &token.token,
                &format!(
                    "token {} is good until {}; it is not shown again",
                    token.id,
                    moment(token.expires_at)
                ),
            )
        }
        Token::List => {
            let tokens = client.tokens().await?;
            let now = OffsetDateTime::now_utc();
            list(
                globals,
                &tokens,
                ["TOKEN", "KIND", "USER", "STATE", "UNTIL", "FOR"],
                |token| {
                    let state = match token.revoked_at {
                        Some(_) => "revoked",
                        None if token.expires_at <= now => "expired",
                        None => "good",
                    };
                    let mut of: Vec<String> = token
                        .project_id
                        .iter()
                        .map(|id| format!("project {id}"))
                        .collect();
                    of.extend(token.task_ids.iter().map(|id| format!("task {id}")));
                    of.extend(token.job_id.iter().map(|id| format!("job {id}")));
                    of.extend(token.session_id.iter().map(|id| format!("session {id}")));
                    [
                        token.id.to_string(),
                        token.kind.as_str().to_owned(),
                        token.user.clone(),
                        state.to_owned(),
                        moment(token.expires_at),
                        of.join(", "),
                    ]
                },
            )
        }
        Token::Revoke { ids } => {
            for id in &ids {
                client.revoke_token(*id).await?;
            }
            let names: Vec<String> = ids.iter().map(ToString::to_string).collect();
            done(
                globals,
                &json!({ "revoked": names }),
                &format!("revoked: {}", names.join(", ")),
            )
        }
    }
}
