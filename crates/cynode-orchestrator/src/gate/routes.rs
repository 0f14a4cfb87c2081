//! The route table of the user API: the action, target, effect and body of each route. Routes that
//! are not listed are refused; a test compares the table with the OpenAPI document.

use cynode_policy::Action;
use http::Method;

/// The kind of target that a route acts on, and where the call names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TargetKind {
    System,
    Project,
    Task,
    /// The task in the query.
    QueriedTask,
    Session,
    Job,
    Artifact,
    /// An artifact addressed by its task and path.
    TaskArtifact,
    User,
    Group,
    Token,
    Image,
    Node,
    Setting,
    Preference,
    Policy,
    Credential,
    Repository,
    Promotion,
    /// A credential of the project in the body.
    NewCredential,
    /// A repository of the project in the body.
    NewRepository,
    /// The task in the body.
    NewPromotion,
    /// The project in the body, or the system.
    NewTask,
    /// The task in the body, or the system.
    NewWork,
    /// The project or task that a new token is restricted to, or the system.
    NewToken,
}

/// What a call changes, which determines how it is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Changes nothing: intent and outcome are written together, before the answer.
    Read,
    /// Changes the database. Runs to completion even if the caller disconnects.
    Local,
    /// Creates an object under an id that the intent contains.
    Create,
    /// Acts in a sandbox on a node.
    Node,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyKind {
    Empty,
    Json,
    /// JSON with a credential: small, so that it is never spooled to a file.
    Secret,
    /// A command: JSON, or a form with its standard input.
    Exec,
    /// Bytes for a sandbox, spooled until they are scanned.
    File,
    /// A tar archive for a sandbox, spooled until it is scanned.
    Archive,
    /// Bytes that are scanned while they stream through.
    Stream,
}

