//! The default rules as a readable table, and a proof that each of them is needed.

use std::sync::LazyLock;

use cynode_policy::{Action, CallContext, DEFAULTS, Decision, Effect, Policies, Resource};

use crate::people::{
    OTHER_TASK, OWNER, STRANGER, TASK, administrator, agent, every_question, everybody, everything,
    sandbox, session, user,
};

pub(crate) fn defaults() -> &'static Policies {
    static READ_ONCE: LazyLock<Policies> = LazyLock::new(|| {
        Policies::parse([("defaults", DEFAULTS)]).expect("the default rules are without flaw")
    });
    &READ_ONCE
}

/// One line for every action and resource, one column for every caller.
fn table(policies: &Policies) -> String {
    let everybody = everybody();
    let heads = everybody
        .iter()
        .enumerate()
        .map(|(number, (name, _))| format!("{}{name}", "| ".repeat(number)));
    let lines = every_question()
        .into_iter()
        .map(|(action, name, resource)| {
            let mark = |principal| {
                let Decision {
                    allowed, errors, ..
                } = policies.decide(principal, action, &resource, &CallContext::default());
                assert_eq!(errors, Vec::<String>::new(), "{action} of {name}");
                if allowed { "+" } else { "." }
            };
            let marks: Vec<&str> = everybody
                .iter()
                .map(|(_, principal)| mark(principal))
                .collect();
            format!("{}  {action:22}{name}", marks.join(" "))
        });
    heads.chain(lines).collect::<Vec<String>>().join("\n")
}

#[test]
// invariant: fail-closed
fn default_decisions_match_their_snapshot() {
    insta::assert_snapshot!(table(defaults()));
}

/// The rules as separate texts, so that one can be removed or inverted.
fn rules_of_defaults() -> Vec<String> {
    let rules: Vec<String> = DEFAULTS
        .split_inclusive(";\n")
        .map(ToOwned::to_owned)
        .filter(|rule| rule.contains("@id"))
        .collect();
    assert_eq!(rules.len(), defaults().rules().len());
    rules
}

/// Some rules forbid what no default rule permits: they matter beside a rule that permits more.
const PERMIT_ALL: &str = "permit (principal, action, resource);";

#[test]
// invariant: policies
fn removing_any_default_rule_changes_a_decision() {
    let generous = |text: &str| {
        let policies = Policies::parse([("defaults", text), ("generous", PERMIT_ALL)]);
        table(&policies.expect("rules do not need one another"))
    };
    let (whole, generous_whole) = (table(defaults()), generous(DEFAULTS));
    let rules = rules_of_defaults();
    for left_out in 0..rules.len() {
        let rest: String = rules
            .iter()
            .enumerate()
            .filter(|(number, _)| *number != left_out)
            .map(|(_, rule)| rule.as_str())
            .collect();
        let policies =
            Policies::parse([("defaults", rest.as_str())]).expect("rules do not need one another");
        assert!(
            table(&policies) != whole || generous(&rest) != generous_whole,
            "nothing changes without {}",
            rules[left_out]
        );
    }
}

#[test]
// invariant: policies
fn inverting_any_default_rule_changes_a_decision() {
    let whole = table(defaults());
    let rules = rules_of_defaults();
    for turned in 0..rules.len() {
        let other = if rules[turned].contains("\nforbid (") {
            rules[turned].replace("\nforbid (", "\npermit (")
        } else {
            rules[turned].replace("\npermit (", "\nforbid (")
        };
        assert_ne!(other, rules[turned]);
        let text: String = rules
            .iter()
            .enumerate()
            .map(|(number, rule)| {
                if number == turned {
                    other.as_str()
                } else {
                    rule.as_str()
                }
            })
            .collect();
        let policies =
            Policies::parse([("defaults", text.as_str())]).expect("an effect is no flaw");
        assert_ne!(table(&policies), whole, "nothing changes with {other}");
    }
}

