//! What a call is about: read from the database by the ids that it names, before anything is decided.

use std::{collections::HashMap, str::FromStr};

use cynode_api::{
    ArtifactId, ErrorCode, GroupId, ImageId, JobId, PreferenceScope, ProjectId, SessionId, TaskId,
    TokenId, TokenKind, UserId, WorkspaceRef,
};
use cynode_policy::{Action, Place, Resource};
use cynode_service::ApiError;
use serde_json::Value;
use uuid::Uuid;

use super::rules::On;
use crate::{
    Orchestrator,
    caller::{Caller, Seen},
    db::{PlacedSession, SessionAt},
};

/// A thing, and whether the caller may know of it.
#[derive(Debug)]
pub(crate) struct About {
    pub(crate) resource: Resource,
    pub(crate) visible: bool,
    pub(crate) session: Option<SessionAt>,
    pub(crate) project_id: Option<ProjectId>,
    pub(crate) task_id: Option<TaskId>,
    pub(crate) session_id: Option<SessionId>,
    pub(crate) job_id: Option<JobId>,
    /// As the record names it, if none of the ids does.
    pub(crate) named: Option<String>,
}

impl About {
    fn everybody(resource: Resource) -> Self {
        Self {
            resource,
            visible: true,
            session: None,
            project_id: None,
            task_id: None,
            session_id: None,
            job_id: None,
            named: None,
        }
    }

    fn placed(caller: &Caller, place: Place, make: impl FnOnce(Place) -> Resource) -> Self {
        Self {
            visible: caller.owns(&place.owners),
            project_id: place.project.map(ProjectId::from_uuid),
            task_id: place.task.map(TaskId::from_uuid),
            ..Self::everybody(make(place))
        }
    }

    fn session(caller: &Caller, id: SessionId, (place, at): PlacedSession) -> Self {
        Self {
            session: Some(at),
            session_id: Some(id),
            ..Self::placed(caller, place, |place| Resource::Session {
                id: *id.as_uuid(),
                place,
            })
        }
    }

    fn artifact(caller: &Caller, id: ArtifactId, place: Place) -> Self {
        Self::placed(caller, place, |place| Resource::Artifact {
            id: id.to_string(),
            place,
        })
        .named(format!("artifact:{id}"))
    }

    fn named(self, name: String) -> Self {
        Self {
            named: Some(name),
            ..self
        }
    }

    /// The refusal of somebody who may not know of it.
    pub(crate) fn missing(&self) -> ApiError {
        match &self.resource {
            Resource::Session { id, .. } => missing(ErrorCode::SessionNotFound, "session", id),
            Resource::Job { id, .. } => missing(ErrorCode::JobNotFound, "job", id),
            Resource::Project { id, .. } => missing(ErrorCode::NotFound, "project", id),
            Resource::Task { id, .. } => missing(ErrorCode::NotFound, "task", id),
            Resource::User { id } => missing(ErrorCode::NotFound, "user", id),
            Resource::Group { id, .. } => missing(ErrorCode::NotFound, "group", id),
            Resource::Token { id, .. } => missing(ErrorCode::NotFound, "token", id),
            // One that is named by its task and path is not there because its task is not.
            Resource::Artifact { id, place } if id.contains('/') => {
                missing(ErrorCode::NotFound, "task", place.task.unwrap_or_default())
            }
            Resource::Artifact { id, .. } => missing(ErrorCode::NotFound, "artifact", id),
            Resource::Preference { .. } => {
                ApiError::new(ErrorCode::NotFound, "there is no such scope")
            }
            _ => ApiError::new(ErrorCode::NotFound, "there is no such thing"),
        }
    }
}

fn missing(code: ErrorCode, what: &str, id: impl std::fmt::Display) -> ApiError {
    ApiError::new(code, format!("there is no {what} {id}"))
}

