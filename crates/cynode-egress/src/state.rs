//! The role's copy of the rules: policies, repositories and sealed credentials, in memory only.
//!
//! Invariant: a copy that no orchestrator has repeated for [`MAX_AGE`] permits nothing, and a copy
//! is never replaced by an older one.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_api::{
    CredentialId, EgressCall, EgressPrincipal, EgressState, Repository, RepositoryId,
    SealedCredential, egress_limits, repository_limits,
};
use cynode_policy::{Action, CallContext, Decision, Policies, Principal, Resource, Role};
use parking_lot::RwLock;

use crate::addresses::OwnListeners;

/// The age at which a copy permits nothing any more.
const AGE_LIMIT: Duration = Duration::from_secs(egress_limits::MAX_STATE_AGE_SECONDS);
/// Policy documents of a copy.
const MAX_POLICIES: usize = 1_000;
/// Sealed credentials of a copy.
const MAX_CREDENTIALS: usize = 10_000;
/// Listeners of CyNode that a copy names.
const MAX_OWN_LISTENERS: usize = 1_000;
/// Flaws of policies that an error lists.
const MAX_FLAWS: usize = 20;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StateError {
    #[error("revision {offered} is older than {current}, which this role has")]
    Older { offered: i64, current: i64 },
    #[error("{0}: more than the role takes")]
    TooMany(&'static str),
    #[error("{0} is there twice")]
    Duplicate(String),
    #[error("own_listeners: '{0}' is not an address with a port")]
    Listener(String),
    #[error("{}", .0.join("; "))]
    Policies(Vec<String>),
}

/// Why the copy answers nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StaleRules {
    #[error("no orchestrator has sent the rules yet")]
    Missing,
    #[error("no orchestrator has sent the rules for {0} seconds")]
    Old(u64),
}

/// Reads the time; tests set it.
pub(crate) trait Clock: Send + Sync {
    fn now(&self) -> Instant;
}

/// The monotonic clock of the system.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}

/// One copy, immutable.
#[derive(Debug)]
pub(crate) struct Rules {
    /// As it came, to recognize a repetition.
    source: EgressState,
    policies: Policies,
    repositories: HashMap<RepositoryId, Arc<Repository>>,
    credentials: HashMap<CredentialId, SealedCredential>,
    pub(crate) own_listeners: OwnListeners,
}

/// The current copy and when it was last repeated.
pub(crate) struct RuleStore {
    clock: Arc<dyn Clock>,
    /// This role's own listener.
    own: Option<SocketAddr>,
    current: RwLock<Option<(Arc<Rules>, Instant)>>,
}

impl std::fmt::Debug for RuleStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RuleStore").finish_non_exhaustive()
    }
}

impl RuleStore {
    pub(crate) fn new(clock: Arc<dyn Clock>, own: Option<SocketAddr>) -> Self {
        Self {
            clock,
            own,
            current: RwLock::new(None),
        }
    }

    /// Takes a copy, unless it is older than the one that is there. A repetition renews its age.
    /// Compiles policies, so it may take a while.
    pub(crate) fn put(&self, state: EgressState) -> Result<(), StateError> {
        let received = self.clock.now();
        let current = self
            .current
            .read()
            .as_ref()
            .map(|(rules, _)| Arc::clone(rules));
        let rules = match current {
            Some(rules) if rules.source == state => rules,
            Some(rules) if rules.source.revision > state.revision => {
                return Err(older(&state, &rules));
            }
            previous => Arc::new(Rules::compile(state, self.own, previous.as_deref())?),
        };
        let mut current = self.current.write();
        if let Some((other, _)) = &*current
            && other.source.revision > rules.source.revision
        {
            // Another orchestrator was faster, with a newer one.
            return Err(older(&rules.source, other));
        }
        *current = Some((rules, received));
        Ok(())
    }

    /// The copy, if it is fresh.
    pub(crate) fn fresh(&self) -> Result<Arc<Rules>, StaleRules> {
        let current = self.current.read();
        let (rules, received) = current.as_ref().ok_or(StaleRules::Missing)?;
        let age = self.clock.now().saturating_duration_since(*received);
        if age > AGE_LIMIT {
            return Err(StaleRules::Old(age.as_secs()));
        }
        Ok(Arc::clone(rules))
    }
}

