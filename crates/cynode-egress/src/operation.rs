//! What every operation of the role begins and ends with.
//!
//! Invariant: an operation asks the role's own copy of the rules first, records the decision, and
//! only then opens a credential, resolves a name or starts git. Its outcome is recorded before it
//! is answered.

use std::{net::IpAddr, sync::Arc};

use cynode_api::{AuditResult, CredentialPlaintext, EgressCall, ErrorCode, Repository};
use cynode_policy::{Action, CallContext, Decision, HeldSecrets, Scanner};
use cynode_service::ApiError;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    audit::{AuditSink, RoleAction, RoleRecord},
    dial::{DialError, Dialer},
    git::{
        command::RemoteAccess,
        mirror::{Mirrors, RepositoryAccess, mirror_of},
    },
    location::RepositoryLocation,
    state::{RuleStore, Rules, StaleRules},
    vault::{Vault, VaultError, git_credential},
};

/// The git role.
pub(crate) struct GitRole {
    pub(crate) vault: Vault,
    pub(crate) rules: RuleStore,
    pub(crate) dialer: Dialer,
    pub(crate) mirrors: Arc<Mirrors>,
    pub(crate) audit: Arc<dyn AuditSink>,
    pub(crate) instance: Uuid,
}

impl std::fmt::Debug for GitRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GitRole").finish_non_exhaustive()
    }
}

/// An operation that the rules permit.
pub(crate) struct Operation {
    pub(crate) rules: Arc<Rules>,
    pub(crate) repository: Arc<Repository>,
    pub(crate) call: EgressCall,
    record: RoleRecord,
}

/// A repository with its credential, ready to be dialled.
pub(crate) struct OpenedRepository {
    pub(crate) access: RepositoryAccess,
    pub(crate) credential: Option<CredentialPlaintext>,
}

/// What an operation is about, for its records.
pub(crate) type Subject<'a> = &'a [(&'static str, &'a str)];

impl Operation {
    /// Adds what was found out to the records that follow.
    pub(crate) fn note(&mut self, name: &str, value: impl Into<Value>) {
        let record = self.record.clone().with(name, value);
        self.record = record;
    }

    /// Asks the rules for more than the operation as a whole.
    pub(crate) fn decide(&self, action: Action, context: &CallContext) -> Decision {
        self.rules
            .decide(&self.call, action, &self.repository, context)
    }
}

impl GitRole {
    /// Decides an operation, and records the decision.
    pub(crate) async fn begin(
        &self,
        call: &EgressCall,
        action: RoleAction,
        context: &CallContext,
        subject: Subject<'_>,
    ) -> Result<Operation, ApiError> {
        let about = |record: RoleRecord| {
            subject
                .iter()
                .fold(record, |record, (name, value)| record.with(name, *value))
        };
        let unknown = call.repository_id.to_string();
        let rules = match self.rules.fresh() {
            Ok(rules) => rules,
            Err(stale) => {
                let error = stale_error(stale);
                let record = RoleRecord::denied(action, call, &unknown, &error.code);
                return Err(self.refuse(about(record), error).await);
            }
        };
        let Some(repository) = rules.repository(call) else {
            let error = ApiError::new(
                ErrorCode::RepositoryNotFound,
                "the project has no such repository",
            );
            let record = RoleRecord::denied(action, call, &unknown, &error.code);
            return Err(self.refuse(about(record), error).await);
        };
        let decision = rules.decide(call, policy_action(action), &repository, context);
        if !decision.allowed {
            let error = denied(action.as_str(), &decision);
            let record = RoleRecord::denied(action, call, &repository.name, &error.code)
                .by_rules(decision.rules);
            return Err(self.refuse(about(record), error).await);
        }
        let record =
            about(RoleRecord::allowed(action, call, &repository.name)).by_rules(decision.rules);
        self.record(record.clone()).await?;
        Ok(Operation {
            rules,
            repository,
            call: call.clone(),
            record,
        })
    }

    /// Records a refusal. Returns the error to answer.
    async fn refuse(&self, record: RoleRecord, error: ApiError) -> ApiError {
        match self.record(record).await {
            Ok(()) => error,
            Err(unrecorded) => unrecorded,
        }
    }

    /// Records how an operation ended, and returns its result.
    pub(crate) async fn end<T>(
        &self,
        operation: &Operation,
        result: Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let record = match &result {
            Ok(_) => operation.record.ended(AuditResult::Done, None),
            Err(error) => operation
                .record
                .ended(AuditResult::from_status(error.status), Some(&error.code)),
        };
        if let Err(error) = self.audit.record(record).await {
            // The decision is recorded; an operation without an outcome shows in the trail.
            tracing::error!(%error, "The outcome of an operation was not recorded.");
        }
        result
    }

