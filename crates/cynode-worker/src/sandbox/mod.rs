//! One sandbox seen from the host: its control socket, the agent behind it, its container's process.

mod agent;
mod changes;
mod link;
pub(crate) mod namespace;
pub(crate) mod terminals;
mod transfer;

pub(crate) use agent::{ANSWER, unavailable, unexpected};
pub(crate) use agent::{Channel, agent_problem};
pub(crate) use changes::{checked, is_sha256, named};
pub(crate) use link::{AgentLink, InitProcess, LinkError};
