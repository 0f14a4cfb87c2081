//! The target of a call: resolved from the ids that the call names before it is authorized.

use std::str::FromStr;

use cynode_api::{
    ArtifactId, CredentialId, ErrorCode, GroupId, ImageId, JobId, PreferenceScope, ProjectId,
    PromotionId, RepositoryId, SessionId, TaskId, TokenId, TokenKind, UserId, WorkspaceRef,
};
use cynode_policy::{Action, Place, Resource};
use cynode_service::ApiError;
use serde_json::Value;
use uuid::Uuid;

use super::{address::Address, routes::TargetKind, submitted_jobs::SubmittedJob};
use crate::{
    Orchestrator,
    caller::Caller,
    db::{PlacedSession, SessionAt, is_visible},
    identity::SessionSnapshot,
};

/// What a call acts on, and whether the caller may know that it exists.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) resource: Resource,
    pub(crate) visible: bool,
    pub(crate) session: Option<SessionAt>,
    pub(crate) project_id: Option<ProjectId>,
    pub(crate) task_id: Option<TaskId>,
    pub(crate) session_id: Option<SessionId>,
    pub(crate) job_id: Option<JobId>,
    /// The name in audit records, for targets without one of the ids above.
    pub(crate) name: Option<String>,
}

impl Target {
    fn public(resource: Resource) -> Self {
        Self {
            resource,
            visible: true,
            session: None,
            project_id: None,
            task_id: None,
            session_id: None,
            job_id: None,
            name: None,
        }
    }

    fn placed(caller: &Caller, place: Place, make: impl FnOnce(Place) -> Resource) -> Self {
        Self {
            visible: caller.owns(&place.owners),
            project_id: place.project.map(ProjectId::from_uuid),
            task_id: place.task.map(TaskId::from_uuid),
            ..Self::public(make(place))
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
            name: Some(name),
            ..self
        }
    }

    /// The error, or that the target does not exist if the caller may not know of it.
    pub(crate) fn error_or_missing(&self, error: ApiError) -> ApiError {
        if self.visible { error } else { self.missing() }
    }

    /// The error for callers who may not know that the target exists.
    pub(crate) fn missing(&self) -> ApiError {
        match &self.resource {
            Resource::Session { id, .. } => missing(ErrorCode::SessionNotFound, "session", id),
            Resource::Job { id, .. } => missing(ErrorCode::JobNotFound, "job", id),
            Resource::Project { id, .. } => missing(ErrorCode::NotFound, "project", id),
            Resource::Task { id, .. } => missing(ErrorCode::NotFound, "task", id),
            Resource::User { id } => missing(ErrorCode::NotFound, "user", id),
            Resource::Group { id, .. } => missing(ErrorCode::NotFound, "group", id),
            Resource::Token { id, .. } => missing(ErrorCode::NotFound, "token", id),
            // An artifact addressed by task and path is missing because its task is.
            Resource::Artifact { id, place } if id.contains('/') => {
                missing(ErrorCode::NotFound, "task", place.task.unwrap_or_default())
            }
            Resource::Artifact { id, .. } => missing(ErrorCode::NotFound, "artifact", id),
            Resource::Credential { id, .. } if !id.is_nil() => {
                missing(ErrorCode::NotFound, "credential", id)
            }
            Resource::Repository { id, .. } if !id.is_nil() => {
                missing(ErrorCode::NotFound, "repository", id)
            }
            Resource::Credential { project, .. } | Resource::Repository { project, .. } => {
                missing(ErrorCode::NotFound, "project", project)
            }
            Resource::Promotion { id, .. } => missing(ErrorCode::NotFound, "promotion", id),
            Resource::Preference { .. } => {
                ApiError::new(ErrorCode::NotFound, "there is no such scope")
            }
            _ => ApiError::new(ErrorCode::NotFound, "not found"),
        }
    }
}

fn missing(code: ErrorCode, kind: &str, id: impl std::fmt::Display) -> ApiError {
    ApiError::new(code, format!("there is no {kind} {id}"))
}

/// Whether an export answers with its bytes rather than storing them as an artifact.
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

/// The parts of a call that name its target.
#[derive(Debug)]
pub(crate) struct TargetNames<'a> {
    pub(crate) address: &'a Address,
    pub(crate) body: &'a Value,
    /// The session, if it was read together with the token.
    pub(crate) snapshot: Option<SessionSnapshot>,
}

