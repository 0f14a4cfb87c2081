//! Help, and tools whose services do not exist yet: they answer with a remedy.
#![expect(
    dead_code,
    reason = "arguments are parsed strictly into fields that no service reads yet"
)]

use cynode_api::{ErrorCode, TaskId};
use cynode_service::ApiError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{ALL, Arguments, MANAGERS, Tool, ToolEffect, arguments, sessions::Empty};
use crate::mcp::{
    help::{self, HelpTopic},
    plan::Plan,
};

pub(super) fn tools() -> Vec<Tool> {
    let mut tools = vec![
        Tool::new::<HelpList, Topics>(
            "help.list",
            ALL,
            ToolEffect::ReadOnly,
            "List the help topics. Start here.",
        ),
        Tool::new::<HelpGet, HelpText>("help.get", ALL, ToolEffect::ReadOnly, "Show a help topic."),
        Tool::new::<ExternalCall, Empty>(
            "api.call",
            ALL,
            ToolEffect::Destructive,
            "Call an external service whose credentials stay outside the sandbox.",
        ),
        Tool::new::<WebFetch, Empty>(
            "web.fetch",
            ALL,
            ToolEffect::ReadOnly,
            "Fetch a web page that policy allows.",
        ),
        Tool::new::<WebSearch, Empty>("web.search", ALL, ToolEffect::ReadOnly, "Search the web."),
        Tool::new::<Publish, Empty>(
            "sandbox.image.publish",
            MANAGERS,
            ToolEffect::Additive,
            "Publish a sandbox as an image.",
        ),
    ];
    for (name, audience, effect) in [
        ("skills.list", ALL, ToolEffect::ReadOnly),
        ("skills.get", ALL, ToolEffect::ReadOnly),
        ("skills.create", MANAGERS, ToolEffect::Additive),
        ("skills.update", MANAGERS, ToolEffect::Destructive),
        ("skills.delete", MANAGERS, ToolEffect::Destructive),
    ] {
        tools.push(Tool::new::<Skills, Empty>(
            name,
            audience,
            effect,
            "Skills: guidance that agents share.",
        ));
    }
    tools
}

/// The help topics.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Topics {
    topics: Vec<TopicLine>,
}

/// A topic in one line.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Line)]
pub(crate) struct TopicLine {
    topic: String,
    about: String,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct HelpText {
    topic: String,
    text: String,
}

arguments! {
    HelpList {
    }
    HelpGet {
        topic: String,
    }
    ExternalCall {
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

// The arguments of skill tools are not designed yet, except that they name a task.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Skills {
    task_id: TaskId,
    #[serde(flatten)]
    #[schema(additional_properties)]
    rest: Map<String, Value>,
}

impl Arguments for Skills {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Unavailable(
            self.task_id,
            "Keep guidance as an artifact of the task, or in the preference \
             agents.sandbox_agent.additional_context.",
        ))
    }
}

fn list_help(topics: &[HelpTopic]) -> Plan {
    let topics: Vec<Value> = topics
        .iter()
        .map(|topic| json!({"topic": topic.name, "about": topic.about}))
        .collect();
    Plan::Answer(json!({ "topics": topics }))
}

fn get_help(topics: &[HelpTopic], name: &str) -> Result<Plan, ApiError> {
    let topic = topics.iter().find(|topic| topic.name == name);
    let names = || {
        topics
            .iter()
            .map(|topic| topic.name)
            .collect::<Vec<_>>()
            .join(", ")
    };
    let topic = topic.ok_or_else(|| {
        ApiError::new(
            ErrorCode::NotFound,
            format!("there is no such help topic; the topics are {}", names()),
        )
    })?;
    Ok(Plan::Answer(
        json!({"topic": topic.name, "text": topic.text}),
    ))
}

/// Help on `/mcp/coding`: a topic, or the list.
pub(super) fn help_for_coding(topic: Option<&str>) -> Result<Plan, ApiError> {
    match topic {
        Some(topic) => get_help(help::CODING_TOPICS, topic),
        None => Ok(list_help(help::CODING_TOPICS)),
    }
}

impl Arguments for HelpList {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(list_help(help::TOPICS))
    }
}

impl Arguments for HelpGet {
    fn into_plan(self) -> Result<Plan, ApiError> {
        get_help(help::TOPICS, &self.topic)
    }
}

const NO_WEB: &str =
    "Have a person provide what is needed as an artifact of the task, or use an image that has it.";

impl Arguments for ExternalCall {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Unavailable(self.task_id, NO_WEB))
    }
}

impl Arguments for WebFetch {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Unavailable(self.task_id, NO_WEB))
    }
}

impl Arguments for WebSearch {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Unavailable(self.task_id, NO_WEB))
    }
}

impl Arguments for Publish {
    fn into_plan(self) -> Result<Plan, ApiError> {
        Ok(Plan::Unavailable(
            self.task_id,
            "Have a person build the image and add it: 'cynode image add'.",
        ))
    }
}
