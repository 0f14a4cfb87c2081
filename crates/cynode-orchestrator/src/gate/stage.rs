//! The stages that a call passes, as audit records and tool results name them.

use cynode_service::ApiError;

use super::Refusal;

/// Where a call was refused or failed. Goes with the answer as a response extension, so that the
/// MCP gateway can report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The cached identity of the caller turned out stale.
    Authenticate,
    /// The route does not accept this kind of token.
    AgentType,
    Arguments,
    /// The caller has no access to the task that a tool call names, or the target is not part of
    /// it.
    Task,
    /// The target does not exist.
    Resource,
    Secrets,
    Policy,
    /// There is no such tool.
    Tool,
    /// The tool is not open to this kind of caller.
    Allowlist,
    /// The tool is disabled by a system setting.
    Enabled,
    Limits,
    Audit,
    /// The call was carried out and failed.
    Run,
}

impl Stage {
    /// The name in audit records and tool results. These are a wire format: they never change.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Authenticate => "authenticate",
            Self::AgentType => "agent_type",
            Self::Arguments => "arguments",
            Self::Task => "task",
            Self::Resource => "resource",
            Self::Secrets => "secrets",
            Self::Policy => "policy",
            Self::Tool => "tool",
            Self::Allowlist => "allowlist",
            Self::Enabled => "enabled",
            Self::Limits => "limits",
            Self::Audit => "audit",
            Self::Run => "run",
        }
    }

    pub(crate) fn refuse(self) -> impl FnOnce(ApiError) -> Refusal {
        move |error| Refusal { stage: self, error }
    }
}
