//! `task`: manages tasks.

use cynode_api::{API_VERSION, TaskCreate};

use super::{CommandResult, age, format_time, print_created, print_list, print_object};
use crate::{
    cli::{Globals, Task},
    connect,
};

pub async fn run(globals: &Globals, command: Task) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Task::Create(args) => {
            let request = TaskCreate {
                version: Some(API_VERSION),
                project_id: args.project,
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
        Task::List { project } => {
            let tasks = client.tasks(project).await?;
            print_list(
                globals,
                &tasks,
                ["TASK", "STATUS", "NAME", "AGE", "BY"],
                |task| {
                    [
                        task.id.to_string(),
                        task.status.as_str().to_owned(),
                        task.name.clone(),
                        age(task.created_at),
                        task.created_by.clone(),
                    ]
                },
            )
        }
        Task::Show { id } => {
            let task = client.task(id).await?;
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
