//! Policy documents and authorization decisions.
//!
//! Invariants: a call that no rule permits is denied; a `forbid` overrides any `permit`, in
//! whatever order they come; a rule that fails during evaluation denies, because its effect is
//! unknown.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::LazyLock,
};

use cedar_policy::{
    Authorizer, Effect as CedarEffect, Entities, Policy, PolicyId, PolicySet, Request, Schema,
    ValidationMode, Validator,
};
use miette::Diagnostic;

use crate::{Action, CallContext, Principal, Resource, entities::RequestError, nesting};

/// The schema that rules are validated against.
pub const SCHEMA: &str = include_str!("../schema.cedarschema");
/// The default rules, in effect until an administrator replaces them.
pub const DEFAULTS: &str = include_str!("../defaults.cedar");

/// The longest document. The time to validate one grows with its length.
pub const MAX_DOCUMENT_BYTES: usize = 64 * 1024;

/// How far a rule may dereference: attributes of the caller and the resource, but not of entities
/// that those refer to, because Cedar doesn't get them.
const DEREFERENCE_LEVEL: u32 = 1;

static VALIDATOR: LazyLock<Validator> = LazyLock::new(|| {
    let (schema, _) =
        Schema::from_cedarschema_str(SCHEMA).expect("our own schema, which the tests parse");
    Validator::new(schema)
});

/// A reason to refuse a policy document.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error("policy '{policy}': {message}")]
pub struct Flaw {
    /// The document's id.
    pub policy: String,
    /// With line and column, if known.
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    Permit,
    Forbid,
}

impl Effect {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Permit => "permit",
            Self::Forbid => "forbid",
        }
    }
}

/// One rule of a document.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rule {
    pub document: String,
    /// The annotation `@id("…")`, else the rule's number in the document, from 1.
    pub name: String,
    pub effect: Effect,
}

/// The name in decisions.
impl fmt::Display for Rule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.document, self.name)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub allowed: bool,
    /// The deciding rules, as `document/rule`, sorted. Empty if no rule permits the call.
    pub rules: Vec<String>,
    /// Errors during evaluation; any error makes the decision a denial.
    pub errors: Vec<String>,
}

/// A set of policy documents, validated against the schema.
#[derive(Clone)]
pub struct Policies {
    set: PolicySet,
    rules: Vec<Rule>,
}

/// Omits the texts of the rules: they are long.
impl fmt::Debug for Policies {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Policies")
            .field("rules", &self.rules)
            .finish_non_exhaustive()
    }
}

impl Policies {
    /// Parses documents, each an id and its text. Reports all flaws of all documents at once, but
    /// validates against the schema only if every document parses.
    pub fn parse<'a>(
        texts: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, Vec<Flaw>> {
        let mut documents = BTreeMap::new();
        let mut read = Self {
            set: PolicySet::new(),
            rules: Vec::new(),
        };
        let mut flaws = Vec::new();
        for (document, text) in texts {
            if documents.insert(document, text).is_some() {
                flaws.push(Flaw {
                    policy: document.to_owned(),
                    message: "there are two documents with this name".to_owned(),
                });
            } else {
                read.add(document, text, &mut flaws);
            }
        }
        if flaws.is_empty() {
            read.validate(&documents, &mut flaws);
        }
        if flaws.is_empty() {
            read.rules.sort();
            Ok(read)
        } else {
            flaws.sort();
            Err(flaws)
        }
    }

    /// Decides whether a caller may perform an action on a resource, with these parameters.
    pub fn decide(
        &self,
        principal: &Principal,
        action: Action,
        resource: &Resource,
        call: &CallContext,
    ) -> Decision {
        let (request, entities) = match cedar_request(principal, action, resource, call) {
            Ok(cedar_request) => cedar_request,
            Err(error) => {
                return Decision {
                    allowed: false,
                    rules: Vec::new(),
                    errors: vec![error.to_string()],
                };
            }
        };
        let response = Authorizer::new().is_authorized(&request, &self.set, &entities);
        let failures: BTreeMap<String, String> = response
            .diagnostics()
            .errors()
            .map(
                |cedar_policy::AuthorizationError::PolicyEvaluationError(error)| {
                    (name_of(error.policy_id()), error.inner().to_string())
                },
            )
            .collect();
        let cedar_allows = response.decision() == cedar_policy::Decision::Allow;
        // If only failures deny the call, the rules that permit it did not decide.
        let reasons = response
            .diagnostics()
            .reason()
            .filter(|_| failures.is_empty() || !cedar_allows)
            .map(name_of);
        let rules: BTreeSet<String> = reasons.chain(failures.keys().cloned()).collect();
        Decision {
            allowed: cedar_allows && failures.is_empty(),
            rules: rules.into_iter().collect(),
            errors: failures
                .into_iter()
                .map(|(rule, error)| format!("{rule}: {error}"))
                .collect(),
        }
    }

