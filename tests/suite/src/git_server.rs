//! A git server over HTTPS: git's own `http-backend` behind a listener with basic authentication
//! and a certificate of the test's authority. The APIs of forges (`forges.rs`) are beside it.
//!
//! It records what every request presents, so that a test can tell where a credential went.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use axum::{
    Router,
    body::{Body, to_bytes},
    extract::{Request, State},
    response::{IntoResponse as _, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use cynode_service::listen::{self, TlsFiles};
use futures_util::StreamExt as _;
use http::{HeaderMap, Method, StatusCode, header};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    process::Command,
    sync::watch,
    task::JoinHandle,
};
use tokio_util::{io::ReaderStream, sync::CancellationToken};

use crate::{
    certificates::Certificates,
    forges::{ApiCall, Forges, PullRequest},
};

/// The largest request: a push of a test.
const MAX_REQUEST_BYTES: usize = 1 << 30;
const CONNECTIONS: usize = 64;

/// How the server answers requests for repositories.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GitBehaviour {
    /// As a git server does.
    #[default]
    Serve,
    /// A redirect to the same path below another base URL.
    Redirect(String),
    /// The response begins, and every piece of it comes this much later.
    Slow(Duration),
    /// A response without an end.
    Endless,
    /// Nothing, ever.
    Silence,
    /// Demands authentication again and again, in the name of another service.
    Demand,
}

/// Requests that the server keeps waiting, so that a test can kill somebody meanwhile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    pub method: Method,
    /// A part of the path, such as `git-receive-pack`.
    pub path: &'static str,
    /// Whether the request takes effect first, so that only its response is missing.
    pub after_effect: bool,
}

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct GitRequest {
    /// The `Host` header.
    pub host: String,
    pub method: Method,
    /// With the query.
    pub path: String,
    /// Every header that may carry a credential, with its value.
    pub credentials: Vec<(String, String)>,
    pub status: u16,
}

#[derive(Debug)]
struct Account {
    username: String,
    password: String,
}

#[derive(Debug)]
struct Script {
    account: Option<Account>,
    behaviour: GitBehaviour,
    requests: Vec<GitRequest>,
    forges: Forges,
}

#[derive(Debug)]
struct Shared {
    root: PathBuf,
    script: Mutex<Script>,
    hold: watch::Sender<Option<Hold>>,
    /// Requests that were kept waiting since the hold began.
    held: AtomicUsize,
}

impl Shared {
    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while requests like this one are held. A client that gives up ends the wait.
    async fn wait(&self, method: &Method, path: &str, after_effect: bool) {
        let is_held = |hold: &Option<Hold>| {
            hold.as_ref().is_some_and(|hold| {
                hold.after_effect == after_effect
                    && hold.method == *method
                    && path.contains(hold.path)
            })
        };
        let mut hold = self.hold.subscribe();
        if is_held(&hold.borrow_and_update()) {
            self.held.fetch_add(1, Ordering::SeqCst);
            // An error means that the server is gone.
            drop(hold.wait_for(|hold| !is_held(hold)).await);
        }
    }
}

