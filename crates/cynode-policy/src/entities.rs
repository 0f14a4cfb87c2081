//! Callers, things and calls as Cedar sees them.
//!
//! What must stay true: no text of a caller is ever parsed here. Ids and attributes go into Cedar as values, so that no quote,
//! backslash or newline in one can become part of anything else. What is made here fits the schema.

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

/// What an agent's token lets it be.
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

/// Who calls.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Principal {
    /// Groups by their names.
    User {
        id: Uuid,
        name: String,
        admin: bool,
        groups: Vec<String>,
    },
    /// `user` is who made the token.
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

/// Where a thing belongs, and whose it is: its owner's and its project's owner's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Place {
    pub task: Option<Uuid>,
    pub project: Option<Uuid>,
    pub owners: Vec<Uuid>,
}

/// What a call is about.
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
}

/// How something is asked for, as far as rules look at it. What is not part of a call is absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Call {
    /// As [`crate::within_workspace`] gives it.
    pub path: Option<String>,
    /// As it was sent; rules also see its last component, as `program_name`.
    pub program: Option<String>,
    pub image: Option<String>,
    pub token_kind: Option<String>,
    pub network: Option<String>,
    pub pty: bool,
    /// The limits of a sandbox that is to be made, with the defaults for those that were not named.
    pub limits: Option<CallLimits>,
}

/// Limits as rules compare them: whole numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallLimits {
    pub memory_bytes: i64,
    /// Thousandths of a processor.
    pub millicpus: i64,
    pub pids: i64,
}

/// Why Cedar can't be asked. Only the third can happen: the action is not about such a thing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unaskable {
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

    pub(crate) fn entity(&self) -> Result<Entity, Unaskable> {
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
    /// What a thing here is in. Both are said outright, so that the task need not be known to Cedar for its project to count.
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
        }
    }

    pub(crate) fn entity(&self) -> Result<Entity, Unaskable> {
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
        };
        entity(self.uid(), attributes, parents)
    }
}

impl Call {
    pub(crate) fn context(&self) -> Result<Context, Unaskable> {
        let Self {
            path,
            program,
            image,
            token_kind,
            network,
            pty,
            limits,
        } = self;
        let texts = [
            ("path", path),
            ("program", program),
            ("image", image),
            ("token_kind", token_kind),
            ("network", network),
        ];
        let given = texts
            .into_iter()
            .filter_map(|(name, text)| Some((name, text.as_deref()?)));
        let given = given.chain(
            program
                .as_deref()
                .map(|program| ("program_name", program_name(program))),
        );
        let given = given.map(|(name, text)| (name, string(text)));
        let limits = limits.iter().flat_map(|limits| {
            let CallLimits {
                memory_bytes,
                millicpus,
                pids,
            } = *limits;
            [
                ("memory_bytes", memory_bytes),
                ("millicpus", millicpus),
                ("pids", pids),
            ]
            .map(|(name, value)| (name, RestrictedExpression::new_long(value)))
        });
        let pairs = given
            .chain(limits)
            .chain([("pty", boolean(*pty))])
            .map(|(name, value)| (name.to_owned(), value));
        Context::from_pairs(pairs).map_err(|error| Unaskable::Call(Box::new(error)))
    }
}

/// The last component of a program's path: `rm` of `rm`, `/bin/rm` and `../bin//rm`. The kernel runs no path that ends in a slash; it is
/// dropped here, so that such a path is not a way around a rule either.
fn program_name(program: &str) -> &str {
    let path = program.trim_end_matches('/');
    path.rsplit_once('/').map_or(path, |(_, name)| name)
}

impl Action {
    pub(crate) fn uid(self) -> EntityUid {
        uid(&TYPES.action, self.as_str())
    }

    /// With the groups that it is in, as the schema has them.
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

/// The names of the schema's types: parsed once, since each decision needs several of them.
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
}

static TYPES: LazyLock<Types> = LazyLock::new(|| {
    let name = |name: &str| {
        format!("CyNode::{name}")
            .parse()
            .expect("the name of a type in our own schema")
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
) -> Result<Entity, Unaskable> {
    let attributes: HashMap<_, _> = attributes
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    Entity::new(uid, attributes, parents).map_err(|error| Unaskable::Attribute(Box::new(error)))
}

#[cfg(test)]
mod tests {
    use cedar_policy::{Entities, Schema};

    use super::*;

    fn id(number: u128) -> Uuid {
        Uuid::from_u128(number)
    }

    fn assert_fits(entity: Result<Entity, Unaskable>) {
        let (schema, _) = Schema::from_cedarschema_str(crate::SCHEMA).expect("our own schema");
        let entity = entity.expect("values are values");
        let text = entity.to_string();
        assert!(
            Entities::from_entities([entity], Some(&schema)).is_ok(),
            "{text}"
        );
    }

    #[test]
    fn what_cedar_is_told_of_callers_fits_the_schema() {
        assert_fits(
            Principal::User {
                id: id(1),
                name: "a".to_owned(),
                admin: false,
                groups: vec!["b".to_owned(), "c".to_owned()],
            }
            .entity(),
        );
        assert_fits(
            Principal::Agent {
                token: id(1),
                role: Role::ProjectManager,
                user: id(2),
                project: None,
                tasks: vec![id(3), id(4)],
            }
            .entity(),
        );
        assert_fits(
            Principal::Agent {
                token: id(1),
                role: Role::ProjectAnalyst,
                user: id(2),
                project: Some(id(5)),
                tasks: vec![],
            }
            .entity(),
        );
        assert_fits(
            Principal::Sandbox {
                token: id(1),
                task: id(3),
            }
            .entity(),
        );
    }

    /// All but a user, of whom only the id is known.
    #[test]
    fn what_cedar_is_told_of_things_fits_the_schema() {
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
                    place,
                },
                Resource::Policy { id: "a".to_owned() },
            ] {
                assert_fits(resource.entity());
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

    /// Whatever place a caller of this crate gives them.
    #[test]
    fn a_project_and_a_task_are_never_in_themselves() {
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
