//! The policies that count now, in memory: compiled once, the same on every orchestrator within a second of a change.

use std::{collections::HashMap, sync::Arc, time::Duration};

use cynode_api::ErrorCode;
use cynode_policy::{Action, Call, DEFAULTS, Decision, Flaw, Policies as Set, Principal, Resource};
use cynode_service::ApiError;
use parking_lot::{Mutex, RwLock};
use uuid::Uuid;

use crate::{
    Orchestrator,
    db::{Db, PolicyRow},
    known::MOST_GROUPS,
};

/// The document that comes with the system.
pub(crate) const DEFAULT: &str = "default";
/// How often, at the least, it is looked whether something changed.
const LOOK: Duration = Duration::from_millis(500);

/// So many decisions are remembered; then all are forgotten.
const REMEMBERED: usize = 4_096;
/// Of calls that name more than so much, none is.
const LONG: usize = 512;

/// All that a decision depends on, beside the rules.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Question {
    principal: Principal,
    action: Action,
    resource: Resource,
    call: Call,
}

/// A set of rules, and what it was found to say: an agent asks the same again and again.
#[derive(Debug)]
struct Loaded {
    revision: i64,
    set: Set,
    decided: Mutex<HashMap<Question, Decision>>,
}

impl Loaded {
    fn decide(
        &self,
        principal: &Principal,
        action: Action,
        resource: &Resource,
        call: &Call,
    ) -> Decision {
        let decide = || self.set.decide(principal, action, resource, call);
        if !is_worth_it(principal, resource, call) {
            return decide();
        }
        let question = Question {
            principal: principal.clone(),
            action,
            resource: resource.clone(),
            call: call.clone(),
        };
        if let Some(decision) = self.decided.lock().get(&question) {
            return decision.clone();
        }
        let decision = decide();
        let mut decided = self.decided.lock();
        if decided.len() >= REMEMBERED {
            decided.clear();
        }
        decided.insert(question, decision.clone());
        decision
    }
}

/// What people do again and again is in sessions, and not to files by their names. And what is remembered has a size.
fn is_worth_it(principal: &Principal, resource: &Resource, call: &Call) -> bool {
    let Call {
        path,
        program,
        image,
        token_kind,
        network,
        pty: _,
        limits: _,
    } = call;
    let named: usize = [program, image, token_kind, network]
        .into_iter()
        .flatten()
        .map(String::len)
        .sum();
    let is_short = |groups: &[String]| groups.len() <= MOST_GROUPS;
    matches!(resource, Resource::Session { .. })
        && matches!(principal, Principal::User { groups, .. } if is_short(groups))
        && path.is_none()
        && named <= LONG
}

/// Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Policies {
    loaded: Arc<RwLock<Arc<Loaded>>>,
    /// Whoever takes over new ones: an older set never comes after a newer one.
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl Policies {
    /// Reads them; the first time, or after an upgrade, the default ones are put there.
    pub(crate) async fn open(db: &Db) -> Result<Self, ApiError> {
        db.seed_policy(DEFAULT, DEFAULTS).await?;
        Ok(Self {
            loaded: Arc::new(RwLock::new(Arc::new(load(db).await?))),
            turn: Arc::default(),
        })
    }

    pub(crate) fn decide(
        &self,
        principal: &Principal,
        action: Action,
        resource: &Resource,
        call: &Call,
    ) -> Decision {
        let loaded = Arc::clone(&self.loaded.read());
        loaded.decide(principal, action, resource, call)
    }

    /// The rules of a document.
    pub(crate) fn revision(&self) -> i64 {
        self.loaded.read().revision
    }

    /// Takes over what is in the database, if that has changed.
    pub(crate) async fn refresh(&self, db: &Db) -> Result<(), ApiError> {
        let _turn = self.turn.lock().await;
        if db.policy_revision().await? != self.revision() {
            let loaded = load(db).await?;
            tracing::info!(revision = loaded.revision, "The policies have changed.");
            *self.loaded.write() = Arc::new(loaded);
        }
        Ok(())
    }

    /// Looks for changes until the orchestrator stops.
    pub(crate) async fn follow(orchestrator: Orchestrator) {
        let mut news = orchestrator.policy_news.subscribe();
        loop {
            if let Err(error) = orchestrator.policies.refresh(&orchestrator.db).await {
                tracing::debug!(error = %error.0, "The policies could not be read; those that are known count on.");
            }
            tokio::select! {
                () = orchestrator.stop.cancelled() => return,
                _ = news.changed() => {}
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }
}

async fn load(db: &Db) -> Result<Loaded, ApiError> {
    let (revision, rows) = db.policies().await?;
    let set = tokio::task::block_in_place(|| parse(&rows)).map_err(|flaws| invalid(&flaws))?;
    Ok(Loaded {
        revision,
        set,
        decided: Mutex::default(),
    })
}

fn parse(rows: &[PolicyRow]) -> Result<Set, Vec<Flaw>> {
    Set::parse(rows.iter().map(|row| (row.id.as_str(), row.text.as_str())))
}

fn invalid(flaws: &[Flaw]) -> ApiError {
    let said: Vec<String> = flaws
        .iter()
        .take(20)
        .map(|flaw| format!("{}: {}", flaw.policy, flaw.message))
        .collect();
    let error = ApiError::new(ErrorCode::PolicyInvalid, said.join("; "));
    ApiError(Box::new(error.0.with("flaws", said)))
}

/// Whether a set of documents can be used: it is valid, and administrators and whoever makes the change can still change it.
pub(crate) fn check(rows: &[PolicyRow], caller: &Principal) -> Result<(), ApiError> {
    let set = parse(rows).map_err(|flaws| invalid(&flaws))?;
    let administrator = Principal::User {
        id: Uuid::nil(),
        name: "admin".to_owned(),
        admin: true,
        groups: Vec::new(),
    };
    let who = [&administrator, caller]
        .into_iter()
        .flat_map(|who| [(who, Action::PolicyPut), (who, Action::PolicyDelete)]);
    for (who, action) in who {
        let decision = set.decide(
            who,
            action,
            &Resource::Policy {
                id: DEFAULT.to_owned(),
            },
            &Call::default(),
        );
        if !decision.allowed {
            let why = if decision.rules.is_empty() {
                "no rule allows it".to_owned()
            } else {
                decision.rules.join(", ")
            };
            let detail = format!(
                "with this nobody could change policies any more: {} is refused to an administrator ({why})",
                action.as_str()
            );
            return Err(ApiError::new(ErrorCode::PolicyInvalid, detail));
        }
    }
    Ok(())
}
