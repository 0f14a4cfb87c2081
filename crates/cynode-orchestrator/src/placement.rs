//! Which image and which node a request gets.

use std::collections::BTreeMap;

use cynode_api::{
    DEFAULT_IMAGE_KEY, ErrorCode, Excess, ImageVersionId, LABEL_AGENT_COMPATIBLE, LimitsRequest,
    NodeId, NodeState, Problem, session_limits,
};
use cynode_policy::{Action, Call, Resource};
use cynode_service::ApiError;

use crate::{
    Orchestrator,
    caller::Caller,
    db::{Chosen, Load, NodeRow, Of},
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
    pub(crate) async fn choose_image(
        &self,
        caller: &Caller,
        reference: Option<&str>,
        work: Work,
        of: Of,
    ) -> Result<Chosen, ApiError> {
        let reference = match reference {
            None | Some("default") => {
                let setting = self.db.setting(DEFAULT_IMAGE_KEY).await?;
                setting
                    .and_then(|setting| setting.value.as_str().map(str::to_owned))
                    .unwrap_or_else(|| self.config.default_image.clone())
            }
            Some(reference) => reference.to_owned(),
        };
        let chosen = self.db.allowed_image(&reference).await?;
        let chosen = chosen.ok_or_else(|| not_allowed(&reference))?;
        let pinned = chosen.image_digest.is_some();
        let decide = |agent_compatible| {
            let resource = Resource::Image {
                reference: chosen.image_ref.clone(),
                agent_compatible,
                pinned,
            };
            self.check(caller, Action::ImageUse, &resource, &Call::default())
        };
        match chosen.agent_compatible {
            Some(agent_compatible) => decide(agent_compatible)?,
            // Until a node has inspected it, it may be either.
            None => match (decide(false), decide(true)) {
                (Err(denied), Err(_)) => return Err(denied),
                (Ok(()), _) if work == Work::Command => {}
                _ => return Err(self.image_pending(&chosen.image_ref)),
            },
        }
        if work == Work::Agent && chosen.agent_compatible == Some(false) {
            let remedy = format!(
                "Use an image with the label {LABEL_AGENT_COMPATIBLE}=true; when you build this one with it, add it again: 'cynode image add --allow {}'.",
                chosen.image_ref
            );
            let detail = format!("{} is not marked as agent-compatible", chosen.image_ref);
            return Err(Problem::new(ErrorCode::ImageNotCompatible, detail)
                .with_remedy(remedy)
                .into());
        }
        if chosen.image_digest.is_none() && self.requires_pinning(of).await? {
            let detail = format!(
                "{} has no digest, and {REQUIRE_PINNING} is set",
                chosen.image_ref
            );
            return Err(ApiError::new(ErrorCode::ImageNotAllowed, detail));
        }
        Ok(chosen)
    }

    fn image_pending(&self, reference: &str) -> ApiError {
        let remedy = format!(
            "Load it on a node ('podman pull', 'podman load' or 'podman build' as the worker's user) and try again: nodes report what they have every {} s. \
             'cynode image show {reference}' says what is awaited.",
            self.config.heartbeat_seconds
        );
        Problem::new(
            ErrorCode::ImagePending,
            format!("no node has reported {reference} yet"),
        )
        .with_remedy(remedy)
        .into()
    }

    /// Whether only images with a digest may be used for somebody. A wider scope that says so can't be overruled by a narrower one.
    async fn requires_pinning(&self, of: Of) -> Result<bool, ApiError> {
        self.db.is_preferred(of, REQUIRE_PINNING).await
    }

    /// The node with the most room that has the image and the labels. One that can't be reached from here, or did not answer a
    /// moment ago, is taken only when no other is left. `not` had it before: there it counts as ended.
    pub(crate) async fn choose_node(
        &self,
        version: ImageVersionId,
        wanted: &NodeRequirements<'_>,
        not: &[NodeId],
    ) -> Result<NodeRow, ApiError> {
        let nodes = self.db.nodes().await?;
        let with_image = self.db.nodes_with(version).await?;
        let given = self.db.load().await?;
        let after = self.config.unreachable_after();
        let mut reasons: Vec<(String, Unfit)> = Vec::new();
        let mut best: Option<((bool, f64), NodeRow)> = None;
        for node in nodes {
            if not.contains(&node.id) {
                reasons.push((node.name, Unfit::HadItBefore));
                continue;
            }
            let given = given.get(&node.id).copied().unwrap_or_default();
            if let Some(reason) = unfit(&node, after, with_image.contains(&node.id), given, wanted)
            {
                reasons.push((node.name, reason));
                continue;
            }
            let is_silent = self.fleet.trouble(node.id).is_some() || self.fleet.is_quiet(node.id);
            let use_now = (is_silent, load(&node, given.sandboxes));
            if best.as_ref().is_none_or(|(least, _)| use_now < *least) {
                best = Some((use_now, node));
            }
        }
        best.map(|(_, node)| node).ok_or_else(|| no_node(&reasons))
    }
}