impl TargetNames<'_> {
    fn text(&self, name: &str) -> &str {
        let path = &self.address.path;
        path.get(name).map(String::as_str).unwrap_or_default()
    }

    /// An id in the path. Text that is not a UUID names nothing.
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

    /// A query parameter that occurs once. The handler refuses repeated ones.
    fn queried(&self, name: &str) -> Option<&str> {
        let mut values = self
            .address
            .query
            .iter()
            .filter(|(parameter, _)| parameter == name)
            .map(|(_, value)| value.as_str());
        values.next().filter(|_| values.next().is_none())
    }

    /// An id in the body. The handler refuses malformed ones.
    fn in_body<T: FromStr>(&self, name: &str) -> Option<T> {
        self.body.get(name)?.as_str()?.parse().ok()
    }
}

impl Orchestrator {
    pub(crate) async fn target(
        &self,
        kind: TargetKind,
        caller: &Caller,
        names: &TargetNames<'_>,
    ) -> Result<Target, ApiError> {
        match kind {
            TargetKind::System => Ok(Target::public(Resource::System)),
            TargetKind::Project => {
                self.project_target(caller, names.id("id", ErrorCode::NotFound)?)
                    .await
            }
            TargetKind::Task => {
                self.task_target(
                    caller,
                    names.id(
                        if names.address.path.contains_key("task_id") {
                            "task_id"
                        } else {
                            "id"
                        },
                        ErrorCode::NotFound,
                    )?,
                )
                .await
            }
            TargetKind::QueriedTask => {
                match names.queried("task_id").and_then(|id| id.parse().ok()) {
                    Some(id) => self.task_target(caller, id).await,
                    None => Ok(Target::public(Resource::System)),
                }
            }
            TargetKind::Session => {
                let id = names.id("id", ErrorCode::SessionNotFound)?;
                match names
                    .snapshot
                    .clone()
                    .and_then(|snapshot| snapshot.if_fresh(id))
                {
                    Some(placed) => Ok(Target::session(caller, id, placed)),
                    None => self.session_target(caller, id).await,
                }
            }
            TargetKind::Job => {
                self.job_target(caller, names.id("id", ErrorCode::NotFound)?)
                    .await
            }
            TargetKind::Artifact => {
                let id: ArtifactId = names.id("id", ErrorCode::NotFound)?;
                let place = self
                    .db
                    .artifact_place(id)
                    .await?
                    .ok_or_else(|| missing(ErrorCode::NotFound, "artifact", id))?;
                Ok(Target::artifact(caller, id, place))
            }
            TargetKind::TaskArtifact => {
                let id: TaskId = names.id("task_id", ErrorCode::NotFound)?;
                let place = self
                    .db
                    .task_place(id)
                    .await?
                    .ok_or_else(|| missing(ErrorCode::NotFound, "task", id))?;
                let path = names.text("path");
                let place = Place {
                    task: Some(*id.as_uuid()),
                    ..place
                };
                Ok(Target::placed(caller, place, |place| Resource::Artifact {
                    id: format!("{id}/{path}"),
                    place,
                })
                .named(format!("artifact:{id}/{path}")))
            }
            TargetKind::User => {
                let id: UserId = names.id("id", ErrorCode::NotFound)?;
                let visible = caller.owns(&[*id.as_uuid()]);
                Ok(Target {
                    visible,
                    ..Target::public(Resource::User { id: *id.as_uuid() })
                }
                .named(format!("user:{id}")))
            }
            TargetKind::Group => {
                let id: GroupId = names.id("id", ErrorCode::NotFound)?;
                let members = self
                    .db
                    .group_members(id)
                    .await?
                    .ok_or_else(|| missing(ErrorCode::NotFound, "group", id))?;
                let visible = caller.owns(&members);
                Ok(Target {
                    visible,
                    ..Target::public(Resource::Group {
                        id: *id.as_uuid(),
                        members,
                    })
                }
                .named(format!("group:{id}")))
            }
            TargetKind::Token => {
                let id: TokenId = names.id("id", ErrorCode::NotFound)?;
                let (user, kind) = self
                    .db
                    .token_owner(id)
                    .await?
                    .ok_or_else(|| missing(ErrorCode::NotFound, "token", id))?;
                let visible = caller.owns(&[user]);
                Ok(Target {
                    visible,
                    ..Target::public(Resource::Token {
                        id: id.to_string(),
                        user,
                        kind,
                    })
                }
                .named(format!("token:{id}")))
            }
            TargetKind::Image => {
                let id: ImageId = names.id("id", ErrorCode::NotFound)?;
                let (reference, agent_compatible, pinned) = self
                    .db
                    .image_place(id)
                    .await?
                    .unwrap_or_else(|| (id.to_string(), false, false));
                let name = format!("image:{reference}");
                Ok(Target::public(Resource::Image {
                    reference,
                    agent_compatible,
                    pinned,
                })
                .named(name))
            }
            TargetKind::Node => Ok(Target::public(Resource::Node {
                id: names.text("id").to_owned(),
            })
            .named(format!("node:{}", names.text("id")))),
            TargetKind::Setting => Ok(Target::public(Resource::Setting {
                key: names.text("key").to_owned(),
            })
            .named(format!("setting:{}", names.text("key")))),
            TargetKind::Policy => Ok(Target::public(Resource::Policy {
                id: names.text("id").to_owned(),
            })
            .named(format!("policy:{}", names.text("id")))),
            TargetKind::Preference => self.preference_target(caller, names).await,
            TargetKind::Credential => {
                self.credential_target(caller, names.id("id", ErrorCode::NotFound)?)
                    .await
            }
            TargetKind::Repository => {
                self.repository_target(caller, names.id("id", ErrorCode::NotFound)?)
                    .await
            }
            TargetKind::Promotion => {
                self.promotion_target(caller, names.id("id", ErrorCode::NotFound)?)
                    .await
            }
            TargetKind::NewCredential => {
                self.new_in_project(caller, names, |project| Resource::Credential {
                    id: Uuid::nil(),
                    project,
                })
                .await
            }
            TargetKind::NewRepository => {
                let name = names.body["name"].as_str().unwrap_or_default();
                self.new_in_project(caller, names, |project| Resource::Repository {
                    id: Uuid::nil(),
                    name: name.to_owned(),
                    project,
                })
                .await
            }
            // The handler refuses a body without a task, for those who may reach it.
            TargetKind::NewPromotion => match names.in_body("task_id") {
                Some(id) => self.task_target(caller, id).await,
                None => Ok(Target::public(Resource::Task {
                    id: Uuid::nil(),
                    place: Place {
                        owners: vec![*caller.scope.user_id.as_uuid()],
                        ..Place::default()
                    },
                })),
            },
            TargetKind::NewTask => match names.in_body("project_id") {
                Some(id) => self.project_target(caller, id).await,
                None => Ok(Target::public(Resource::System)),
            },
            TargetKind::NewWork => {
                let in_job = || {
                    SubmittedJob::of(Action::JobCreate, names.body)?
                        .id("task_id")?
                        .parse()
                        .ok()
                };
                let mut target = match names.in_body("task_id").or_else(in_job) {
                    Some(id) => self.task_target(caller, id).await?,
                    None => Target::public(Resource::System),
                };
                target.session_id = names.in_body("session_id");
                target.job_id = names.in_body("job_id");
                Ok(target)
            }
            TargetKind::NewToken => match (
                names.in_body("project_id"),
                names.body["task_ids"][0]
                    .as_str()
                    .and_then(|id| id.parse().ok()),
            ) {
                (Some(id), _) => self.project_target(caller, id).await,
                (None, Some(id)) => self.task_target(caller, id).await,
                (None, None) => Ok(Target::public(Resource::System)),
            },
        }
    }

