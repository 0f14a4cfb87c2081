//! Chooses the image and the node of a request.

use std::{collections::BTreeMap, fmt::Write as _, sync::Arc, time::Duration};

use cynode_api::{
    Artifact, ArtifactId, DEFAULT_IMAGE_KEY, Excess, ImageVersionId, LABEL_AGENT_COMPATIBLE,
    LimitsRequest, NodeId, NodeState, Problem, Task, TaskId, TokenKind, WorkspaceId, WorkspaceRef,
    document::quote,
};
use cynode_inference::same_model;
use cynode_policy::{Action, CallContext, Resource};
use time::OffsetDateTime;

use crate::{
    Config, Orchestrator,
    caller::Caller,
    db::{self, Db, Load, Missing, NodeRow, PreferenceContext, ResolvedImage, is_visible},
    fleet::Fleet,
};

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Db(#[from] db::Error),
    /// The gate's refusal.
    #[error("a policy denies the use of the image")]
    Denied(Box<Problem>),
    #[error("no allowed image goes by '{reference}'")]
    ImageNotAllowed { reference: String },
    #[error("{reference} is not marked as agent-compatible")]
    ImageNotCompatible { reference: String },
    #[error("{reference} has no digest, and {REQUIRE_PINNING} is set")]
    ImageUnpinned { reference: String },
    #[error("no node has reported {reference} yet")]
    ImagePending {
        reference: String,
        heartbeat_seconds: u64,
    },
    #[error("no session of this task kept a workspace {0}")]
    WorkspaceNotFound(WorkspaceId),
    #[error("limits.{limit}: {node}, which has the workspace, gives a sandbox at most {max}")]
    WorkspaceNodeLimit {
        limit: &'static str,
        node: String,
        max: String,
    },
    #[error("{node}, which has the workspace, {reason}")]
    WorkspaceNodeLabel { node: String, reason: String },
    #[error("{node}, which has the workspace, runs plain commands only")]
    WorkspaceNodeOutdated { node: String },
    #[error("{node}, which has the workspace, {reason}")]
    WorkspaceNodeModels { node: String, reason: String },
    #[error("{}", .0.join("; "))]
    LimitUnenforceable(Vec<String>),
    /// No node fits, each with its reason.
    #[error("{}", describe(.0))]
    NoNode(Vec<(String, Unfit)>),
}

impl Error {
    pub(crate) fn remedy(&self) -> Option<String> {
        match self {
            Self::ImageNotAllowed { reference } => Some(format!(
                "Choose one that 'cynode image list' shows as allowed, \
                 or have an administrator run 'cynode image add --allow {reference}'."
            )),
            Self::ImageNotCompatible { reference } => Some(format!(
                "Use an image with the label {LABEL_AGENT_COMPATIBLE}=true; \
                 when you build this one with it, add it again: \
                 'cynode image add --allow {reference}'."
            )),
            Self::ImagePending {
                reference,
                heartbeat_seconds,
            } => Some(format!(
                "Load it on a node ('podman pull', 'podman load' or 'podman build' \
                 as the worker's user) and try again: \
                 nodes report what they have every {heartbeat_seconds} s. \
                 'cynode image show {reference}' says what is awaited."
            )),
            Self::NoNode(reasons) if reasons.is_empty() => Some(
                "Start a worker: 'cynode up', or on another machine 'cynode up --worker-only' \
                 with a key of 'cynode node key create'."
                    .to_owned(),
            ),
            Self::NoNode(reasons) => {
                let mut remedies: Vec<&str> =
                    reasons.iter().map(|(_, reason)| reason.remedy()).collect();
                remedies.sort_unstable();
                remedies.dedup();
                Some(remedies.join(" "))
            }
            _ => None,
        }
    }
}

fn describe(reasons: &[(String, Unfit)]) -> String {
    if reasons.is_empty() {
        return "no node has registered yet".to_owned();
    }
    let reasons: Vec<String> = reasons
        .iter()
        .map(|(name, reason)| format!("{name}: {reason}"))
        .collect();
    reasons.join("; ")
}

/// The preference that forbids images without a digest.
const REQUIRE_PINNING: &str = "sandbox_images.require_digest_pinning";

