//! `task`: manages tasks.

use cynode_api::{API_VERSION, Task as ApiTask, TaskCreate, TaskStatus};

use super::{CommandResult, age, format_time, newest, print_created, print_list, print_object};
use crate::{
    cli::{Globals, Task},
    connect,
    output::TableStyle,
    resolve,
};

pub async fn run(globals: &Globals, command: Task) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Task::Create(args) => {
            let project = resolve::optional(args.project.as_deref(), async |project| {
                resolve::project(&client, project).await
            })
            .await?;
            let request = TaskCreate {
                version: Some(API_VERSION),
                project_id: project,
                name: args.name,
                description: args.description,
                requirements: args.requirements,
                acceptance_criteria: args.criteria,
                ..TaskCreate::default()
            };
            let task = client.create_task(&request).await?;
            print_created(
                globals,
                &task,
                &task.id.to_string(),
                &format!("task '{}' is {}", task.name, task.status.as_str()),
            )
        }
        Task::List { project, all, list } => {
            let project = resolve::optional(project.as_deref(), async |project| {
                resolve::project(&client, project).await
            })
            .await?;
            let query = project.map(|id| ("project_id", id.to_string()));
            let mut tasks: Vec<ApiTask> =
                newest(&client, list, Vec::from_iter(query), |task: &ApiTask| {
                    all || !is_finished(task)
                })
                .await?;
            tasks.sort_by_key(is_finished);
            let style = TableStyle::new(list.wide);
            print_list(
                globals,
                style,
                &tasks,
                ["TASK", "STATUS", "NAME", "AGE", "BY"],
                |task| {
                    [
                        style.id(&task.id),
                        task.status.as_str().to_owned(),
                        task.name.clone(),
                        age(task.created_at),
                        task.created_by.clone(),
                    ]
                },
            )
        }
        Task::Show { task } => {
            let task = client.task(resolve::task(&client, &task).await?).await?;
            let fields = [
                ("task", task.id.to_string()),
                ("name", task.name.clone()),
                ("status", task.status.as_str().to_owned()),
                (
                    "project",
                    task.project_id.map(|id| id.to_string()).unwrap_or_default(),
                ),
                ("description", task.description.clone().unwrap_or_default()),
                ("requires", task.requirements.join("; ")),
                ("accepted if", task.acceptance_criteria.join("; ")),
                ("profile", task.profile.clone().unwrap_or_default()),
                ("created", format_time(task.created_at)),
                ("by", task.created_by.clone()),
            ];
            print_object(globals, &task, &fields)
        }
    }
}

const fn is_finished(task: &ApiTask) -> bool {
    matches!(
        task.status,
        TaskStatus::Done | TaskStatus::Failed | TaskStatus::Canceled
    )
}
