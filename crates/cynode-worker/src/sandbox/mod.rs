//! One sandbox as seen from the host: its control socket, the agent, and the container's process.

mod agent;
mod changes;
mod link;
pub(crate) mod namespace;
pub(crate) mod terminals;
mod transfer;

pub(crate) use agent::{Channel, agent_problem};
pub(crate) use agent::{REPLY_TIMEOUT, unavailable, unexpected};
pub(crate) use changes::{changes_of_request, is_sha256, validate_changes};
pub(crate) use link::{AgentLink, InitProcess, LinkError, bind};