    async fn credential_target(
        &self,
        caller: &Caller,
        id: CredentialId,
    ) -> Result<Target, ApiError> {
        let project = self
            .db
            .credential_project(id)
            .await?
            .ok_or_else(|| missing(ErrorCode::NotFound, "credential", id))?;
        Ok(Target {
            visible: caller.scope.is_admin,
            project_id: Some(project),
            ..Target::public(Resource::Credential {
                id: *id.as_uuid(),
                project: *project.as_uuid(),
            })
        }
        .named(format!("credential:{id}")))
    }

    async fn repository_target(
        &self,
        caller: &Caller,
        id: RepositoryId,
    ) -> Result<Target, ApiError> {
        let repository = self
            .db
            .any_repository(id)
            .await?
            .ok_or_else(|| missing(ErrorCode::NotFound, "repository", id))?;
        let visible = is_visible(self.db.repository(&caller.scope, id).await)?;
        Ok(Target {
            visible,
            project_id: Some(repository.project_id),
            ..Target::public(Resource::Repository {
                id: *id.as_uuid(),
                name: repository.name,
                project: *repository.project_id.as_uuid(),
            })
        }
        .named(format!("repository:{id}")))
    }

    async fn promotion_target(&self, caller: &Caller, id: PromotionId) -> Result<Target, ApiError> {
        let place = self
            .db
            .promotion_place(id)
            .await?
            .ok_or_else(|| missing(ErrorCode::NotFound, "promotion", id))?;
        Ok(Target::placed(caller, place, |place| Resource::Promotion {
            id: *id.as_uuid(),
            place,
        })
        .named(format!("promotion:{id}")))
    }

    /// What is to be registered in the project of the body. The handler refuses a body without
    /// one, for those who may reach it.
    async fn new_in_project(
        &self,
        caller: &Caller,
        names: &TargetNames<'_>,
        resource: impl FnOnce(Uuid) -> Resource,
    ) -> Result<Target, ApiError> {
        let Some(id) = names.in_body::<ProjectId>("project_id") else {
            return Ok(Target::public(resource(Uuid::nil())));
        };
        let project = self.project_target(caller, id).await?;
        Ok(Target {
            visible: project.visible,
            project_id: Some(id),
            ..Target::public(resource(*id.as_uuid()))
        })
    }

