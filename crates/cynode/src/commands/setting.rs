//! `setting` and `preference`: read and change settings and preferences.

use cynode_api::{
    Preference as ApiPreference, PreferenceScope, ProjectId, Setting as ApiSetting, TaskId,
};
use cynode_client::UserClient;
use serde_json::Value;

use super::{
    CommandResult, api_name, format_value, not_found, parse_value, print_done, print_list,
    print_object,
};
use crate::{
    cli::{Globals, Preference, PreferenceScopeArg, Setting},
    connect,
    failure::Failure,
    output::TableStyle,
    resolve,
};

/// Prints the value, or the object as JSON.
fn print_value(globals: &Globals, object: &impl serde::Serialize, value: &Value) -> CommandResult {
    match globals.output {
        crate::cli::OutputFormat::Json => print_object(globals, object, &[]),
        crate::cli::OutputFormat::Table => {
            crate::output::line(&crate::sanitize::line(&format_value(value)))?;
            Ok(std::process::ExitCode::SUCCESS)
        }
    }
}

pub async fn setting(globals: &Globals, command: Setting) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Setting::Get { key } => {
            let setting = client.setting(&key).await?;
            print_value(globals, &setting, &setting.value)
        }
        Setting::Set { key, value: text } => {
            let setting = client.put_setting(&key, parse_value(&text)).await?;
            print_done(
                globals,
                &setting,
                &format!("{} is {}", setting.key, setting.value),
            )
        }
        Setting::List => {
            let settings = client.settings().await?;
            print_list(
                globals,
                TableStyle::new(false),
                &settings,
                ["KEY", "VALUE", "REVISION", "BY"],
                |setting: &ApiSetting| {
                    [
                        setting.key.clone(),
                        format_value(&setting.value),
                        setting.revision.to_string(),
                        setting.updated_by.clone(),
                    ]
                },
            )
        }
    }
}

pub async fn preference(globals: &Globals, command: Preference) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Preference::Get { key, task, project } => {
            let (task, project) = context(&client, task, project).await?;
            let preference = client
                .effective_preferences(task, project)
                .await?
                .into_iter()
                .find(|preference| preference.key == key);
            let preference = preference.ok_or_else(|| not_found("preference", &key))?;
            print_value(globals, &preference, &preference.value)
        }
        Preference::Set {
            scope,
            key,
            value: text,
        } => {
            let preference = client
                .put_preference(
                    scope.scope,
                    &scope_id(&client, &scope).await?,
                    &key,
                    parse_value(&text),
                )
                .await?;
            print_done(
                globals,
                &preference,
                &format!(
                    "{} is {} for {}",
                    preference.key,
                    preference.value,
                    scope.scope.as_str()
                ),
            )
        }
        Preference::List {
            task,
            project,
            scope,
        } => {
            let preferences = if let Some(scope) = scope {
                let id = scope_id(&client, &scope).await?;
                client.preferences(scope.scope, &id).await?
            } else {
                let (task, project) = context(&client, task, project).await?;
                client.effective_preferences(task, project).await?
            };
            print_list(
                globals,
                TableStyle::new(true),
                &preferences,
                ["KEY", "VALUE", "SCOPE", "REVISION", "BY"],
                |preference: &ApiPreference| {
                    let scope = if preference.scope_id.is_nil() {
                        api_name(&preference.scope)
                    } else {
                        format!("{}:{}", api_name(&preference.scope), preference.scope_id)
                    };
                    [
                        preference.key.clone(),
                        format_value(&preference.value),
                        scope,
                        preference.revision.to_string(),
                        preference.updated_by.clone(),
                    ]
                },
            )
        }
    }
}

/// The task and project whose preferences are effective.
async fn context(
    client: &UserClient,
    task: Option<String>,
    project: Option<String>,
) -> Result<(Option<TaskId>, Option<ProjectId>), Failure> {
    let task = resolve::optional(task.as_deref(), async |task| {
        resolve::task(client, task).await
    });
    let project = resolve::optional(project.as_deref(), async |project| {
        resolve::project(client, project).await
    });
    Ok((task.await?, project.await?))
}

/// The id of a scope, which may be given by name or by a part of the id.
async fn scope_id(client: &UserClient, scope: &PreferenceScopeArg) -> Result<String, Failure> {
    let id = &scope.id;
    Ok(match scope.scope {
        PreferenceScope::Task => resolve::task(client, id).await?.to_string(),
        PreferenceScope::Project => resolve::project(client, id).await?.to_string(),
        PreferenceScope::User => resolve::user(client, id).await?.to_string(),
        PreferenceScope::Group => resolve::group(client, id).await?.to_string(),
        PreferenceScope::System => id.clone(),
    })
}
