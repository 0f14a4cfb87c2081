//! Every route of the user API, and what calling it means: which action, on what, with which effect. A route that is not here is
//! refused; a test compares the table with the description.

use cynode_policy::Action;
use http::Method;

/// What a call is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    System,
    Project,
    Task,
    /// The task that the query names.
    QueriedTask,
    Session,
    Job,
    Artifact,
    /// One that is named by its task and path.
    TaskArtifact,
    User,
    Group,
    Token,
    Image,
    Node,
    Setting,
    Preference,
    Policy,
    /// The project that the body names, or the system.
    NewTask,
    /// The task that the body names, or the system.
    NewWork,
    /// What a new token is for, or the system.
    NewToken,
}

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Nothing that lasts: its records are written together, before the answer.
    Read,
    /// It changes something here, and goes on to its end also when its caller goes away.
    Here,
    /// It makes something that is found by an id which its intent has.
    Made,
    /// It does something in a sandbox.
    Node,
}

/// What a call brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takes {
    Nothing,
    Json,
    /// A command: JSON, or a form with its input.
    Exec,
    /// Bytes for a sandbox: they are held here until they have been looked through.
    File,
    Archive,
    /// Bytes that are looked through as they pass.
    Stream,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    pub(crate) route: &'static str,
    pub(crate) action: Action,
    pub(crate) on: On,
    pub(crate) effect: Effect,
    pub(crate) takes: Takes,
    /// What it brings gets into a sandbox: it is looked through for secrets.
    pub(crate) enters: bool,
    /// Managers' and analysts' tokens are taken here.
    pub(crate) agents: bool,
}

const fn read(route: &'static str, action: Action, on: On) -> Rule {
    Rule {
        route,
        action,
        on,
        effect: Effect::Read,
        takes: Takes::Nothing,
        enters: false,
        agents: false,
    }
}

const fn here(route: &'static str, action: Action, on: On) -> Rule {
    Rule {
        effect: Effect::Here,
        takes: Takes::Json,
        ..read(route, action, on)
    }
}

const fn node(route: &'static str, action: Action, takes: Takes, enters: bool) -> Rule {
    Rule {
        effect: Effect::Node,
        takes,
        enters,
        ..read(route, action, On::Session)
    }
}