#[test]
fn every_action_that_a_default_rule_names_matters() {
    let whole = table(defaults());
    for (start, _) in DEFAULTS.match_indices("CyNode::Action::\"") {
        let end = start
            + DEFAULTS[start..]
                .find([',', ']'])
                .expect("an action stands in a list or before a comma");
        // The only action of its rule, which can't do without it.
        if !DEFAULTS[..start].trim_end().ends_with([',', '[']) {
            continue;
        }
        let after = if DEFAULTS[end..].starts_with(',') {
            end + 1
        } else {
            end
        };
        let before = DEFAULTS[..start].trim_end();
        let before = if after == end {
            before.trim_end_matches(',')
        } else {
            before
        };
        let text = format!("{before} {}", &DEFAULTS[after..]);
        let policies = Policies::parse([("defaults", text.as_str())])
            .expect("a list without one of its actions is a list");
        assert_ne!(
            table(&policies),
            whole,
            "nothing changes without {} at {start}",
            &DEFAULTS[start..end]
        );
    }
}

#[test]
fn administrative_actions_are_denied_to_all_but_administrators() {
    let policies = defaults();
    for (action, name, resource) in every_question()
        .into_iter()
        .filter(|(action, ..)| action.groups().contains(&"administer"))
    {
        for (caller, principal) in everybody() {
            let allowed = policies
                .decide(&principal, action, &resource, &CallContext::default())
                .allowed;
            // A manager reaches this only through a tool that a system setting enables.
            let by_tool = action == Action::ImageAdd && caller.starts_with("manager");
            assert_eq!(
                allowed,
                principal == administrator() || by_tool,
                "{caller}: {action} of {name}"
            );
        }
    }
}

#[test]
// invariant: policies
fn no_agent_and_no_sandbox_approves_a_promotion_whatever_a_rule_permits() {
    let policies = Policies::parse([("defaults", DEFAULTS), ("generous", PERMIT_ALL)])
        .expect("a rule without flaw");
    let promotion = everything()
        .into_iter()
        .find(|(name, _)| *name == "Promotion")
        .expect("it is in the list")
        .1;
    for (caller, principal) in everybody() {
        let decision = policies.decide(
            &principal,
            Action::PromotionApprove,
            &promotion,
            &CallContext::default(),
        );
        let is_person = matches!(principal, cynode_policy::Principal::User { .. });
        assert_eq!(decision.allowed, is_person, "{caller}: {decision:?}");
    }
}

#[test]
fn an_analyst_changes_nothing() {
    let policies = defaults();
    for (action, name, resource) in every_question()
        .into_iter()
        .filter(|(action, ..)| action.groups().contains(&"write"))
    {
        for (caller, principal) in everybody()
            .into_iter()
            .filter(|(caller, _)| caller.starts_with("analyst"))
        {
            assert!(
                !policies
                    .decide(&principal, action, &resource, &CallContext::default())
                    .allowed,
                "{caller}: {action} of {name}"
            );
        }
    }
}

#[test]
fn a_sandbox_may_do_nothing_until_a_rule_permits_it() {
    let without = defaults();
    let permitted = r#"permit (principal is CyNode::Sandbox, action == CyNode::Action::"artifact.put", resource) when { resource == principal.task };"#;
    let with = Policies::parse([("defaults", DEFAULTS), ("sandboxes", permitted)])
        .expect("a rule without flaw");
    for (action, name, resource) in every_question() {
        assert!(
            !without
                .decide(&sandbox(), action, &resource, &CallContext::default())
                .allowed,
            "{action} of {name}"
        );
        let decision = with.decide(&sandbox(), action, &resource, &CallContext::default());
        assert_eq!(
            decision.allowed,
            action == Action::ArtifactPut,
            "{action} of {name}"
        );
    }
}

