//! `job`: manages jobs.

use std::process::ExitCode;

use cynode_api::{Job as ApiJob, JobState, Reporter};
use cynode_client::UserClient;
use serde_json::json;

use super::{
    CommandResult, agent_job, follow::Follower, format_time, note_more, print_done, print_list,
    print_object, progress, timeline,
};
use crate::{
    cli::{Globals, Job, JobList, OutputFormat},
    connect,
    output::{self, TableStyle},
    resolve,
};

/// The states of jobs that a list shows first.
const UNFINISHED: &str = "in_progress,accepted";
const FINISHED: &str = "completed,failed,timeout,canceled";

pub async fn run(globals: &Globals, command: Job) -> CommandResult {
    let client = connect::user_client(globals)?;
    match command {
        Job::Run(args) => super::run::from_arguments(&client, globals, &args).await,
        Job::List(args) => list(&client, globals, args).await,
        Job::Show(args) => {
            let id = resolve::job(&client, &args.job).await?;
            let job = if args.follow {
                progress::until_end(&client, id).await?
            } else {
                client.job(id).await?
            };
            let changed = match globals.output {
                OutputFormat::Table => agent_job::changed_files(&client, &job).await,
                OutputFormat::Json => Vec::new(),
            };
            show(globals, &job, changed)
        }
        Job::Logs(args) => {
            let id = resolve::job(&client, &args.job).await?;
            if globals.output == OutputFormat::Json {
                let page = client
                    .job_output(id, &cynode_client::OutputQuery::default())
                    .await?;
                output::json(&page)?;
                return Ok(ExitCode::SUCCESS);
            }
            Follower::new(&client, id, args.raw)
                .print(args.follow)
                .await?;
            Ok(ExitCode::SUCCESS)
        }
        Job::Stop { jobs: names } => {
            let mut ids = Vec::new();
            for name in &names {
                ids.push(resolve::job(&client, name).await?);
            }
            let mut jobs = Vec::new();
            for id in ids {
                let job = client.stop_job(id).await?;
                if globals.output == OutputFormat::Table {
                    output::message(&format!("job {id} is {}", job.state));
                }
                jobs.push(job);
            }
            match globals.output {
                OutputFormat::Json if jobs.len() == 1 => print_done(globals, &jobs[0], ""),
                OutputFormat::Json => print_done(globals, &json!({ "items": jobs }), ""),
                OutputFormat::Table => Ok(ExitCode::SUCCESS),
            }
        }
    }
}

fn show(globals: &Globals, job: &ApiJob, changed: Vec<String>) -> CommandResult {
    let error = job
        .error
        .as_ref()
        .map(|error| timeline::cut(&format!("{}: {}", error.code, error.detail)))
        .unwrap_or_default();
    let reporter = match job.reported_by {
        // The others have seen it themselves.
        reporter @ (Reporter::Sandbox | Reporter::File) => {
            format!("the sandbox's own {}", reporter.as_str())
        }
        Reporter::Worker | Reporter::Orchestrator => String::new(),
    };
    let mut fields = vec![
        ("job", job.job_id.to_string()),
        ("state", job.state.to_string()),
        (
            "exit",
            job.exit_code
                .map(|code| code.to_string())
                .unwrap_or_default(),
        ),
        ("error", error),
        ("reported by", reporter),
        ("command", command_line(job)),
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
    fields.extend(timeline::fields(job));
    fields.extend(changed.into_iter().map(|file| ("changed", file)));
    let printed = print_object(globals, job, &fields)?;
    let rows = timeline::rows(job);
    if globals.output == OutputFormat::Table && !rows.is_empty() {
        output::line("")?;
        output::table(TableStyle::new(false), timeline::HEADER, rows)?;
    }
    Ok(printed)
}

async fn list(client: &UserClient, globals: &Globals, args: JobList) -> CommandResult {
    let task = resolve::optional(args.task.as_deref(), async |task| {
        resolve::task(client, task).await
    })
    .await?;
    let states = match (args.state, args.all) {
        (Some(state), _) => vec![state.to_string()],
        (None, true) => vec![UNFINISHED.to_owned(), FINISHED.to_owned()],
        (None, false) => vec![UNFINISHED.to_owned()],
    };
    let mut jobs: Vec<ApiJob> = Vec::new();
    let mut has_more = false;
    for state in states {
        let mut query = vec![("state", state)];
        query.extend(task.map(|id| ("task_id", id.to_string())));
        let listing = client
            .newest(query, args.list.limit - jobs.len(), |_| true)
            .await?;
        jobs.extend(listing.items);
        has_more = listing.has_more;
        if has_more {
            break;
        }
    }
    // What runs comes before what waits.
    jobs.sort_by_key(|job| match job.state {
        JobState::InProgress => 0,
        JobState::Accepted => 1,
        _ => 2,
    });
    note_more(args.list, has_more);
    let style = TableStyle::new(args.list.wide);
    print_list(
        globals,
        style,
        &jobs,
        [
            "JOB", "STATE", "EXIT", "STARTED", "COMMAND", "IMAGE", "TASK",
        ],
        |job: &ApiJob| {
            let exit = job
                .exit_code
                .map(|code| code.to_string())
                .unwrap_or_default();
            [
                style.id(&job.job_id),
                job.state.to_string(),
                exit,
                job.started_at.map(|at| style.time(at)).unwrap_or_default(),
                command_line(job),
                job.image_ref.clone(),
                style.id(&job.task_id),
            ]
        },
    )
}

/// The command in one line, as far as it is shown.
fn command_line(job: &ApiJob) -> String {
    const SHOWN_CHARACTERS: usize = 100;
    let Some(words) = &job.command else {
        return String::new();
    };
    let text = words.join(" ");
    match text.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
