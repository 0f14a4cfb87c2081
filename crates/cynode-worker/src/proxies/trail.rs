//! Records denials in the node's audit trail.

use super::{DeniedTarget, Proxies, ProxyPeer};
use crate::audit::{
    AuditedSandbox, DecisionOutcome, NodeAction, NodeDecision, ProxyTarget, SandboxOwner,
};

/// Records a denial. If that fails the denial stands: it has no effect.
pub(super) async fn record_denial(
    proxies: &Proxies,
    peer: &ProxyPeer,
    target: &DeniedTarget,
    code: &str,
) {
    let Some(trail) = proxies.trail.get() else {
        return;
    };
    let session = SandboxOwner::Session(peer.session_id);
    let decision = NodeDecision {
        sandbox: AuditedSandbox {
            owner: peer.job_id.map_or(session, SandboxOwner::Job),
            task_id: peer.task_id,
        },
        action: NodeAction::ProxyDenied(ProxyTarget {
            host: target.host.clone(),
            port: target.port,
            rule: target.rule.to_owned(),
        }),
        outcome: DecisionOutcome::Denied {
            code: code.to_owned(),
        },
    };
    if let Err(error) = trail.record(decision).await {
        tracing::debug!(%error, session_id = %peer.session_id, "A denial was not recorded.");
    }
}