#[test]
fn a_resource_without_an_owner_is_visible_only_to_administrators() {
    let lost = Resource::Session {
        id: uuid::Uuid::from_u128(40),
        place: cynode_policy::Place::default(),
    };
    for (caller, principal) in everybody() {
        let allowed = defaults()
            .decide(
                &principal,
                Action::SessionShow,
                &lost,
                &CallContext::default(),
            )
            .allowed;
        assert_eq!(allowed, principal == administrator(), "{caller}");
    }
}

#[test]
fn an_agent_without_a_task_or_a_project_reaches_nothing() {
    use cynode_policy::Role::{ProjectAnalyst, ProjectManager};
    for role in [ProjectManager, ProjectAnalyst] {
        let nothing = agent(role, None, &[]);
        let elsewhere = agent(role, None, &[OTHER_TASK]);
        for (action, name, resource) in every_question() {
            let of_nothing = defaults()
                .decide(&nothing, action, &resource, &CallContext::default())
                .allowed;
            let of_elsewhere = defaults()
                .decide(&elsewhere, action, &resource, &CallContext::default())
                .allowed;
            assert_eq!(of_nothing, of_elsewhere, "{action} of {name}");
        }
        assert!(
            !defaults()
                .decide(
                    &nothing,
                    Action::SessionShow,
                    &session(),
                    &CallContext::default()
                )
                .allowed
        );
    }
}

#[test]
fn an_agent_has_none_of_its_users_rights() {
    let policies = defaults();
    let elsewhere = agent(cynode_policy::Role::ProjectManager, None, &[OTHER_TASK]);
    assert!(
        policies
            .decide(
                &user(OWNER),
                Action::SessionExec,
                &session(),
                &CallContext::default()
            )
            .allowed
    );
    assert!(
        !policies
            .decide(
                &elsewhere,
                Action::SessionExec,
                &session(),
                &CallContext::default()
            )
            .allowed
    );
}

#[test]
fn a_decision_names_the_rules_that_made_it() {
    let policies = defaults();
    let decide = |principal, action, resource: &Resource| {
        policies.decide(&principal, action, resource, &CallContext::default())
    };
    assert_eq!(
        decide(user(OWNER), Action::SessionExec, &session()).rules,
        ["defaults/owners"]
    );
    assert_eq!(
        decide(
            agent(cynode_policy::Role::ProjectManager, None, &[TASK]),
            Action::FileRead,
            &session()
        )
        .rules,
        ["defaults/managers-work"]
    );
    assert_eq!(
        decide(user(STRANGER), Action::SessionExec, &session()),
        Decision {
            allowed: false,
            rules: vec![],
            errors: vec![]
        }
    );
    let quota = everything()
        .into_iter()
        .find(|(name, _)| *name == "Preference: owner's quota")
        .expect("it is in the list")
        .1;
    assert_eq!(
        decide(user(OWNER), Action::PreferencePut, &quota),
        Decision {
            allowed: false,
            rules: vec!["defaults/preferences-of-administrators".to_owned()],
            errors: vec![]
        }
    );
    assert_eq!(
        decide(administrator(), Action::PreferencePut, &quota).rules,
        ["defaults/administrators"]
    );
}

#[test]
fn rules_are_listed_by_document_name_and_effect() {
    let policies = defaults();
    let names: Vec<&str> = policies
        .rules()
        .iter()
        .map(|rule| rule.name.as_str())
        .collect();
    assert!(
        names.is_sorted() && names.contains(&"administrators"),
        "{names:?}"
    );
    let forbidding: Vec<String> = policies
        .rules()
        .iter()
        .filter(|rule| rule.effect == Effect::Forbid)
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        forbidding,
        [
            "defaults/image-preferences-of-people",
            "defaults/preferences-of-administrators",
            "defaults/promotions-approved-by-people"
        ]
    );
    assert_eq!(
        (Effect::Permit.as_str(), Effect::Forbid.as_str()),
        ("permit", "forbid")
    );
    let printed = format!("{policies:?}");
    assert!(
        printed.contains("administrators") && printed.len() < 5_000,
        "{printed}"
    );
}