fn older(offered: &EgressState, current: &Rules) -> StateError {
    StateError::Older {
        offered: offered.revision,
        current: current.source.revision,
    }
}

impl Rules {
    fn compile(
        state: EgressState,
        own: Option<SocketAddr>,
        previous: Option<&Self>,
    ) -> Result<Self, StateError> {
        let bounds = [
            ("policies", state.policies.len(), MAX_POLICIES),
            (
                "repositories",
                state.repositories.len(),
                repository_limits::MAX_REPOSITORIES,
            ),
            ("credentials", state.credentials.len(), MAX_CREDENTIALS),
            (
                "own_listeners",
                state.own_listeners.len(),
                MAX_OWN_LISTENERS,
            ),
        ];
        if let Some((name, ..)) = bounds.iter().find(|(_, length, most)| length > most) {
            return Err(StateError::TooMany(name));
        }
        let documents = state
            .policies
            .iter()
            .map(|policy| (policy.id.as_str(), policy.text.as_str()));
        let policies = Policies::parse(documents).map_err(|flaws| {
            StateError::Policies(
                flaws
                    .iter()
                    .take(MAX_FLAWS)
                    .map(ToString::to_string)
                    .collect(),
            )
        })?;
        let mut listeners: Vec<SocketAddr> = own.into_iter().collect();
        for text in &state.own_listeners {
            listeners.push(
                text.parse()
                    .map_err(|_| StateError::Listener(text.chars().take(100).collect()))?,
            );
        }
        let mut own_listeners = OwnListeners::new(listeners);
        if let Some(previous) = previous
            && previous.source.revision == state.revision
        {
            // Each orchestrator names its own.
            own_listeners = own_listeners.and(&previous.own_listeners);
        }
        if own_listeners.len() > MAX_OWN_LISTENERS + 1 {
            return Err(StateError::TooMany("own_listeners"));
        }
        let mut repositories = HashMap::new();
        for repository in &state.repositories {
            let id = repository.id;
            if repositories
                .insert(id, Arc::new(repository.clone()))
                .is_some()
            {
                return Err(StateError::Duplicate(format!("repository {id}")));
            }
        }
        let mut credentials = HashMap::new();
        for credential in &state.credentials {
            let id = credential.id;
            if credentials.insert(id, credential.clone()).is_some() {
                return Err(StateError::Duplicate(format!("credential {id}")));
            }
        }
        Ok(Self {
            policies,
            repositories,
            credentials,
            own_listeners,
            source: state,
        })
    }

    /// A repository of the call's project. One of another project does not exist for it.
    pub(crate) fn repository(&self, call: &EgressCall) -> Option<Arc<Repository>> {
        self.repositories
            .get(&call.repository_id)
            .filter(|repository| repository.project_id == call.project_id)
            .cloned()
    }

    pub(crate) fn credential(&self, id: CredentialId) -> Option<&SealedCredential> {
        self.credentials.get(&id)
    }

    /// Asks the policies whether a caller may act on a repository.
    pub(crate) fn decide(
        &self,
        call: &EgressCall,
        action: Action,
        repository: &Repository,
        context: &CallContext,
    ) -> Decision {
        let Some(principal) = principal_of(&call.principal) else {
            return Decision {
                allowed: false,
                rules: Vec::new(),
                errors: vec!["the role of the agent is unknown".to_owned()],
            };
        };
        let resource = Resource::Repository {
            id: *repository.id.as_uuid(),
            name: repository.name.clone(),
            project: *repository.project_id.as_uuid(),
        };
        self.policies.decide(&principal, action, &resource, context)
    }
}

/// The caller as policies know it.
pub(crate) fn principal_of(principal: &EgressPrincipal) -> Option<Principal> {
    Some(match principal {
        EgressPrincipal::User {
            id,
            name,
            admin,
            groups,
        } => Principal::User {
            id: *id,
            name: name.clone(),
            admin: *admin,
            groups: groups.clone(),
        },
        EgressPrincipal::Agent {
            token,
            role,
            user,
            project,
            tasks,
        } => Principal::Agent {
            token: *token,
            role: [Role::ProjectManager, Role::ProjectAnalyst]
                .into_iter()
                .find(|known| known.as_str() == role)?,
            user: *user,
            project: *project,
            tasks: tasks.clone(),
        },
    })
}