/// A running server. Without an account it serves anybody, but takes no push.
#[derive(Debug)]
pub struct GitServer {
    port: u16,
    certificates: Certificates,
    shared: Arc<Shared>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl GitServer {
    /// Starts a server on a free port of the loopback interface, with its files below `directory`.
    pub async fn start(directory: &Path) -> Result<Self> {
        fs_err::create_dir_all(directory)?;
        let certificates = Certificates::create(directory, "DNS:localhost,IP:127.0.0.1")?;
        Self::with_certificates(directory, certificates).await
    }

    /// Starts a server whose certificate has the authority of another one.
    pub async fn beside(&self, directory: &Path) -> Result<Self> {
        fs_err::create_dir_all(directory)?;
        Self::with_certificates(directory, self.certificates.clone()).await
    }

    async fn with_certificates(directory: &Path, certificates: Certificates) -> Result<Self> {
        // Installed once per process; a second call has no effect.
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        let tls = TlsFiles {
            cert: Some(certificates.certificate.clone()),
            key: Some(certificates.key.clone()),
            ..TlsFiles::default()
        };
        let bound = listen::prepare("127.0.0.1:0".parse()?, &tls, false)?
            .bind()
            .await?;
        let port = bound.address.port();
        let shared = Arc::new(Shared {
            root: directory.join("repositories"),
            script: Mutex::new(Script {
                account: None,
                behaviour: GitBehaviour::default(),
                requests: Vec::new(),
                forges: Forges::new(format!("https://localhost:{port}")),
            }),
            hold: watch::Sender::new(None),
            held: AtomicUsize::new(0),
        });
        fs_err::create_dir_all(&shared.root)?;
        let router = Router::new()
            .fallback(answer)
            .with_state(Arc::clone(&shared));
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            drop(listen::serve(bound, router, stopped, CONNECTIONS).await);
        });
        Ok(Self {
            port,
            certificates,
            shared,
            stop,
            task,
        })
    }

    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// `https://localhost:PORT/path`.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("https://localhost:{}/{path}", self.port)
    }

    /// The address with its port, as a repository's registration allows it.
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1/32:{}", self.port)
    }

    /// The certificate authority to trust.
    #[must_use]
    pub fn authority(&self) -> &Path {
        &self.certificates.authority
    }

    /// From now on only this account is served; forges take its password as a token.
    pub fn require(&self, username: &str, password: &str) {
        self.shared.script().account = Some(Account {
            username: username.to_owned(),
            password: password.to_owned(),
        });
    }

    pub fn behave(&self, behaviour: GitBehaviour) {
        self.shared.script().behaviour = behaviour;
    }

    /// Keeps requests waiting until [`Self::release`].
    pub fn hold(&self, hold: Hold) {
        self.shared.held.store(0, Ordering::SeqCst);
        self.shared.hold.send_replace(Some(hold));
    }

    /// Requests that were kept waiting since the hold began.
    #[must_use]
    pub fn held(&self) -> usize {
        self.shared.held.load(Ordering::SeqCst)
    }

    pub fn release(&self) {
        self.shared.hold.send_replace(None);
    }

    /// Every request so far.
    #[must_use]
    pub fn requests(&self) -> Vec<GitRequest> {
        self.shared.script().requests.clone()
    }

    /// The values of every header that may carry a credential, of all requests.
    #[must_use]
    pub fn presented(&self) -> Vec<String> {
        let requests = self.requests();
        let credentials = requests.into_iter().flat_map(|request| request.credentials);
        credentials.map(|(_, value)| value).collect()
    }

    /// The pull requests that were opened.
    #[must_use]
    pub fn pulls(&self) -> Vec<PullRequest> {
        self.shared.script().forges.pulls().to_vec()
    }

    /// Creates `path`, such as `team/shop.git`, with one commit of these files on `main`.
    pub fn create(&self, path: &str, files: &[(&str, &str)]) -> Result<ServedRepository> {
        let repository = ServedRepository {
            directory: self.shared.root.join(path),
        };
        fs_err::create_dir_all(&repository.directory)?;
        repository.git(
            &["init", "--quiet", "--bare", "--initial-branch", "main"],
            b"",
        )?;
        for (key, value) in [
            ("http.receivepack", "true"),
            // One line for each update of a ref: nothing may be pushed twice.
            ("core.logAllRefUpdates", "always"),
        ] {
            repository.git(&["config", key, value], b"")?;
        }
        repository.commit("main", files, "Begin")?;
        Ok(repository)
    }
}

impl Drop for GitServer {
    fn drop(&mut self) {
        self.stop.cancel();
        self.task.abort();
    }
}

/// A bare repository of the server.
#[derive(Clone, Debug)]
pub struct ServedRepository {
    directory: PathBuf,
}