/// The kind of work, as far as it restricts the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// A session or an agent's job: needs an agent-compatible image.
    Agent,
    /// A plain command: any allowed image.
    Command,
}

impl Orchestrator {
    /// The allowed version that a request's reference identifies.
    pub(crate) async fn choose_image(
        &self,
        caller: &Caller,
        reference: Option<&str>,
        work: Work,
        context: PreferenceContext,
    ) -> Result<ResolvedImage, Error> {
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
        let chosen = chosen.ok_or(Error::ImageNotAllowed { reference })?;
        let pinned = chosen.image_digest.is_some();
        let decide = |agent_compatible| {
            let resource = Resource::Image {
                reference: chosen.image_ref.clone(),
                agent_compatible,
                pinned,
            };
            self.check(caller, Action::ImageUse, &resource, &CallContext::default())
                .map_err(|denial| Error::Denied(denial.into_problem()))
        };
        match chosen.agent_compatible {
            Some(agent_compatible) => decide(agent_compatible)?,
            // Before a node has inspected the image, it may be either.
            None => match (decide(false), decide(true)) {
                (Err(denied), Err(_)) => return Err(denied),
                (Ok(()), _) if work == Work::Command => {}
                _ => {
                    return Err(Error::ImagePending {
                        reference: chosen.image_ref,
                        heartbeat_seconds: self.config.heartbeat_seconds,
                    });
                }
            },
        }
        if work == Work::Agent && chosen.agent_compatible == Some(false) {
            return Err(Error::ImageNotCompatible {
                reference: chosen.image_ref,
            });
        }
        if chosen.image_digest.is_none() && self.requires_pinning(context).await? {
            return Err(Error::ImageUnpinned {
                reference: chosen.image_ref,
            });
        }
        Ok(chosen)
    }

    /// Whether images must be pinned. A wider scope that requires it can't be overruled by a
    /// narrower one.
    async fn requires_pinning(&self, context: PreferenceContext) -> Result<bool, db::Error> {
        self.db.is_preferred(context, REQUIRE_PINNING).await
    }

    /// The named task, or a new implicit one; the flag tells whether it is new.
    pub(crate) async fn task_for(
        &self,
        caller: &Caller,
        named: Option<TaskId>,
        name: impl FnOnce() -> String,
    ) -> Result<(Task, bool), db::Error> {
        match named {
            Some(id) => Ok((self.db.task(&caller.scope, id).await?, false)),
            None => Ok((
                implicit_task(TaskId::generate(), name(), &caller.user_name),
                true,
            )),
        }
    }

    /// A workspace may start only from an artifact that the caller can read; an agent's, only from
    /// one of the same task.
    pub(crate) async fn check_artifact(
        &self,
        caller: &Caller,
        task_id: TaskId,
        wanted: Option<&WorkspaceRef>,
    ) -> Result<(), db::Error> {
        let Some(WorkspaceRef::Artifact(id)) = wanted else {
            return Ok(());
        };
        let artifact = self.readable_artifact(caller, *id).await?;
        if caller.kind != TokenKind::User && artifact.task_id != task_id {
            return Err(Missing::Artifact(*id).into());
        }
        Ok(())
    }

    pub(crate) async fn readable_artifact(
        &self,
        caller: &Caller,
        id: ArtifactId,
    ) -> Result<Artifact, db::Error> {
        let artifact = self.db.artifact(id).await?;
        if !is_visible(self.db.task(&caller.scope, artifact.task_id).await)? {
            return Err(Missing::Artifact(id).into());
        }
        Ok(artifact)
    }
}

/// Chooses nodes, by what the database and recent calls say of them. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    pub(crate) db: Db,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) config: Arc<Config>,
}

