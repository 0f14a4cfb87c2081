//! The client against a scripted server, byte for byte.

use std::path::Path;

use cynode_api::{ErrorCode, ExecRequest, SessionId, Stream};
use cynode_client::{
    Error, ExecEvent, FileBody, Peer, PtyMessage, PtyOpen, PutOptions, Readiness, SessionClient,
    Trust,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_tungstenite::tungstenite::{Message, handshake::derive_accept_key, protocol::Role};

/// Answers each connection with the next response; returns the requests it received.
async fn server(
    answers: Vec<&'static str>,
) -> (SessionClient, tokio::task::JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let client = SessionClient::new(
        &format!("http://{}", listener.local_addr().expect("address")),
        "secret",
    )
    .expect("client");
    let served = tokio::spawn(async move {
        let mut requests = Vec::new();
        for answer in answers {
            let (mut socket, _) = listener.accept().await.expect("accepted");
            requests.push(head(&mut socket).await);
            socket.write_all(answer.as_bytes()).await.expect("written");
        }
        requests
    });
    (client, served)
}

async fn head(socket: &mut TcpStream) -> String {
    let mut text = Vec::new();
    let mut piece = [0; 4096];
    loop {
        if let Some(end) = text.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&text[..end]);
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "))
                .map_or(0, |length| length.parse().expect("length"));
            if text.len() >= end + 4 + length {
                break;
            }
        }
        let count = socket.read(&mut piece).await.expect("read");
        assert!(count > 0, "the client hung up");
        text.extend_from_slice(&piece[..count]);
    }
    String::from_utf8_lossy(&text).into_owned()
}

fn id() -> SessionId {
    "01890000-0000-7000-8000-000000000001".parse().expect("id")
}

fn exec() -> ExecRequest {
    ExecRequest {
        argv: vec!["true".into()],
        timeout_ms: 1000,
        ..ExecRequest::default()
    }
}