/// Whether an export answers with its bytes; otherwise they are kept as an artifact.
pub(crate) fn wants_bytes(headers: &http::HeaderMap) -> bool {
    let accept = headers
        .get(http::header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .unwrap_or_default();
    [
        "application/octet-stream",
        "application/x-tar",
        "text/x-diff",
    ]
    .contains(&accept)
}

/// What a call names.
#[derive(Debug)]
pub(crate) struct Named<'a> {
    pub(crate) path: &'a HashMap<String, String>,
    pub(crate) query: &'a [(String, String)],
    pub(crate) body: &'a Value,
    /// What was read of its session already.
    pub(crate) seen: Option<Seen>,
}

impl Named<'_> {
    fn text(&self, name: &str) -> &str {
        self.path.get(name).map(String::as_str).unwrap_or_default()
    }

    /// An id in the path; one that is not a UUID names nothing.
    fn id<T: FromStr>(&self, name: &str, code: ErrorCode) -> Result<T, ApiError> {
        let text = self.text(name);
        text.parse().map_err(|_| {
            ApiError::new(
                code,
                format!(
                    "'{}' is not an id",
                    text.chars().take(100).collect::<String>()
                ),
            )
        })
    }

    /// A parameter that is there once. A query that says it twice is refused by whoever reads it.
    fn queried(&self, name: &str) -> Option<&str> {
        let mut found = self
            .query
            .iter()
            .filter(|(known, _)| known == name)
            .map(|(_, value)| value.as_str());
        found.next().filter(|_| found.next().is_none())
    }

    /// An id in the body. One that can't be read is refused by whoever reads the body.
    fn in_body<T: FromStr>(&self, name: &str) -> Option<T> {
        self.body.get(name)?.as_str()?.parse().ok()
    }
}

