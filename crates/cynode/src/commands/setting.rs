//! `setting` and `preference`: read and change settings and preferences.

use cynode_api::{Preference as ApiPreference, Setting as ApiSetting};
use serde_json::Value;

use super::{
    CommandResult, api_name, format_value, not_found, parse_value, print_done, print_list,
    print_object,
};
use crate::{
    cli::{Globals, Preference, Setting},
    connect,
};

/// Prints the value, or the object as JSON.
fn print_value(globals: &Globals, object: &impl serde::Serialize, value: &Value) -> CommandResult {
    match globals.output {
        crate::cli::Format::Json => print_object(globals, object, &[]),
        crate::cli::Format::Table => {
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
                .put_preference(scope.scope, &scope.id, &key, parse_value(&text))
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
            let preferences = match scope {
                Some(scope) => client.preferences(scope.scope, &scope.id).await?,
                None => client.effective_preferences(task, project).await?,
            };
            print_list(
                globals,
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
