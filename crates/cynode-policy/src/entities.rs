//! Callers, resources and calls as Cedar entities.
//!
//! Invariant: caller-supplied text is never parsed here. Ids and attributes are passed to Cedar as
//! values, so no quote, backslash or newline can be interpreted. All entities conform to the
//! schema.

use std::{
    collections::{HashMap, HashSet},
    sync::LazyLock,
};

use cedar_policy::{
    Context, ContextCreationError, Entity, EntityAttrEvaluationError, EntityId, EntityTypeName,
    EntityUid, RequestValidationError, RestrictedExpression, entities_errors::EntitiesError,
};
use uuid::Uuid;

use crate::Action;

/// The role of an agent's token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    ProjectManager,
    ProjectAnalyst,
}

impl Role {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ProjectManager => "project_manager",
            Self::ProjectAnalyst => "project_analyst",
        }
    }
}

/// The caller.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Principal {
    /// Groups are identified by name.
    User {
        id: Uuid,
        name: String,
        admin: bool,
        groups: Vec<String>,
    },
    /// `user` created the token.
    Agent {
        token: Uuid,
        role: Role,
        user: Uuid,
        project: Option<Uuid>,
        tasks: Vec<Uuid>,
    },
    Sandbox {
        token: Uuid,
        task: Uuid,
    },
}

/// The task and project of a resource, and its owners: its own and its project's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Place {
    pub task: Option<Uuid>,
    pub project: Option<Uuid>,
    pub owners: Vec<Uuid>,
}

/// The target of a call.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Resource {
    System,
    Project {
        id: Uuid,
        place: Place,
    },
    Task {
        id: Uuid,
        place: Place,
    },
    Session {
        id: Uuid,
        place: Place,
    },
    Job {
        id: Uuid,
        place: Place,
    },
    Artifact {
        id: String,
        place: Place,
    },
    User {
        id: Uuid,
    },
    Group {
        id: Uuid,
        members: Vec<Uuid>,
    },
    Token {
        id: String,
        user: Uuid,
        kind: String,
    },
    Image {
        reference: String,
        agent_compatible: bool,
        pinned: bool,
    },
    Node {
        id: String,
    },
    Setting {
        key: String,
    },
    Preference {
        scope: String,
        key: String,
        place: Place,
    },
    Policy {
        id: String,
    },
    /// A repository of a project. One that is to be registered has the nil id.
    Repository {
        id: Uuid,
        name: String,
        project: Uuid,
    },
    /// A credential of a project. One that is to be added has the nil id.
    Credential {
        id: Uuid,
        project: Uuid,
    },
    /// The owners in the place are the task's. They are not the promotion's own: whoever owns a
    /// task must not approve what it publishes.
    Promotion {
        id: Uuid,
        place: Place,
    },
}

/// The parameters of a call that rules can test. Parameters that a call doesn't have are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CallContext {
    /// In a session: normalized by [`crate::within_workspace`]. In a repository: relative to its
    /// root.
    pub path: Option<String>,
    /// The branch of a repository that is pushed.
    pub branch: Option<String>,
    /// Verbatim from the request; rules also see its last component, as `program_name`.
    pub program: Option<String>,
    pub image: Option<String>,
    pub token_kind: Option<String>,
    pub network: Option<String>,
    pub pty: bool,
    /// The limits of a sandbox to create, with defaults for those that the caller omitted.
    pub limits: Option<CallLimits>,
}

/// Limits as integers, so that rules can compare them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallLimits {
    pub memory_bytes: i64,
    /// Thousandths of a CPU.
    pub millicpus: i64,
    pub pids: i64,
    pub disk_bytes: i64,
    /// Open files of one process.
    pub nofile: i64,
}

/// The reason why Cedar can't evaluate a call. Only `Request` occurs in practice: the action
/// doesn't apply to the resource's type.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error(transparent)]
    Attribute(Box<EntityAttrEvaluationError>),
    #[error(transparent)]
    Call(Box<ContextCreationError>),
    #[error(transparent)]
    Request(Box<RequestValidationError>),
    #[error(transparent)]
    Entities(Box<EntitiesError>),
}

impl Principal {
    pub(crate) fn uid(&self) -> EntityUid {
        match self {
            Self::User { id, .. } => by_id(&TYPES.user, *id),
            Self::Agent { token, .. } => by_id(&TYPES.agent, *token),
            Self::Sandbox { token, .. } => by_id(&TYPES.sandbox, *token),
        }
    }

