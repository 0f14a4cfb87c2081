//! Help, and tools whose services are not there yet: they say so, and what to do meanwhile.
#![expect(
    dead_code,
    reason = "what is read strictly has its type, whether anybody uses it yet or not"
)]

use cynode_api::{ErrorCode, TaskId};
use cynode_service::ApiError;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{ALL, Arguments, Kind, MANAGERS, Tool, arguments, sessions::Empty};
use crate::mcp::{help, plan::Plan};

pub(super) fn tools() -> Vec<Tool> {
    let mut tools = vec![
        Tool::new::<HelpList, Topics>(
            "help.list",
            ALL,
            Kind::Reads,
            "What there is help on. Begin here.",
        ),
        Tool::new::<HelpGet, Topic>("help.get", ALL, Kind::Reads, "Help on a topic."),
        Tool::new::<ApiCall, Empty>(
            "api.call",
            ALL,
            Kind::Changes,
            "Call an outside service whose credentials stay outside the sandbox.",
        ),
        Tool::new::<WebFetch, Empty>(
            "web.fetch",
            ALL,
            Kind::Reads,
            "Fetch a page of the web that policy allows.",
        ),
        Tool::new::<WebSearch, Empty>("web.search", ALL, Kind::Reads, "Search the web."),
        Tool::new::<Publish, Empty>(
            "sandbox.image.publish",
            MANAGERS,
            Kind::Adds,
            "Publish a sandbox as an image.",
        ),
    ];
    for (name, for_whom, kind) in [
        ("skills.list", ALL, Kind::Reads),
        ("skills.get", ALL, Kind::Reads),
        ("skills.create", MANAGERS, Kind::Adds),
        ("skills.update", MANAGERS, Kind::Changes),
        ("skills.delete", MANAGERS, Kind::Changes),
    ] {
        tools.push(Tool::new::<Skills, Empty>(
            name,
            for_whom,
            kind,
            "Skills: guidance that agents share.",
        ));
    }
    for (name, about) in [
        (
            "git.repo.validate",
            "See whether a repository can be reached and written to.",
        ),
        ("git.changeset.apply", "Apply a patch artifact to a branch."),
        ("git.branch.create", "Create a branch."),
        ("git.commit.create", "Make a commit."),
        ("git.push", "Push a branch."),
        ("git.pr.create", "Open a pull request."),
        ("git.promote", "From a patch artifact to a pull request."),
    ] {
        tools.push(Tool::new::<Git, Empty>(
            name,
            MANAGERS,
            Kind::Changes,
            about,
        ));
    }
    tools
}

/// What there is help on.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Topics {
    topics: Vec<Line>,
}

/// A topic in one line.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Line {
    topic: String,
    about: String,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Topic {
    topic: String,
    text: String,
}

arguments! {
    HelpList {
    }
    HelpGet {
        topic: String,
    }
    ApiCall {
        task_id: TaskId,
        provider: String,
        operation: String,
        #[schema(value_type = Object)]
        params: Map<String, Value>,
    }
    WebFetch {
        task_id: TaskId,
        url: String,
    }
    WebSearch {
        task_id: TaskId,
        query: String,
        limit: Option<u32>,
    }
    Publish {
        task_id: TaskId,
        session_id: cynode_api::SessionId,
        image_ref: String,
    }
}

/// Tools of which it is not settled what they will take; only that they name a task.
macro_rules! unsettled {
    ($($name:ident: $remedy:expr;)*) => { $(
        #[derive(Debug, serde::Deserialize, ToSchema)]
        pub(crate) struct $name {
            task_id: TaskId,
            #[serde(flatten)]
            #[schema(additional_properties)]
            rest: Map<String, Value>,
        }

        impl Arguments for $name {
            fn plan(self) -> Result<Plan, ApiError> {
                Ok(Plan::Missing(self.task_id, $remedy))
            }
        }
    )* };
}

unsettled! {
    Git: "Export the change with sandbox.workspace.export_patch; a person can fetch the artifact and push it.";
    Skills: "Keep guidance as an artifact of the task, or in the preference agents.sandbox_agent.additional_context.";
}

impl Arguments for HelpList {
    fn plan(self) -> Result<Plan, ApiError> {
        let topics: Vec<Value> = help::TOPICS
            .iter()
            .map(|topic| json!({"topic": topic.name, "about": topic.about}))
            .collect();
        Ok(Plan::Answer(json!({ "topics": topics })))
    }
}

impl Arguments for HelpGet {
    fn plan(self) -> Result<Plan, ApiError> {
        let found = help::TOPICS.iter().find(|topic| topic.name == self.topic);
        let known = || {
            help::TOPICS
                .iter()
                .map(|topic| topic.name)
                .collect::<Vec<_>>()
                .join(", ")
        };
        let topic = found.ok_or_else(|| {
            ApiError::new(
                ErrorCode::NotFound,
                format!("there is no help on that; there is on {}", known()),
            )
        })?;
        Ok(Plan::Answer(
            json!({"topic": topic.name, "text": topic.text}),
        ))
    }
}

const NO_WEB: &str =
    "Have a person bring what is needed as an artifact of the task, or use an image that has it.";

impl Arguments for ApiCall {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Missing(self.task_id, NO_WEB))
    }
}

impl Arguments for WebFetch {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Missing(self.task_id, NO_WEB))
    }
}

impl Arguments for WebSearch {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Missing(self.task_id, NO_WEB))
    }
}

impl Arguments for Publish {
    fn plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Missing(
            self.task_id,
            "Have a person build the image and add it: 'cynode image add'.",
        ))
    }
}
