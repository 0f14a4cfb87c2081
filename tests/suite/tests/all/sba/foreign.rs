//! Runners that the worker does not know: a specification together with a command.

use anyhow::Result;
use cynode_api::{JobRun, JobState};
use cynode_client::SessionClient;
use cynode_tests::{Options, World, run_step, sba_job, specification};
use serde_json::json;

use super::Ended;

/// A job whose runner is a script. `$result` is a successful result of the job.
fn foreign(script: &str) -> JobRun {
    let spec = specification(&[run_step("echo never run by us")]);
    let result = json!({
        "protocol_version": "1.0", "job_id": spec["job_id"], "status": "success",
        "steps": [], "artifacts": [], "failure_code": null, "failure_message": null,
        "engine": "of another runner",
    });
    let mut request = sba_job(&spec);
    let script = format!("result='{result}'; {script}");
    request.sandbox.command = ["/bin/sh", "-c", &script].map(str::to_owned).to_vec();
    request
}

async fn verdict(client: &SessionClient, script: &str) -> Result<(JobState, String, String)> {
    let ended = Ended::after(client, &foreign(script)).await?;
    let (state, code, reporter) = ended.verdict();
    Ok((state, code.to_owned(), reporter.to_owned()))
}

// part of: CYNAI.SBAGNT.JobLifecycle, CYNAI.SBAGNT.ResultContract
// invariant: jobs
#[tokio::test]
async fn the_result_of_another_runner_is_a_claim_that_its_exit_must_confirm() -> Result<()> {
    let world = World::new()?;
    let worker = world.worker(&Options::default()).await?;
    let client = worker.client()?;
    let said = |state, code: &str, reporter: &str| (state, code.to_owned(), reporter.to_owned());
    let write = "echo \"$result\" > /job/result.json";
    let failure = "echo \"$result\" | sed 's/\"success\"/\"failure\"/; \
                   s/\"failure_code\":null/\"failure_code\":\"out_of_tea\"/; \
                   s/\"failure_message\":null/\"failure_message\":\"none left\"/' > /job/result.json";
    for (script, expected) in [
        (write.to_owned(), said(JobState::Completed, "", "file")),
        (
            format!("{write}; exit 1"),
            said(JobState::Failed, "internal", "worker"),
        ),
        (
            failure.to_owned(),
            said(JobState::Failed, "out_of_tea", "file"),
        ),
        (
            format!("{failure}; exit 3"),
            said(JobState::Failed, "out_of_tea", "file"),
        ),
        (
            "true".to_owned(),
            said(JobState::Failed, "internal", "worker"),
        ),
        (
            "echo '{' > /job/result.json".to_owned(),
            said(JobState::Failed, "internal", "worker"),
        ),
        (
            "ln -s /etc/passwd /job/result.json".to_owned(),
            said(JobState::Failed, "internal", "worker"),
        ),
        (
            "mkfifo /job/result.json".to_owned(),
            said(JobState::Failed, "internal", "worker"),
        ),
    ] {
        assert_eq!(verdict(&client, &script).await?, expected, "{script}");
    }
    // What it finds.
    let found = Ended::after(
        &client,
        &foreign(&format!(
            "{write}; ls /job /job/artifacts; grep -c 'never run by us' /job/job.json; echo $CYNODE_ARTIFACTS_DIR"
        )),
    )
    .await?;
    assert_eq!(
        found.job.output.stdout,
        "/job:\nartifacts\njob.json\nresult.json\n\n/job/artifacts:\n1\n/job/artifacts\n"
    );
    assert!(found.result.steps.is_empty());
    Ok(())
}