    pub(crate) fn entity(&self) -> Result<Entity, RequestError> {
        let (attributes, parents) = match self {
            Self::User {
                name,
                admin,
                groups,
                ..
            } => (
                vec![("name", string(name)), ("admin", boolean(*admin))],
                groups
                    .iter()
                    .map(|group| uid(&TYPES.group, group))
                    .collect(),
            ),
            Self::Agent {
                role,
                user,
                project,
                tasks,
                ..
            } => {
                let tasks = tasks
                    .iter()
                    .map(|task| reference(by_id(&TYPES.task, *task)));
                let mut attributes = vec![
                    ("role", string(role.as_str())),
                    ("user", reference(by_id(&TYPES.user, *user))),
                    ("tasks", RestrictedExpression::new_set(tasks)),
                ];
                attributes.extend(
                    project.map(|project| ("project", reference(by_id(&TYPES.project, project)))),
                );
                (attributes, HashSet::new())
            }
            Self::Sandbox { task, .. } => (
                vec![("task", reference(by_id(&TYPES.task, *task)))],
                HashSet::new(),
            ),
        };
        entity(self.uid(), attributes, parents)
    }
}

impl Place {
    /// The parent entities of a resource. Includes the project directly, so that Cedar need not
    /// know the task.
    fn parents(&self) -> HashSet<EntityUid> {
        let task = self.task.map(|task| by_id(&TYPES.task, task));
        task.into_iter().chain(self.project_uid()).collect()
    }

    fn project_uid(&self) -> Option<EntityUid> {
        self.project.map(|project| by_id(&TYPES.project, project))
    }

    fn owners(&self) -> (&'static str, RestrictedExpression) {
        ("owners", users(&self.owners))
    }

    fn task_owners(&self) -> (&'static str, RestrictedExpression) {
        ("task_owners", users(&self.owners))
    }
}

impl Resource {
    pub(crate) fn uid(&self) -> EntityUid {
        match self {
            Self::System => uid(&TYPES.system, "cynode"),
            Self::Project { id, .. } => by_id(&TYPES.project, *id),
            Self::Task { id, .. } => by_id(&TYPES.task, *id),
            Self::Session { id, .. } => by_id(&TYPES.session, *id),
            Self::Job { id, .. } => by_id(&TYPES.job, *id),
            Self::Artifact { id, .. } => uid(&TYPES.artifact, id),
            Self::User { id } => by_id(&TYPES.user, *id),
            Self::Group { id, .. } => by_id(&TYPES.group, *id),
            Self::Token { id, .. } => uid(&TYPES.token, id),
            Self::Image { reference, .. } => uid(&TYPES.image, reference),
            Self::Node { id } => uid(&TYPES.node, id),
            Self::Setting { key } => uid(&TYPES.setting, key),
            Self::Preference { scope, key, .. } => {
                uid(&TYPES.preference, &format!("{scope}/{key}"))
            }
            Self::Policy { id } => uid(&TYPES.policy, id),
            Self::Repository { id, .. } => by_id(&TYPES.repository, *id),
            Self::Credential { id, .. } => by_id(&TYPES.credential, *id),
            Self::Promotion { id, .. } => by_id(&TYPES.promotion, *id),
        }
    }

    pub(crate) fn entity(&self) -> Result<Entity, RequestError> {
        let (attributes, parents) = match self {
            Self::System | Self::User { .. } | Self::Node { .. } | Self::Policy { .. } => {
                (vec![], HashSet::new())
            }
            Self::Project { place, .. } => (vec![place.owners()], HashSet::new()),
            Self::Task { place, .. } => (
                vec![place.owners()],
                place.project_uid().into_iter().collect(),
            ),
            Self::Session { place, .. }
            | Self::Job { place, .. }
            | Self::Artifact { place, .. } => (vec![place.owners()], place.parents()),
            Self::Group { members, .. } => (vec![("members", users(members))], HashSet::new()),
            Self::Token { user, kind, .. } => (
                vec![
                    ("user", reference(by_id(&TYPES.user, *user))),
                    ("kind", string(kind)),
                ],
                HashSet::new(),
            ),
            Self::Image {
                reference,
                agent_compatible,
                pinned,
            } => {
                let attributes = vec![
                    ("reference", string(reference)),
                    ("agent_compatible", boolean(*agent_compatible)),
                    ("pinned", boolean(*pinned)),
                ];
                (attributes, HashSet::new())
            }
            Self::Setting { key } => (vec![("key", string(key))], HashSet::new()),
            Self::Preference { scope, key, place } => (
                vec![
                    ("scope", string(scope)),
                    ("key", string(key)),
                    place.owners(),
                ],
                place.parents(),
            ),
            Self::Repository { name, project, .. } => (
                vec![("name", string(name))],
                HashSet::from([by_id(&TYPES.project, *project)]),
            ),
            Self::Credential { project, .. } => {
                (vec![], HashSet::from([by_id(&TYPES.project, *project)]))
            }
            Self::Promotion { place, .. } => (vec![place.task_owners()], place.parents()),
        };
        entity(self.uid(), attributes, parents)
    }
}