fn not_allowed(reference: &str) -> ApiError {
    let remedy = format!(
        "Choose one that 'cynode image list' shows as allowed, or have an administrator run 'cynode image add --allow {reference}'."
    );
    Problem::new(
        ErrorCode::ImageNotAllowed,
        format!("no allowed image goes by '{reference}'"),
    )
    .with_remedy(remedy)
    .into()
}

/// Why a node can't take work.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Unfit {
    HadItBefore,
    NotReady(String),
    Label(String),
    NoImage,
    /// A limit that is more than it gives.
    Limit(String),
    Full(i64),
    /// What the memory limits would add up to, and the most that they may.
    Promised(u64, u64),
}

impl std::fmt::Display for Unfit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::HadItBefore => f.write_str("had it before"),
            Self::NotReady(reason) | Self::Label(reason) => f.write_str(reason),
            Self::NoImage => f.write_str("does not have the image"),
            Self::Limit(most) => write!(f, "gives a sandbox at most {most}"),
            Self::Full(most) => write!(f, "is full ({most} sandboxes)"),
            Self::Promised(sum, most) => {
                write!(
                    f,
                    "has promised its memory (the limits of its sandboxes would add up to {sum} bytes, more than {most})"
                )
            }
        }
    }
}

impl Unfit {
    const fn remedy(&self) -> &'static str {
        match self {
            Self::Full(_) => "End sessions, or raise worker.max_sandboxes.",
            Self::NoImage => {
                "Load the image on a node; after loading another under its reference, pin it with 'cynode image add'. 'cynode image show' says what is awaited."
            }
            Self::Limit(_) => "Ask for less: 'cynode node show' has the largest limits.",
            Self::Promised(..) => {
                "End sessions, ask for less memory, or raise worker.memory_overcommit."
            }
            Self::Label(_) => "Ask for labels that a node has: see 'cynode node show'.",
            Self::NotReady(_) | Self::HadItBefore => "Try again; see 'cynode node list'.",
        }
    }
}

/// The refusal when no node can take the work, with the remedy for each reason that nodes have.
fn no_node(reasons: &[(String, Unfit)]) -> ApiError {
    if reasons.is_empty() {
        let remedy = "Start a worker: 'cynode up', or on another machine 'cynode up --worker-only' with a key of 'cynode node key create'.";
        return Problem::new(ErrorCode::NoCapacity, "no node has registered yet")
            .with_remedy(remedy)
            .into();
    }
    let detail: Vec<String> = reasons
        .iter()
        .map(|(name, reason)| format!("{name}: {reason}"))
        .collect();
    let mut remedies: Vec<&str> = reasons.iter().map(|(_, reason)| reason.remedy()).collect();
    remedies.sort_unstable();
    remedies.dedup();
    Problem::new(ErrorCode::NoCapacity, detail.join("; "))
        .with_remedy(remedies.join(" "))
        .into()
}

/// The labels that a request wants of its node.
pub(crate) type NodeLabels = BTreeMap<String, String>;

/// What a request wants of its node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeRequirements<'a> {
    pub(crate) labels: &'a NodeLabels,
    pub(crate) limits: LimitsRequest,
}

impl Orchestrator {
    /// Refuses limits that no node with the labels could ever give a sandbox. Where no such node is known, one may come.
    pub(crate) async fn check_largest(
        &self,
        wanted: &NodeRequirements<'_>,
    ) -> Result<(), ApiError> {
        if wanted.limits == LimitsRequest::default() {
            return Ok(());
        }
        refuse_beyond(&self.db.nodes().await?, wanted)
    }
}