impl Placement {
    /// The node with the most capacity that has the image and the labels. A node that is
    /// unreachable from here or did not answer recently is chosen only when no other is left.
    /// `excluded` lists nodes that had the job before and consider it ended.
    pub(crate) async fn choose_node(
        &self,
        version: ImageVersionId,
        wanted: &NodeRequirements<'_>,
        excluded: &[NodeId],
    ) -> Result<NodeRow, Error> {
        let nodes = self.db.nodes().await?;
        let with_image = self.db.nodes_with(version).await?;
        let given = self.db.load().await?;
        let after = self.config.unreachable_after();
        let mut reasons: Vec<(String, Unfit)> = Vec::new();
        let mut best: Option<((bool, f64), NodeRow)> = None;
        for node in nodes {
            if excluded.contains(&node.id) {
                reasons.push((node.name, Unfit::HadItBefore));
                continue;
            }
            let given = given.get(&node.id).copied().unwrap_or_default();
            if let Some(reason) = unfit(&node, after, with_image.contains(&node.id), given, wanted)
            {
                reasons.push((node.name, reason));
                continue;
            }
            let is_silent =
                self.fleet.connection_error(node.id).is_some() || self.fleet.is_backed_off(node.id);
            let use_now = (is_silent, load(&node, given.sandboxes));
            if best.as_ref().is_none_or(|(least, _)| use_now < *least) {
                best = Some((use_now, node));
            }
        }
        best.map(|(_, node)| node).ok_or(Error::NoNode(reasons))
    }

    /// Fails for limits that no node with the labels could ever grant. Without such a node, one may
    /// still register.
    pub(crate) async fn check_grantable(&self, wanted: &NodeRequirements<'_>) -> Result<(), Error> {
        if wanted.limits == LimitsRequest::default() {
            return Ok(());
        }
        refuse_beyond(&self.db.nodes().await?, wanted)
    }

    /// Why no node serves one of the models, if none does. Without a node that has the labels, one
    /// may still register.
    pub(crate) async fn unserved(
        &self,
        wanted: &NodeRequirements<'_>,
    ) -> Result<Option<String>, Error> {
        if wanted.models.is_empty() {
            return Ok(None);
        }
        Ok(unserved(&self.db.nodes().await?, wanted))
    }

    /// The node that has the requested workspace.
    pub(crate) async fn workspace_node(
        &self,
        task_id: TaskId,
        wanted: Option<&WorkspaceRef>,
    ) -> Result<Option<NodeId>, Error> {
        let Some(WorkspaceRef::Workspace(id)) = wanted else {
            return Ok(None);
        };
        let node = self.db.workspace_node(task_id, *id.as_uuid()).await?;
        node.map(Some).ok_or(Error::WorkspaceNotFound(*id))
    }