impl CallContext {
    pub(crate) fn context(&self) -> Result<Context, RequestError> {
        let Self {
            path,
            branch,
            program,
            image,
            token_kind,
            network,
            pty,
            limits,
        } = self;
        let texts = [
            ("path", path),
            ("branch", branch),
            ("program", program),
            ("image", image),
            ("token_kind", token_kind),
            ("network", network),
        ];
        let texts = texts
            .into_iter()
            .filter_map(|(name, text)| Some((name, text.as_deref()?)));
        let texts = texts.chain(
            program
                .as_deref()
                .map(|program| ("program_name", program_name(program))),
        );
        let texts = texts.map(|(name, text)| (name, string(text)));
        let limits = limits.iter().flat_map(|limits| {
            let CallLimits {
                memory_bytes,
                millicpus,
                pids,
                disk_bytes,
                nofile,
            } = *limits;
            [
                ("memory_bytes", memory_bytes),
                ("millicpus", millicpus),
                ("pids", pids),
                ("disk_bytes", disk_bytes),
                ("nofile", nofile),
            ]
            .map(|(name, value)| (name, RestrictedExpression::new_long(value)))
        });
        let pairs = texts
            .chain(limits)
            .chain([("pty", boolean(*pty))])
            .map(|(name, value)| (name.to_owned(), value));
        Context::from_pairs(pairs).map_err(|error| RequestError::Call(Box::new(error)))
    }
}

/// The last component of a program's path: `rm` for `rm`, `/bin/rm` and `../bin//rm`. The kernel
/// refuses a path that ends in a slash; dropping the slash closes that way around a rule anyway.
fn program_name(program: &str) -> &str {
    let path = program.trim_end_matches('/');
    path.rsplit_once('/').map_or(path, |(_, name)| name)
}

impl Action {
    pub(crate) fn uid(self) -> EntityUid {
        uid(&TYPES.action, self.as_str())
    }

    /// The action's entity with its groups, as in the schema.
    pub(crate) fn entity(self) -> Entity {
        Entity::new_no_attrs(
            self.uid(),
            self.groups()
                .iter()
                .map(|group| uid(&TYPES.action, group))
                .collect(),
        )
    }
}

/// The schema's type names, parsed once: each decision needs several of them.
struct Types {
    action: EntityTypeName,
    user: EntityTypeName,
    agent: EntityTypeName,
    sandbox: EntityTypeName,
    system: EntityTypeName,
    project: EntityTypeName,
    task: EntityTypeName,
    session: EntityTypeName,
    job: EntityTypeName,
    artifact: EntityTypeName,
    group: EntityTypeName,
    token: EntityTypeName,
    image: EntityTypeName,
    node: EntityTypeName,
    setting: EntityTypeName,
    preference: EntityTypeName,
    policy: EntityTypeName,
    repository: EntityTypeName,
    credential: EntityTypeName,
    promotion: EntityTypeName,
}

static TYPES: LazyLock<Types> = LazyLock::new(|| {
    let name = |name: &str| {
        format!("CyNode::{name}")
            .parse()
            .expect("a type of our own schema")
    };
    Types {
        action: name("Action"),
        user: name("User"),
        agent: name("Agent"),
        sandbox: name("Sandbox"),
        system: name("System"),
        project: name("Project"),
        task: name("Task"),
        session: name("Session"),
        job: name("Job"),
        artifact: name("Artifact"),
        group: name("Group"),
        token: name("Token"),
        image: name("Image"),
        node: name("Node"),
        setting: name("Setting"),
        preference: name("Preference"),
        policy: name("Policy"),
        repository: name("Repository"),
        credential: name("Credential"),
        promotion: name("Promotion"),
    }
});

fn uid(name: &EntityTypeName, id: &str) -> EntityUid {
    EntityUid::from_type_name_and_id(name.clone(), EntityId::new(id))
}

fn by_id(name: &EntityTypeName, id: Uuid) -> EntityUid {
    uid(
        name,
        id.as_hyphenated().encode_lower(&mut Uuid::encode_buffer()),
    )
}

fn string(text: &str) -> RestrictedExpression {
    RestrictedExpression::new_string(text.to_owned())
}

fn boolean(value: bool) -> RestrictedExpression {
    RestrictedExpression::new_bool(value)
}

fn reference(uid: EntityUid) -> RestrictedExpression {
    RestrictedExpression::new_entity_uid(uid)
}

