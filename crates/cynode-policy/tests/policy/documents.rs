//! What can be kept as a policy, and how what can't is told.

use cynode_policy::{Flaw, Policies};
use proptest::prelude::*;

fn flaws(documents: &[(&str, &str)]) -> Vec<Flaw> {
    Policies::parse(documents.iter().copied()).expect_err("these have a flaw")
}

fn one_flaw(text: &str) -> String {
    let flaws = flaws(&[("good", "permit (principal, action, resource);"), ("site", text)]);
    let [flaw] = flaws.as_slice() else { panic!("one flaw, not {flaws:?}") };
    assert_eq!(flaw.policy, "site");
    flaw.message.clone()
}

fn names(text: &str) -> Vec<String> {
    let policies = Policies::parse([("site", text)]).expect("rules without flaw");
    policies.rules().iter().map(|rule| rule.name.clone()).collect()
}

#[test]
fn a_rule_is_named_by_its_annotation_or_its_number() {
    let rule = "permit (principal, action, resource);";
    assert_eq!(names(&format!("{rule} @id(\"mine\") {rule} {rule}")), ["1", "3", "mine"]);
    assert_eq!(names(&rule.repeat(12)).len(), 12);
    assert_eq!(names(&format!("@id(\"\") {rule}")), ["1"]);
}

#[test]
fn two_rules_of_one_name_are_a_flaw_in_one_document_only() {
    let rule = "@id(\"mine\") permit (principal, action, resource);";
    assert_eq!(one_flaw(&rule.repeat(2)), "there are two rules of the name 'mine'");
    assert_eq!(one_flaw(&format!("@id(\"2\") {0} {0}", "permit (principal, action, resource);")), "there are two rules of the name '2'");
    assert!(Policies::parse([("one", rule), ("other", rule)]).is_ok());
}

#[test]
fn rules_that_decisions_would_name_alike_are_a_flaw() {
    let rule = |name: &str| format!("@id(\"{name}\") permit (principal, action, resource);");
    let flaws = flaws(&[("a/b", &rule("c")), ("a", &rule("b/c"))]);
    assert_eq!(flaws, [Flaw { policy: "a".to_owned(), message: "there are two rules of the name 'b/c'".to_owned() }]);
}

#[test]
fn two_documents_of_one_name_are_a_flaw() {
    let flaws = flaws(&[("site", ""), ("site", "")]);
    assert_eq!(flaws[0].to_string(), "policy 'site': there are two documents of this name");
}

#[test]
fn a_template_is_a_flaw() {
    let message = one_flaw("permit (principal, action, resource);\npermit (principal == ?principal, action, resource);");
    assert!(message.starts_with("rule 2 is a template"), "{message}");
}

#[test]
fn what_cedar_can_not_read_is_told_with_its_place() {
    for (text, place) in [
        ("permit (principal, action resource);", "line 1, column 27: "),
        ("\n\n  permit principal;", "line 3, column 10: "),
        ("// 💥 é\nforbid (principal, action, resource) when { \"é💥\" ++ };", "line 2, column 52: "),
        ("permit (principal, action, resource)", "line 1, column 37: "),
        ("permit (principal, action, resource) when { \"", "line 1, column 45: "),
    ] {
        let message = one_flaw(text);
        assert!(message.starts_with(place), "{text}: {message}");
    }
}

#[test]
fn what_the_schema_does_not_know_is_told_with_its_place() {
    for (condition, complaint) in [
        ("action == CyNode::Action::\"session.exce\", resource);", "session.exce"),
        ("action, resource is CyNode::Sesion);", "CyNode::Sesion"),
        ("action, resource) when { resource.owners.contains(principal) };", "owners"),
        ("action, resource) when { context.path like \"*\" };", "path"),
        ("action, resource) when { context.ptty };", "ptty"),
        ("action, resource) when { context.pty == \"yes\" };", "type"),
        ("action, resource) when { principal.admin };", "admin"),
        ("action, resource == CyNode::System::\"other\");", "other"),
        ("action, resource is CyNode::Session) when { ip(\"10.0.0.1\").isLoopback() };", "ip"),
    ] {
        let text = format!("permit (principal, action, resource);\n@id(\"here\") permit (principal, {condition}");
        let all = flaws(&[("site", &text)]);
        assert!(all.iter().any(|flaw| flaw.message.starts_with("line 2, column ") && flaw.message.contains(complaint)), "{text}: {all:?}");
        assert!(all.iter().all(|flaw| flaw.policy == "site"), "{all:?}");
    }
}

#[test]
fn a_rule_can_not_look_into_what_it_is_not_told_of() {
    let message = one_flaw("permit (principal is CyNode::Agent, action, resource) when { principal.user.admin };");
    assert!(message.starts_with("line 1, column "), "{message}");
}

#[test]
fn a_rule_that_can_never_hold_is_no_flaw() {
    assert!(Policies::parse([("site", "permit (principal is CyNode::User, action, resource) when { principal is CyNode::Agent };")]).is_ok());
}

#[test]
fn flaws_of_all_documents_are_told_at_once() {
    let flaws = flaws(&[("b", "permit;"), ("good", ""), ("a", "forbid;")]);
    assert_eq!(flaws.iter().map(|flaw| flaw.policy.as_str()).collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn a_text_nested_without_end_is_told_or_read_but_never_fatal() {
    for depth in [100, 10_000] {
        let text = format!("permit (principal, action, resource) when {{ {}true{} }};", "(".repeat(depth), ")".repeat(depth));
        drop(Policies::parse([("site", text.as_str())]));
        let text = format!("permit (principal, action, resource) when {{ {}true }};", "!".repeat(depth));
        assert!(Policies::parse([("site", text.as_str())]).is_err(), "Cedar takes four negations at most");
    }
}

proptest! {
    #[test]
    fn any_text_is_rules_or_flaws(text in any::<String>(), id in any::<String>()) {
        match Policies::parse([(id.as_str(), text.as_str())]) {
            Ok(policies) => prop_assert!(policies.rules().is_empty()),
            Err(flaws) => prop_assert!(flaws.iter().all(|flaw| flaw.policy == id && !flaw.message.is_empty())),
        }
    }

    #[test]
    fn a_broken_rule_is_rules_or_flaws(cut in 0_usize..2_000, put in "[(){};\"\\\\a-z:=!&|. \n]{0,4}") {
        let text = cynode_policy::DEFAULTS;
        let cut = (cut..text.len()).find(|cut| text.is_char_boundary(*cut)).unwrap_or(0);
        let broken = format!("{}{put}{}", &text[..cut], text[cut..].chars().skip(1).collect::<String>());
        if let Err(flaws) = Policies::parse([("site", broken.as_str())]) {
            prop_assert!(!flaws.is_empty());
        }
    }
}