    /// The node of a workspace, if it satisfies the requirements too.
    pub(crate) async fn check_workspace_node(
        &self,
        id: NodeId,
        wanted: &NodeRequirements<'_>,
    ) -> Result<NodeId, Error> {
        if wanted.labels.is_empty()
            && wanted.limits == LimitsRequest::default()
            && !wanted.needs_runner
            && wanted.models.is_empty()
        {
            return Ok(id);
        }
        let node = self.db.node(id).await?;
        if wanted.needs_runner && !has_runner(&node) {
            return Err(Error::WorkspaceNodeOutdated { node: node.name });
        }
        if let Some(reason) = missing_models(&node, wanted.models) {
            return Err(Error::WorkspaceNodeModels {
                node: node.name,
                reason,
            });
        }
        if let Some(excess) = beyond(&node, wanted.limits) {
            return Err(Error::WorkspaceNodeLimit {
                limit: excess.limit,
                node: node.name,
                max: excess.max,
            });
        }
        match missing_label(&node, wanted.labels) {
            Some(reason) => Err(Error::WorkspaceNodeLabel {
                node: node.name,
                reason,
            }),
            None => Ok(id),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unfit {
    HadItBefore,
    NotReady(String),
    Label(String),
    NoImage,
    /// The worker is too old for SBA jobs.
    NoRunner,
    /// The node serves none of the allowed models.
    NoModel(String),
    /// A requested limit exceeds the node's maximum.
    Limit(String),
    Full(i64),
    /// The sum of the memory limits with the new sandbox, and the maximum.
    Promised(u64, u64),
}

impl std::fmt::Display for Unfit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::HadItBefore => f.write_str("had it before"),
            Self::NotReady(reason) | Self::Label(reason) | Self::NoModel(reason) => {
                f.write_str(reason)
            }
            Self::NoImage => f.write_str("does not have the image"),
            Self::NoRunner => f.write_str("runs plain commands only"),
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
            Self::NoRunner => "Upgrade the workers: these are too old for jobs of cynode-sba.",
            Self::NoModel(_) => {
                "Start a model server with one of the models on a node (worker.inference.url), or name others: 'cynode node show' lists what a node serves."
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

/// The task of a session or job that was created without one.
pub(crate) fn implicit_task(id: TaskId, name: String, created_by: &str) -> Task {
    let now = OffsetDateTime::now_utc();
    Task {
        id,
        project_id: None,
        name,
        description: None,
        requirements: Vec::new(),
        acceptance_criteria: Vec::new(),
        status: cynode_api::TaskStatus::Active,
        profile: None,
        metadata: serde_json::Map::new(),
        created_by: created_by.to_owned(),
        created_at: now,
        updated_at: now,
    }
}

/// The labels that a request requires of its node.
pub(crate) type NodeLabels = BTreeMap<String, String>;

/// The requirements of a request on its node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeRequirements<'a> {
    pub(crate) labels: &'a NodeLabels,
    pub(crate) limits: LimitsRequest,
    /// The work is an SBA job.
    pub(crate) needs_runner: bool,
    /// The node must serve one of these; any node will do if there are none.
    pub(crate) models: &'a [String],
}

fn refuse_beyond(nodes: &[NodeRow], wanted: &NodeRequirements<'_>) -> Result<(), Error> {
    let candidates = nodes
        .iter()
        .filter(|node| !node.is_lost && missing_label(node, wanted.labels).is_none());
    let beyond = |node: &NodeRow| {
        beyond(node, wanted.limits).map(|excess| {
            format!(
                "limits.{}: {} gives a sandbox at most {}",
                excess.limit, node.name, excess.max
            )
        })
    };
    // `None` as soon as one node can grant the limits.
    match candidates.map(beyond).collect::<Option<Vec<String>>>() {
        Some(reasons) if !reasons.is_empty() => Err(Error::LimitUnenforceable(reasons)),
        _ => Ok(()),
    }
}

fn unserved(nodes: &[NodeRow], wanted: &NodeRequirements<'_>) -> Option<String> {
    let candidates = nodes
        .iter()
        .filter(|node| !node.is_lost && missing_label(node, wanted.labels).is_none());
    let reason = |node: &NodeRow| {
        missing_models(node, wanted.models).map(|reason| format!("{}: {reason}", node.name))
    };
    // `None` as soon as one node serves one of them.
    let reasons: Vec<String> = candidates.map(reason).collect::<Option<_>>()?;
    let others = reasons.len().saturating_sub(SHOWN_NODES);
    let mut text = reasons[..reasons.len() - others].join("; ");
    if others > 0 {
        let _written = write!(text, "; and {others} more nodes");
    }
    (!text.is_empty()).then_some(text)
}

/// The first limit that exceeds the node's maximum.
pub(crate) fn beyond(node: &NodeRow, limits: LimitsRequest) -> Option<Excess> {
    node.capability.largest?.requested_excess(limits)
}

/// The first label that the node lacks.
pub(crate) fn missing_label(node: &NodeRow, labels: &NodeLabels) -> Option<String> {
    let missing = labels
        .iter()
        .find(|(name, value)| node.capability.labels.get(*name) != Some(value));
    missing.map(|(name, value)| format!("does not have the label {name}={value}"))
}

/// Models that a reason names; the others are counted.
const SHOWN_MODELS: usize = 8;
/// Nodes that a reason names; the others are counted.
const SHOWN_NODES: usize = 8;

/// Why the node serves none of the models, if it serves none.
fn missing_models(node: &NodeRow, models: &[String]) -> Option<String> {
    if models.is_empty() {
        return None;
    }
    let Some(inference) = &node.capability.inference else {
        return Some("has no model server".to_owned());
    };
    let served = &inference.models;
    let serves_one = served
        .iter()
        .any(|served| models.iter().any(|model| same_model(model, served)));
    if serves_one {
        return None;
    }
    Some(match &inference.problem {
        Some(problem) if served.is_empty() => format!("can't use its model server: {problem}"),
        _ => format!(
            "serves none of {}, only {}",
            listed(models, SHOWN_MODELS),
            listed(served, SHOWN_MODELS)
        ),
    })
}

/// A few of the names; the others are counted.
fn listed(names: &[String], most: usize) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    let shown: Vec<String> = names.iter().take(most).map(|name| quote(name)).collect();
    let shown = shown.join(", ");
    match names.len().saturating_sub(most) {
        0 => shown,
        others => format!("{shown} and {others} more"),
    }
}

/// Whether the node runs SBA jobs.
fn has_runner(node: &NodeRow) -> bool {
    node.capability.runner.is_some_and(|version| version >= 1)
}

/// Why a node can't take the work now, if so.
fn unfit(
    node: &NodeRow,
    unreachable_after: Duration,
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
        return Some(Unfit::Limit(excess.max));
    }
    if wanted.needs_runner && !has_runner(node) {
        return Some(Unfit::NoRunner);
    }
    if let Some(reason) = missing_models(node, wanted.models) {
        return Some(Unfit::NoModel(reason));
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
    use cynode_api::{Capability, NodeInference};

    use super::*;

    fn node(name: &str, inference: Option<NodeInference>) -> NodeRow {
        NodeRow {
            id: NodeId::generate(),
            name: name.to_owned(),
            api_url: "http://127.0.0.1:1".to_owned(),
            capability: Capability {
                runner: Some(1),
                max_sandboxes: 1,
                labels: NodeLabels::from([("zone".to_owned(), name.to_owned())]),
                inference,
                ..Capability::default()
            },
            draining: false,
            not_ready: None,
            is_lost: false,
            running_sandboxes: 0,
            token_epoch: 0,
            rotating: false,
            tokens_rotated_at: OffsetDateTime::UNIX_EPOCH,
            config_revision: 0,
            registered_at: OffsetDateTime::UNIX_EPOCH,
            last_heartbeat_at: OffsetDateTime::UNIX_EPOCH,
            silent_for: Duration::ZERO,
        }
    }

    fn serving(models: &[&str]) -> Option<NodeInference> {
        Some(NodeInference {
            models: models.iter().map(|name| (*name).to_owned()).collect(),
            ..NodeInference::default()
        })
    }

    #[test]
    fn a_job_needs_a_node_that_serves_one_of_its_models() {
        let models = ["x", "llama3.2"].map(str::to_owned);
        let labels = NodeLabels::new();
        let wanted = NodeRequirements {
            labels: &labels,
            limits: LimitsRequest::default(),
            needs_runner: true,
            models: &models,
        };
        let fits = |node: &NodeRow, wanted| {
            unfit(node, Duration::from_secs(1), true, Load::default(), wanted).is_none()
        };
        let serves = node("a", serving(&["y", "llama3.2:latest"]));
        let other = node("b", serving(&["y"]));
        let none = node("c", None);
        assert!(fits(&serves, &wanted));
        assert!(!fits(&other, &wanted) && !fits(&none, &wanted));
        let any = NodeRequirements {
            models: &[],
            ..wanted
        };
        assert!(fits(&other, &any) && fits(&none, &any));

        // It waits for a node that serves one, however busy, and for the first node of all.
        let busy = NodeRow {
            draining: true,
            ..serves.clone()
        };
        assert_eq!(unserved(&[none.clone(), busy.clone()], &wanted), None);
        assert_eq!(unserved(&[], &wanted), None);
        assert_eq!(
            unserved(&[other.clone(), none.clone()], &wanted).as_deref(),
            Some("b: serves none of \"x\", \"llama3.2\", only \"y\"; c: has no model server")
        );
        // A lost node, or one without the labels, does not count.
        let lost = NodeRow {
            is_lost: true,
            ..serves.clone()
        };
        assert!(unserved(&[lost, none.clone()], &wanted).is_some());
        let zone = NodeLabels::from([("zone".to_owned(), "c".to_owned())]);
        let elsewhere = NodeRequirements {
            labels: &zone,
            ..wanted
        };
        assert!(unserved(&[serves, none], &elsewhere).is_some());
        assert_eq!(unserved(&[other], &elsewhere), None);
    }

    #[test]
    fn a_remedy_fits_the_reasons_of_the_nodes() {
        let remedy = |reasons: &[Unfit]| {
            let reasons = reasons
                .iter()
                .map(|reason| ("n".to_owned(), reason.clone()))
                .collect();
            Error::NoNode(reasons).remedy().unwrap_or_default()
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
