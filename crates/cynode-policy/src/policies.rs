//! Rules, and what they decide.
//!
//! What must stay true: what no rule permits is denied; a rule that forbids outdoes any that permit, in whatever order they come;
//! a rule that fails while it is evaluated denies, because nobody can say what it would have forbidden.

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

use crate::{Action, Call, Principal, Resource, entities::Unaskable, nesting};

/// What rules can speak of.
pub const SCHEMA: &str = include_str!("../schema.cedarschema");
/// The rules that hold until an administrator puts others in their place.
pub const DEFAULTS: &str = include_str!("../defaults.cedar");

/// The longest document. Checking one takes time that grows with it.
pub const MAX_DOCUMENT_BYTES: usize = 64 * 1024;

/// How far a rule may look: into the caller and the thing, not into what these name, which Cedar is not told of.
const DEPTH: u32 = 1;

static VALIDATOR: LazyLock<Validator> = LazyLock::new(|| {
    let (schema, _) =
        Schema::from_cedarschema_str(SCHEMA).expect("our own schema, which the tests read");
    Validator::new(schema)
});

/// Why a policy can't be kept.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error("policy '{policy}': {message}")]
pub struct Flaw {
    /// The document's id.
    pub policy: String,
    /// With line and column, where they are known.
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
    /// What its annotation `@id("…")` says, else its number in the document, from 1.
    pub name: String,
    pub effect: Effect,
}

/// As decisions name it.
impl fmt::Display for Rule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.document, self.name)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub allowed: bool,
    /// The rules that made it, as `document/rule`, sorted. None when it was denied because none permits it.
    pub rules: Vec<String>,
    /// What failed while the rules were evaluated; with any, the decision is a denial.
    pub errors: Vec<String>,
}

/// A set of policy documents that were checked against the schema.
#[derive(Clone)]
pub struct Policies {
    set: PolicySet,
    rules: Vec<Rule>,
}

/// Without the rules' texts, which are long.
impl fmt::Debug for Policies {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Policies")
            .field("rules", &self.rules)
            .finish_non_exhaustive()
    }
}

impl Policies {
    /// Reads documents, each an id and its text. All flaws of all documents are told at once, but those of meaning only when every
    /// document can be read.
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
                    message: "there are two documents of this name".to_owned(),
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

    /// Whether this caller may do this to this thing, called like this.
    pub fn decide(
        &self,
        principal: &Principal,
        action: Action,
        resource: &Resource,
        call: &Call,
    ) -> Decision {
        let (request, entities) = match question(principal, action, resource, call) {
            Ok(question) => question,
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
        // Where only failures stand against it, those that permit it did not make the decision.
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
                "longer than {MAX_DOCUMENT_BYTES} bytes; make more documents of it"
            )));
        }
        if let Some(offset) = nesting::too_deep(text) {
            return flaws.push(flaw(at(text, offset, &nesting::remedy())));
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
            flaws.push(flaw(format!("rule {number} is a template: a rule names whom and what it is about, so it has no ?principal or ?resource")));
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
                Err(_) => flaws.push(flaw(format!(
                    "there are two rules of the name '{}'",
                    rule.name
                ))),
            }
        }
    }

    fn validate(&self, documents: &BTreeMap<&str, &str>, flaws: &mut Vec<Flaw>) {
        let document_of: BTreeMap<String, &str> = self
            .rules
            .iter()
            .map(|rule| (rule.to_string(), rule.document.as_str()))
            .collect();
        let result = VALIDATOR.validate_with_level(&self.set, ValidationMode::Strict, DEPTH);
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

/// All that Cedar is told. A user who asks about themselves is one entity, and the caller's has all that is known.
fn question(
    principal: &Principal,
    action: Action,
    resource: &Resource,
    call: &Call,
) -> Result<(Request, Entities), Unaskable> {
    let request = Request::new(
        principal.uid(),
        action.uid(),
        resource.uid(),
        call.context()?,
        Some(VALIDATOR.schema()),
    );
    let request = request.map_err(|error| Unaskable::Request(Box::new(error)))?;
    let mut all = vec![principal.entity()?, action.entity()];
    if resource.uid() != principal.uid() {
        all.push(resource.entity()?);
    }
    let entities =
        Entities::from_entities(all, None).map_err(|error| Unaskable::Entities(Box::new(error)))?;
    Ok((request, entities))
}

/// As it was given, where Cedar's own text of it has escapes.
fn name_of(id: &PolicyId) -> String {
    AsRef::<str>::as_ref(id).to_owned()
}

/// Cedar numbers the rules of a text from 0 and holds them in no order.
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

/// What is wrong, where, and what to do about it, in one line.
fn located(text: &str, error: &impl Diagnostic) -> String {
    let message = error
        .help()
        .map_or_else(|| error.to_string(), |help| format!("{error} ({help})"));
    let label = error.labels().and_then(|mut labels| labels.next());
    label.map_or_else(
        || message.clone(),
        |label| at(text, label.offset(), &message),
    )
}

fn at(text: &str, offset: usize, message: &str) -> String {
    let (line, column) = position(text, offset);
    format!("line {line}, column {column}: {message}")
}

/// Line and column, both from 1, of a place in a text.
fn position(text: &str, offset: usize) -> (usize, usize) {
    let before = &text[..text.floor_char_boundary(offset)];
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (
        before.matches('\n').count() + 1,
        before[line_start..].chars().count() + 1,
    )
}