#[tokio::test]
async fn a_problem_document_becomes_a_problem_and_other_refusals_keep_their_status() {
    let (client, served) = server(vec![
        "HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-type: application/problem+json\r\ncontent-length: 124\r\n\r\n{\"type\":\"urn:cynode:error:session_not_found\",\"title\":\"t\",\"status\":404,\"detail\":\"d\",\"code\":\"session_not_found\",\"remedy\":\"r\"}   ",
        "HTTP/1.1 502 Bad Gateway\r\nconnection: close\r\ncontent-length: 4\r\n\r\nnope",
        "HTTP/1.1 302 Found\r\nconnection: close\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    ])
    .await;
    assert!(
        client
            .get_session(id())
            .await
            .expect_err("refused")
            .is(ErrorCode::SessionNotFound)
    );
    assert!(
        matches!(client.get_session(id()).await, Err(Error::Status { status: 502, body, .. }) if body == "nope")
    );
    // A redirect is not followed: it would leak the token.
    assert!(matches!(
        client.get_session(id()).await,
        Err(Error::Status { status: 302, .. })
    ));
    let requests = served.await.expect("served");
    assert!(
        requests.iter().all(|request| request
            .to_lowercase()
            .contains("authorization: bearer secret")),
        "{requests:?}"
    );
}

#[tokio::test]
async fn a_refused_connection_is_unreachable_and_never_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let client = SessionClient::new(
        &format!("http://{}", listener.local_addr().expect("address")),
        "t",
    )
    .expect("client");
    drop(listener);
    let error = client.get_session(id()).await.expect_err("nobody");
    assert!(
        matches!(&error, Error::Unreachable { never_sent: true, url, .. } if url.contains("/v1/worker/sessions/")),
        "{error:?}"
    );
    assert!(error.is_transient());
}

#[tokio::test]
async fn a_connection_that_closes_without_an_answer_may_have_been_sent() {
    let (client, _served) = server(vec![""]).await;
    assert!(matches!(
        client.get_session(id()).await,
        Err(Error::Unreachable {
            never_sent: false,
            ..
        })
    ));
}

#[tokio::test]
async fn events_are_typed_and_a_stream_that_stops_is_broken() {
    let (client, served) = server(vec![
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n\
         id: 0\nevent: start\ndata: {\"seq\":0,\"at\":\"2030-01-01T00:00:00Z\",\"exec_id\":\"01890000-0000-7000-8000-000000000002\"}\n\n\
         : keepalive\n\n\
         id: 1\nevent: stdout\ndata: {\"seq\":1,\"at\":\"2030-01-01T00:00:00Z\",\"data\":\"hi\"}\n\n",
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n\
         id: 1\nevent: stdout\ndata: {\"seq\":1,\"at\":\"2030-01-01T00:00:00Z\",\"data\":\"again\"}\n\n\
         id: 2\nevent: stderr\ndata: {\"seq\":2,\"at\":\"2030-01-01T00:00:00Z\",\"data_b64\":\"/w==\"}\n\n\
         id: 3\nevent: exit\ndata: {\"seq\":3,\"at\":\"2030-01-01T00:00:00Z\",\"exit\":{\"exit_code\":7,\"signal\":null,\"timed_out\":false,\"oom_killed\":false,\"bytes\":{\"stdout\":2,\"stderr\":1},\"duration_ms\":5,\"via\":\"agent\"}}\n\n",
    ])
    .await;
    let mut events = client.exec_stream(id(), &exec()).await.expect("stream");
    let Some(ExecEvent::Start { exec_id, .. }) = events.next().await.expect("start") else {
        panic!("no start")
    };
    assert!(
        matches!(events.next().await, Ok(Some(ExecEvent::Output { seq: 1, stream: Stream::Stdout, data, .. })) if data == "hi")
    );
    assert!(
        matches!(events.next().await, Err(error @ Error::Broken { .. }) if error.is_transient())
    );

    let mut events = client
        .exec_output_stream(id(), exec_id, events.last_seq())
        .await
        .expect("resumed");
    assert!(
        matches!(events.next().await, Ok(Some(ExecEvent::Output { seq: 2, stream: Stream::Stderr, data, .. })) if data == b"\xff"[..]),
        "a repeated chunk was not skipped"
    );
    assert!(
        matches!(events.next().await, Ok(Some(ExecEvent::Exit(exit))) if exit.exit_code == Some(7))
    );
    assert!(matches!(events.next().await, Ok(None)));
    let requests = served.await.expect("served");
    assert!(
        requests[0]
            .to_lowercase()
            .contains("accept: text/event-stream"),
        "{}",
        requests[0]
    );
    assert!(
        requests[1].to_lowercase().contains("last-event-id: 1"),
        "{}",
        requests[1]
    );
}

async fn read(mut body: FileBody) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    while let Some(piece) = body.chunk().await? {
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

#[tokio::test]
async fn files_carry_their_mode_and_a_body_cut_short_is_an_error() {
    let (client, served) = server(vec![
        "HTTP/1.1 200 OK\r\nconnection: close\r\nx-mode: 0750\r\netag: \"sha256:00\"\r\nx-type: file\r\ncontent-length: 2\r\n\r\nhi",
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 100\r\n\r\nhalf",
        "HTTP/1.1 201 Created\r\nconnection: close\r\ncontent-length: 0\r\n\r\n",
    ])
    .await;
    let file = client.get_file(id(), Path::new("a b")).await.expect("file");
    assert_eq!((file.info.mode, file.info.size), (Some(0o750), Some(2)));
    assert_eq!(read(file).await.expect("body"), b"hi");
    let cut = client.get_file(id(), Path::new("x")).await.expect("head");
    assert!(matches!(read(cut).await, Err(Error::Broken { .. })));
    client
        .put_file(
            id(),
            Path::new("x"),
            "data",
            &PutOptions {
                mode: Some(0o644),
                create_new: true,
                ..PutOptions::default()
            },
        )
        .await
        .expect("put");
    let requests = served.await.expect("served");
    assert!(
        requests[0].starts_with(
            "GET /v1/worker/sessions/01890000-0000-7000-8000-000000000001/files?path=a+b "
        ),
        "{}",
        requests[0]
    );
    assert!(
        requests[2].contains("x-mode: 0644")
            && requests[2].contains("if-none-match: *")
            && requests[2].ends_with("data"),
        "{}",
        requests[2]
    );
}

#[tokio::test]
async fn an_unready_worker_gives_its_reason() {
    let (client, _served) = server(vec![
        "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 10\r\n\r\nno podman\n",
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 6\r\n\r\nready\n",
    ])
    .await;
    assert_eq!(
        client.readyz().await.expect("answer"),
        Readiness::NotReady("no podman".into())
    );
    assert_eq!(client.readyz().await.expect("answer"), Readiness::Ready);
}

#[tokio::test]
async fn the_server_at_an_address_is_identified() {
    let problem = r#"{"type":"urn:cynode:error:not_found","title":"t","status":404,"detail":"d","code":"not_found","remedy":"r"}"#;
    for (status, body, expected) in [
        (
            "200 OK",
            r#"{"info":{"title":"CyNode user API"}}"#,
            Peer::Orchestrator,
        ),
        (
            "200 OK",
            r#"{"info":{"title":"CyNode Worker API"}}"#,
            Peer::Worker,
        ),
        ("200 OK", "<html>", Peer::Other),
        ("404 Not Found", problem, Peer::Control),
        ("404 Not Found", "nothing here", Peer::Other),
    ] {
        let answer = format!(
            "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let (client, served) = server(vec![answer.leak()]).await;
        assert_eq!(
            SessionClient::identify(client.base(), Trust::Environment)
                .await
                .expect("an answer"),
            expected,
            "{status} {body}"
        );
        assert!(!served.await.expect("served")[0].contains("secret"));
    }
    // A server that does not speak HTTP, such as PostgreSQL.
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let url = format!("http://{}", listener.local_addr().expect("address"));
    tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.expect("accepted");
        head(&mut socket).await;
    });
    let error = SessionClient::identify(&url, Trust::Environment)
        .await
        .expect_err("no HTTP");
    assert!(
        matches!(
            error,
            Error::Unreachable {
                never_sent: false,
                ..
            }
        ),
        "{error:?}"
    );
}

#[tokio::test]
async fn a_terminal_exchanges_bytes_and_control_messages() {
    use futures_util::{SinkExt, StreamExt};
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let client = SessionClient::new(
        &format!("http://{}", listener.local_addr().expect("address")),
        "t",
    )
    .expect("client");
    let served = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.expect("accepted");
        let request = head(&mut socket).await;
        let key = request
            .lines()
            .find_map(|line| line.strip_prefix("sec-websocket-key: "))
            .expect("key")
            .trim()
            .to_owned();
        let answer = format!(
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-accept: {}\r\n\r\n",
            derive_accept_key(key.as_bytes())
        );
        socket.write_all(answer.as_bytes()).await.expect("written");
        let mut socket =
            tokio_tungstenite::WebSocketStream::from_raw_socket(socket, Role::Server, None).await;
        socket
            .send(Message::text(r#"{"type":"ready"}"#))
            .await
            .expect("sent");
        socket
            .send(Message::text(r#"{"type":"novelty","x":1}"#))
            .await
            .expect("sent");
        let echoed = socket.next().await.expect("input").expect("input");
        socket.send(echoed).await.expect("sent");
        let resize = socket
            .next()
            .await
            .expect("resize")
            .expect("resize")
            .into_text()
            .expect("text");
        socket
            .send(Message::text(
                r#"{"type":"exit","exit_code":3,"signal":null}"#,
            ))
            .await
            .expect("sent");
        (request, resize.to_string())
    });
    let mut pty = client
        .open_pty(
            id(),
            &PtyOpen {
                cols: 80,
                rows: 24,
                argv: vec!["sh".into(), "-c".into(), "a b".into()],
            },
        )
        .await
        .expect("open");
    assert_eq!(pty.next().await.expect("message"), Some(PtyMessage::Ready));
    pty.write(&b"\x03\xff"[..]).await.expect("written");
    assert_eq!(
        pty.next().await.expect("message"),
        Some(PtyMessage::Data(b"\x03\xff"[..].into()))
    );
    pty.resize(100, 40).await.expect("resized");
    assert_eq!(
        pty.next().await.expect("message"),
        Some(PtyMessage::Exit {
            exit_code: Some(3),
            signal: None
        })
    );
    let (request, resize) = served.await.expect("served");
    assert!(
        request.contains("/pty?cols=80&rows=24&argv=sh&argv=-c&argv=a+b "),
        "{request}"
    );
    assert_eq!(resize, r#"{"type":"resize","cols":100,"rows":40}"#);
}

#[tokio::test]
async fn a_refused_terminal_gives_its_reason() {
    let (client, _served) = server(vec![
        "HTTP/1.1 403 Forbidden\r\nconnection: close\r\ncontent-length: 111\r\n\r\n{\"type\":\"urn:x\",\"title\":\"t\",\"status\":403,\"detail\":\"no terminal here\",\"code\":\"pty_not_allowed\",\"remedy\":\"r\"}      ",
    ])
    .await;
    let error = client
        .open_pty(
            id(),
            &PtyOpen {
                cols: 80,
                rows: 24,
                argv: Vec::new(),
            },
        )
        .await
        .expect_err("refused");
    assert!(error.is(ErrorCode::PtyNotAllowed), "{error:?}");
}