impl Orchestrator {
    pub(crate) async fn about(
        &self,
        on: On,
        caller: &Caller,
        named: &Named<'_>,
    ) -> Result<About, ApiError> {
        match on {
            On::System => Ok(About::everybody(Resource::System)),
            On::Project => {
                self.about_project(caller, named.id("id", ErrorCode::NotFound)?)
                    .await
            }
            On::Task => {
                self.about_task(
                    caller,
                    named.id(
                        if named.path.contains_key("task_id") {
                            "task_id"
                        } else {
                            "id"
                        },
                        ErrorCode::NotFound,
                    )?,
                )
                .await
            }
            On::QueriedTask => match named.queried("task_id").and_then(|id| id.parse().ok()) {
                Some(id) => self.about_task(caller, id).await,
                None => Ok(About::everybody(Resource::System)),
            },
            On::Session => {
                let id = named.id("id", ErrorCode::SessionNotFound)?;
                match named.seen.clone().and_then(|seen| seen.of(id)) {
                    Some(placed) => Ok(About::session(caller, id, placed)),
                    None => self.about_session(caller, id).await,
                }
            }
            On::Job => {
                self.about_job(caller, named.id("id", ErrorCode::NotFound)?)
                    .await
            }
            On::Artifact => {
                let id: ArtifactId = named.id("id", ErrorCode::NotFound)?;
                let place = self
                    .db
                    .artifact_place(id)
                    .await?
                    .ok_or_else(|| missing(ErrorCode::NotFound, "artifact", id))?;
                Ok(About::artifact(caller, id, place))
            }
            On::TaskArtifact => {
                let id: TaskId = named.id("task_id", ErrorCode::NotFound)?;
                let place = self
                    .db
                    .task_place(id)
                    .await?
                    .ok_or_else(|| missing(ErrorCode::NotFound, "task", id))?;
                let path = named.text("path");
                let place = Place {
                    task: Some(*id.as_uuid()),
                    ..place
                };
                Ok(About::placed(caller, place, |place| Resource::Artifact {
                    id: format!("{id}/{path}"),
                    place,
                })
                .named(format!("artifact:{id}/{path}")))
            }
            On::User => {
                let id: UserId = named.id("id", ErrorCode::NotFound)?;
                let visible = caller.owns(&[*id.as_uuid()]);
                Ok(About {
                    visible,
                    ..About::everybody(Resource::User { id: *id.as_uuid() })
                }
                .named(format!("user:{id}")))
            }
            On::Group => {
                let id: GroupId = named.id("id", ErrorCode::NotFound)?;
                let members = self
                    .db
                    .group_members(id)
                    .await?
                    .ok_or_else(|| missing(ErrorCode::NotFound, "group", id))?;
                let visible = caller.owns(&members);
                Ok(About {
                    visible,
                    ..About::everybody(Resource::Group {
                        id: *id.as_uuid(),
                        members,
                    })
                }
                .named(format!("group:{id}")))
            }
            On::Token => {
                let id: TokenId = named.id("id", ErrorCode::NotFound)?;
                let (user, kind) = self
                    .db
                    .token_owner(id)
                    .await?
                    .ok_or_else(|| missing(ErrorCode::NotFound, "token", id))?;
                let visible = caller.owns(&[user]);
                Ok(About {
                    visible,
                    ..About::everybody(Resource::Token {
                        id: id.to_string(),
                        user,
                        kind,
                    })
                }
                .named(format!("token:{id}")))
            }
            On::Image => {
                let id: ImageId = named.id("id", ErrorCode::NotFound)?;
                let (reference, agent_compatible, pinned) = self
                    .db
                    .image_place(id)
                    .await?
                    .unwrap_or_else(|| (id.to_string(), false, false));
                let name = format!("image:{reference}");
                Ok(About::everybody(Resource::Image {
                    reference,
                    agent_compatible,
                    pinned,
                })
                .named(name))
            }
            On::Node => Ok(About::everybody(Resource::Node {
                id: named.text("id").to_owned(),
            })
            .named(format!("node:{}", named.text("id")))),
            On::Setting => Ok(About::everybody(Resource::Setting {
                key: named.text("key").to_owned(),
            })
            .named(format!("setting:{}", named.text("key")))),
            On::Policy => Ok(About::everybody(Resource::Policy {
                id: named.text("id").to_owned(),
            })
            .named(format!("policy:{}", named.text("id")))),
            On::Preference => self.about_preference(caller, named).await,
            On::NewTask => match named.in_body("project_id") {
                Some(id) => self.about_project(caller, id).await,
                None => Ok(About::everybody(Resource::System)),
            },
            On::NewWork => {
                let mut about = match named.in_body("task_id") {
                    Some(id) => self.about_task(caller, id).await?,
                    None => About::everybody(Resource::System),
                };
                about.session_id = named.in_body("session_id");
                about.job_id = named.in_body("job_id");
                Ok(about)
            }
            On::NewToken => match (
                named.in_body("project_id"),
                named.body["task_ids"][0]
                    .as_str()
                    .and_then(|id| id.parse().ok()),
            ) {
                (Some(id), _) => self.about_project(caller, id).await,
                (None, Some(id)) => self.about_task(caller, id).await,
                (None, None) => Ok(About::everybody(Resource::System)),
            },
        }
    }

    pub(crate) async fn about_project(
        &self,
        caller: &Caller,
        id: ProjectId,
    ) -> Result<About, ApiError> {
        let place = self
            .db
            .project_place(id)
            .await?
            .ok_or_else(|| missing(ErrorCode::NotFound, "project", id))?;
        Ok(About {
            project_id: Some(id),
            ..About::placed(caller, place, |place| Resource::Project {
                id: *id.as_uuid(),
                place,
            })
        })
    }

    pub(crate) async fn about_task(&self, caller: &Caller, id: TaskId) -> Result<About, ApiError> {
        let place = self
            .db
            .task_place(id)
            .await?
            .ok_or_else(|| missing(ErrorCode::NotFound, "task", id))?;
        Ok(About {
            task_id: Some(id),
            ..About::placed(caller, place, |place| Resource::Task {
                id: *id.as_uuid(),
                place,
            })
        })
    }

    pub(crate) async fn about_session(
        &self,
        caller: &Caller,
        id: SessionId,
    ) -> Result<About, ApiError> {
        let placed = self
            .db
            .session_place(id)
            .await?
            .ok_or_else(|| missing(ErrorCode::SessionNotFound, "session", id))?;
        Ok(About::session(caller, id, placed))
    }

