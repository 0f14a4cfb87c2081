//! The policies in effect, compiled and in memory. Changes reach every orchestrator within a
//! second.

use std::{collections::HashMap, sync::Arc, time::Duration};

use cynode_policy::{
    Action, CallContext, DEFAULTS, Decision, Flaw, Policies as PolicySet, Principal, Resource,
};
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    db::{self, Db, PolicyRow},
    identity::MAX_CACHED_GROUPS,
};

/// The policy document that ships with the system.
pub(crate) const DEFAULT: &str = "default";
/// Polls for changes at least this often, because notifications can be lost.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The decision cache is cleared when it reaches this size.
const DECISION_CACHE_CAPACITY: usize = 4_096;
/// Decisions on calls with longer names, in bytes in total, are not cached.
const MAX_CACHED_NAME_BYTES: usize = 512;

/// Flaws of a policy document that an error lists.
const MAX_FLAWS: usize = 20;

/// Everything that a decision depends on besides the rules.
#[derive(Debug, PartialEq, Eq, Hash)]
struct DecisionKey {
    principal: Principal,
    action: Action,
    resource: Resource,
    call: CallContext,
}

/// A compiled policy set with a cache of its decisions: agents repeat the same calls.
#[derive(Debug)]
struct LoadedPolicies {
    revision: i64,
    set: PolicySet,
    decisions: Mutex<HashMap<DecisionKey, Decision>>,
}

impl LoadedPolicies {
    fn decide(
        &self,
        principal: &Principal,
        action: Action,
        resource: &Resource,
        call: &CallContext,
    ) -> Decision {
        let decide = || self.set.decide(principal, action, resource, call);
        if !is_cacheable(principal, resource, call) {
            return decide();
        }
        let key = DecisionKey {
            principal: principal.clone(),
            action,
            resource: resource.clone(),
            call: call.clone(),
        };
        if let Some(decision) = self.decisions.lock().get(&key) {
            return decision.clone();
        }
        let decision = decide();
        let mut decisions = self.decisions.lock();
        if decisions.len() >= DECISION_CACHE_CAPACITY {
            decisions.clear();
        }
        decisions.insert(key, decision.clone());
        decision
    }
}

/// Caches only users' calls in sessions that name no file: these repeat, and their keys are small.
fn is_cacheable(principal: &Principal, resource: &Resource, call: &CallContext) -> bool {
    let CallContext {
        path,
        branch,
        program,
        image,
        token_kind,
        network,
        pty: _,
        limits: _,
    } = call;
    let name_bytes: usize = [branch, program, image, token_kind, network]
        .into_iter()
        .flatten()
        .map(String::len)
        .sum();
    let is_small = |groups: &[String]| groups.len() <= MAX_CACHED_GROUPS;
    matches!(resource, Resource::Session { .. })
        && matches!(principal, Principal::User { groups, .. } if is_small(groups))
        && path.is_none()
        && name_bytes <= MAX_CACHED_NAME_BYTES
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Db(#[from] db::Error),
    /// The flaws of the documents, each with the name of its document.
    #[error("{}", .0.join("; "))]
    Invalid(Vec<String>),
    #[error("this would lock administrators out of the policies: {action} is denied ({reason})")]
    LocksOut {
        action: &'static str,
        reason: String,
    },
}

/// Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Policies {
    loaded: Arc<RwLock<Arc<LoadedPolicies>>>,
    /// Serializes refreshes, so that an older set never replaces a newer one.
    refresh_lock: Arc<tokio::sync::Mutex<()>>,
}

impl Policies {
    /// Loads the policies. The first start, and the first after an upgrade, seed the default ones.
    pub(crate) async fn open(db: &Db) -> Result<Self, Error> {
        db.seed_policy(DEFAULT, DEFAULTS).await?;
        Ok(Self {
            loaded: Arc::new(RwLock::new(Arc::new(load(db).await?))),
            refresh_lock: Arc::default(),
        })
    }

    pub(crate) fn decide(
        &self,
        principal: &Principal,
        action: Action,
        resource: &Resource,
        call: &CallContext,
    ) -> Decision {
        let loaded = Arc::clone(&self.loaded.read());
        loaded.decide(principal, action, resource, call)
    }

    pub(crate) fn revision(&self) -> i64 {
        self.loaded.read().revision
    }

    /// Reloads the policies if the database has another revision.
    pub(crate) async fn refresh(&self, db: &Db) -> Result<(), Error> {
        let _guard = self.refresh_lock.lock().await;
        if db.policy_revision().await? != self.revision() {
            let loaded = load(db).await?;
            tracing::info!(revision = loaded.revision, "Policies reloaded.");
            *self.loaded.write() = Arc::new(loaded);
        }
        Ok(())
    }

    /// Follows changes until the orchestrator stops.
    pub(crate) async fn follow(
        self,
        db: Db,
        mut changes: watch::Receiver<u64>,
        stop: CancellationToken,
    ) {
        loop {
            if let Err(error) = self.refresh(&db).await {
                tracing::debug!(
                    error = %error,
                    "Reloading the policies failed; the loaded ones stay in effect."
                );
            }
            tokio::select! {
                () = stop.cancelled() => return,
                _ = changes.changed() => {}
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
        }
    }
}

async fn load(db: &Db) -> Result<LoadedPolicies, Error> {
    let (revision, rows) = db.policies().await?;
    let set = tokio::task::block_in_place(|| parse(&rows)).map_err(|flaws| invalid(&flaws))?;
    Ok(LoadedPolicies {
        revision,
        set,
        decisions: Mutex::default(),
    })
}

fn parse(rows: &[PolicyRow]) -> Result<PolicySet, Vec<Flaw>> {
    PolicySet::parse(rows.iter().map(|row| (row.id.as_str(), row.text.as_str())))
}

fn invalid(flaws: &[Flaw]) -> Error {
    let messages = flaws
        .iter()
        .take(MAX_FLAWS)
        .map(|flaw| format!("{}: {}", flaw.policy, flaw.message));
    Error::Invalid(messages.collect())
}

/// Checks that a set of documents is valid, and that administrators and the caller could still
/// change it.
pub(crate) fn check(rows: &[PolicyRow], caller: &Principal) -> Result<(), Error> {
    let set = parse(rows).map_err(|flaws| invalid(&flaws))?;
    let administrator = Principal::User {
        id: Uuid::nil(),
        name: "admin".to_owned(),
        admin: true,
        groups: Vec::new(),
    };
    let required = [&administrator, caller].into_iter().flat_map(|principal| {
        [
            (principal, Action::PolicyPut),
            (principal, Action::PolicyDelete),
        ]
    });
    for (principal, action) in required {
        let decision = set.decide(
            principal,
            action,
            &Resource::Policy {
                id: DEFAULT.to_owned(),
            },
            &CallContext::default(),
        );
        if !decision.allowed {
            let reason = if decision.rules.is_empty() {
                "no rule allows it".to_owned()
            } else {
                decision.rules.join(", ")
            };
            return Err(Error::LocksOut {
                action: action.as_str(),
                reason,
            });
        }
    }
    Ok(())
}