#[cfg(test)]
pub(crate) mod testing {
    use cynode_api::{EgressPolicy, ForgeKind, ProjectId, RepositoryRules, TaskId};
    use parking_lot::Mutex;
    use time::OffsetDateTime;
    use uuid::Uuid;

    use super::*;

    /// A clock that tests advance.
    pub(crate) struct ManualClock(pub(crate) Mutex<Instant>);

    impl ManualClock {
        pub(crate) fn advance(&self, by: Duration) {
            *self.0.lock() += by;
        }
    }

    impl Clock for ManualClock {
        fn now(&self) -> Instant {
            *self.0.lock()
        }
    }

    pub(crate) fn repository(project: ProjectId, url: &str) -> Repository {
        Repository {
            id: RepositoryId::generate(),
            project_id: project,
            name: "app".to_owned(),
            provider: ForgeKind::Git,
            url: url.to_owned(),
            api_url: None,
            credential_id: None,
            default_branch: None,
            ca: None,
            addresses: Vec::new(),
            rules: RepositoryRules::default(),
            checks: Vec::new(),
            revision: 1,
            created_by: "ada".to_owned(),
            created_at: OffsetDateTime::UNIX_EPOCH,
        }
    }

    /// The default rules and these repositories.
    pub(crate) fn state(revision: i64, repositories: Vec<Repository>) -> EgressState {
        EgressState {
            version: 1,
            revision,
            policies: vec![EgressPolicy {
                id: "defaults".to_owned(),
                text: cynode_policy::DEFAULTS.to_owned(),
            }],
            repositories,
            credentials: Vec::new(),
            own_listeners: vec!["127.0.0.1:12080".to_owned()],
        }
    }

