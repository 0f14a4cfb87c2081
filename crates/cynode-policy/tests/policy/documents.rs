//! Which documents are accepted as policies, and how flaws are reported.

use cynode_policy::{Action, CallContext, Flaw, Policies};
use proptest::prelude::*;

fn flaws(documents: &[(&str, &str)]) -> Vec<Flaw> {
    Policies::parse(documents.iter().copied()).expect_err("these have a flaw")
}

fn one_flaw(text: &str) -> String {
    let flaws = flaws(&[
        ("good", "permit (principal, action, resource);"),
        ("site", text),
    ]);
    let [flaw] = flaws.as_slice() else {
        panic!("one flaw, not {flaws:?}")
    };
    assert_eq!(flaw.policy, "site");
    flaw.message.clone()
}

fn names(text: &str) -> Vec<String> {
    let policies = Policies::parse([("site", text)]).expect("rules without flaw");
    policies
        .rules()
        .iter()
        .map(|rule| rule.name.clone())
        .collect()
}

#[test]
fn a_rule_is_named_by_its_annotation_or_its_number() {
    let rule = "permit (principal, action, resource);";
    assert_eq!(
        names(&format!("{rule} @id(\"mine\") {rule} {rule}")),
        ["1", "3", "mine"]
    );
    assert_eq!(names(&rule.repeat(12)).len(), 12);
    assert_eq!(names(&format!("@id(\"\") {rule}")), ["1"]);
}

#[test]
fn two_rules_of_one_name_are_a_flaw_in_one_document_only() {
    let rule = "@id(\"mine\") permit (principal, action, resource);";
    assert_eq!(
        one_flaw(&rule.repeat(2)),
        "there are two rules named 'mine'"
    );
    assert_eq!(
        one_flaw(&format!(
            "@id(\"2\") {0} {0}",
            "permit (principal, action, resource);"
        )),
        "there are two rules named '2'"
    );
    assert!(Policies::parse([("one", rule), ("other", rule)]).is_ok());
}

#[test]
fn rules_that_decisions_would_name_alike_are_a_flaw() {
    let rule = |name: &str| format!("@id(\"{name}\") permit (principal, action, resource);");
    let flaws = flaws(&[("a/b", &rule("c")), ("a", &rule("b/c"))]);
    assert_eq!(
        flaws,
        [Flaw {
            policy: "a".to_owned(),
            message: "there are two rules named 'b/c'".to_owned()
        }]
    );
}

#[test]
fn names_with_special_characters_are_reported_verbatim() {
    let document = "a \"quoted\" \\ name\nof é\u{202e}";
    let all = "@id(\"it's \\\"mine\\\"\\n\") permit (principal, action, resource);";
    let policies = Policies::parse([(document, all)]).expect("a rule without flaw");
    let decision = policies.decide(
        &crate::people::administrator(),
        Action::FileRead,
        &crate::people::session(),
        &CallContext::default(),
    );
    assert_eq!(decision.rules, [format!("{document}/it's \"mine\"\n")]);
    assert_eq!(policies.rules()[0].to_string(), decision.rules[0]);
    let flaws = flaws(&[(
        document,
        "permit (principal, action, resource) when { principal.admin };",
    )]);
    assert!(
        flaws
            .iter()
            .all(|flaw| flaw.policy == document && flaw.message.starts_with("line 1, column ")),
        "{flaws:?}"
    );
}

#[test]
fn two_documents_of_one_name_are_a_flaw() {
    let flaws = flaws(&[("site", ""), ("site", "")]);
    assert_eq!(
        flaws[0].to_string(),
        "policy 'site': there are two documents with this name"
    );
}

#[test]
fn a_template_is_a_flaw() {
    let message = one_flaw(
        "permit (principal, action, resource);\npermit (principal == ?principal, action, resource);",
    );
    assert!(message.starts_with("rule 2 is a template"), "{message}");
}

#[test]
fn a_syntax_error_is_reported_with_its_position() {
    for (text, place) in [
        (
            "permit (principal, action resource);",
            "line 1, column 27: ",
        ),
        ("\n\n  permit principal;", "line 3, column 10: "),
        (
            "// 💥 é\nforbid (principal, action, resource) when { \"é💥\" ++ };",
            "line 2, column 51: ",
        ),
        (
            "permit (principal, action, resource)",
            "line 1, column 37: ",
        ),
        (
            "permit (principal, action, resource) when { \"",
            "line 1, column 45: ",
        ),
    ] {
        let message = one_flaw(text);
        assert!(message.starts_with(place), "{text}: {message}");
    }
}

#[test]
fn an_attribute_unknown_to_the_schema_is_reported_with_its_position() {
    for (condition, complaint) in [
        (
            "action == CyNode::Action::\"session.exce\", resource);",
            "session.exce",
        ),
        ("action, resource is CyNode::Sesion);", "CyNode::Sesion"),
        (
            "action, resource) when { resource.owners.contains(principal) };",
            "owners",
        ),
        (
            "action, resource) when { context.path like \"*\" };",
            "path",
        ),
        ("action, resource) when { context.ptty };", "ptty"),
        ("action, resource) when { context.pty == \"yes\" };", "type"),
        ("action, resource) when { principal.admin };", "admin"),
        ("action, resource == CyNode::System::\"other\");", "other"),
    ] {
        let text = format!(
            "permit (principal, action, resource);\n@id(\"here\") permit (principal, {condition}"
        );
        let all = flaws(&[("site", &text)]);
        assert!(
            all.iter()
                .any(|flaw| flaw.message.starts_with("line 2, column ")
                    && flaw.message.contains(complaint)),
            "{text}: {all:?}"
        );
        assert!(all.iter().all(|flaw| flaw.policy == "site"), "{all:?}");
    }
}

