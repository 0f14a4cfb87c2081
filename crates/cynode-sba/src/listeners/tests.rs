use tokio::{io::AsyncReadExt as _, net::UnixListener};

use super::*;

/// A client, and the worker's end of its connection.
async fn pair() -> (TcpStream, UnixStream, tokio::task::JoinHandle<()>) {
    let listening = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .expect("bound");
    let address = listening.local_addr().expect("an address");
    let (client, accepted) = tokio::join!(TcpStream::connect(address), listening.accept());
    let (ours, worker) = UnixStream::pair().expect("a pair");
    let forwarding = tokio::spawn(forward(accepted.expect("accepted").0, ours));
    (client.expect("connected"), worker, forwarding)
}

async fn rest(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.expect("read");
    bytes
}

#[tokio::test]
async fn a_client_that_has_sent_everything_still_gets_the_answer() {
    let (mut client, mut worker, forwarding) = pair().await;
    client.write_all(b"question").await.expect("sent");
    client.shutdown().await.expect("closed");
    assert_eq!(rest(&mut worker).await, b"question");
    worker.write_all(b"answer").await.expect("sent");
    drop(worker);
    assert_eq!(rest(&mut client).await, b"answer");
    forwarding.await.expect("it ends");
}

#[tokio::test]
async fn an_answer_that_the_worker_ends_reaches_a_client_that_is_still_sending() {
    let (mut client, mut worker, forwarding) = pair().await;
    worker.write_all(b"refused").await.expect("sent");
    drop(worker);
    assert_eq!(rest(&mut client).await, b"refused");
    // The client does not close its end; the connection ends all the same.
    tokio::time::timeout(10 * LINGER, forwarding)
        .await
        .expect("in time")
        .expect("it ends");
}

#[tokio::test]
async fn a_connection_waits_for_a_worker_that_restarts() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("proxy.sock");
    let connecting = tokio::spawn({
        let socket = socket.clone();
        async move { connect(Listener::Proxy, &socket).await }
    });
    tokio::task::yield_now().await;
    let listening = UnixListener::bind(&socket).expect("bound");
    let (mut accepted, _) = listening.accept().await.expect("accepted");
    let mut preamble = [0; cynode_sba_proto::proxy::PREAMBLE_BYTES];
    accepted.read_exact(&mut preamble).await.expect("read");
    assert_eq!(Listener::parse(&preamble), Ok(Listener::Proxy));
    connecting.await.expect("connected");
}

#[tokio::test]
async fn a_port_that_is_taken_is_retried_until_it_is_free() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .expect("bound");
    let address = taken.local_addr().expect("an address");
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("proxy.sock");
    let worker = UnixListener::bind(&socket).expect("bound");
    let local = tokio::task::LocalSet::new();
    let permits = Arc::new(Semaphore::new(1));
    local.spawn_local(async move {
        let first = std::net::TcpListener::bind(address);
        assert!(first.is_err());
        let accepting = retry(address, first).await.expect("an address");
        accept(Listener::Callback, accepting, socket.into(), permits).await;
    });
    local
        .run_until(async move {
            tokio::task::yield_now().await;
            drop(taken);
            let client = async {
                loop {
                    if let Ok(client) = TcpStream::connect(address).await {
                        break client;
                    }
                    tokio::time::sleep(FIRST_RETRY_DELAY).await;
                }
            };
            let (_client, accepted) = tokio::join!(client, worker.accept());
            accepted.expect("forwarded");
        })
        .await;
}