pub(crate) const RULES: &[Rule] = &[
    here("POST /v1/projects", Action::ProjectCreate, On::System),
    read("GET /v1/projects", Action::ProjectList, On::System),
    read("GET /v1/projects/{id}", Action::ProjectShow, On::Project),
    here(
        "PATCH /v1/projects/{id}",
        Action::ProjectUpdate,
        On::Project,
    ),
    here("POST /v1/tasks", Action::TaskCreate, On::NewTask),
    read("GET /v1/tasks", Action::TaskList, On::System),
    read("GET /v1/tasks/{id}", Action::TaskShow, On::Task),
    here("PATCH /v1/tasks/{id}", Action::TaskUpdate, On::Task),
    here("POST /v1/users", Action::UserCreate, On::System),
    read("GET /v1/users", Action::UserList, On::System),
    read("GET /v1/users/{id}", Action::UserShow, On::User),
    here("POST /v1/groups", Action::GroupCreate, On::System),
    read("GET /v1/groups", Action::GroupList, On::System),
    read("GET /v1/groups/{id}", Action::GroupShow, On::Group),
    here("POST /v1/tokens", Action::TokenCreate, On::NewToken),
    read("GET /v1/tokens", Action::TokenList, On::System),
    read("GET /v1/tokens/{id}", Action::TokenShow, On::Token),
    Rule {
        takes: Takes::Nothing,
        ..here("DELETE /v1/tokens/{id}", Action::TokenRevoke, On::Token)
    },
    read("GET /v1/settings", Action::SettingList, On::System),
    read("GET /v1/settings/{key}", Action::SettingShow, On::Setting),
    here("PUT /v1/settings/{key}", Action::SettingPut, On::Setting),
    read(
        "GET /v1/preferences",
        Action::PreferenceEffective,
        On::System,
    ),
    read(
        "GET /v1/preferences/{scope}/{scope_id}",
        Action::PreferenceList,
        On::Preference,
    ),
    here(
        "PUT /v1/preferences/{scope}/{scope_id}/{key}",
        Action::PreferencePut,
        On::Preference,
    ),
    here("POST /v1/images", Action::ImageAdd, On::System),
    read("GET /v1/images", Action::ImageList, On::System),
    read("GET /v1/images/{id}", Action::ImageShow, On::Image),
    here("PATCH /v1/images/{id}", Action::ImageUpdate, On::Image),
    read("GET /v1/nodes", Action::NodeList, On::System),
    read("GET /v1/nodes/{id}", Action::NodeShow, On::Node),
    here("POST /v1/nodes/{id}/drain", Action::NodeDrain, On::Node),
    here("POST /v1/nodes/keys", Action::NodeKey, On::System),
    Rule {
        agents: true,
        ..read("GET /v1/events", Action::EventList, On::System)
    },
    Rule {
        effect: Effect::Made,
        enters: true,
        ..here("POST /v1/jobs", Action::JobCreate, On::NewWork)
    },
    read("GET /v1/jobs", Action::JobList, On::System),
    read("GET /v1/jobs/{id}", Action::JobShow, On::Job),
    Rule {
        takes: Takes::Nothing,
        ..here("POST /v1/jobs/{id}/stop", Action::JobStop, On::Job)
    },
    read("GET /v1/jobs/{id}/output", Action::JobOutput, On::Job),
    read("GET /v1/artifacts", Action::ArtifactList, On::QueriedTask),
    read("GET /v1/artifacts/{id}", Action::ArtifactShow, On::Artifact),
    read(
        "GET /v1/artifacts/{id}/content",
        Action::ArtifactGet,
        On::Artifact,
    ),
    Rule {
        takes: Takes::Stream,
        enters: true,
        ..here(
            "PUT /v1/tasks/{task_id}/artifacts/{*path}",
            Action::ArtifactPut,
            On::Task,
        )
    },
    read(
        "GET /v1/tasks/{task_id}/artifacts/{*path}",
        Action::ArtifactGet,
        On::TaskArtifact,
    ),
    Rule {
        effect: Effect::Made,
        enters: true,
        ..here("POST /v1/sessions", Action::SessionCreate, On::NewWork)
    },
    read("GET /v1/sessions", Action::SessionList, On::System),
    read("GET /v1/sessions/{id}", Action::SessionShow, On::Session),
    Rule {
        enters: true,
        ..here(
            "PATCH /v1/sessions/{id}",
            Action::SessionUpdate,
            On::Session,
        )
    },
    here(
        "POST /v1/sessions/{id}/end",
        Action::SessionEnd,
        On::Session,
    ),
    here(
        "POST /v1/sessions/{id}/resume",
        Action::SessionResume,
        On::Session,
    ),
    here(
        "POST /v1/sessions/{id}/export",
        Action::SessionExport,
        On::Session,
    ),
    node(
        "POST /v1/sessions/{id}/signal",
        Action::SessionSignal,
        Takes::Json,
        false,
    ),
    node(
        "POST /v1/sessions/{id}/exec",
        Action::SessionExec,
        Takes::Exec,
        true,
    ),
    read("GET /v1/sessions/{id}/execs", Action::ExecList, On::Session),
    read(
        "GET /v1/sessions/{id}/execs/{exec_id}",
        Action::ExecShow,
        On::Session,
    ),
    read(
        "GET /v1/sessions/{id}/execs/{exec_id}/output",
        Action::ExecOutput,
        On::Session,
    ),
    node(
        "POST /v1/sessions/{id}/execs/{exec_id}/signal",
        Action::ExecSignal,
        Takes::Json,
        false,
    ),
    node(
        "POST /v1/sessions/{id}/execs/{exec_id}/stdin",
        Action::ExecStdin,
        Takes::Json,
        true,
    ),
    read("GET /v1/sessions/{id}/files", Action::FileRead, On::Session),
    read(
        "HEAD /v1/sessions/{id}/files",
        Action::FileStat,
        On::Session,
    ),
    node(
        "PUT /v1/sessions/{id}/files",
        Action::FileWrite,
        Takes::File,
        true,
    ),
    node(
        "DELETE /v1/sessions/{id}/files",
        Action::FileDelete,
        Takes::Nothing,
        false,
    ),
    Rule {
        takes: Takes::Json,
        ..read(
            "POST /v1/sessions/{id}/files:list",
            Action::FileList,
            On::Session,
        )
    },
    Rule {
        takes: Takes::Json,
        ..read(
            "POST /v1/sessions/{id}/files:search",
            Action::FileSearch,
            On::Session,
        )
    },
    node(
        "POST /v1/sessions/{id}/files:patch",
        Action::FilePatch,
        Takes::Json,
        true,
    ),
    node(
        "POST /v1/sessions/{id}/files:move",
        Action::FileMove,
        Takes::Json,
        true,
    ),
    node(
        "POST /v1/sessions/{id}/files:mkdir",
        Action::FileMkdir,
        Takes::Json,
        true,
    ),
    node(
        "POST /v1/sessions/{id}/import",
        Action::FileImport,
        Takes::Archive,
        true,
    ),
    node(
        "GET /v1/sessions/{id}/pty",
        Action::SessionPty,
        Takes::Nothing,
        true,
    ),
    read("GET /v1/policies", Action::PolicyList, On::System),
    Rule {
        takes: Takes::Json,
        ..read("POST /v1/policies:test", Action::PolicyTest, On::System)
    },
    read("GET /v1/policies/{id}", Action::PolicyShow, On::Policy),
    here("PUT /v1/policies/{id}", Action::PolicyPut, On::Policy),
    Rule {
        takes: Takes::Nothing,
        ..here("DELETE /v1/policies/{id}", Action::PolicyDelete, On::Policy)
    },
    read("GET /v1/audit", Action::AuditRead, On::System),
    read("GET /v1/audit/checkpoints", Action::AuditRead, On::System),
    read("GET /v1/audit/verify", Action::AuditVerify, On::System),
];