    pub(crate) fn call(repository: &Repository) -> EgressCall {
        EgressCall {
            call_id: None,
            principal: EgressPrincipal::User {
                id: Uuid::now_v7(),
                name: "ada".to_owned(),
                admin: false,
                groups: Vec::new(),
            },
            task_id: TaskId::generate(),
            project_id: repository.project_id,
            session_id: None,
            promotion_id: None,
            repository_id: repository.id,
        }
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::{EgressPolicy, ProjectId};
    use parking_lot::Mutex;
    use uuid::Uuid;

    use super::{testing::*, *};

    const URL: &str = "https://git.example/team/app.git";

    fn store() -> (Arc<ManualClock>, RuleStore) {
        let clock = Arc::new(ManualClock(Mutex::new(Instant::now())));
        let store = RuleStore::new(Arc::clone(&clock) as Arc<dyn Clock>, None);
        (clock, store)
    }

    #[test]
    fn rules_that_nobody_repeats_permit_nothing_after_ten_seconds() {
        let (clock, store) = store();
        assert_eq!(store.fresh().err(), Some(StaleRules::Missing));
        let rules = state(7, Vec::new());
        store.put(rules.clone()).expect("taken");
        clock.advance(Duration::from_secs(10));
        assert!(store.fresh().is_ok());
        clock.advance(Duration::from_millis(1));
        assert_eq!(store.fresh().err(), Some(StaleRules::Old(10)));
        store.put(rules).expect("repeated");
        assert!(store.fresh().is_ok());
    }

    #[test]
    fn an_older_copy_neither_replaces_a_newer_one_nor_renews_it() {
        let (clock, store) = store();
        let project = ProjectId::generate();
        let added = repository(project, URL);
        store.put(state(7, vec![added.clone()])).expect("taken");
        clock.advance(Duration::from_secs(9));
        assert_eq!(
            store.put(state(6, Vec::new())),
            Err(StateError::Older {
                offered: 6,
                current: 7
            })
        );
        assert!(
            store
                .fresh()
                .expect("fresh")
                .repository(&call(&added))
                .is_some()
        );
        clock.advance(Duration::from_secs(2));
        assert!(store.fresh().is_err(), "an older copy renewed a newer one");
        store.put(state(8, Vec::new())).expect("taken");
        assert!(
            store
                .fresh()
                .expect("fresh")
                .repository(&call(&added))
                .is_none()
        );
    }

    #[test]
    fn a_copy_with_flaws_is_refused_as_a_whole() {
        let (_, store) = store();
        store.put(state(1, Vec::new())).expect("taken");
        let broken = EgressState {
            policies: vec![EgressPolicy {
                id: "broken".to_owned(),
                text: "permit (".to_owned(),
            }],
            ..state(2, Vec::new())
        };
        assert!(matches!(store.put(broken), Err(StateError::Policies(_))));
        let listener = EgressState {
            own_listeners: vec!["localhost".to_owned()],
            ..state(2, Vec::new())
        };
        assert!(matches!(store.put(listener), Err(StateError::Listener(_))));
        let one = repository(ProjectId::generate(), URL);
        let twice = state(2, vec![one.clone(), one]);
        assert!(matches!(store.put(twice), Err(StateError::Duplicate(_))));
        let many =
            vec![repository(ProjectId::generate(), URL); repository_limits::MAX_REPOSITORIES + 1];
        assert_eq!(
            store.put(state(2, many)),
            Err(StateError::TooMany("repositories"))
        );
        assert_eq!(store.fresh().expect("fresh").source.revision, 1);
    }

    #[test]
    fn the_listeners_of_several_orchestrators_are_remembered_together() {
        let (_, store) = store();
        let of = |listener: &str| EgressState {
            own_listeners: vec![listener.to_owned()],
            ..state(1, Vec::new())
        };
        store.put(of("10.0.0.1:12080")).expect("taken");
        store.put(of("10.0.0.2:12080")).expect("taken");
        let own = &store.fresh().expect("fresh").own_listeners;
        for address in ["10.0.0.1", "10.0.0.2"] {
            assert!(own.contains(address.parse().expect("an address"), 12_080));
        }
    }

    #[test]
    fn a_repository_is_found_by_its_own_project_only() {
        let (_, store) = store();
        let own = repository(ProjectId::generate(), URL);
        store.put(state(1, vec![own.clone()])).expect("taken");
        let rules = store.fresh().expect("fresh");
        assert!(rules.repository(&call(&own)).is_some());
        let foreign = EgressCall {
            project_id: ProjectId::generate(),
            ..call(&own)
        };
        assert!(rules.repository(&foreign).is_none());
    }

    #[test]
    fn the_policies_of_the_copy_decide() {
        let (_, store) = store();
        let own = repository(ProjectId::generate(), URL);
        let mut rules = state(1, vec![own.clone()]);
        rules.policies.push(EgressPolicy {
            id: "no-push".to_owned(),
            text: "@id(\"release\") forbid (principal, action == CyNode::Action::\"git.push\", \
                   resource) when { context has branch && context.branch like \"*release*\" };"
                .to_owned(),
        });
        store.put(rules).expect("taken");
        let rules = store.fresh().expect("fresh");
        let decide = |call: &EgressCall, branch: &str| {
            let context = CallContext {
                branch: Some(branch.to_owned()),
                ..CallContext::default()
            };
            rules.decide(call, Action::GitPush, &own, &context)
        };
        assert!(decide(&call(&own), "cynode/1/fix").allowed);
        let denied = decide(&call(&own), "cynode/1/release");
        assert!(!denied.allowed);
        assert_eq!(denied.rules, ["no-push/release"]);
        let agent = |role: &str| EgressCall {
            principal: EgressPrincipal::Agent {
                token: Uuid::now_v7(),
                role: role.to_owned(),
                user: Uuid::now_v7(),
                project: None,
                tasks: Vec::new(),
            },
            ..call(&own)
        };
        assert!(decide(&agent("project_manager"), "cynode/1/fix").allowed);
        assert!(!decide(&agent("project_analyst"), "cynode/1/fix").allowed);
        assert!(!decide(&agent("root"), "cynode/1/fix").allowed);
    }
}
