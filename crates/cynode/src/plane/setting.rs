//! `setting` and `preference`.

use cynode_api::{Preference as Object, Setting as SettingObject};
use serde_json::Value;

use super::{Outcome, done, list, none_such, plain, show, value, word};
use crate::{
    cli::{Globals, Preference, Setting},
    connect,
};

/// The value alone, or the whole object as JSON.
fn one(globals: &Globals, object: &impl serde::Serialize, value: &Value) -> Outcome {
    match globals.output {
        crate::cli::Format::Json => show(globals, object, &[]),
        crate::cli::Format::Table => {
            crate::output::line(&crate::sanitize::line(&plain(value)))?;
            Ok(std::process::ExitCode::SUCCESS)
        }
    }
}

pub async fn setting(globals: &Globals, command: Setting) -> Outcome {
    let client = connect::plane(globals)?;
    match command {
        Setting::Get { key } => {
            let setting = client.setting(&key).await?;
            one(globals, &setting, &setting.value)
        }
        Setting::Set { key, value: text } => {
            let setting = client.put_setting(&key, value(&text)).await?;
            done(
                globals,
                &setting,
                &format!("{} is {}", setting.key, setting.value),
            )
        }
        Setting::List => {
            let settings = client.settings().await?;
            list(
                globals,
                &settings,
                ["KEY", "VALUE", "REVISION", "BY"],
                |setting: &SettingObject| {
                    [
                        setting.key.clone(),
                        plain(&setting.value),
                        setting.revision.to_string(),
                        setting.updated_by.clone(),
                    ]
                },
            )
        }
    }
}

pub async fn preference(globals: &Globals, command: Preference) -> Outcome {
    let client = connect::plane(globals)?;
    match command {
        Preference::Get { key, task, project } => {
            let found = client
                .effective_preferences(task, project)
                .await?
                .into_iter()
                .find(|preference| preference.key == key);
            let preference = found.ok_or_else(|| none_such("preference", &key))?;
            one(globals, &preference, &preference.value)
        }
        Preference::Set {
            scope,
            key,
            value: text,
        } => {
            let preference = client
                .put_preference(scope.scope, &scope.id, &key, value(&text))
                .await?;
            done(
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
            list(
                globals,
                &preferences,
                ["KEY", "VALUE", "OF", "REVISION", "BY"],
                |preference: &Object| {
                    let of = if preference.scope_id.is_nil() {
                        word(&preference.scope)
                    } else {
                        format!("{}:{}", word(&preference.scope), preference.scope_id)
                    };
                    [
                        preference.key.clone(),
                        plain(&preference.value),
                        of,
                        preference.revision.to_string(),
                        preference.updated_by.clone(),
                    ]
                },
            )
        }
    }
}
