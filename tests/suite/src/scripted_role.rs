//! A scripted git role: the API that orchestrators call, in this process, with faults that a real
//! role can't be made to show on demand. It opens credentials, remembers what it was asked, and
//! keeps its branches in memory.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context as _, Result};
use axum::{
    Json, Router,
    body::Body,
    extract::{Request, State},
    response::{IntoResponse as _, Response},
    routing::{get, post, put},
};
use cynode_api::{
    API_VERSION, Base64Bytes, CredentialId, CredentialPlaintext, EgressInfo, EgressState,
    ErrorCode, GitCommit, GitCommitted, GitPull, GitPulled, GitPush, GitPushed, GitResolved,
    Problem, PromotedFile, PromotionVerdict, SEED_NOTES_HEADER, SeedNotes,
};
use cynode_service::{
    ApiError,
    multipart::{self, Multipart},
    seal::{SealedValue, SealingKey},
};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};

const MAX_BODY: usize = 64 * 1024 * 1024;

/// A fault of one call.
#[derive(Clone, Debug)]
pub enum RoleFault {
    /// The call is refused, with these members of the problem.
    Refuse(ErrorCode, Value),
    /// The call has no effect and no answer until the faults are cleared.
    Hang,
    /// The call takes effect and has no answer until the faults are cleared.
    HangAfter,
    /// A rule refuses the change.
    Deny,
}

#[derive(Debug)]
struct PlannedRoleFault {
    call: String,
    times: usize,
    fault: RoleFault,
}

#[derive(Debug)]
struct Role {
    key: Mutex<SealingKey>,
    token: Mutex<String>,
    instance: uuid::Uuid,
    faults: watch::Sender<Vec<PlannedRoleFault>>,
    requests: Mutex<Vec<(String, Value)>>,
    state: Mutex<Option<EgressState>>,
    /// The commit that every reference of a remote names.
    head: Mutex<String>,
    branches: Mutex<BTreeMap<String, String>>,
    pulls: Mutex<BTreeMap<String, u64>>,
    /// What seeds contain, as a file.
    content: Mutex<Vec<u8>>,
}

#[derive(Debug)]
pub struct ScriptedRole {
    role: Arc<Role>,
    url: String,
    token_file: PathBuf,
    serving: JoinHandle<()>,
}

impl Drop for ScriptedRole {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ScriptedRole {
    /// Starts a role whose token is in a file below `directory`.
    pub async fn start(directory: &Path) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let token = format!("scripted-{}", uuid::Uuid::new_v4());
        let token_file = directory.join("git-role.token");
        fs_err::write(&token_file, &token)?;
        let role = Arc::new(Role {
            key: Mutex::new(SealingKey::generate()?),
            token: Mutex::new(token),
            instance: uuid::Uuid::now_v7(),
            faults: watch::Sender::default(),
            requests: Mutex::default(),
            state: Mutex::default(),
            head: Mutex::new("a".repeat(40)),
            branches: Mutex::default(),
            pulls: Mutex::default(),
            content: Mutex::new(b"kept\n".to_vec()),
        });
        let routes = Router::new()
            .route("/v1/egress", get(info))
            .route("/v1/egress/state", put(put_state))
            .route("/v1/egress/git/resolve", post(resolve))
            .route("/v1/egress/git/seeds", post(seed))
            .route("/v1/egress/git/commits", post(commit))
            .route("/v1/egress/git/pushes", post(push))
            .route("/v1/egress/git/pulls", post(pull))
            .with_state(Arc::clone(&role));
        let serving = tokio::spawn(async move {
            drop(axum::serve(listener, routes).await);
        });
        Ok(Self {
            role,
            url,
            token_file,
            serving,
        })
    }