    pub(crate) async fn about_job(&self, caller: &Caller, id: JobId) -> Result<About, ApiError> {
        let place = self
            .db
            .job_place(id)
            .await?
            .ok_or_else(|| missing(ErrorCode::JobNotFound, "job", id))?;
        Ok(About {
            job_id: Some(id),
            ..About::placed(caller, place, |place| Resource::Job {
                id: *id.as_uuid(),
                place,
            })
        })
    }

    /// What a call does besides its own action: a workspace that begins with an artifact reads it, and an export that is kept writes one. Without
    /// these, a rule about artifacts would be passed by way of a sandbox.
    pub(crate) async fn implied(
        &self,
        action: Action,
        caller: &Caller,
        about: &About,
        headers: &http::HeaderMap,
        body: &Value,
    ) -> Result<Vec<(Action, About)>, ApiError> {
        match action {
            Action::SessionCreate | Action::JobCreate => {
                match body["workspace_ref"].as_str().map(str::parse) {
                    Some(Ok(WorkspaceRef::Artifact(id))) => {
                        // One that is gone can't be read; a repeated request that it began with is still the same request.
                        let Some(place) = self.db.artifact_place(id).await? else {
                            return Ok(Vec::new());
                        };
                        let mut artifact = About::artifact(caller, id, place);
                        // Whoever may work in a task may know of what is in it. An agent knows of nothing else, whatever its user has.
                        let in_task = about.visible
                            && about.task_id.is_some()
                            && artifact.task_id == about.task_id;
                        artifact.visible =
                            in_task || (artifact.visible && caller.kind == TokenKind::User);
                        Ok(vec![(Action::ArtifactGet, artifact)])
                    }
                    _ => Ok(Vec::new()),
                }
            }
            Action::SessionExport if !wants_bytes(headers) => match about.task_id {
                Some(id) => {
                    let task = self.about_task(caller, id).await?;
                    Ok(vec![(
                        Action::ArtifactPut,
                        About {
                            visible: about.visible || task.visible,
                            ..task
                        },
                    )])
                }
                None => Ok(Vec::new()),
            },
            _ => Ok(Vec::new()),
        }
    }

    async fn about_preference(
        &self,
        caller: &Caller,
        named: &Named<'_>,
    ) -> Result<About, ApiError> {
        let none = || ApiError::new(ErrorCode::NotFound, "there is no such scope");
        let scope: PreferenceScope = named.text("scope").parse().map_err(|_| none())?;
        let id: Uuid = if scope == PreferenceScope::System {
            Uuid::nil()
        } else {
            named.text("scope_id").parse().map_err(|_| none())?
        };
        let place = match scope {
            PreferenceScope::Task => {
                self.db
                    .task_place(TaskId::from_uuid(id))
                    .await?
                    .map(|place| Place {
                        task: Some(id),
                        ..place
                    })
            }
            PreferenceScope::Project => {
                self.db
                    .project_place(ProjectId::from_uuid(id))
                    .await?
                    .map(|place| Place {
                        project: Some(id),
                        ..place
                    })
            }
            PreferenceScope::User => Some(Place {
                owners: vec![id],
                ..Place::default()
            }),
            // Members may look; only administrators change it.
            PreferenceScope::Group => {
                self.db
                    .group_members(GroupId::from_uuid(id))
                    .await?
                    .map(|owners| Place {
                        owners,
                        ..Place::default()
                    })
            }
            PreferenceScope::System => Some(Place::default()),
        };
        let place = place.ok_or_else(none)?;
        let (scope_name, key) = (scope.as_str().to_owned(), named.text("key").to_owned());
        let name = format!("preference:{scope_name}/{id}/{key}");
        let about = About::placed(caller, place, |place| Resource::Preference {
            scope: scope_name,
            key,
            place,
        });
        Ok(About {
            visible: about.visible || scope == PreferenceScope::System,
            ..about
        }
        .named(name))
    }
}