impl BodyKind {
    /// Whether the body may be large, so that the call is authorized before it is read.
    pub(crate) const fn is_upload(self) -> bool {
        matches!(self, Self::File | Self::Archive | Self::Stream)
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct RouteSpec {
    /// The method and the path.
    pub(crate) pattern: &'static str,
    pub(crate) action: Action,
    pub(crate) target: TargetKind,
    pub(crate) effect: Effect,
    pub(crate) body: BodyKind,
    /// The body reaches a sandbox, so it is scanned for secrets.
    pub(crate) enters_sandbox: bool,
    /// Accepts the tokens of project managers and analysts.
    pub(crate) accepts_agents: bool,
}

const fn read(pattern: &'static str, action: Action, target: TargetKind) -> RouteSpec {
    RouteSpec {
        pattern,
        action,
        target,
        effect: Effect::Read,
        body: BodyKind::Empty,
        enters_sandbox: false,
        accepts_agents: false,
    }
}

const fn local(pattern: &'static str, action: Action, target: TargetKind) -> RouteSpec {
    RouteSpec {
        effect: Effect::Local,
        body: BodyKind::Json,
        ..read(pattern, action, target)
    }
}

const fn node(
    pattern: &'static str,
    action: Action,
    body: BodyKind,
    enters_sandbox: bool,
) -> RouteSpec {
    RouteSpec {
        effect: Effect::Node,
        body,
        enters_sandbox,
        ..read(pattern, action, TargetKind::Session)
    }
}

pub(crate) const ROUTES: &[RouteSpec] = &[
    local(
        "POST /v1/projects",
        Action::ProjectCreate,
        TargetKind::System,
    ),
    read("GET /v1/projects", Action::ProjectList, TargetKind::System),
    read(
        "GET /v1/projects/{id}",
        Action::ProjectShow,
        TargetKind::Project,
    ),
    local(
        "PATCH /v1/projects/{id}",
        Action::ProjectUpdate,
        TargetKind::Project,
    ),
    local("POST /v1/tasks", Action::TaskCreate, TargetKind::NewTask),
    read("GET /v1/tasks", Action::TaskList, TargetKind::System),
    read("GET /v1/tasks/{id}", Action::TaskShow, TargetKind::Task),
    local("PATCH /v1/tasks/{id}", Action::TaskUpdate, TargetKind::Task),
    local("POST /v1/users", Action::UserCreate, TargetKind::System),
    read("GET /v1/users", Action::UserList, TargetKind::System),
    read("GET /v1/users/{id}", Action::UserShow, TargetKind::User),
    local("POST /v1/groups", Action::GroupCreate, TargetKind::System),
    read("GET /v1/groups", Action::GroupList, TargetKind::System),
    read("GET /v1/groups/{id}", Action::GroupShow, TargetKind::Group),
    local("POST /v1/tokens", Action::TokenCreate, TargetKind::NewToken),
    read("GET /v1/tokens", Action::TokenList, TargetKind::System),
    read("GET /v1/tokens/{id}", Action::TokenShow, TargetKind::Token),
    local(
        "POST /v1/tokens/{id}/renew",
        Action::TokenRenew,
        TargetKind::Token,
    ),
    RouteSpec {
        body: BodyKind::Empty,
        ..local(
            "DELETE /v1/tokens/{id}",
            Action::TokenRevoke,
            TargetKind::Token,
        )
    },
    read("GET /v1/settings", Action::SettingList, TargetKind::System),
    read(
        "GET /v1/settings/{key}",
        Action::SettingShow,
        TargetKind::Setting,
    ),
    local(
        "PUT /v1/settings/{key}",
        Action::SettingPut,
        TargetKind::Setting,
    ),
    read(
        "GET /v1/preferences",
        Action::PreferenceEffective,
        TargetKind::System,
    ),
    read(
        "GET /v1/preferences/{scope}/{scope_id}",
        Action::PreferenceList,
        TargetKind::Preference,
    ),
    local(
        "PUT /v1/preferences/{scope}/{scope_id}/{key}",
        Action::PreferencePut,
        TargetKind::Preference,
    ),
    local("POST /v1/images", Action::ImageAdd, TargetKind::System),
    read("GET /v1/images", Action::ImageList, TargetKind::System),
    read("GET /v1/images/{id}", Action::ImageShow, TargetKind::Image),
    local(
        "PATCH /v1/images/{id}",
        Action::ImageUpdate,
        TargetKind::Image,
    ),
    RouteSpec {
        body: BodyKind::Empty,
        ..local(
            "DELETE /v1/images/{id}",
            Action::ImageRemove,
            TargetKind::Image,
        )
    },
    RouteSpec {
        body: BodyKind::Secret,
        ..local(
            "POST /v1/credentials",
            Action::CredentialAdd,
            TargetKind::NewCredential,
        )
    },
    read(
        "GET /v1/credentials",
        Action::CredentialList,
        TargetKind::System,
    ),
    read(
        "GET /v1/credentials/{id}",
        Action::CredentialShow,
        TargetKind::Credential,
    ),
    RouteSpec {
        body: BodyKind::Secret,
        ..local(
            "POST /v1/credentials/{id}/rotate",
            Action::CredentialRotate,
            TargetKind::Credential,
        )
    },
    local(
        "POST /v1/credentials/{id}/disable",
        Action::CredentialDisable,
        TargetKind::Credential,
    ),
    local(
        "POST /v1/repositories",
        Action::RepositoryAdd,
        TargetKind::NewRepository,
    ),
    read(
        "GET /v1/repositories",
        Action::RepositoryList,
        TargetKind::System,
    ),
    read(
        "GET /v1/repositories/{id}",
        Action::RepositoryShow,
        TargetKind::Repository,
    ),
    RouteSpec {
        body: BodyKind::Empty,
        ..local(
            "DELETE /v1/repositories/{id}",
            Action::RepositoryRemove,
            TargetKind::Repository,
        )
    },
    local(
        "POST /v1/promotions",
        Action::PromotionCreate,
        TargetKind::NewPromotion,
    ),
    read(
        "GET /v1/promotions",
        Action::PromotionList,
        TargetKind::System,
    ),
    read(
        "GET /v1/promotions/{id}",
        Action::PromotionShow,
        TargetKind::Promotion,
    ),
    local(
        "POST /v1/promotions/{id}/approve",
        Action::PromotionApprove,
        TargetKind::Promotion,
    ),
    local(
        "POST /v1/promotions/{id}/reject",
        Action::PromotionApprove,
        TargetKind::Promotion,
    ),
    local(
        "POST /v1/promotions/{id}/cancel",
        Action::PromotionCancel,
        TargetKind::Promotion,
    ),
    read("GET /v1/nodes", Action::NodeList, TargetKind::System),
    read("GET /v1/nodes/{id}", Action::NodeShow, TargetKind::Node),
    local(
        "POST /v1/nodes/{id}/drain",
        Action::NodeDrain,
        TargetKind::Node,
    ),
    local("POST /v1/nodes/keys", Action::NodeKey, TargetKind::System),
    RouteSpec {
        accepts_agents: true,
        ..read("GET /v1/events", Action::EventList, TargetKind::System)
    },
    RouteSpec {
        effect: Effect::Create,
        enters_sandbox: true,
        ..local("POST /v1/jobs", Action::JobCreate, TargetKind::NewWork)
    },
    read("GET /v1/jobs", Action::JobList, TargetKind::System),
    read("GET /v1/jobs/{id}", Action::JobShow, TargetKind::Job),
    RouteSpec {
        body: BodyKind::Empty,
        ..local("POST /v1/jobs/{id}/stop", Action::JobStop, TargetKind::Job)
    },
    read(
        "GET /v1/jobs/{id}/output",
        Action::JobOutput,
        TargetKind::Job,
    ),
    read(
        "GET /v1/artifacts",
        Action::ArtifactList,
        TargetKind::QueriedTask,
    ),
    read(
        "GET /v1/artifacts/{id}",
        Action::ArtifactShow,
        TargetKind::Artifact,
    ),
    read(
        "GET /v1/artifacts/{id}/content",
        Action::ArtifactGet,
        TargetKind::Artifact,
    ),
    RouteSpec {
        body: BodyKind::Stream,
        enters_sandbox: true,
        ..local(
            "PUT /v1/tasks/{task_id}/artifacts/{*path}",
            Action::ArtifactPut,
            TargetKind::Task,
        )
    },
    read(
        "GET /v1/tasks/{task_id}/artifacts/{*path}",
        Action::ArtifactGet,
        TargetKind::TaskArtifact,
    ),
    RouteSpec {
        effect: Effect::Create,
        enters_sandbox: true,
        ..local(
            "POST /v1/sessions",
            Action::SessionCreate,
            TargetKind::NewWork,
        )
    },
    read("GET /v1/sessions", Action::SessionList, TargetKind::System),
    read(
        "GET /v1/sessions/{id}",
        Action::SessionShow,
        TargetKind::Session,
    ),
    RouteSpec {
        enters_sandbox: true,
        ..local(
            "PATCH /v1/sessions/{id}",
            Action::SessionUpdate,
            TargetKind::Session,
        )
    },
    local(
        "POST /v1/sessions/{id}/end",
        Action::SessionEnd,
        TargetKind::Session,
    ),
    local(
        "POST /v1/sessions/{id}/resume",
        Action::SessionResume,
        TargetKind::Session,
    ),
    local(
        "POST /v1/sessions/{id}/export",
        Action::SessionExport,
        TargetKind::Session,
    ),
    node(
        "POST /v1/sessions/{id}/signal",
        Action::SessionSignal,
        BodyKind::Json,
        false,
    ),
    node(
        "POST /v1/sessions/{id}/exec",
        Action::SessionExec,
        BodyKind::Exec,
        true,
    ),
    read(
        "GET /v1/sessions/{id}/execs",
        Action::ExecList,
        TargetKind::Session,
    ),
    read(
        "GET /v1/sessions/{id}/execs/{exec_id}",
        Action::ExecShow,
        TargetKind::Session,
    ),
    read(
        "GET /v1/sessions/{id}/execs/{exec_id}/output",
        Action::ExecOutput,
        TargetKind::Session,
    ),
    node(
        "POST /v1/sessions/{id}/execs/{exec_id}/signal",
        Action::ExecSignal,
        BodyKind::Json,
        false,
    ),
    node(
        "POST /v1/sessions/{id}/execs/{exec_id}/stdin",
        Action::ExecStdin,
        BodyKind::Json,
        true,
    ),
    read(
        "GET /v1/sessions/{id}/files",
        Action::FileRead,
        TargetKind::Session,
    ),
    read(
        "HEAD /v1/sessions/{id}/files",
        Action::FileStat,
        TargetKind::Session,
    ),
    node(
        "PUT /v1/sessions/{id}/files",
        Action::FileWrite,
        BodyKind::File,
        true,
    ),
    node(
        "DELETE /v1/sessions/{id}/files",
        Action::FileDelete,
        BodyKind::Empty,
        false,
    ),
    RouteSpec {
        body: BodyKind::Json,
        ..read(
            "POST /v1/sessions/{id}/files:list",
            Action::FileList,
            TargetKind::Session,
        )
    },
    RouteSpec {
        body: BodyKind::Json,
        ..read(
            "POST /v1/sessions/{id}/files:search",
            Action::FileSearch,
            TargetKind::Session,
        )
    },
    node(
        "POST /v1/sessions/{id}/files:patch",
        Action::FilePatch,
        BodyKind::Json,
        true,
    ),
    read(
        "GET /v1/sessions/{id}/files:watch",
        Action::FileList,
        TargetKind::Session,
    ),
    node(
        "POST /v1/sessions/{id}/files:edit",
        Action::FileWrite,
        BodyKind::Json,
        true,
    ),
    node(
        "POST /v1/sessions/{id}/files:move",
        Action::FileMove,
        BodyKind::Json,
        true,
    ),
    node(
        "POST /v1/sessions/{id}/files:mkdir",
        Action::FileMkdir,
        BodyKind::Json,
        true,
    ),
    node(
        "POST /v1/sessions/{id}/import",
        Action::FileImport,
        BodyKind::Archive,
        true,
    ),
    node(
        "GET /v1/sessions/{id}/pty",
        Action::SessionPty,
        BodyKind::Empty,
        true,
    ),
    read("GET /v1/policies", Action::PolicyList, TargetKind::System),
    RouteSpec {
        body: BodyKind::Json,
        ..read(
            "POST /v1/policies:test",
            Action::PolicyTest,
            TargetKind::System,
        )
    },
    read(
        "GET /v1/policies/{id}",
        Action::PolicyShow,
        TargetKind::Policy,
    ),
    local(
        "PUT /v1/policies/{id}",
        Action::PolicyPut,
        TargetKind::Policy,
    ),
    RouteSpec {
        body: BodyKind::Empty,
        ..local(
            "DELETE /v1/policies/{id}",
            Action::PolicyDelete,
            TargetKind::Policy,
        )
    },
    read("GET /v1/audit", Action::AuditRead, TargetKind::System),
    read(
        "GET /v1/audit/checkpoints",
        Action::AuditRead,
        TargetKind::System,
    ),
    read(
        "GET /v1/audit/verify",
        Action::AuditVerify,
        TargetKind::System,
    ),
];

/// The spec of a route. Routes with GET accept HEAD as well.
pub(crate) fn find(method: &Method, path: &str) -> Option<&'static RouteSpec> {
    let by_method = |method: &str| {
        ROUTES.iter().find(|route| {
            route
                .pattern
                .strip_prefix(method)
                .and_then(|rest| rest.strip_prefix(' '))
                == Some(path)
        })
    };
    by_method(method.as_str()).or_else(|| {
        if method == Method::HEAD {
            by_method("GET")
        } else {
            None
        }
    })
}

impl RouteSpec {
    /// Whether a call may proceed on a cached identity: it has no effect before its intent is
    /// written, and its body is buffered so that the call can be decided again.
    pub(crate) fn accepts_cached_identity(&self) -> bool {
        self.effect == Effect::Node
            && matches!(self.body, BodyKind::Json | BodyKind::Exec)
            && self.target == TargetKind::Session
    }
}

/// Whether the node knows the outcome of a call with this action.
pub(crate) fn runs_on_node(action: &str) -> bool {
    ROUTES
        .iter()
        .any(|route| route.effect == Effect::Node && route.action.as_str() == action)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    // invariant: fail-closed
    fn the_route_table_and_the_openapi_document_list_the_same_routes() {
        let document = crate::openapi();
        let mut described = Vec::new();
        for (path, operations) in document["paths"].as_object().expect("paths") {
            for method in operations.as_object().expect("operations").keys() {
                described.push(format!("{} {path}", method.to_uppercase()));
            }
        }
        let mut listed: Vec<String> = ROUTES
            .iter()
            .map(|route| route.pattern.replace("{*path}", "{path}"))
            .collect();
        described.sort();
        listed.sort();
        assert_eq!(
            described, listed,
            "the route table and the OpenAPI document differ"
        );
    }

    #[test]
    fn head_is_treated_as_get_unless_it_has_a_row_of_its_own() {
        assert_eq!(
            find(&Method::HEAD, "/v1/projects").map(|route| route.action),
            Some(Action::ProjectList)
        );
        assert_eq!(
            find(&Method::HEAD, "/v1/sessions/{id}/files").map(|route| route.action),
            Some(Action::FileStat)
        );
        assert!(find(&Method::PUT, "/v1/projects").is_none());
    }
}
