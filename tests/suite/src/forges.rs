//! Doubles of the pull request APIs of GitHub, GitLab and Gitea, in the shape of recorded answers:
//! the fields, codes and refusals that a client meets, and nothing else.

use std::{path::Path, process::Command};

use axum::{
    Json,
    response::{IntoResponse as _, Response},
};
use http::{HeaderMap, Method, StatusCode};
use serde_json::{Value, json};

/// A pull request, or merge request, that a client opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullRequest {
    /// `team/shop`.
    pub repository: String,
    pub number: u64,
    pub head: String,
    /// The commit of the head when it was opened.
    pub commit: String,
    pub base: String,
    pub title: String,
    pub body: String,
    pub draft: bool,
    pub url: String,
}

/// A request to an API.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ApiCall<'a> {
    pub(crate) method: &'a Method,
    /// With the query.
    pub(crate) path: &'a str,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) body: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Api {
    Github,
    Gitlab,
    Gitea,
}

/// The forges of one server. They share their pull requests.
#[derive(Debug)]
pub(crate) struct Forges {
    base: String,
    pulls: Vec<PullRequest>,
}

impl Forges {
    pub(crate) const fn new(base: String) -> Self {
        Self {
            base,
            pulls: Vec::new(),
        }
    }

    pub(crate) fn pulls(&self) -> &[PullRequest] {
        &self.pulls
    }