fn users(ids: &[Uuid]) -> RestrictedExpression {
    RestrictedExpression::new_set(ids.iter().map(|id| reference(by_id(&TYPES.user, *id))))
}

fn entity(
    uid: EntityUid,
    attributes: Vec<(&'static str, RestrictedExpression)>,
    parents: HashSet<EntityUid>,
) -> Result<Entity, RequestError> {
    let attributes: HashMap<_, _> = attributes
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    Entity::new(uid, attributes, parents).map_err(|error| RequestError::Attribute(Box::new(error)))
}

#[cfg(test)]
mod tests {
    use cedar_policy::{Entities, Schema};

    use super::*;

    fn id(number: u128) -> Uuid {
        Uuid::from_u128(number)
    }

    fn assert_conforms(entity: Result<Entity, RequestError>) {
        let (schema, _) = Schema::from_cedarschema_str(crate::SCHEMA).expect("our own schema");
        let entity = entity.expect("values are values");
        let text = entity.to_string();
        assert!(
            Entities::from_entities([entity], Some(&schema)).is_ok(),
            "{text}"
        );
    }

    #[test]
    fn entities_of_callers_conform_to_the_schema() {
        assert_conforms(
            Principal::User {
                id: id(1),
                name: "a".to_owned(),
                admin: false,
                groups: vec!["b".to_owned(), "c".to_owned()],
            }
            .entity(),
        );
        assert_conforms(
            Principal::Agent {
                token: id(1),
                role: Role::ProjectManager,
                user: id(2),
                project: None,
                tasks: vec![id(3), id(4)],
            }
            .entity(),
        );
        assert_conforms(
            Principal::Agent {
                token: id(1),
                role: Role::ProjectAnalyst,
                user: id(2),
                project: Some(id(5)),
                tasks: vec![],
            }
            .entity(),
        );
        assert_conforms(
            Principal::Sandbox {
                token: id(1),
                task: id(3),
            }
            .entity(),
        );
    }

    /// Except users: only their ids are known.
    #[test]
    fn entities_of_resources_conform_to_the_schema() {
        for place in [
            Place::default(),
            Place {
                task: Some(id(1)),
                project: Some(id(2)),
                owners: vec![id(3), id(4)],
            },
        ] {
            for resource in [
                Resource::System,
                Resource::Project {
                    id: id(2),
                    place: place.clone(),
                },
                Resource::Task {
                    id: id(1),
                    place: place.clone(),
                },
                Resource::Session {
                    id: id(5),
                    place: place.clone(),
                },
                Resource::Job {
                    id: id(5),
                    place: place.clone(),
                },
                Resource::Artifact {
                    id: "a".to_owned(),
                    place: place.clone(),
                },
                Resource::Group {
                    id: id(6),
                    members: place.owners.clone(),
                },
                Resource::Token {
                    id: "a".to_owned(),
                    user: id(3),
                    kind: "user".to_owned(),
                },
                Resource::Image {
                    reference: "a".to_owned(),
                    agent_compatible: true,
                    pinned: true,
                },
                Resource::Node { id: "a".to_owned() },
                Resource::Setting {
                    key: "a".to_owned(),
                },
                Resource::Preference {
                    scope: "a".to_owned(),
                    key: "a".to_owned(),
                    place: place.clone(),
                },
                Resource::Policy { id: "a".to_owned() },
                Resource::Repository {
                    id: id(7),
                    name: "a".to_owned(),
                    project: id(2),
                },
                Resource::Credential {
                    id: id(8),
                    project: id(2),
                },
                Resource::Promotion { id: id(9), place },
            ] {
                assert_conforms(resource.entity());
            }
        }
    }

    #[test]
    fn a_program_is_named_by_the_last_component_of_its_path() {
        for (program, name) in [
            ("rm", "rm"),
            ("/bin/rm", "rm"),
            ("./rm", "rm"),
            ("../usr/bin//rm", "rm"),
            ("/bin/rm/", "rm"),
            ("bin/rm -rf", "rm -rf"),
            ("", ""),
            ("/", ""),
        ] {
            assert_eq!(program_name(program), name, "{program}");
        }
    }

    /// Even if a caller of this crate passes such a place.
    #[test]
    fn no_project_or_task_contains_itself() {
        let place = Place {
            task: Some(id(1)),
            project: Some(id(2)),
            owners: vec![],
        };
        let parents =
            |resource: Resource| resource.entity().expect("values are values").into_inner().2;
        assert!(
            parents(Resource::Project {
                id: id(2),
                place: place.clone()
            })
            .is_empty()
        );
        assert_eq!(
            parents(Resource::Task { id: id(1), place }),
            [by_id(&TYPES.project, id(2))].into()
        );
    }
}
