//! Commands in a session: start, follow, write to and signal them.

use std::{io, time::Duration};

use bytes::Bytes;
use cynode_api::{
    API_VERSION, Exec, ExecAccepted, ExecId, ExecRequest, ExecResult, OutputPage, OutputQuery,
    Page, SessionId, SignalExec, SignalName, SignalScope, StdinWrite, exec_form,
};
use futures_util::{Stream, StreamExt as _, stream};
use http::{Method, header};
use reqwest::{Body, RequestBuilder};

use crate::{
    Error, ExecEvents, Result, SessionClient,
    client::{CALL_TIMEOUT, MAX_PAGES, check_status, json, send},
};

pub(crate) const EVENT_STREAM: &str = "text/event-stream";

impl SessionClient {
    /// Runs a command and waits for it to end.
    pub async fn exec(&self, session: SessionId, request: &ExecRequest) -> Result<ExecResult> {
        // The server enforces the deadline; this timeout only detects a dead connection.
        let timeout = Duration::from_millis(request.timeout_ms) + CALL_TIMEOUT;
        json(
            send(
                self.request(Method::POST, &self.session(session, "/exec"))
                    .timeout(timeout)
                    .json(request),
            )
            .await?,
        )
        .await
    }

    /// Starts a command that outlives the call. `request.background` must be set.
    pub async fn exec_background(
        &self,
        session: SessionId,
        request: &ExecRequest,
    ) -> Result<ExecAccepted> {
        self.call(Method::POST, &self.session(session, "/exec"), request)
            .await
    }

    /// Runs a command and streams its output. Repeating a request with an `exec_id` re-attaches to
    /// the command.
    pub async fn exec_stream(
        &self,
        session: SessionId,
        request: &ExecRequest,
    ) -> Result<ExecEvents> {
        let request = self
            .request(Method::POST, &self.session(session, "/exec"))
            .header(header::ACCEPT, EVENT_STREAM)
            .json(request);
        Ok(ExecEvents::new(
            check_status(send(request).await?).await?,
            0,
        ))
    }

    /// Runs a command with standard input, at most 100 MiB, and waits for it to end.
    pub async fn exec_with_input(
        &self,
        session: SessionId,
        request: &ExecRequest,
        input: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    ) -> Result<ExecResult> {
        json(send(self.exec_form(session, request, input)).await?).await
    }

    /// Runs a command with standard input, at most 100 MiB, and streams its output.
    pub async fn exec_stream_with_input(
        &self,
        session: SessionId,
        request: &ExecRequest,
        input: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    ) -> Result<ExecEvents> {
        let request = self
            .exec_form(session, request, input)
            .header(header::ACCEPT, EVENT_STREAM);
        Ok(ExecEvents::new(
            check_status(send(request).await?).await?,
            0,
        ))
    }

    fn exec_form(
        &self,
        session: SessionId,
        request: &ExecRequest,
        input: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    ) -> RequestBuilder {
        let boundary = format!("cynode-{}", ExecId::generate());
        let (head, tail) = exec_form(&boundary, &serde_json::to_vec(request).unwrap_or_default());
        let ends = |bytes: Vec<u8>| stream::iter([Ok::<_, io::Error>(Bytes::from(bytes))]);
        self.request(Method::POST, &self.session(session, "/exec"))
            .header(
                header::CONTENT_TYPE,
                format!("multipart/form-data; boundary={boundary}"),
            )
            .body(Body::wrap_stream(ends(head).chain(input).chain(ends(tail))))
    }

    /// The newest exec.
    pub async fn newest_exec(&self, session: SessionId) -> Result<Option<Exec>> {
        Ok(self.all_execs(session).await?.pop())
    }

    /// Running and recent execs, oldest first.
    pub async fn all_execs(&self, session: SessionId) -> Result<Vec<Exec>> {
        let path = self.session(session, "/execs");
        let mut execs = Vec::new();
        let mut query = Vec::new();
        for _ in 0..MAX_PAGES {
            let page: Page<Exec> = self.get(&path, &query).await?;
            execs.extend(page.items);
            let Some(cursor) = page.next_cursor else {
                return Ok(execs);
            };
            query = vec![("cursor", cursor)];
        }
        Err(Error::answer(
            self.base(),
            format!("the list has more than {MAX_PAGES} pages"),
        ))
    }

    /// Running and recent execs: the first page only.
    pub async fn list_execs(&self, session: SessionId) -> Result<Page<Exec>> {
        self.get(&self.session(session, "/execs"), &()).await
    }

    pub async fn get_exec(&self, session: SessionId, exec: ExecId) -> Result<Exec> {
        self.get(&self.session(session, &format!("/execs/{exec}")), &())
            .await
    }

    pub async fn exec_output(
        &self,
        session: SessionId,
        exec: ExecId,
        query: &OutputQuery,
    ) -> Result<OutputPage> {
        self.get(
            &self.session(session, &format!("/execs/{exec}/output")),
            query,
        )
        .await
    }

    /// Streams the output of a command after `last_seq`; 0 is the start.
    pub async fn exec_output_stream(
        &self,
        session: SessionId,
        exec: ExecId,
        last_seq: u64,
    ) -> Result<ExecEvents> {
        let request = self
            .request(
                Method::GET,
                &self.session(session, &format!("/execs/{exec}/output")),
            )
            .header(header::ACCEPT, EVENT_STREAM)
            .header("Last-Event-ID", last_seq.to_string());
        Ok(ExecEvents::new(
            check_status(send(request).await?).await?,
            last_seq,
        ))
    }

    pub async fn signal_exec(
        &self,
        session: SessionId,
        exec: ExecId,
        signal: SignalName,
        scope: SignalScope,
    ) -> Result<()> {
        let body = SignalExec {
            version: Some(API_VERSION),
            signal,
            scope,
        };
        self.call_empty(
            Method::POST,
            &self.session(session, &format!("/execs/{exec}/signal")),
            &body,
        )
        .await
    }

    /// Writes to a command that was started with `stdin_open`. Returns once the sandbox has
    /// accepted the data. A slow reader can delay that, so there is no timeout.
    pub async fn write_stdin(
        &self,
        session: SessionId,
        exec: ExecId,
        data: Vec<u8>,
        eof: bool,
    ) -> Result<()> {
        let data_b64 = (!data.is_empty()).then_some(cynode_api::Base64Bytes(data));
        let body = StdinWrite {
            version: Some(API_VERSION),
            data_b64,
            eof,
        };
        let request = self
            .request(
                Method::POST,
                &self.session(session, &format!("/execs/{exec}/stdin")),
            )
            .json(&body);
        check_status(send(request).await?).await.map(drop)
    }
}