    /// Answers one call. `token` is the only one that is accepted.
    pub(crate) fn answer(
        &mut self,
        root: &Path,
        token: Option<&str>,
        call: &ApiCall<'_>,
    ) -> Response {
        let (path, query) = call.path.split_once('?').unwrap_or((call.path, ""));
        let Some((api, repository, rest)) = route(path) else {
            return refusal(StatusCode::NOT_FOUND, "404 Not Found");
        };
        if token.is_some_and(|token| !is_authorized(api, call.headers, token)) {
            return refusal(StatusCode::UNAUTHORIZED, "Bad credentials");
        }
        // A GET of the repository itself: its default branch.
        if rest.is_empty() && *call.method == Method::GET {
            return Json(json!({
                "id": 1,
                "name": repository,
                "full_name": repository,
                "path_with_namespace": repository,
                "default_branch": "main",
            }))
            .into_response();
        }
        let collection = match api {
            Api::Gitlab => "merge_requests",
            Api::Github | Api::Gitea => "pulls",
        };
        if rest != collection {
            return refusal(StatusCode::NOT_FOUND, "Not Found");
        }
        match *call.method {
            Method::GET => self.list(api, &repository, query),
            Method::POST => match serde_json::from_slice(call.body) {
                Ok(body) => self.open(api, &repository, root, &body),
                Err(_) => refusal(StatusCode::BAD_REQUEST, "Problems parsing JSON"),
            },
            _ => refusal(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed"),
        }
    }

    fn list(&self, api: Api, repository: &str, query: &str) -> Response {
        let parameter = |name: &str| {
            query
                .split('&')
                .filter_map(|pair| pair.split_once('='))
                .find(|(found, _)| *found == name)
                .map(|(_, value)| decoded(value))
        };
        let head = match api {
            // `owner:branch`.
            Api::Github => parameter("head").map(|head| {
                head.split_once(':')
                    .map_or(head.clone(), |(_, b)| b.to_owned())
            }),
            Api::Gitlab => parameter("source_branch"),
            // Has no such filter.
            Api::Gitea => None,
        };
        if parameter("page").is_some_and(|page| page != "1") {
            return Json(json!([])).into_response();
        }
        let found: Vec<Value> = self
            .pulls
            .iter()
            .filter(|pull| pull.repository == repository)
            .filter(|pull| head.as_ref().is_none_or(|head| pull.head == *head))
            .map(|pull| document(api, pull))
            .collect();
        Json(found).into_response()
    }

    fn open(&mut self, api: Api, repository: &str, root: &Path, body: &Value) -> Response {
        let text = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
        let (head, base, description) = match api {
            Api::Gitlab => ("source_branch", "target_branch", "description"),
            Api::Github | Api::Gitea => ("head", "base", "body"),
        };
        let (head, base) = (text(head), text(base));
        let Some(commit) = commit(&root.join(format!("{repository}.git")), &head) else {
            return match api {
                Api::Github => refusal(StatusCode::UNPROCESSABLE_ENTITY, "Validation Failed"),
                Api::Gitlab | Api::Gitea => refusal(StatusCode::NOT_FOUND, "branch not found"),
            };
        };
        let exists = |pull: &&PullRequest| pull.repository == repository && pull.head == head;
        if let Some(pull) = self.pulls.iter().find(exists) {
            return duplicate(api, pull);
        }
        let number = self.pulls.len() as u64 + 1;
        let page = match api {
            Api::Github => "pull",
            Api::Gitlab => "-/merge_requests",
            Api::Gitea => "pulls",
        };
        let title = text("title");
        let pull = PullRequest {
            repository: repository.to_owned(),
            number,
            head,
            commit,
            base,
            body: text(description),
            // GitLab and Gitea mark drafts in the title.
            draft: body["draft"] == true
                || title.starts_with("Draft:")
                || title.starts_with("WIP:"),
            title,
            url: format!("{}/{repository}/{page}/{number}", self.base),
        };
        let answer = document(api, &pull);
        self.pulls.push(pull);
        (StatusCode::CREATED, Json(answer)).into_response()
    }
}

/// The API, the repository and the rest of the path.
fn route(path: &str) -> Option<(Api, String, String)> {
    if let Some(rest) = path.strip_prefix("/api/v4/projects/") {
        let (project, rest) = rest.split_once('/').unwrap_or((rest, ""));
        return Some((Api::Gitlab, decoded(project), rest.to_owned()));
    }
    let (api, rest) = path
        .strip_prefix("/api/v3/repos/")
        .map(|rest| (Api::Github, rest))
        .or_else(|| {
            path.strip_prefix("/api/v1/repos/")
                .map(|rest| (Api::Gitea, rest))
        })?;
    let mut parts = rest.splitn(3, '/');
    let (owner, name) = (parts.next()?, parts.next()?);
    let rest = parts.next().unwrap_or_default().to_owned();
    Some((api, format!("{owner}/{name}"), rest))
}

fn is_authorized(api: Api, headers: &HeaderMap, token: &str) -> bool {
    let is = |name: &str, expected: String| {
        headers
            .get(name)
            .is_some_and(|value| value.as_bytes() == expected.as_bytes())
    };
    let bearer = is("authorization", format!("Bearer {token}"));
    match api {
        Api::Github => bearer || is("authorization", format!("token {token}")),
        Api::Gitlab => bearer || is("private-token", token.to_owned()),
        Api::Gitea => bearer || is("authorization", format!("token {token}")),
    }
}

fn document(api: Api, pull: &PullRequest) -> Value {
    match api {
        Api::Github => json!({
            "url": format!("{}/api", pull.url),
            "html_url": pull.url,
            "number": pull.number,
            "state": "open",
            "title": pull.title,
            "body": pull.body,
            "draft": pull.draft,
            "head": {
                "label": format!("team:{}", pull.head),
                "ref": pull.head,
                "sha": pull.commit,
                "repo": {"full_name": pull.repository},
            },
            "base": {"ref": pull.base, "repo": {"full_name": pull.repository}},
        }),
        Api::Gitlab => json!({
            "id": 1_000 + pull.number,
            "iid": pull.number,
            "web_url": pull.url,
            "state": "opened",
            "title": pull.title,
            "description": pull.body,
            "draft": pull.draft,
            "source_branch": pull.head,
            "target_branch": pull.base,
            "sha": pull.commit,
            "source_project_id": 1,
            "target_project_id": 1,
        }),
        Api::Gitea => json!({
            "id": 1_000 + pull.number,
            "html_url": pull.url,
            "number": pull.number,
            "state": "open",
            "title": pull.title,
            "body": pull.body,
            "head": {
                "label": pull.head,
                "ref": pull.head,
                "sha": pull.commit,
                "repo": {"full_name": pull.repository},
            },
            "base": {
                "label": pull.base,
                "ref": pull.base,
                "repo": {"full_name": pull.repository},
            },
        }),
    }
}

fn duplicate(api: Api, pull: &PullRequest) -> Response {
    match api {
        Api::Github => {
            let message = format!("A pull request already exists for team:{}.", pull.head);
            let answer = json!({
                "message": "Validation Failed",
                "errors": [{"resource": "PullRequest", "code": "custom", "message": message}],
                "documentation_url": "https://docs.github.com/rest/pulls/pulls",
                "status": "422",
            });
            (StatusCode::UNPROCESSABLE_ENTITY, Json(answer)).into_response()
        }
        Api::Gitlab => {
            let message = format!(
                "Another open merge request already exists for this source branch: !{}",
                pull.number
            );
            (StatusCode::CONFLICT, Json(json!({ "message": [message] }))).into_response()
        }
        Api::Gitea => refusal(
            StatusCode::CONFLICT,
            "pull request already exists for these targets",
        ),
    }
}

fn refusal(status: StatusCode, message: &str) -> Response {
    (status, Json(json!({ "message": message }))).into_response()
}

/// The commit of a branch in a bare repository.
fn commit(repository: &Path, branch: &str) -> Option<String> {
    let output = Command::new("git")
        .arg("--git-dir")
        .arg(repository)
        .args(["rev-parse", "--verify", "--quiet"])
        .arg(format!("refs/heads/{branch}"))
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

/// Decodes `%2F` and the like.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let escaped = (*first == b'%')
            .then(|| tail.get(..2))
            .flatten()
            .and_then(|digits| hex::decode(digits).ok());
        match escaped {
            Some(byte) => {
                bytes.extend(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