    pub(crate) async fn project_target(
        &self,
        caller: &Caller,
        id: ProjectId,
    ) -> Result<Target, ApiError> {
        let place = self
            .db
            .project_place(id)
            .await?
            .ok_or_else(|| missing(ErrorCode::NotFound, "project", id))?;
        Ok(Target {
            project_id: Some(id),
            ..Target::placed(caller, place, |place| Resource::Project {
                id: *id.as_uuid(),
                place,
            })
        })
    }

    pub(crate) async fn task_target(
        &self,
        caller: &Caller,
        id: TaskId,
    ) -> Result<Target, ApiError> {
        let place = self
            .db
            .task_place(id)
            .await?
            .ok_or_else(|| missing(ErrorCode::NotFound, "task", id))?;
        Ok(Target {
            task_id: Some(id),
            ..Target::placed(caller, place, |place| Resource::Task {
                id: *id.as_uuid(),
                place,
            })
        })
    }

    pub(crate) async fn session_target(
        &self,
        caller: &Caller,
        id: SessionId,
    ) -> Result<Target, ApiError> {
        let placed = self
            .db
            .session_place(id)
            .await?
            .ok_or_else(|| missing(ErrorCode::SessionNotFound, "session", id))?;
        Ok(Target::session(caller, id, placed))
    }

    pub(crate) async fn job_target(&self, caller: &Caller, id: JobId) -> Result<Target, ApiError> {
        let place = self
            .db
            .job_place(id)
            .await?
            .ok_or_else(|| missing(ErrorCode::JobNotFound, "job", id))?;
        Ok(Target {
            job_id: Some(id),
            ..Target::placed(caller, place, |place| Resource::Job {
                id: *id.as_uuid(),
                place,
            })
        })
    }

    /// What a call does besides its own action: a workspace seeded from an artifact reads it, and a
    /// stored export writes one. Otherwise a sandbox could be used to bypass rules about artifacts.
    pub(crate) async fn implied_targets(
        &self,
        action: Action,
        caller: &Caller,
        target: &Target,
        headers: &http::HeaderMap,
        body: &Value,
    ) -> Result<Vec<(Action, Target)>, ApiError> {
        match action {
            Action::SessionCreate | Action::JobCreate => {
                match body["workspace_ref"].as_str().map(str::parse) {
                    Some(Ok(WorkspaceRef::Artifact(id))) => {
                        // A deleted artifact can't be read, but a retried request that was seeded
                        // from it is still the same request.
                        let Some(place) = self.db.artifact_place(id).await? else {
                            return Ok(Vec::new());
                        };
                        let mut artifact = Target::artifact(caller, id, place);
                        // Access to a task includes its artifacts. An agent may know of no
                        // others, even if its user owns them.
                        let in_task = target.visible
                            && target.task_id.is_some()
                            && artifact.task_id == target.task_id;
                        artifact.visible =
                            in_task || (artifact.visible && caller.kind == TokenKind::User);
                        Ok(vec![(Action::ArtifactGet, artifact)])
                    }
                    _ => Ok(Vec::new()),
                }
            }
            Action::SessionExport if !wants_bytes(headers) => match target.task_id {
                Some(id) => {
                    let task = self.task_target(caller, id).await?;
                    Ok(vec![(
                        Action::ArtifactPut,
                        Target {
                            visible: target.visible || task.visible,
                            ..task
                        },
                    )])
                }
                None => Ok(Vec::new()),
            },
            _ => Ok(Vec::new()),
        }
    }

    async fn preference_target(
        &self,
        caller: &Caller,
        names: &TargetNames<'_>,
    ) -> Result<Target, ApiError> {
        let none = || ApiError::new(ErrorCode::NotFound, "there is no such scope");
        let scope: PreferenceScope = names.text("scope").parse().map_err(|_| none())?;
        let id: Uuid = if scope == PreferenceScope::System {
            Uuid::nil()
        } else {
            names.text("scope_id").parse().map_err(|_| none())?
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
            // Members may read; only administrators may write.
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
        let (scope_name, key) = (scope.as_str().to_owned(), names.text("key").to_owned());
        let name = format!("preference:{scope_name}/{id}/{key}");
        let target = Target::placed(caller, place, |place| Resource::Preference {
            scope: scope_name,
            key,
            place,
        });
        Ok(Target {
            visible: target.visible || scope == PreferenceScope::System,
            ..target
        }
        .named(name))
    }
}
