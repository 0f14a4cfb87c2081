//! `project`: manages projects.

use cynode_api::{API_VERSION, Project as ApiProject, ProjectCreate, ProjectPatch};

use super::{
    CommandResult, age, format_time, newest, print_created, print_done, print_list, print_object,
};
use crate::{
    cli::{Globals, Project},
    connect,
    output::TableStyle,
    resolve,
};

pub async fn run(globals: &Globals, command: Project) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Project::Create { name, slug, scope } => {
            let request = ProjectCreate {
                version: Some(API_VERSION),
                name,
                slug,
                scope,
                ..ProjectCreate::default()
            };
            let project = client.create_project(&request).await?;
            print_created(
                globals,
                &project,
                &project.id.to_string(),
                &format!("project '{}' has the slug {}", project.name, project.slug),
            )
        }
        Project::List { list } => {
            let projects: Vec<ApiProject> = newest(&client, list, Vec::new(), |_| true).await?;
            let style = TableStyle::new(list.wide);
            print_list(
                globals,
                style,
                &projects,
                ["PROJECT", "NAME", "SLUG", "AGE", "BY"],
                |project| {
                    [
                        style.id(&project.id),
                        project.name.clone(),
                        project.slug.clone(),
                        age(project.created_at),
                        project.created_by.clone(),
                    ]
                },
            )
        }
        Project::Show { project } => {
            let id = resolve::project(&client, &project).await?;
            let project = client.project(id).await?;
            let fields = [
                ("project", project.id.to_string()),
                ("name", project.name.clone()),
                ("slug", project.slug.clone()),
                ("scope", project.scope.clone().unwrap_or_default()),
                ("created", format_time(project.created_at)),
                ("by", project.created_by.clone()),
            ];
            print_object(globals, &project, &fields)
        }
        Project::Update {
            project,
            name,
            scope,
        } => {
            let id = resolve::project(&client, &project).await?;
            let patch = ProjectPatch {
                version: Some(API_VERSION),
                name,
                scope,
                metadata: None,
            };
            let project = client.patch_project(id, &patch).await?;
            print_done(
                globals,
                &project,
                &format!("changed project '{}'", project.name),
            )
        }
    }
}
