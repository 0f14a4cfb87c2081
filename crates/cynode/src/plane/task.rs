//! `task`.

use cynode_api::{API_VERSION, TaskCreate};

use super::{Outcome, age, list, made, moment, show};
use crate::{
    cli::{Globals, Task},
    connect,
};

pub async fn run(globals: &Globals, command: Task) -> Outcome {
    let client = connect::plane(globals)?;
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
            made(
                globals,
                &task,
                &task.id.to_string(),
                &format!("task '{}' is {}", task.name, task.status.as_str()),
            )
        }
        Task::List { project } => {
            let tasks = client.tasks(project).await?;
            list(
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
                ("created", moment(task.created_at)),
                ("by", task.created_by.clone()),
            ];
            show(globals, &task, &fields)
        }
    }
}
