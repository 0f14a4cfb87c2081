//! Patches on their way from a caller to the agent: parsed by the gate, and encoded.

use anyhow::{Context as _, Result, ensure};
use cynode_api::{
    AuditKind, ErrorCode, NodeKeyCreate, NodeState, PatchRequest, PatchResult, SessionId,
    UserSessionCreate,
};
use cynode_client::{AuditFilter, PutOptions, SessionClient};
use cynode_patch::{MAX_WIRE_BYTES, Patch};
use cynode_tests::{Answer, eventually};
use http::Method;
use serde_json::{Value, json};

use super::{
    audit::records,
    cluster::{Cluster, session},
    simulated::{ONE, SimulatedFleet},
};

const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(30);

fn text(diff: &str) -> PatchRequest {
    PatchRequest {
        diff: diff.to_owned(),
        ..PatchRequest::default()
    }
}

async fn write(client: &SessionClient, id: SessionId, name: &str, content: &str) -> Result<()> {
    client
        .put_file(
            id,
            name.as_ref(),
            content.to_owned(),
            &PutOptions::default(),
        )
        .await?;
    Ok(())
}

async fn read(client: &SessionClient, id: SessionId, name: &str) -> Result<String> {
    let mut body = client.get_file(id, name.as_ref()).await?;
    let mut content = Vec::new();
    while let Some(chunk) = body.chunk().await? {
        content.extend_from_slice(&chunk);
    }
    Ok(String::from_utf8(content)?)
}

#[tokio::test]
// invariant: one-reader
async fn every_form_of_a_patch_applies_and_the_answer_says_what_was_repaired() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let id: SessionId = cluster.session(&admin, &session()).await?.parse()?;
    let user = cluster.orchestrator.client()?;
    let client = user.sessions();
    write(client, id, "a.txt", "one\ntwo\nthree\ntwo\n").await?;
    let patch = async |diff: &str, dry_run: bool| -> Result<Answer> {
        let body = json!({"diff": diff, "dry_run": dry_run});
        let path = format!("/v1/sessions/{id}/files:patch");
        Answer::of(cluster.request(Method::POST, &path)?.json(&body)).await
    };
    let applied = |answer: &Answer| -> Result<PatchResult> {
        ensure!(answer.status == 200, "{answer:?}");
        Ok(serde_json::from_slice(&answer.body)?)
    };

    let wrong = "Here it is:\n--- a/a.txt\n+++ b/a.txt\n@@ -1,9 +1,9 @@\n-one\n+1\n two\n";
    let dry = applied(&patch(wrong, true).await?)?;
    let done = applied(&patch(wrong, false).await?)?;
    assert_eq!(dry, done);
    assert_eq!(
        (
            done.repaired.len(),
            done.repaired[0].path.as_str(),
            done.repaired[0].hunk,
            done.repaired[0].what.as_str()
        ),
        (
            1,
            "a.txt",
            1,
            "its header says -9 +9 lines, but it has -2 +2"
        )
    );
    let begin = |body: &str| format!("*** Begin Patch\n{body}*** End Patch\n");
    let moved = begin(
        "*** Update File: a.txt\n*** Move to: d/b.txt\n@@ three\n-two\n+2\n*** Add File: new\n+x\n",
    );
    let done = applied(&patch(&moved, false).await?)?;
    assert_eq!((done.files.len(), done.repaired.len()), (2, 0));
    assert_eq!(read(client, id, "d/b.txt").await?, "1\ntwo\nthree\n2\n");
    applied(&patch(&begin("*** Delete File: new\n"), false).await?)?;

    // A hunk without line numbers fits one place, or none.
    write(client, id, "twice", "x\ny\nx\n").await?;
    for diff in [
        begin("*** Update File: twice\n@@\n-x\n+z\n"),
        "--- a/twice\n+++ b/twice\n@@ @@\n-x\n+z\n".to_owned(),
    ] {
        let rejected = patch(&diff, false).await?;
        assert_eq!(rejected.outcome(), (409, "patch_rejected".to_owned()));
        let problem: Value = serde_json::from_slice(&rejected.body)?;
        let reject = &problem["rejects"][0];
        ensure!(
            reject["reason"]
                .as_str()
                .is_some_and(|reason| reason.contains("fits 2 places")),
            "{problem}"
        );
        assert_eq!(reject["expected"], json!(["x"]));
        // What was repaired explains a rejection too.
        let is_repaired = problem["repaired"][0]["what"] == "without line numbers";
        assert_eq!(is_repaired, diff.contains("@@ @@"), "{problem}");
    }
    assert_eq!(read(client, id, "twice").await?, "x\ny\nx\n");

    let filter = AuditFilter {
        action: Some("file.patch".to_owned()),
        ..Default::default()
    };
    let mut intents = records(&user, &filter).await?;
    intents.retain(|record| record.body.kind == AuditKind::Intent);
    let detail = &intents
        .get(1)
        .context("the patch with wrong counts")?
        .body
        .detail;
    assert_eq!(
        (&detail["paths"], &detail["repaired"]),
        (&json!(["a.txt"]), &json!(1))
    );
    let detail = &intents.get(2).context("the one that moves")?.body.detail;
    assert_eq!(detail["paths"], json!(["a.txt", "d/b.txt", "new"]));
    cluster.worker.shut_down().await
}