#[test]
fn a_rule_cannot_read_attributes_of_an_agents_user() {
    let message = one_flaw(
        "permit (principal is CyNode::Agent, action, resource) when { principal.user.admin };",
    );
    assert!(message.starts_with("line 1, column "), "{message}");
}

#[test]
fn a_rule_that_can_never_hold_is_no_flaw() {
    assert!(Policies::parse([("site", "permit (principal is CyNode::User, action, resource) when { principal is CyNode::Agent };")]).is_ok());
}

#[test]
fn flaws_of_all_documents_are_reported_at_once() {
    let flaws = flaws(&[("b", "permit;"), ("good", ""), ("a", "forbid;")]);
    assert_eq!(
        flaws
            .iter()
            .map(|flaw| flaw.policy.as_str())
            .collect::<Vec<_>>(),
        ["a", "b"]
    );
}

/// Expressions that nest, or chain an operator, `count` times.
fn nested(count: usize) -> Vec<String> {
    let between =
        |open: &str, close: &str| format!("{}true{}", open.repeat(count), close.repeat(count));
    vec![
        between("(", ")"),
        between("[", "]"),
        between("{a: ", "}"),
        between("!", ""),
        between("if context.pty then true else ", ""),
        between("(if true then ", " else false)"),
        between("context.pty && ", ""),
        between("context.pty || ", ""),
        between("", " && context.pty"),
        between("", "} when { context.pty"),
        between("", "} unless { context.pty"),
        between("", ".contains(1)"),
        between("", ".a"),
        between("", "[\"a\"]"),
        between("", " + 1"),
        between("[1].contains(", ")"),
        between("1 * ", ""),
        between("- ", ""),
    ]
}

/// Deeper texts would overflow the stack of the test's thread and end the process.
#[test]
fn a_deeply_nested_text_is_refused_before_cedar_parses_it() {
    for condition in nested(700).into_iter().chain(nested(10_000)) {
        let text = format!(
            "permit (principal, action, resource);\npermit (principal, action, resource) when {{ {condition} }};"
        );
        let text = &text[..text.len().min(cynode_policy::MAX_DOCUMENT_BYTES)];
        let message = one_flaw(text);
        assert!(
            message.starts_with("line 2, column ") && message.contains("nested too deeply"),
            "{}: {message}",
            &text[..200]
        );
    }
}

/// Below the bound, neither the parser nor the validator nor the evaluator overflows the stack,
/// however the expression nests.
#[test]
fn nested_conditions_are_evaluated_or_refused_with_a_position() {
    for count in [
        1, 2, 5, 10, 20, 28, 29, 30, 31, 32, 50, 100, 149, 150, 200, 298, 299, 300,
    ] {
        for condition in nested(count) {
            let text = format!("permit (principal, action, resource) when {{ {condition} }};");
            match Policies::parse([("site", text.as_str())]) {
                Ok(policies) => {
                    let decision = policies.decide(
                        &crate::people::administrator(),
                        Action::FileRead,
                        &crate::people::session(),
                        &CallContext::default(),
                    );
                    assert!(decision.errors.is_empty(), "{count}: {text}: {decision:?}");
                }
                Err(flaws) => assert!(
                    flaws
                        .iter()
                        .all(|flaw| flaw.message.starts_with("line 1, column ")),
                    "{count}: {text}: {flaws:?}"
                ),
            }
        }
    }
}

#[test]
fn brackets_in_strings_comments_and_lists_do_not_count_as_nesting() {
    let brackets = "([{".repeat(1_000);
    let operators = "&&||!.".repeat(1_000);
    let list = "CyNode::Action::\"file.read\", ".repeat(1_000);
    let text = format!(
        "// {brackets} {operators}
         @note(\"{brackets} \\\" {operators}\")
         permit (principal, action in [{list} CyNode::Action::\"file.read\"], resource)
         when {{ context has path && [\"{brackets}\", \"{operators}\"].contains(context.path) }}; // {brackets}\r"
    );
    assert_eq!(names(&text), ["1"]);
    let rules =
        "permit (principal, action, resource) when { context.pty && context.pty };\n".repeat(200);
    assert_eq!(names(&rules).len(), 200);
}

#[test]
fn a_document_that_is_too_long_is_a_flaw() {
    let fitting = " ".repeat(cynode_policy::MAX_DOCUMENT_BYTES);
    assert!(Policies::parse([("site", fitting.as_str())]).is_ok());
    assert_eq!(
        one_flaw(&format!("{fitting} ")),
        "longer than 65536 bytes; split it into several documents"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_text_parses_as_rules_or_flaws(text in any::<String>(), id in any::<String>()) {
        match Policies::parse([(id.as_str(), text.as_str())]) {
            Ok(policies) => prop_assert!(policies.rules().is_empty()),
            Err(flaws) => prop_assert!(
                flaws
                    .iter()
                    .all(|flaw| flaw.policy == id && !flaw.message.is_empty())
            ),
        }
    }

    #[test]
    fn a_mutated_rule_parses_as_rules_or_flaws(
        cut in 0_usize..2_000,
        put in "[(){};\"\\\\a-z:=!&|. \n]{0,4}",
    ) {
        let text = cynode_policy::DEFAULTS;
        let cut = (cut..text.len())
            .find(|cut| text.is_char_boundary(*cut))
            .unwrap_or(0);
        let broken = format!(
            "{}{put}{}",
            &text[..cut],
            text[cut..].chars().skip(1).collect::<String>()
        );
        if let Err(flaws) = Policies::parse([("site", broken.as_str())]) {
            prop_assert!(!flaws.is_empty());
        }
    }
}