fn refuse_beyond(nodes: &[NodeRow], wanted: &NodeRequirements<'_>) -> Result<(), ApiError> {
    let candidates = nodes
        .iter()
        .filter(|node| !node.is_lost && missing_label(node, wanted.labels).is_none());
    let beyond = |node: &NodeRow| {
        beyond(node, wanted.limits).map(|excess| {
            format!(
                "limits.{}: {} gives a sandbox at most {}",
                excess.limit, node.name, excess.most
            )
        })
    };
    // `None` as soon as one node gives enough.
    match candidates.map(beyond).collect::<Option<Vec<String>>>() {
        Some(reasons) if !reasons.is_empty() => Err(ApiError::new(
            ErrorCode::LimitUnenforceable,
            reasons.join("; "),
        )),
        _ => Ok(()),
    }
}

/// The limit that is more than a node ever gives.
pub(crate) fn beyond(node: &NodeRow, limits: LimitsRequest) -> Option<Excess> {
    node.capability.largest?.excess_of(limits)
}

/// Refuses labels that no node can have.
pub(crate) fn check_node_labels(labels: &NodeLabels) -> Result<(), ApiError> {
    use session_limits::{MAX_LABEL_BYTES, MAX_LABELS};
    if labels.len() > MAX_LABELS {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!("node_labels: more than {MAX_LABELS}"),
        ));
    }
    match labels.iter().find(|(name, value)| {
        name.is_empty() || name.len() > MAX_LABEL_BYTES || value.len() > MAX_LABEL_BYTES
    }) {
        Some((name, _)) => Err(ApiError::invalid(format!(
            "node_labels: {name:?} is not a label (1 to {MAX_LABEL_BYTES} bytes)"
        ))),
        None => Ok(()),
    }
}

/// The first label that a node would need and has not.
pub(crate) fn missing_label(node: &NodeRow, labels: &NodeLabels) -> Option<String> {
    let missing = labels
        .iter()
        .find(|(name, value)| node.capability.labels.get(*name) != Some(value));
    missing.map(|(name, value)| format!("does not have the label {name}={value}"))
}

/// Why a node can't take this work now.
fn unfit(
    node: &NodeRow,
    unreachable_after: f64,
    has_image: bool,
    given: Load,
    wanted: &NodeRequirements<'_>,
) -> Option<Unfit> {
    let (state, reason) = node.state(unreachable_after);
    if state != NodeState::Ready {
        return Some(Unfit::NotReady(
            reason.unwrap_or_else(|| "is draining".to_owned()),
        ));
    }
    if let Some(reason) = missing_label(node, wanted.labels) {
        return Some(Unfit::Label(reason));
    }
    if let Some(excess) = beyond(node, wanted.limits) {
        return Some(Unfit::Limit(excess.most));
    }
    if !has_image {
        return Some(Unfit::NoImage);
    }
    let most = i64::try_from(node.capability.max_sandboxes).unwrap_or(i64::MAX);
    if given.sandboxes.max(node.running_sandboxes.into()) >= most {
        return Some(Unfit::Full(most));
    }
    let promised = given
        .memory_bytes
        .saturating_add(wanted.limits.or_default().memory_bytes);
    node.capability
        .promised_memory_bytes
        .filter(|most| promised > *most)
        .map(|most| Unfit::Promised(promised, most))
}

#[expect(clippy::cast_precision_loss, reason = "a share of a few hundred")]
fn load(node: &NodeRow, given: i64) -> f64 {
    given.max(node.running_sandboxes.into()) as f64 / node.capability.max_sandboxes.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remedy_fits_the_reasons_of_the_nodes() {
        let remedy = |reasons: &[Unfit]| {
            no_node(
                &reasons
                    .iter()
                    .map(|reason| ("n".to_owned(), reason.clone()))
                    .collect::<Vec<_>>(),
            )
            .0
            .remedy
        };
        assert!(remedy(&[Unfit::NoImage, Unfit::NoImage]).starts_with("Load the image on a node"));
        assert!(
            !remedy(&[Unfit::NoImage]).contains("max_sandboxes")
                && remedy(&[Unfit::Full(3)]).contains("max_sandboxes")
        );
        let both = remedy(&[Unfit::NoImage, Unfit::Full(3), Unfit::NoImage]);
        assert!(
            both.contains("max_sandboxes") && both.matches("Load the image").count() == 1,
            "{both}"
        );
        assert!(remedy(&[]).contains("cynode up"));
        assert!(remedy(&[Unfit::Label("x".into())]).contains("labels"));
    }
}
