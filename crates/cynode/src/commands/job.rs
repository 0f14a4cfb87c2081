//! `job`: manages jobs.

use std::process::ExitCode;

use cynode_api::Job as ApiJob;
use serde_json::json;

use super::{CommandResult, follow::Follower, format_time, print_done, print_list, print_object};
use crate::{
    cli::{Format, Globals, Job},
    connect, output,
};

pub async fn run(globals: &Globals, command: Job) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Job::Run(args) => super::run::from_file(&client, globals, &args).await,
        Job::List { state, task } => {
            let jobs = client.jobs(state, task).await?;
            print_list(
                globals,
                &jobs,
                ["JOB", "STATE", "EXIT", "STARTED", "IMAGE", "TASK"],
                |job: &ApiJob| {
                    let exit = job
                        .exit_code
                        .map(|code| code.to_string())
                        .unwrap_or_default();
                    let started = job.started_at.map(format_time).unwrap_or_default();
                    [
                        job.job_id.to_string(),
                        job.state.to_string(),
                        exit,
                        started,
                        job.image_ref.clone(),
                        job.task_id.to_string(),
                    ]
                },
            )
        }
        Job::Show { id } => {
            let job = client.job(id).await?;
            let error = job
                .error
                .as_ref()
                .map(|error| format!("{}: {}", error.code, error.detail))
                .unwrap_or_default();
            let fields = [
                ("job", job.job_id.to_string()),
                ("state", job.state.to_string()),
                (
                    "exit",
                    job.exit_code
                        .map(|code| code.to_string())
                        .unwrap_or_default(),
                ),
                ("error", error),
                (
                    "output",
                    job.output
                        .truncated_by
                        .as_ref()
                        .map(|quota| format!("truncated: {quota}"))
                        .unwrap_or_default(),
                ),
                ("task", job.task_id.to_string()),
                ("image", job.image_ref.clone()),
                ("digest", job.image_digest.clone().unwrap_or_default()),
                (
                    "node",
                    job.node_id.map(|id| id.to_string()).unwrap_or_default(),
                ),
                (
                    "started",
                    job.started_at.map(format_time).unwrap_or_default(),
                ),
                ("ended", job.ended_at.map(format_time).unwrap_or_default()),
                ("by", job.created_by.clone().unwrap_or_default()),
            ];
            print_object(globals, &job, &fields)
        }
        Job::Logs(args) => {
            if globals.output == Format::Json {
                let page = client
                    .job_output(args.id, &cynode_client::OutputQuery::default())
                    .await?;
                output::json(&page)?;
                return Ok(ExitCode::SUCCESS);
            }
            Follower::new(&client, args.id, args.raw)
                .print(args.follow)
                .await?;
            Ok(ExitCode::SUCCESS)
        }
        Job::Stop { ids } => {
            let mut jobs = Vec::new();
            for id in ids {
                let job = client.stop_job(id).await?;
                if globals.output == Format::Table {
                    output::message(&format!("job {id} is {}", job.state));
                }
                jobs.push(job);
            }
            match globals.output {
                Format::Json if jobs.len() == 1 => print_done(globals, &jobs[0], ""),
                Format::Json => print_done(globals, &json!({ "items": jobs }), ""),
                Format::Table => Ok(ExitCode::SUCCESS),
            }
        }
    }
}