    /// Every rule, sorted by document and name.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    fn add(&mut self, document: &str, text: &str, flaws: &mut Vec<Flaw>) {
        let flaw = |message: String| Flaw {
            policy: document.to_owned(),
            message,
        };
        if text.len() > MAX_DOCUMENT_BYTES {
            return flaws.push(flaw(format!(
                "longer than {MAX_DOCUMENT_BYTES} bytes; split it into several documents"
            )));
        }
        if let Some(offset) = nesting::too_deep(text) {
            return flaws.push(flaw(at_position(text, offset, &nesting::remedy())));
        }
        let set: PolicySet = match text.parse() {
            Ok(set) => set,
            Err(errors) => {
                let errors: cedar_policy::ParseErrors = errors;
                flaws.extend(errors.iter().map(|error| flaw(located(text, error))));
                return;
            }
        };
        for template in set.templates() {
            let number = number(template.id());
            flaws.push(flaw(format!(
                "rule {number} is a template: templates with ?principal or ?resource are not \
                 supported"
            )));
        }
        for policy in in_order(&set) {
            let name = policy
                .annotation("id")
                .filter(|name| !name.is_empty())
                .map_or_else(|| number(policy.id()).to_string(), ToOwned::to_owned);
            let effect = match policy.effect() {
                CedarEffect::Permit => Effect::Permit,
                CedarEffect::Forbid => Effect::Forbid,
            };
            let rule = Rule {
                document: document.to_owned(),
                name,
                effect,
            };
            match self.set.add(policy.new_id(PolicyId::new(rule.to_string()))) {
                Ok(()) => self.rules.push(rule),
                Err(_) => flaws.push(flaw(format!("there are two rules named '{}'", rule.name))),
            }
        }
    }

    fn validate(&self, documents: &BTreeMap<&str, &str>, flaws: &mut Vec<Flaw>) {
        let document_of: BTreeMap<String, &str> = self
            .rules
            .iter()
            .map(|rule| (rule.to_string(), rule.document.as_str()))
            .collect();
        let result =
            VALIDATOR.validate_with_level(&self.set, ValidationMode::Strict, DEREFERENCE_LEVEL);
        for error in result.validation_errors() {
            let document = document_of
                .get(&name_of(error.policy_id()))
                .copied()
                .unwrap_or_default();
            let text = documents.get(document).copied().unwrap_or_default();
            flaws.push(Flaw {
                policy: document.to_owned(),
                message: located(text, error),
            });
        }
    }
}

/// Builds the request and its entities. A user who calls for themselves is one entity: the
/// caller's, which has all attributes.
fn cedar_request(
    principal: &Principal,
    action: Action,
    resource: &Resource,
    call: &CallContext,
) -> Result<(Request, Entities), RequestError> {
    let request = Request::new(
        principal.uid(),
        action.uid(),
        resource.uid(),
        call.context()?,
        Some(VALIDATOR.schema()),
    );
    let request = request.map_err(|error| RequestError::Request(Box::new(error)))?;
    let mut all = vec![principal.entity()?, action.entity()];
    if resource.uid() != principal.uid() {
        all.push(resource.entity()?);
    }
    let entities = Entities::from_entities(all, None)
        .map_err(|error| RequestError::Entities(Box::new(error)))?;
    Ok((request, entities))
}

/// The id verbatim: Cedar's `Display` escapes it.
fn name_of(id: &PolicyId) -> String {
    AsRef::<str>::as_ref(id).to_owned()
}

/// The number of a rule in its document, from 1. Cedar counts from 0 and keeps no order.
fn number(id: &PolicyId) -> usize {
    let id: &str = id.as_ref();
    id.strip_prefix("policy")
        .and_then(|number| number.parse().ok())
        .map_or(0, |number: usize| number + 1)
}

fn in_order(set: &PolicySet) -> Vec<&Policy> {
    let mut policies: Vec<&Policy> = set.policies().collect();
    policies.sort_by_key(|policy| number(policy.id()));
    policies
}

/// Formats an error with its position and remedy in one line.
fn located(text: &str, error: &impl Diagnostic) -> String {
    let message = error
        .help()
        .map_or_else(|| error.to_string(), |help| format!("{error} ({help})"));
    let label = error.labels().and_then(|mut labels| labels.next());
    label.map_or_else(
        || message.clone(),
        |label| at_position(text, label.offset(), &message),
    )
}

fn at_position(text: &str, offset: usize, message: &str) -> String {
    let (line, column) = position(text, offset);
    format!("line {line}, column {column}: {message}")
}

/// Line and column of an offset, both from 1.
fn position(text: &str, offset: usize) -> (usize, usize) {
    let before = &text[..text.floor_char_boundary(offset)];
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (
        before.matches('\n').count() + 1,
        before[line_start..].chars().count() + 1,
    )
}
