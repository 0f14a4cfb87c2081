//! Which image and which node a request gets.

use std::collections::BTreeMap;

use cynode_api::{DEFAULT_IMAGE_KEY, ErrorCode, ImageVersionId, NodeId, NodeState, session_limits};
use cynode_policy::{Action, Call, Resource};
use cynode_service::ApiError;

use crate::{
    Orchestrator,
    caller::Caller,
    db::{Chosen, NodeRow, Of},
};

/// A preference: images without a digest are not used.
const REQUIRE_PINNING: &str = "sandbox_images.require_digest_pinning";

/// What the work is, as far as the choice of an image goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// A session, or an agent's job: only images made for it.
    Agent,
    /// One plain command: any allowed image.
    Command,
}

impl Orchestrator {
    /// The allowed version that a request's reference means.
    pub(crate) async fn choose_image(&self, caller: &Caller, reference: Option<&str>, work: Work, of: Of) -> Result<Chosen, ApiError> {
        let reference = match reference {
            None | Some("default") => {
                let setting = self.db.setting(DEFAULT_IMAGE_KEY).await?;
                setting.and_then(|setting| setting.value.as_str().map(str::to_owned)).unwrap_or_else(|| self.config.default_image.clone())
            }
            Some(reference) => reference.to_owned(),
        };
        let chosen = self.db.allowed_image(&reference).await?;
        let chosen = chosen.ok_or_else(|| ApiError::new(ErrorCode::ImageNotAllowed, format!("no allowed image goes by '{reference}'")))?;
        let (reference, pinned) = (chosen.image_ref.clone(), chosen.image_digest.is_some());
        self.check(caller, Action::ImageUse, &Resource::Image { reference, agent_compatible: chosen.agent_compatible, pinned }, &Call::default())?;
        if work == Work::Agent && !chosen.agent_compatible {
            return Err(ApiError::new(ErrorCode::ImageNotCompatible, format!("{} is not marked as agent-compatible", chosen.image_ref)));
        }
        if chosen.image_digest.is_none() && self.requires_pinning(of).await? {
            let detail = format!("{} has no digest, and {REQUIRE_PINNING} is set", chosen.image_ref);
            return Err(ApiError::new(ErrorCode::ImageNotAllowed, detail));
        }
        Ok(chosen)
    }

    /// Whether only images with a digest may be used for somebody. A wider scope that says so can't be overruled by a narrower one.
    async fn requires_pinning(&self, of: Of) -> Result<bool, ApiError> {
        self.db.is_preferred(of, REQUIRE_PINNING).await
    }

    /// The node with the most room that has the image and the labels. One that can't be reached from here, or did not answer a
    /// moment ago, is taken only when no other is left. `not` had it before: there it counts as ended.
    pub(crate) async fn choose_node(&self, version: ImageVersionId, labels: &NodeLabels, not: &[NodeId]) -> Result<NodeRow, ApiError> {
        let nodes = self.db.nodes().await?;
        let with_image = self.db.nodes_with(version).await?;
        let given = self.db.load().await?;
        let after = self.config.unreachable_after();
        let mut reasons = Vec::new();
        let mut best: Option<((bool, f64), NodeRow)> = None;
        for node in nodes {
            if not.contains(&node.id) {
                reasons.push((node.name, "had it before".to_owned()));
                continue;
            }
            let given = given.iter().find(|(id, _)| *id == node.id).map_or(0, |(_, count)| *count);
            if let Some(reason) = unfit(&node, after, with_image.contains(&node.id), given, labels) {
                reasons.push((node.name, reason));
                continue;
            }
            let is_silent = self.fleet.trouble(node.id).is_some() || self.fleet.is_quiet(node.id);
            let use_now = (is_silent, load(&node, given));
            if best.as_ref().is_none_or(|(least, _)| use_now < *least) {
                best = Some((use_now, node));
            }
        }
        best.map(|(_, node)| node).ok_or_else(|| {
            let said: Vec<String> = reasons.iter().map(|(name, reason)| format!("{name}: {reason}")).collect();
            let detail = if said.is_empty() { "no node has registered yet".to_owned() } else { said.join("; ") };
            ApiError::new(ErrorCode::NoCapacity, detail)
        })
    }
}

/// What a request wants of its node.
pub(crate) type NodeLabels = BTreeMap<String, String>;

/// Refuses labels that no node can have.
pub(crate) fn check_node_labels(labels: &NodeLabels) -> Result<(), ApiError> {
    use session_limits::{MAX_LABEL_BYTES, MAX_LABELS};
    if labels.len() > MAX_LABELS {
        return Err(ApiError::new(ErrorCode::TooLarge, format!("node_labels: more than {MAX_LABELS}")));
    }
    match labels.iter().find(|(name, value)| name.is_empty() || name.len() > MAX_LABEL_BYTES || value.len() > MAX_LABEL_BYTES) {
        Some((name, _)) => Err(ApiError::invalid(format!("node_labels: {name:?} is not a label (1 to {MAX_LABEL_BYTES} bytes)"))),
        None => Ok(()),
    }
}

/// The first label that a node would need and has not.
pub(crate) fn missing_label(node: &NodeRow, labels: &NodeLabels) -> Option<String> {
    let missing = labels.iter().find(|(name, value)| node.capability.labels.get(*name) != Some(value));
    missing.map(|(name, value)| format!("does not have the label {name}={value}"))
}

/// Why a node can't take this work now.
fn unfit(node: &NodeRow, unreachable_after: f64, has_image: bool, given: i64, labels: &NodeLabels) -> Option<String> {
    let (state, reason) = node.state(unreachable_after);
    if state != NodeState::Ready {
        return Some(reason.unwrap_or_else(|| "is draining".to_owned()));
    }
    if let Some(reason) = missing_label(node, labels) {
        return Some(reason);
    }
    if !has_image {
        return Some("does not have the image".to_owned());
    }
    let most = i64::try_from(node.capability.max_sandboxes).unwrap_or(i64::MAX);
    (given.max(node.running_sandboxes.into()) >= most).then(|| format!("is full ({most} sandboxes)"))
}

#[expect(clippy::cast_precision_loss, reason = "a share of a few hundred")]
fn load(node: &NodeRow, given: i64) -> f64 {
    given.max(node.running_sandboxes.into()) as f64 / node.capability.max_sandboxes.max(1) as f64
}