    /// The settings of an orchestrator that calls this role.
    #[must_use]
    pub fn settings(&self) -> [(&'static str, String); 2] {
        [
            ("egress_git_url", self.url.clone()),
            (
                "egress_git_token_file",
                self.token_file.display().to_string(),
            ),
        ]
    }

    /// Plans a fault for the next calls: `resolve`, `seeds`, `commits`, `pushes`, `pulls`, `state`.
    pub fn plan(&self, call: &str, times: usize, fault: RoleFault) {
        let planned = PlannedRoleFault {
            call: call.to_owned(),
            times,
            fault,
        };
        self.role.faults.send_modify(|faults| faults.push(planned));
    }

    pub fn clear_faults(&self) {
        self.role.faults.send_modify(Vec::clear);
    }

    /// What was asked of one call, oldest first.
    #[must_use]
    pub fn requests(&self, call: &str) -> Vec<Value> {
        lock(&self.role.requests)
            .iter()
            .filter(|(name, _)| name == call)
            .map(|(_, request)| request.clone())
            .collect()
    }

    /// The copy of the rules that arrived last.
    #[must_use]
    pub fn state(&self) -> Option<EgressState> {
        lock(&self.role.state).clone()
    }

    /// Forgets the rules and replaces the token, as a role that was set up anew.
    pub fn restart(&self) -> Result<()> {
        *lock(&self.role.state) = None;
        let token = format!("scripted-{}", uuid::Uuid::new_v4());
        fs_err::write(&self.token_file, &token)?;
        *lock(&self.role.token) = token;
        Ok(())
    }

    /// Opens a credential as it arrived with the rules.
    pub fn open(&self, id: CredentialId) -> Result<CredentialPlaintext> {
        let state = self.state().context("no rules have arrived")?;
        let sealed = state
            .credentials
            .into_iter()
            .find(|credential| credential.id == id)
            .context("the credential did not arrive")?;
        let value = SealedValue {
            encapsulated: sealed.encapsulated.0,
            ciphertext: sealed.ciphertext.0,
        };
        let opened = lock(&self.role.key).open("git", &id.to_string(), &value)?;
        Ok(serde_json::from_slice(&opened)?)
    }

    /// Moves every reference of the remote.
    pub fn set_head(&self, commit: &str) {
        commit.clone_into(&mut lock(&self.role.head));
    }

    /// Replaces the file in seeds.
    pub fn set_content(&self, content: &[u8]) {
        content.clone_into(&mut lock(&self.role.content));
    }

    #[must_use]
    pub fn branches(&self) -> BTreeMap<String, String> {
        lock(&self.role.branches).clone()
    }

    /// The branches with a pull request, and how often one was opened.
    #[must_use]
    pub fn pulls(&self) -> BTreeMap<String, u64> {
        lock(&self.role.pulls).clone()
    }
}

impl Role {
    /// Records a request, and fails as planned. Returns whether the answer is to be withheld.
    async fn begin(&self, call: &str, request: Value) -> Result<Option<RoleFault>, ApiError> {
        lock(&self.requests).push((call.to_owned(), request));
        let mut fault = None;
        self.faults.send_if_modified(|faults| {
            let planned = faults
                .iter_mut()
                .find(|planned| planned.call == call && planned.times > 0);
            if let Some(planned) = planned {
                planned.times -= 1;
                fault = Some(planned.fault.clone());
            }
            false
        });
        match fault {
            Some(RoleFault::Refuse(code, members)) => {
                let mut problem = Problem::new(code, "refused as planned");
                if let Value::Object(members) = members {
                    problem.extensions.extend(members);
                }
                Err(problem.into())
            }
            Some(RoleFault::Hang) => {
                self.hang().await;
                Err(ApiError::new(ErrorCode::ShuttingDown, "it hung"))
            }
            fault => Ok(fault),
        }
    }

    async fn hang(&self) {
        let mut faults = self.faults.subscribe();
        drop(faults.wait_for(Vec::is_empty).await);
    }

    /// Withholds the answer of a call that has taken effect.
    async fn finish<T: serde::Serialize>(
        &self,
        fault: Option<RoleFault>,
        answer: T,
    ) -> Result<Response, ApiError> {
        if matches!(fault, Some(RoleFault::HangAfter)) {
            self.hang().await;
        }
        Ok(Json(answer).into_response())
    }

