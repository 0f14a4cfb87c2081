//! `repository`: registers git repositories, and names them as workspaces.

use std::{io::Read as _, path::Path};

use cynode_api::{
    API_VERSION, ProjectId, Repository as ApiRepository, RepositoryCheck, RepositoryCreate,
    RepositoryRules, TaskCreate, TaskId, WorkspaceRef, repository_limits,
};
use cynode_client::UserClient;
use serde_json::{Value, json};

use super::{
    CommandResult, age, format_time, newest, print_created, print_done, print_list, print_object,
};
use crate::{
    cli::{Globals, OutputFormat, Repository, RepositoryAdd},
    connect,
    failure::Failure,
    output::{self, TableStyle},
    resolve,
};

/// The longest file of rules to read.
const MAX_RULES_BYTES: u64 = 1024 * 1024;

pub async fn run(globals: &Globals, command: Repository) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Repository::Add(args) => add(&client, globals, *args).await,
        Repository::List { project, list } => {
            let project = project_id(&client, project.as_deref()).await?;
            let repositories: Vec<ApiRepository> =
                newest(&client, list, resolve::of_project(project), |_| true).await?;
            let style = TableStyle::new(list.wide);
            print_list(
                globals,
                style,
                &repositories,
                [
                    "REPOSITORY",
                    "NAME",
                    "PROVIDER",
                    "URL",
                    "PROJECT",
                    "AGE",
                    "BY",
                ],
                |repository| {
                    [
                        style.id(&repository.id),
                        repository.name.clone(),
                        repository.provider.as_str().to_owned(),
                        repository.url.clone(),
                        style.id(&repository.project_id),
                        age(repository.created_at),
                        repository.created_by.clone(),
                    ]
                },
            )
        }
        Repository::Show {
            repository,
            project,
        } => {
            let project = project_id(&client, project.as_deref()).await?;
            show(
                globals,
                &resolve::repository(&client, project, &repository).await?,
            )
        }
        Repository::Remove {
            repositories,
            project,
        } => {
            let project = project_id(&client, project.as_deref()).await?;
            let mut found = Vec::new();
            for repository in &repositories {
                found.push(resolve::repository(&client, project, repository).await?);
            }
            for repository in &found {
                client.remove_repository(repository.id).await?;
            }
            let ids: Vec<String> = found.iter().map(|one| one.id.to_string()).collect();
            let names: Vec<&str> = found.iter().map(|one| one.name.as_str()).collect();
            print_done(
                globals,
                &json!({ "removed": ids }),
                &format!("removed: {}", names.join(", ")),
            )
        }
    }
}

/// The project of an option, if the option is given.
pub(super) async fn project_id(
    client: &UserClient,
    project: Option<&str>,
) -> Result<Option<ProjectId>, Failure> {
    resolve::optional(project, async |project| {
        resolve::project(client, project).await
    })
    .await
}

async fn add(client: &UserClient, globals: &Globals, args: RepositoryAdd) -> CommandResult {
    let project_id = resolve::project(client, &args.project).await?;
    let (rules, mut checks) = match &args.rules {
        Some(path) => rules(path, &read(path, MAX_RULES_BYTES)?)?,
        None => (RepositoryRules::default(), Vec::new()),
    };
    checks.extend(args.checks);
    let ca = match &args.host_ca {
        Some(path) => Some(read(path, repository_limits::MAX_CA_BYTES as u64)?),
        None => None,
    };
    let credential_id = resolve::optional(args.credential.as_deref(), async |credential| {
        resolve::credential(client, Some(project_id), credential).await
    })
    .await?;
    let request = RepositoryCreate {
        version: Some(API_VERSION),
        project_id,
        name: args.name,
        provider: args.provider.into(),
        url: args.url,
        api_url: args.api_url,
        credential_id,
        default_branch: args.default_branch,
        ca,
        addresses: args.addresses,
        rules,
        checks,
    };
    let repository = client.create_repository(&request).await?;
    let note = format!("repository '{}' is registered", repository.name);
    print_created(globals, &repository, &repository.id.to_string(), &note)
}

/// Reads a bounded text file.
fn read(path: &Path, limit: u64) -> Result<String, Failure> {
    let mut text = String::new();
    fs_err::File::open(path)
        .and_then(|file| file.take(limit + 1).read_to_string(&mut text))
        .map_err(|error| Failure::usage(error.to_string()))?;
    if text.len() as u64 > limit {
        let limit = output::size(limit);
        let message = format!("{} is longer than {limit}", path.display());
        return Err(Failure::usage(message));
    }
    Ok(text)
}

/// Rules, and checks beside them, as TOML or JSON.
fn rules(path: &Path, text: &str) -> Result<(RepositoryRules, Vec<RepositoryCheck>), Failure> {
    let invalid = |error: &dyn std::fmt::Display| {
        Failure::usage(format!("{}: {error}", path.display()))
            .remedy("See 'cynode repository add --help' and docs/git.md.")
    };
    let is_json = path
        .extension()
        .is_some_and(|extension| extension == "json");
    let mut document: Value = if is_json {
        serde_json::from_str(text).map_err(|error| invalid(&error))?
    } else {
        toml::from_str(text).map_err(|error| invalid(&error))?
    };
    let checks = document
        .as_object_mut()
        .and_then(|members| members.remove("checks"))
        .unwrap_or_else(|| json!([]));
    Ok((
        serde_json::from_value(document).map_err(|error| invalid(&error))?,
        serde_json::from_value(checks).map_err(|error| invalid(&error))?,
    ))
}