/// The rule of a route. Where an address takes GET, it takes HEAD too.
pub(crate) fn find(method: &Method, path: &str) -> Option<&'static Rule> {
    let of = |method: &str| {
        RULES.iter().find(|rule| {
            rule.route
                .strip_prefix(method)
                .and_then(|rest| rest.strip_prefix(' '))
                == Some(path)
        })
    };
    of(method.as_str()).or_else(|| {
        if method == Method::HEAD {
            of("GET")
        } else {
            None
        }
    })
}

impl Rule {
    /// Whether a call may be looked at with what is remembered of its caller: what it brings is here whole, so that it can be looked
    /// at again, and it does nothing before its intent is written.
    pub(crate) fn makes_sure(&self) -> bool {
        self.effect == Effect::Node
            && matches!(self.takes, Takes::Json | Takes::Exec)
            && self.on == On::Session
    }
}

/// Whether what became of a call is known by the node.
pub(crate) fn runs_on_node(action: &str) -> bool {
    RULES
        .iter()
        .any(|rule| rule.effect == Effect::Node && rule.action.as_str() == action)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_of_the_description_has_a_rule_and_every_rule_a_route() {
        let document = crate::openapi();
        let mut described = Vec::new();
        for (path, operations) in document["paths"].as_object().expect("paths") {
            for method in operations.as_object().expect("operations").keys() {
                described.push(format!("{} {path}", method.to_uppercase()));
            }
        }
        let mut ruled: Vec<String> = RULES
            .iter()
            .map(|rule| rule.route.replace("{*path}", "{path}"))
            .collect();
        described.sort();
        ruled.sort();
        assert_eq!(
            described, ruled,
            "a route without a rule is refused; a rule without a route is dead"
        );
    }

    #[test]
    fn head_is_ruled_as_get_unless_it_has_a_rule_of_its_own() {
        assert_eq!(
            find(&Method::HEAD, "/v1/projects").map(|rule| rule.action),
            Some(Action::ProjectList)
        );
        assert_eq!(
            find(&Method::HEAD, "/v1/sessions/{id}/files").map(|rule| rule.action),
            Some(Action::FileStat)
        );
        assert!(find(&Method::PUT, "/v1/projects").is_none());
    }
}