#[tokio::test]
// invariant: bounded
async fn an_encoded_patch_may_be_larger_than_the_text_of_the_caller() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let admin = cluster.orchestrator.token()?;
    let id: SessionId = cluster.session(&admin, &session()).await?.parse()?;
    let user = cluster.orchestrator.client()?;
    let client = user.sessions();
    // Quoted, each letter of these names takes four bytes, in two places.
    let deletions = |count: usize| {
        let sections: Vec<String> = (0..count)
            .map(|number| format!("*** Delete File: {number}{}\n", "\u{7f}".repeat(1_500)))
            .collect();
        format!("*** Begin Patch\n{}*** End Patch\n", sections.concat())
    };
    let encoded = |text: &str| -> Result<usize> {
        let (patch, _) = Patch::parse_any(text.as_bytes(), 1)?;
        Ok(patch.to_wire().map_or(usize::MAX, |wire| wire.len()))
    };
    let below = deletions(1_700);
    let size = encoded(&below)?;
    ensure!(
        size > 10 << 20 && size < MAX_WIRE_BYTES && below.len() < size / 4,
        "{size}"
    );
    // The agent has read all of it: none of the files exists.
    let answer = client.patch_files(id, &text(&below)).await;
    let error = answer.expect_err("rejected");
    ensure!(error.is(ErrorCode::PatchRejected), "{error}");
    let above = deletions(1_800);
    assert_eq!(encoded(&above)?, usize::MAX);
    let answer = client.patch_files(id, &text(&above)).await;
    let error = answer.expect_err("refused");
    ensure!(
        error.is(ErrorCode::InvalidRequest) && error.to_string().contains("20971520"),
        "{error}"
    );
    cluster.worker.shut_down().await
}

#[tokio::test]
async fn a_node_of_an_earlier_version_gets_diffs_and_nothing_else() -> Result<()> {
    let fleet = SimulatedFleet::start(&[]).await?;
    let node = cynode_tests::SimulatedWorker::start("old", &[ONE]).await?;
    node.read_diffs_only();
    let key = fleet
        .client
        .create_node_key(&NodeKeyCreate::default())
        .await?
        .psk;
    node.join(&fleet.orchestrator.control_url()?, &key).await?;
    let ready = async || {
        let nodes = fleet.client.nodes().await?;
        Ok(nodes.iter().any(|node| node.state == NodeState::Ready))
    };
    eventually("the node is ready", TIMEOUT, ready).await?;
    let request = UserSessionCreate {
        image_ref: Some(ONE.to_owned()),
        ..Default::default()
    };
    let client = fleet.client.sessions();
    let id = client.create_user_session(&request).await?.session_id;
    write(client, id, "d/x", "a\n").await?;

    let wrong = "--- a/d/x\n+++ b/d/x\n@@ -1,9 +1,9 @@\n-a\n+b\n";
    let done = client.patch_files(id, &text(wrong)).await?;
    assert_eq!((done.files.len(), done.repaired.len()), (1, 1));
    assert_eq!(read(client, id, "d/x").await?, "b\n");
    let received = node.patches();
    let [only] = received.as_slice() else {
        anyhow::bail!("{received:?}")
    };
    assert!(!only.is_encoded);
    let sent = String::from_utf8(only.body.clone())?;
    ensure!(
        sent.ends_with("--- \"d/x\"\n+++ \"d/x\"\n@@ -1,1 +1,1 @@\n-a\n+b\n"),
        "{sent}"
    );
    for diff in [
        "*** Begin Patch\n*** Update File: d/x\n@@\n-b\n+c\n*** End Patch\n",
        "*** Begin Patch\n*** Delete File: d/x\n*** End Patch\n",
        "--- a/d/x\n+++ b/d/x\n@@ @@\n-b\n+c\n",
    ] {
        let answer = client.patch_files(id, &text(diff)).await;
        let error = answer.expect_err("refused");
        ensure!(error.is(ErrorCode::AgentOutdated), "{error}");
        ensure!(error.to_string().contains("line numbers"), "{error}");
    }
    // A file that is added needs no place.
    let added = "*** Begin Patch\n*** Add File: new\n+x\n*** End Patch\n";
    client.patch_files(id, &text(added)).await?;
    assert_eq!(
        (read(client, id, "new").await?, node.patches().len()),
        ("x\n".to_owned(), 2)
    );
    Ok(())
}