impl ServedRepository {
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Runs git in the repository, without any configuration of this machine.
    pub fn git(&self, arguments: &[&str], input: &[u8]) -> Result<String> {
        use std::{io::Write as _, process};
        let mut child = process::Command::new("git")
            .args(["-c", "user.name=t", "-c", "user.email=t@example.org"])
            .args(arguments)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_DIR", &self.directory)
            .stdin(process::Stdio::piped())
            .stdout(process::Stdio::piped())
            .stderr(process::Stdio::piped())
            .spawn()?;
        child.stdin.take().context("its input")?.write_all(input)?;
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "git {arguments:?}: {output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Commits these files on a branch, beside those that it has. Returns the commit.
    pub fn commit(&self, branch: &str, files: &[(&str, &str)], message: &str) -> Result<String> {
        let name = format!("refs/heads/{branch}");
        let mut stream = format!(
            "commit {name}\ncommitter t <t@example.org> now\ndata {}\n{message}\n",
            message.len()
        );
        if self.tip(branch).is_ok() {
            stream += &format!("from {name}^0\n");
        }
        for (path, content) in files {
            let mode = if path.ends_with(".sh") {
                "100755"
            } else {
                "100644"
            };
            stream += &format!(
                "M {mode} inline {path}\ndata {}\n{content}\n",
                content.len()
            );
        }
        self.git(
            &["fast-import", "--quiet", "--date-format=now", "--force"],
            stream.as_bytes(),
        )?;
        self.tip(branch)
    }

    /// The commit that a branch points to.
    pub fn tip(&self, branch: &str) -> Result<String> {
        self.git(
            &[
                "rev-parse",
                "--verify",
                &format!("refs/heads/{branch}^{{commit}}"),
            ],
            b"",
        )
    }

    /// The branches, sorted.
    pub fn branches(&self) -> Result<Vec<String>> {
        let listed = self.git(
            &["for-each-ref", "--format=%(refname:lstrip=2)", "refs/heads"],
            b"",
        )?;
        Ok(listed.lines().map(str::to_owned).collect())
    }

    /// A file of a commit or branch.
    pub fn file(&self, revision: &str, path: &str) -> Result<String> {
        self.git(&["cat-file", "blob", &format!("{revision}:{path}")], b"")
    }

    /// How often a branch was updated, its creation included.
    pub fn updates(&self, branch: &str) -> Result<usize> {
        let log = self.directory.join("logs/refs/heads").join(branch);
        Ok(fs_err::read_to_string(log)?.lines().count())
    }
}

/// Headers that may carry a credential.
const CREDENTIAL_HEADERS: [&str; 4] = ["authorization", "private-token", "cookie", "x-api-key"];

async fn answer(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let path = parts
        .uri
        .path_and_query()
        .map_or("/", |path| path.as_str())
        .to_owned();
    let record = |status: StatusCode| GitRequest {
        host: text(&parts.headers, "host"),
        method: parts.method.clone(),
        path: path.clone(),
        credentials: CREDENTIAL_HEADERS
            .iter()
            .filter(|name| parts.headers.contains_key(**name))
            .map(|name| ((*name).to_owned(), text(&parts.headers, name)))
            .collect(),
        status: status.as_u16(),
    };
    let Ok(body) = to_bytes(body, MAX_REQUEST_BYTES).await else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    shared.wait(&parts.method, &path, false).await;
    let behaviour = shared.script().behaviour.clone();
    let response = match behaviour {
        GitBehaviour::Silence => {
            shared.script().requests.push(record(StatusCode::OK));
            return std::future::pending().await;
        }
        GitBehaviour::Redirect(base) => {
            let location = format!("{}{path}", base.trim_end_matches('/'));
            (StatusCode::FOUND, [(header::LOCATION, location)]).into_response()
        }
        GitBehaviour::Demand => unauthorized("another service"),
        GitBehaviour::Endless => {
            let piece = Bytes::from(vec![b'0'; 64 * 1024]);
            let pieces =
                futures_util::stream::repeat_with(move || Ok::<_, std::io::Error>(piece.clone()));
            let kind = [(header::CONTENT_TYPE, content_type(&path))];
            (kind, Body::from_stream(pieces)).into_response()
        }
        GitBehaviour::Serve => serve(&shared, &parts, &path, body).await,
        GitBehaviour::Slow(pause) => {
            let (parts, body) = serve(&shared, &parts, &path, body).await.into_parts();
            let pieces = body.into_data_stream().then(move |piece| async move {
                tokio::time::sleep(pause).await;
                piece
            });
            Response::from_parts(parts, Body::from_stream(pieces))
        }
    };
    shared.script().requests.push(record(response.status()));
    shared.wait(&parts.method, &path, true).await;
    response
}

async fn serve(shared: &Shared, parts: &http::request::Parts, path: &str, body: Bytes) -> Response {
    if path.starts_with("/api/") {
        let mut script = shared.script();
        let Script {
            account, forges, ..
        } = &mut *script;
        let token = account.as_ref().map(|account| account.password.as_str());
        let call = ApiCall {
            method: &parts.method,
            path,
            headers: &parts.headers,
            body: &body,
        };
        return forges.answer(&shared.root, token, &call);
    }
    let identity = match &shared.script().account {
        None => String::new(),
        Some(account) => {
            let pair = format!("{}:{}", account.username, account.password);
            let expected = format!("Basic {}", STANDARD.encode(pair));
            if text(&parts.headers, "authorization") != expected {
                return unauthorized("git");
            }
            account.username.clone()
        }
    };
    match backend(shared, parts, &identity, body).await {
        Ok(response) => response,
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}")).into_response(),
    }
}

