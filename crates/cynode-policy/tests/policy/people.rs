//! Callers and resources for all tests.

use cynode_policy::{Action, Place, Principal, Resource, Role};
use uuid::Uuid;

pub(crate) const ADMINISTRATOR: Uuid = Uuid::from_u128(1);
pub(crate) const OWNER: Uuid = Uuid::from_u128(2);
pub(crate) const PROJECT_OWNER: Uuid = Uuid::from_u128(3);
pub(crate) const STRANGER: Uuid = Uuid::from_u128(4);
pub(crate) const PROJECT: Uuid = Uuid::from_u128(10);
pub(crate) const TASK: Uuid = Uuid::from_u128(11);
pub(crate) const OTHER_PROJECT: Uuid = Uuid::from_u128(20);
pub(crate) const OTHER_TASK: Uuid = Uuid::from_u128(21);

pub(crate) fn user(id: Uuid) -> Principal {
    Principal::User {
        id,
        name: "somebody".to_owned(),
        admin: false,
        groups: vec!["reviewers".to_owned()],
    }
}

pub(crate) fn administrator() -> Principal {
    Principal::User {
        id: ADMINISTRATOR,
        name: "admin".to_owned(),
        admin: true,
        groups: Vec::new(),
    }
}

/// An agent whose token the owner created, so that a denial is never due to the user behind it.
pub(crate) fn agent(role: Role, project: Option<Uuid>, tasks: &[Uuid]) -> Principal {
    Principal::Agent {
        token: Uuid::from_u128(30),
        role,
        user: OWNER,
        project,
        tasks: tasks.to_vec(),
    }
}

pub(crate) fn sandbox() -> Principal {
    Principal::Sandbox {
        token: Uuid::from_u128(31),
        task: TASK,
    }
}

/// Every kind of caller, in the order of the table's columns.
pub(crate) fn everybody() -> Vec<(&'static str, Principal)> {
    let mut everybody = vec![
        ("administrator", administrator()),
        ("owner", user(OWNER)),
        ("project's owner", user(PROJECT_OWNER)),
        ("stranger", user(STRANGER)),
    ];
    for (names, role) in [
        (
            [
                "manager of the task",
                "manager of the project",
                "manager of another",
            ],
            Role::ProjectManager,
        ),
        (
            [
                "analyst of the task",
                "analyst of the project",
                "analyst of another",
            ],
            Role::ProjectAnalyst,
        ),
    ] {
        let [task, project, another] = names;
        everybody.push((task, agent(role, None, &[TASK])));
        everybody.push((project, agent(role, Some(PROJECT), &[])));
        everybody.push((another, agent(role, Some(OTHER_PROJECT), &[OTHER_TASK])));
    }
    everybody.push(("sandbox", sandbox()));
    everybody
}

pub(crate) fn in_the_task() -> Place {
    Place {
        task: Some(TASK),
        project: Some(PROJECT),
        owners: vec![OWNER, PROJECT_OWNER],
    }
}

fn in_the_project() -> Place {
    Place {
        task: None,
        project: Some(PROJECT),
        owners: vec![PROJECT_OWNER],
    }
}

pub(crate) fn session() -> Resource {
    Resource::Session {
        id: Uuid::from_u128(40),
        place: in_the_task(),
    }
}

fn preference(scope: &str, key: &str, place: Place) -> Resource {
    Resource::Preference {
        scope: scope.to_owned(),
        key: key.to_owned(),
        place,
    }
}

/// A resource of every type, with its label in the table.
pub(crate) fn everything() -> Vec<(&'static str, Resource)> {
    let of_owner = || Place {
        owners: vec![OWNER],
        ..Place::default()
    };
    vec![
        ("System", Resource::System),
        (
            "Project",
            Resource::Project {
                id: PROJECT,
                place: in_the_project(),
            },
        ),
        (
            "Task",
            Resource::Task {
                id: TASK,
                place: Place {
                    task: None,
                    ..in_the_task()
                },
            },
        ),
        ("Session", session()),
        (
            "Job",
            Resource::Job {
                id: Uuid::from_u128(41),
                place: in_the_task(),
            },
        ),
        (
            "Artifact",
            Resource::Artifact {
                id: "42".to_owned(),
                place: in_the_task(),
            },
        ),
        ("User: owner", Resource::User { id: OWNER }),
        (
            "Group: with owner",
            Resource::Group {
                id: Uuid::from_u128(43),
                members: vec![OWNER],
            },
        ),
        (
            "Token: owner's",
            Resource::Token {
                id: "44".to_owned(),
                user: OWNER,
                kind: "user".to_owned(),
            },
        ),
        (
            "Image",
            Resource::Image {
                reference: "registry.example/runner:1".to_owned(),
                agent_compatible: true,
                pinned: false,
            },
        ),
        (
            "Node",
            Resource::Node {
                id: "45".to_owned(),
            },
        ),
        (
            "Setting",
            Resource::Setting {
                key: "sandbox.default_image".to_owned(),
            },
        ),
        (
            "Preference: task",
            preference(
                "task",
                "agents.sandbox_agent.additional_context",
                in_the_task(),
            ),
        ),
        (
            "Preference: task, images",
            preference("task", "sandbox_images.registries", in_the_task()),
        ),
        (
            "Preference: task, models",
            preference("task", "inference.allowed_models", in_the_task()),
        ),
        (
            "Preference: task, egress",
            preference("task", "egress.hosts", in_the_task()),
        ),
        (
            "Preference: task, quota",
            preference("task", "quota.sessions", in_the_task()),
        ),
        (
            "Preference: project",
            preference(
                "project",
                "agents.sandbox_agent.additional_context",
                in_the_project(),
            ),
        ),
        (
            "Preference: owner's",
            preference(
                "user",
                "agents.sandbox_agent.additional_context",
                of_owner(),
            ),
        ),
        (
            "Preference: owner's quota",
            preference("user", "quota.sessions", of_owner()),
        ),
        (
            "Preference: group",
            preference(
                "group",
                "agents.sandbox_agent.additional_context",
                of_owner(),
            ),
        ),
        (
            "Preference: system",
            preference(
                "system",
                "agents.sandbox_agent.additional_context",
                of_owner(),
            ),
        ),
        (
            "Policy",
            Resource::Policy {
                id: "defaults".to_owned(),
            },
        ),
        (
            "Repository",
            Resource::Repository {
                id: Uuid::from_u128(46),
                name: "site".to_owned(),
                project: PROJECT,
            },
        ),
        (
            "Credential",
            Resource::Credential {
                id: Uuid::from_u128(47),
                project: PROJECT,
            },
        ),
        (
            "Promotion",
            Resource::Promotion {
                id: Uuid::from_u128(48),
                place: in_the_task(),
            },
        ),
    ]
}

/// Every action with every resource that it applies to.
pub(crate) fn every_question() -> Vec<(Action, &'static str, Resource)> {
    let types = crate::rules::types_by_action();
    let everything = everything();
    let mut questions = Vec::new();
    for action in Action::ALL {
        for (name, resource) in &everything {
            let kind = name.split(':').next().unwrap_or_default();
            if types[action.as_str()].contains(kind) {
                questions.push((*action, *name, resource.clone()));
            }
        }
    }
    questions
}
