//! The audit and policy calls against a scripted server.

use std::time::Duration;

use cynode_api::{AuditDecision, AuditVerifyLine, ErrorCode, PolicyPut, PolicyTest};
use cynode_client::{AuditFilter, Error, UserClient};
use time::macros::datetime;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

/// Answers each connection with the next body; returns the requests it received.
async fn server(
    answers: Vec<(&'static str, String)>,
) -> (UserClient, tokio::task::JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let client = UserClient::new(
        &format!("http://{}", listener.local_addr().expect("address")),
        "secret",
    )
    .expect("client");
    let served = tokio::spawn(async move {
        let mut requests = Vec::new();
        for (status, body) in answers {
            let (mut socket, _) = listener.accept().await.expect("accepted");
            let mut request = Vec::new();
            let mut piece = [0; 4096];
            while !is_whole(&request) {
                let count = socket.read(&mut piece).await.expect("read");
                assert!(count > 0, "the client hung up");
                request.extend_from_slice(&piece[..count]);
            }
            requests.push(String::from_utf8(request).expect("text"));
            // Without a length, so that a body can stop anywhere.
            let answer = format!(
                "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n{body}"
            );
            socket.write_all(answer.as_bytes()).await.expect("written");
        }
        requests
    });
    (client, served)
}

fn is_whole(request: &[u8]) -> bool {
    let text = String::from_utf8_lossy(request);
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        return false;
    };
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .map_or(0, |length| length.parse().expect("length"));
    body.len() >= length
}

const RECORD: &str = r#"{"cursor":8,"stream":"01890000-0000-7000-8000-000000000001","seq":3,"at":"2026-01-02T03:04:05.000006Z","version":1,"kind":"event","action":"node.lost","weather":"rain","hash":"00"}"#;

#[tokio::test]
async fn the_query_has_the_filters_and_a_raw_page_keeps_unknown_members() {
    let page = format!(r#"{{"items":[{RECORD}],"next_cursor":9}}"#);
    let (client, served) = server(vec![("200 OK", page.clone()), ("200 OK", page)]).await;
    let filter = AuditFilter {
        subject: Some("ada & co".into()),
        decision: Some(AuditDecision::Deny),
        action: Some("file.read".into()),
        since: Some(datetime!(2026-01-02 03:04:05 UTC)),
        ..AuditFilter::default()
    };
    let typed = client
        .audit(7, &filter, Duration::from_secs(900))
        .await
        .expect("a page");
    assert_eq!(
        (typed.items[0].body.action.as_str(), typed.next_cursor),
        ("node.lost", 9)
    );
    let raw = client
        .raw_audit(7, &AuditFilter::default(), Duration::ZERO)
        .await
        .expect("a page");
    assert_eq!(raw.items[0]["weather"], "rain");
    let requests = served.await.expect("served");
    for part in [
        "GET /v1/audit?after=7&limit=1000",
        "subject=ada+%26+co",
        "decision=deny",
        "since=2026-01-02T03%3A04%3A05Z",
        "wait_ms=60000",
    ] {
        assert!(requests[0].contains(part), "{part} in {}", requests[0]);
    }
    assert!(!requests[0].contains("until") && !requests[1].contains("subject"));
}

const VERDICT: &str = r#"{"verdict":{"intact":true,"records":2,"streams":1,"checkpoints":1,"truncated":0,"open":0,"key":"k","problems":[],"more_problems":false}}"#;

#[tokio::test]
async fn a_verification_reports_progress_and_ends_with_a_verdict() {
    let lines = format!("{{\"checked\":1,\"of\":2}}\n\n{VERDICT}\n");
    for body in [lines.clone(), lines.trim_end().to_owned()] {
        let (client, _served) = server(vec![("200 OK", body)]).await;
        let mut verification = client.verify_audit().await.expect("begun");
        assert_eq!(
            verification.next().await.expect("a line"),
            Some(AuditVerifyLine::Progress { checked: 1, of: 2 })
        );
        assert!(
            matches!(verification.next().await.expect("a line"), Some(AuditVerifyLine::Verdict { verdict }) if verdict.intact)
        );
        assert_eq!(verification.next().await.expect("the end"), None);
    }
}

#[tokio::test]
async fn a_verification_without_a_verdict_is_an_error() {
    for body in ["", "{\"checked\":1,\"of\":2}\n"] {
        let (client, _served) = server(vec![("200 OK", body.to_owned())]).await;
        let mut verification = client.verify_audit().await.expect("begun");
        let end = loop {
            match verification.next().await {
                Ok(Some(AuditVerifyLine::Progress { .. })) => {}
                other => break other,
            }
        };
        assert!(matches!(end, Err(Error::Broken { .. })), "{end:?}");
    }
    let (client, _served) =
        server(vec![("200 OK", "{\"verdict\":{\"intact\":tr".to_owned())]).await;
    assert!(matches!(
        client.verify_audit().await.expect("begun").next().await,
        Err(Error::Answer { .. })
    ));
}

#[tokio::test]
async fn policy_names_are_escaped_in_paths() {
    let policy = r#"{"id":"a/b","text":"permit","revision":2,"updated_at":"2026-01-02T03:04:05Z","updated_by":"ada","is_default":false,"rules":[{"name":"a/b/0","effect":"permit"}]}"#;
    let refused = r#"{"type":"urn:cynode:error:policy_invalid","title":"t","status":422,"detail":"line 1: no","code":"policy_invalid","remedy":"r"}"#;
    let (client, served) = server(vec![
        ("200 OK", policy.to_owned()),
        ("422 Unprocessable Entity", refused.to_owned()),
        ("204 No Content", String::new()),
        ("200 OK", r#"{"allowed":false}"#.to_owned()),
        ("200 OK", format!(r#"{{"items":[{policy}]}}"#)),
    ])
    .await;
    let put = PolicyPut {
        text: "permit".into(),
        if_revision: Some(1),
        ..PolicyPut::default()
    };
    assert_eq!(
        client.put_policy("a/b", &put).await.expect("put").rules[0].effect,
        "permit"
    );
    assert!(
        client
            .put_policy("a/b", &put)
            .await
            .expect_err("refused")
            .is(ErrorCode::PolicyInvalid)
    );
    client.delete_policy("a/b").await.expect("deleted");
    let test = PolicyTest {
        user: Some("ada".into()),
        action: "file.read".into(),
        ..PolicyTest::default()
    };
    assert!(!client.test_policy(&test).await.expect("answered").allowed);
    assert_eq!(client.policies().await.expect("listed").len(), 1);
    let requests = served.await.expect("served");
    let begins: Vec<&str> = requests
        .iter()
        .map(|request| request.lines().next().unwrap_or_default())
        .collect();
    assert_eq!(begins[0], "PUT /v1/policies/a%2Fb HTTP/1.1");
    assert_eq!(begins[2], "DELETE /v1/policies/a%2Fb HTTP/1.1");
    assert_eq!(begins[3], "POST /v1/policies:test HTTP/1.1");
    assert!(
        requests[0].ends_with(r#"{"text":"permit","if_revision":1}"#),
        "{}",
        requests[0]
    );
}
