//! `credential`: stores the credentials of repositories, whose values never come back.

use cynode_api::{
    API_VERSION, Credential as ApiCredential, CredentialCreate, CredentialRotate, EgressRole,
};
use serde_json::json;

use super::{
    CommandResult, age, newest, print_created, print_done, print_list, repository::project_id,
};
use crate::{
    cli::{Credential, Globals},
    connect,
    output::TableStyle,
    resolve, secret_input,
};

pub async fn run(globals: &Globals, command: Credential) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Credential::Add(args) => {
            let project_id = resolve::project(&client, &args.project).await?;
            let secret = secret_input::read(&format!(
                "value of the credential '{}', which is not shown:",
                args.name
            ))
            .await?;
            let request = CredentialCreate {
                version: Some(API_VERSION),
                project_id,
                name: args.name,
                role: EgressRole::Git,
                url: args.url,
                username: args.username,
                secret,
            };
            let credential = client.create_credential(&request).await?;
            let note = format!(
                "credential '{}' is sealed to key {} and valid at {} only",
                credential.name, credential.key_id, credential.url
            );
            print_created(globals, &credential, &credential.id.to_string(), &note)
        }
        Credential::List { project, list } => {
            let project = project_id(&client, project.as_deref()).await?;
            let credentials: Vec<ApiCredential> =
                newest(&client, list, resolve::of_project(project), |_| true).await?;
            let style = TableStyle::new(list.wide);
            print_list(
                globals,
                style,
                &credentials,
                [
                    "CREDENTIAL",
                    "NAME",
                    "STATE",
                    "URL",
                    "ROTATED",
                    "PROJECT",
                    "BY",
                ],
                |credential| {
                    let state = match credential.disabled_at {
                        Some(_) => "disabled",
                        None => "active",
                    };
                    [
                        style.id(&credential.id),
                        credential.name.clone(),
                        state.to_owned(),
                        credential.url.clone(),
                        age(credential.rotated_at),
                        style.id(&credential.project_id),
                        credential.created_by.clone(),
                    ]
                },
            )
        }
        Credential::Rotate {
            credential,
            project,
            username,
        } => {
            let project = project_id(&client, project.as_deref()).await?;
            let id = resolve::credential(&client, project, &credential).await?;
            let secret = secret_input::read(&format!(
                "new value of the credential '{credential}', which is not shown:"
            ))
            .await?;
            let request = CredentialRotate {
                version: Some(API_VERSION),
                username,
                secret,
            };
            let rotated = client.rotate_credential(id, &request).await?;
            print_done(
                globals,
                &rotated,
                &format!("replaced the value of credential '{}'", rotated.name),
            )
        }
        Credential::Disable {
            credentials,
            project,
        } => {
            let project = project_id(&client, project.as_deref()).await?;
            let mut ids = Vec::new();
            for credential in &credentials {
                ids.push(resolve::credential(&client, project, credential).await?);
            }
            let mut disabled = Vec::new();
            for id in ids {
                disabled.push(client.disable_credential(id).await?);
            }
            let names: Vec<&str> = disabled.iter().map(|one| one.name.as_str()).collect();
            let note = format!("disabled: {}", names.join(", "));
            print_done(globals, &json!({ "items": disabled }), &note)
        }
    }
}