    fn authenticate(&self, request: &Request) -> Result<(), ApiError> {
        let expected = format!("Bearer {}", *lock(&self.token));
        let offered = request.headers().get(http::header::AUTHORIZATION);
        if offered.is_some_and(|offered| offered.as_bytes() == expected.as_bytes()) {
            Ok(())
        } else {
            Err(ApiError::new(ErrorCode::Unauthorized, "another token"))
        }
    }

    /// A role without rules permits nothing.
    fn check_rules(&self, request: &Value) -> Result<(), ApiError> {
        let state = lock(&self.state);
        let stale = || ApiError::new(ErrorCode::EgressStale, "the rules are too old");
        let state = state.as_ref().ok_or_else(stale)?;
        let known = state
            .repositories
            .iter()
            .any(|repository| json!(repository.id) == request["call"]["repository_id"]);
        if known {
            Ok(())
        } else {
            Err(ApiError::new(
                ErrorCode::RepositoryNotFound,
                "there is no such repository",
            ))
        }
    }
}

type RoleState = State<Arc<Role>>;

async fn json_of(role: &Role, request: Request) -> Result<Value, ApiError> {
    role.authenticate(&request)?;
    let bytes = axum::body::to_bytes(request.into_body(), MAX_BODY)
        .await
        .map_err(|error| ApiError::invalid(error.to_string()))?;
    serde_json::from_slice(&bytes).map_err(|error| ApiError::invalid(error.to_string()))
}

fn parsed<T: serde::de::DeserializeOwned>(request: &Value) -> Result<T, ApiError> {
    serde_json::from_value(request.clone()).map_err(|error| ApiError::invalid(error.to_string()))
}

async fn info(State(role): RoleState, request: Request) -> Result<Json<EgressInfo>, ApiError> {
    role.authenticate(&request)?;
    let key = lock(&role.key);
    Ok(Json(EgressInfo {
        version: API_VERSION,
        role: "git".to_owned(),
        key_id: key.id(),
        public_key: Base64Bytes(key.public().to_vec()),
        instance: role.instance,
    }))
}

async fn put_state(State(role): RoleState, request: Request) -> Result<Response, ApiError> {
    let request = json_of(&role, request).await?;
    let fault = role.begin("state", json!(request["revision"])).await?;
    let state: EgressState = parsed(&request)?;
    {
        let mut known = lock(&role.state);
        if known
            .as_ref()
            .is_some_and(|known| known.revision > state.revision)
        {
            return Err(ApiError::new(
                ErrorCode::StateOutdated,
                "the role has newer rules",
            ));
        }
        *known = Some(state);
    }
    role.finish(fault, json!({})).await
}

async fn resolve(State(role): RoleState, request: Request) -> Result<Response, ApiError> {
    let request = json_of(&role, request).await?;
    let fault = role.begin("resolve", request.clone()).await?;
    role.check_rules(&request)?;
    let reference = request["reference"].as_str().unwrap_or("main").to_owned();
    let commit = lock(&role.head).clone();
    let resolved = GitResolved {
        commit,
        reference: format!("refs/heads/{reference}"),
        default_branch: "main".to_owned(),
    };
    role.finish(fault, resolved).await
}

async fn seed(State(role): RoleState, request: Request) -> Result<Response, ApiError> {
    let request = json_of(&role, request).await?;
    role.begin("seeds", request.clone()).await?;
    role.check_rules(&request)?;
    let broken = |error: std::io::Error| ApiError::new(ErrorCode::Internal, error.to_string());
    let content = lock(&role.content).clone();
    let mut archive = tar::Builder::new(Vec::new());
    for (path, content) in [
        ("README", content.as_slice()),
        (".git/HEAD", b"ref: refs/heads/main\n".as_slice()),
    ] {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        archive
            .append_data(&mut header, path, content)
            .map_err(broken)?;
    }
    let bytes = archive.into_inner().map_err(broken)?;
    let notes = SeedNotes {
        submodules: vec!["vendor/lib".to_owned()],
        submodules_total: 1,
        ..SeedNotes::default()
    };
    let notes = serde_json::to_string(&notes).unwrap_or_default();
    let mut response = Response::new(Body::from(bytes));
    if let Ok(notes) = notes.parse() {
        response.headers_mut().insert(SEED_NOTES_HEADER, notes);
    }
    Ok(response)
}

async fn commit(State(role): RoleState, request: Request) -> Result<Response, ApiError> {
    role.authenticate(&request)?;
    let boundary = multipart::boundary(request.headers())?;
    let boundary = boundary.ok_or_else(|| ApiError::invalid("a form is expected"))?;
    let mut form = Multipart::new(request.into_body(), &boundary);
    let mut parts = BTreeMap::new();
    while let Some(name) = form.next_part().await? {
        let mut bytes = Vec::new();
        while let Some(piece) = form.next_piece().await? {
            bytes.extend_from_slice(&piece);
        }
        parts.insert(name, bytes);
    }
    let request: Value = serde_json::from_slice(&parts["request"])
        .map_err(|error| ApiError::invalid(error.to_string()))?;
    let fault = role.begin("commits", request.clone()).await?;
    role.check_rules(&request)?;
    let GitCommit {
        sha256,
        base,
        message,
        author,
        at,
        call,
        ..
    } = parsed(&request)?;
    if hex::encode(Sha256::digest(&parts["changeset"])) != sha256 {
        return Err(ApiError::new(
            ErrorCode::PreconditionFailed,
            "the changeset is another one",
        ));
    }
    let revision = lock(&role.state)
        .iter()
        .flat_map(|state| &state.repositories)
        .find(|repository| repository.id == call.repository_id)
        .map_or(0, |repository| repository.revision);
    let text = format!("{sha256}{base}{message}{author}{at}");
    let id = hex::encode(Sha256::digest(text.as_bytes()));
    let allowed = !matches!(fault, Some(RoleFault::Deny));
    let committed = GitCommitted {
        commit: id[..40].to_owned(),
        tree: id[24..].to_owned(),
        base,
        files: vec![PromotedFile {
            path: "README".to_owned(),
            operation: "modify".to_owned(),
            mode: "100644".to_owned(),
            size: 5,
            added_lines: 1,
            removed_lines: 1,
        }],
        files_total: 1,
        verdicts: vec![PromotionVerdict {
            rule: "paths".to_owned(),
            allowed,
            path: Some("README".to_owned()),
            reason: "as planned".to_owned(),
        }],
        allowed,
        revision,
    };
    role.finish(fault, committed).await
}

async fn push(State(role): RoleState, request: Request) -> Result<Response, ApiError> {
    let request = json_of(&role, request).await?;
    let fault = role.begin("pushes", request.clone()).await?;
    role.check_rules(&request)?;
    let GitPush { branch, commit, .. } = parsed(&request)?;
    let before = lock(&role.branches).insert(branch.clone(), commit.clone());
    let pushed = GitPushed {
        pushed: before.as_ref() != Some(&commit),
        branch,
        commit,
    };
    role.finish(fault, pushed).await
}

async fn pull(State(role): RoleState, request: Request) -> Result<Response, ApiError> {
    let request = json_of(&role, request).await?;
    let fault = role.begin("pulls", request.clone()).await?;
    role.check_rules(&request)?;
    let GitPull { branch, .. } = parsed(&request)?;
    let created = {
        let mut pulls = lock(&role.pulls);
        let is_new = !pulls.contains_key(&branch);
        if is_new {
            pulls.insert(branch.clone(), 1);
        }
        is_new
    };
    let pulled = GitPulled {
        url: format!("https://forge.example/pulls/{branch}"),
        number: 1,
        created,
    };
    role.finish(fault, pulled).await
}