    async fn record(&self, record: RoleRecord) -> Result<(), ApiError> {
        self.audit
            .record(record)
            .await
            .map_err(|error| ApiError::new(ErrorCode::AuditUnavailable, error.to_string()))
    }

    /// Opens the credential and checks the addresses of a permitted operation's repository.
    pub(crate) async fn open(&self, operation: &Operation) -> Result<OpenedRepository, ApiError> {
        let repository = &operation.repository;
        let location = RepositoryLocation::parse(&repository.url)
            .map_err(|error| ApiError::invalid(format!("the repository's url: {error}")))?;
        let credential = match repository.credential_id {
            None => None,
            Some(id) => {
                let sealed = operation.rules.credential(id).ok_or_else(|| {
                    ApiError::new(
                        ErrorCode::CredentialUnusable,
                        "the repository's credential is disabled or gone",
                    )
                })?;
                let opened = self
                    .vault
                    .open_for(sealed, repository.project_id, &location)
                    .map_err(|error| vault_error(&error))?;
                Some(opened)
            }
        };
        let addresses = self
            .addresses(operation, location.host(), location.port())
            .await?;
        let remote = RemoteAccess {
            scheme: location.scheme().to_owned(),
            host: location.host().to_owned(),
            port: location.port(),
            addresses,
            ca: repository.ca.clone(),
            credential: credential.as_ref().map(git_credential),
        };
        Ok(OpenedRepository {
            access: RepositoryAccess {
                mirror: mirror_of(repository),
                repository: Arc::clone(repository),
                location,
                remote,
            },
            credential,
        })
    }

    /// The checked addresses of a host. What an administrator admitted is for the repository's own
    /// host.
    pub(crate) async fn addresses(
        &self,
        operation: &Operation,
        host: &str,
        port: u16,
    ) -> Result<Vec<IpAddr>, ApiError> {
        // Tests dial nobody.
        if cfg!(test) && operation.repository.url.starts_with("file://") {
            return Ok(Vec::new());
        }
        let own_host = RepositoryLocation::parse(&operation.repository.url)
            .is_ok_and(|location| location.host().eq_ignore_ascii_case(host));
        let allowed = if own_host {
            operation.repository.addresses.as_slice()
        } else {
            &[]
        };
        self.dialer
            .addresses(host, port, allowed, &operation.rules.own_listeners)
            .await
            .map_err(|error| dial_error(&error))
    }

    /// Scans for tokens of this system, well-known shapes, and the credential itself.
    pub(crate) fn scanner(credential: Option<&CredentialPlaintext>) -> Scanner {
        let mut key = [0; 32];
        for half in key.chunks_mut(16) {
            half.copy_from_slice(Uuid::new_v4().as_bytes());
        }
        let mut held = HeldSecrets::new(key);
        if let Some(credential) = credential {
            // Too short to be told from ordinary words: the orchestrator takes none.
            let _is_held = held.add("credential", credential.secret.as_bytes());
        }
        Scanner::new(held, true)
    }
}

/// The action of policies.
const fn policy_action(action: RoleAction) -> Action {
    match action {
        RoleAction::Fetch => Action::GitFetch,
        RoleAction::Commit => Action::GitCommit,
        RoleAction::Push => Action::GitPush,
        RoleAction::PullRequest => Action::GitPr,
    }
}

pub(crate) fn denied(action: &str, decision: &Decision) -> ApiError {
    let detail = if decision.rules.is_empty() {
        format!("no rule permits {action} here")
    } else {
        format!("{action} is denied by {}", decision.rules.join(", "))
    };
    ApiError::new(ErrorCode::DeniedByPolicy, detail).with("rules", json!(decision.rules))
}

fn stale_error(stale: StaleRules) -> ApiError {
    ApiError::new(ErrorCode::EgressStale, stale.to_string())
}

fn vault_error(error: &VaultError) -> ApiError {
    ApiError::new(ErrorCode::CredentialUnusable, error.to_string())
}

fn dial_error(error: &DialError) -> ApiError {
    let code = match error {
        DialError::Refused { .. } => ErrorCode::AddressRefused,
        DialError::Resolve { .. } | DialError::Timeout { .. } | DialError::Count { .. } => {
            ErrorCode::RepositoryUnreachable
        }
    };
    ApiError::new(code, error.to_string())
}