fn unauthorized(realm: &str) -> Response {
    let demand = format!("Basic realm=\"{realm}\"");
    (
        StatusCode::UNAUTHORIZED,
        [(header::WWW_AUTHENTICATE, demand)],
    )
        .into_response()
}

fn content_type(path: &str) -> &'static str {
    if path.contains("info/refs") {
        "application/x-git-upload-pack-advertisement"
    } else {
        "application/x-git-upload-pack-result"
    }
}

fn text(headers: &HeaderMap, name: &str) -> String {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    value.unwrap_or_default().to_owned()
}

/// Runs `git http-backend`, a CGI program.
async fn backend(
    shared: &Shared,
    parts: &http::request::Parts,
    identity: &str,
    body: Bytes,
) -> Result<Response> {
    let mut command = Command::new("git");
    command
        .arg("http-backend")
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_COMMITTER_NAME", "server")
        .env("GIT_COMMITTER_EMAIL", "server@example.org")
        .env("GIT_PROJECT_ROOT", &shared.root)
        .env("GIT_HTTP_EXPORT_ALL", "1")
        .env("PATH_INFO", parts.uri.path())
        .env("QUERY_STRING", parts.uri.query().unwrap_or_default())
        .env("REQUEST_METHOD", parts.method.as_str())
        .env("CONTENT_LENGTH", body.len().to_string())
        .env("CONTENT_TYPE", text(&parts.headers, "content-type"))
        .env(
            "HTTP_CONTENT_ENCODING",
            text(&parts.headers, "content-encoding"),
        )
        .env("GIT_PROTOCOL", text(&parts.headers, "git-protocol"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    if !identity.is_empty() {
        command.env("REMOTE_USER", identity);
    }
    let mut child = command.spawn().context("starting git http-backend")?;
    let mut input = child.stdin.take().context("its input")?;
    tokio::spawn(async move {
        // It may end without reading everything.
        drop(input.write_all(&body).await);
    });
    let mut output = BufReader::new(child.stdout.take().context("its output")?);
    let mut response = Response::builder();
    let mut status = StatusCode::OK;
    loop {
        let mut line = String::new();
        ensure!(output.read_line(&mut line).await? > 0, "no CGI headers");
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        if name.eq_ignore_ascii_case("status") {
            let code = value.split(' ').next().unwrap_or_default();
            status = code.parse()?;
        } else {
            response = response.header(name, value);
        }
    }
    if parts.uri.path().ends_with("/git-receive-pack") {
        // The push is done, or refused, before its response.
        let mut report = Vec::new();
        output.read_to_end(&mut report).await?;
        child.wait().await?;
        return Ok(response.status(status).body(Body::from(report))?);
    }
    // The process lives as long as its output is read.
    let pieces = ReaderStream::new(output).map(move |piece| {
        let _running = &child;
        piece
    });
    Ok(response.status(status).body(Body::from_stream(pieces))?)
}