fn show(globals: &Globals, repository: &ApiRepository) -> CommandResult {
    let addresses: Vec<String> = repository
        .addresses
        .iter()
        .map(|address| format!("{}:{}", address.cidr, address.port))
        .collect();
    let optional = |text: &Option<String>| text.clone().unwrap_or_default();
    let authority = match repository.ca {
        Some(_) => "own certificates, and no others",
        None => "",
    };
    let printed = print_object(
        globals,
        repository,
        &[
            ("repository", repository.id.to_string()),
            ("name", repository.name.clone()),
            ("provider", repository.provider.as_str().to_owned()),
            ("url", repository.url.clone()),
            ("api", optional(&repository.api_url)),
            (
                "credential",
                repository
                    .credential_id
                    .map(|id| id.to_string())
                    .unwrap_or_default(),
            ),
            ("default", optional(&repository.default_branch)),
            ("trusts", authority.to_owned()),
            ("addresses", addresses.join(", ")),
            ("project", repository.project_id.to_string()),
            ("revision", repository.revision.to_string()),
            ("created", format_time(repository.created_at)),
            ("by", repository.created_by.clone()),
        ],
    )?;
    if globals.output == OutputFormat::Table {
        print_rules(repository)?;
    }
    Ok(printed)
}

/// Prints the rules that differ from their defaults, and the checks.
fn print_rules(repository: &ApiRepository) -> Result<(), Failure> {
    let (rules, defaults) = (json!(repository.rules), json!(RepositoryRules::default()));
    let rows: Vec<[String; 2]> = rules
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(name, value)| defaults.get(name.as_str()) != Some(*value))
        .map(|(name, value)| [name.clone(), value.to_string()])
        .collect();
    if !rows.is_empty() {
        output::line("")?;
        output::table(TableStyle::new(false), ["RULE", "VALUE"], rows)?;
    }
    if !repository.checks.is_empty() {
        output::line("")?;
        output::table(
            TableStyle::new(false),
            ["CHECK", "COMMAND", "IMAGE", "TIMEOUT"],
            repository.checks.iter().map(|check| {
                [
                    check.name.clone(),
                    check.argv.join(" "),
                    check.image_ref.clone().unwrap_or_default(),
                    check
                        .timeout_seconds
                        .map(|seconds| output::span(seconds.into()))
                        .unwrap_or_default(),
                ]
            }),
        )?;
    }
    Ok(())
}

/// The workspace that `--repo REPOSITORY[@REF]` means, and the task to use it in: the given one, or
/// a new one of the repository's project, under `new_id` if the caller has chosen an id.
pub async fn workspace(
    client: &UserClient,
    text: &str,
    task: Option<TaskId>,
    new_id: Option<TaskId>,
    task_name: impl FnOnce() -> String,
) -> Result<(TaskId, WorkspaceRef), Failure> {
    let (name, reference) = match text.split_once('@') {
        Some((name, reference)) => (name, Some(reference)),
        None => (text, None),
    };
    let project = match task {
        Some(task) => client.task(task).await?.project_id,
        None => None,
    };
    let repository = resolve::repository(client, project, name).await?;
    let task = match task {
        Some(task) => task,
        None => {
            let request = TaskCreate {
                version: Some(API_VERSION),
                id: new_id,
                project_id: Some(repository.project_id),
                name: task_name(),
                ..TaskCreate::default()
            };
            client.create_task(&request).await?.id
        }
    };
    let reference = reference.map(|reference| format!("@{reference}"));
    let workspace = format!("git:{}{}", repository.name, reference.unwrap_or_default())
        .parse()
        .map_err(|error: String| Failure::usage(format!("--repo: {error}")))?;
    Ok((task, workspace))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_toml_or_json_with_checks_beside_them() {
        let toml = "allow_paths = [\"src/**\"]\nrequire_approval = true\n[[checks]]\nname = \
                    \"test\"\nargv = [\"true\"]\n";
        let json = r#"{"allow_paths": ["src/**"], "require_approval": true,
                      "checks": [{"name": "test", "argv": ["true"]}]}"#;
        let expected = RepositoryRules {
            allow_paths: vec!["src/**".to_owned()],
            require_approval: true,
            ..RepositoryRules::default()
        };
        for (name, text) in [("rules.toml", toml), ("rules.json", json)] {
            let (rules, checks) = rules(Path::new(name), text).expect(name);
            assert_eq!(rules, expected, "{name}");
            assert_eq!(checks.len(), 1, "{name}");
        }
        for text in [
            "allow_path = []",
            "allow_paths = 1",
            "[[checks]]\nname = \"x\"",
            "=",
        ] {
            let refused = rules(Path::new("rules.toml"), text).expect_err(text);
            assert!(refused.message().starts_with("rules.toml: "), "{refused:?}");
        }
    }
}
