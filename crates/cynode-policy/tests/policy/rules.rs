//! How rules combine to a decision, whatever they contain.

use std::{
    collections::{BTreeMap, BTreeSet},
    str::FromStr as _,
};

use cedar_policy::Schema;
use cynode_policy::{
    Action, CallContext, CallLimits, DEFAULTS, Place, Policies, Principal, Resource, SCHEMA,
};
use proptest::{prelude::*, sample::select};
use uuid::Uuid;

use crate::default_rules::defaults;
use crate::people::{OWNER, STRANGER, every_question, everybody, session, user};

fn schema() -> Schema {
    Schema::from_cedarschema_str(SCHEMA)
        .expect("the schema can be read")
        .0
}

/// The resource types of each action in the schema.
pub(crate) fn types_by_action() -> BTreeMap<String, BTreeSet<String>> {
    let schema = schema();
    let types = |action| {
        schema
            .resources_for_action(action)
            .into_iter()
            .flatten()
            .map(|name| name.basename().to_owned())
            .collect()
    };
    schema
        .actions()
        .map(|action| (action.id().unescaped().to_owned(), types(action)))
        .collect()
}

#[test]
// invariant: api-boundaries
fn the_schema_and_the_code_know_the_same_actions_in_the_same_groups() {
    let entities = schema().action_entities().expect("actions are entities");
    let mut of_schema: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for action in schema().actions() {
        let groups = entities
            .ancestors(action)
            .into_iter()
            .flatten()
            .map(|group| group.id().unescaped().to_owned());
        of_schema.insert(action.id().unescaped().to_owned(), groups.collect());
    }
    let groups: BTreeSet<String> = of_schema.values().flatten().cloned().collect();
    of_schema.retain(|name, _| !groups.contains(name));
    let of_code: BTreeMap<String, BTreeSet<String>> = Action::ALL
        .iter()
        .map(|action| {
            (
                action.to_string(),
                action.groups().iter().map(ToString::to_string).collect(),
            )
        })
        .collect();
    assert_eq!(of_schema, of_code);
    assert_eq!(
        groups,
        ["administer", "egress", "files", "read", "run", "write"]
            .map(ToOwned::to_owned)
            .into()
    );
}

#[test]
fn an_action_either_reads_or_writes() {
    for action in Action::ALL {
        assert!(
            action.groups().contains(&"read") != action.groups().contains(&"write"),
            "{action}"
        );
        assert_eq!(
            action.groups().contains(&"files"),
            action.as_str().starts_with("file."),
            "{action}"
        );
        assert!(
            !action.groups().contains(&"run") || action.groups().contains(&"write"),
            "{action}"
        );
    }
}

#[test]
fn action_names_round_trip() {
    for action in Action::ALL {
        assert_eq!(Action::from_str(action.as_str()), Ok(*action));
    }
    for unknown in [
        "",
        "session",
        "session.exec ",
        "Session.Exec",
        "read",
        "session.exec\0",
    ] {
        let error = Action::from_str(unknown).expect_err("there is no such action");
        assert_eq!(error.to_string(), format!("unknown action '{unknown}'"));
    }
}

#[test]
fn every_action_can_be_decided_within_the_schema() {
    let all = Policies::parse([("all", "permit (principal, action, resource);")])
        .expect("a rule without flaw");
    let mut decided = BTreeSet::new();
    for (action, name, resource) in every_question() {
        decided.insert(action);
        for (caller, principal) in everybody() {
            let decision = all.decide(&principal, action, &resource, &CallContext::default());
            assert!(
                decision.allowed,
                "{caller}: {action} of {name}: {decision:?}"
            );
        }
    }
    assert_eq!(decided.len(), Action::ALL.len());
}

#[test]
fn an_action_on_the_wrong_kind_of_resource_is_denied_with_the_reason() {
    let all = Policies::parse([("all", "permit (principal, action, resource);")])
        .expect("a rule without flaw");
    let decision = all.decide(
        &user(OWNER),
        Action::SessionExec,
        &Resource::System,
        &CallContext::default(),
    );
    assert!(!decision.allowed && decision.rules.is_empty());
    assert!(
        decision.errors[0].contains("CyNode::System"),
        "{decision:?}"
    );
}

#[test]
fn a_rule_sees_the_caller_the_resource_and_the_call() {
    let of_groups = r#"permit (principal in CyNode::Group::"reviewers", action, resource);"#;
    let of_name = r#"permit (principal is CyNode::User, action, resource) when { principal.name == "somebody" };"#;
    let of_path = r#"permit (principal, action in CyNode::Action::"files", resource) when { context has path && context.path like "/workspace/*" };"#;
    let of_branch = r#"permit (principal, action, resource) when { context has branch && context.branch like "cynode/*" };"#;
    let of_program = r#"permit (principal, action, resource) when { context has program && context.program == "git" && context has program_name && context.program_name == "git" };"#;
    let of_image = r#"permit (principal, action, resource) when { context has image && context.image like "registry.example/*" };"#;
    let of_kind = r#"permit (principal, action, resource) when { context has token_kind && context.token_kind == "user" };"#;
    let of_network = r#"permit (principal, action, resource) when { context has network && context.network == "none" };"#;
    let of_terminal = r"permit (principal, action, resource) when { context.pty };";
    let of_limits = "permit (principal, action, resource) when { context has memory_bytes && context.memory_bytes <= 1000
        && context has millicpus && context.millicpus <= 1500 && context has pids && context.pids <= 10
        && context has disk_bytes && context.disk_bytes <= 5000 && context has nofile && context.nofile <= 64 };";
    let of_task = r#"permit (principal, action, resource in CyNode::Task::"00000000-0000-0000-0000-00000000000b");"#;
    let of_project = r#"permit (principal, action, resource in CyNode::Project::"00000000-0000-0000-0000-00000000000a");"#;
    let call = CallContext {
        path: Some("/workspace/a".to_owned()),
        branch: Some("cynode/a".to_owned()),
        program: Some("git".to_owned()),
        image: Some("registry.example/a".to_owned()),
        token_kind: Some("user".to_owned()),
        network: Some("none".to_owned()),
        pty: true,
        limits: Some(CallLimits {
            memory_bytes: 1_000,
            millicpus: 1_500,
            pids: 10,
            disk_bytes: 5_000,
            nofile: 64,
        }),
    };
    let nobody = Principal::User {
        id: STRANGER,
        name: "nobody".to_owned(),
        admin: false,
        groups: vec![],
    };
    let nowhere = Resource::Session {
        id: Uuid::from_u128(40),
        place: Place::default(),
    };
    for text in [
        of_groups,
        of_name,
        of_path,
        of_branch,
        of_program,
        of_image,
        of_kind,
        of_network,
        of_terminal,
        of_limits,
        of_task,
        of_project,
    ] {
        let policies = Policies::parse([("one", text)]).expect("a rule without flaw");
        assert!(
            policies
                .decide(&user(OWNER), Action::FileRead, &session(), &call)
                .allowed,
            "{text}"
        );
        assert!(
            !policies
                .decide(&nobody, Action::FileRead, &nowhere, &CallContext::default())
                .allowed,
            "{text}"
        );
    }
}

#[test]
fn a_rule_about_a_program_holds_for_its_path_too() {
    let forbidden = r#"permit (principal, action, resource);
        forbid (principal, action, resource) when { context has program_name && ["rm", "git"].contains(context.program_name) };"#;
    let policies = Policies::parse([("one", forbidden)]).expect("a rule without flaw");
    let allowed = |action, program: Option<&str>| {
        let resource = if action == Action::JobCreate {
            Resource::System
        } else {
            session()
        };
        policies
            .decide(
                &user(OWNER),
                action,
                &resource,
                &CallContext {
                    program: program.map(str::to_owned),
                    ..CallContext::default()
                },
            )
            .allowed
    };
    for action in [Action::SessionExec, Action::SessionPty, Action::JobCreate] {
        for program in [
            "rm",
            "/bin/rm",
            "/usr/bin/rm",
            "./rm",
            "../../bin/rm",
            "//bin//rm",
            "/bin/rm/",
            "git",
            "/usr/bin/git",
        ] {
            assert!(!allowed(action, Some(program)), "{action} {program}");
        }
        for program in [
            Some("rmdir"),
            Some("/bin/xrm"),
            Some("rm/x"),
            Some("/rm/ls"),
            Some(""),
            None,
        ] {
            assert!(allowed(action, program), "{action} {program:?}");
        }
    }
}

#[test]
fn a_rule_bounds_what_a_sandbox_may_ask_for() {
    let text = "permit (principal, action, resource);
        forbid (principal, action, resource) when { context has memory_bytes && context.memory_bytes > 1000 };
        forbid (principal, action, resource) when { context has millicpus && context.millicpus > 1500 };
        forbid (principal, action, resource) when { context has pids && context.pids > 10 };
        forbid (principal, action, resource) when { context has disk_bytes && context.disk_bytes > 5000 };
        forbid (principal, action, resource) when { context has nofile && context.nofile > 64 };";
    let policies = Policies::parse([("one", text)]).expect("rules without flaw");
    let allowed = |memory_bytes, millicpus, pids, disk_bytes, nofile| {
        let call = CallContext {
            limits: Some(CallLimits {
                memory_bytes,
                millicpus,
                pids,
                disk_bytes,
                nofile,
            }),
            ..CallContext::default()
        };
        policies
            .decide(
                &user(OWNER),
                Action::SessionCreate,
                &Resource::System,
                &call,
            )
            .allowed
    };
    assert!(allowed(1_000, 1_500, 10, 5_000, 64));
    assert!(!allowed(1_001, 1_500, 10, 5_000, 64) && !allowed(1_000, 1_501, 10, 5_000, 64));
    assert!(!allowed(1_000, 1_500, 11, 5_000, 64));
    assert!(!allowed(1_000, 1_500, 10, 5_001, 64) && !allowed(1_000, 1_500, 10, 5_000, 65));
}

#[test]
fn rules_see_the_attributes_of_resources() {
    let image = |pinned, agent_compatible| Resource::Image {
        reference: "registry.example/a".to_owned(),
        agent_compatible,
        pinned,
    };
    let pinned = "permit (principal, action, resource is CyNode::Image) when { resource.pinned && !resource.agent_compatible };";
    let policies = Policies::parse([("one", pinned)]).expect("a rule without flaw");
    let allowed = |resource| {
        policies
            .decide(
                &user(OWNER),
                Action::ImageUse,
                &resource,
                &CallContext::default(),
            )
            .allowed
    };
    assert!(allowed(image(true, false)));
    assert!(!allowed(image(true, true)) && !allowed(image(false, false)));

    let kind = r#"permit (principal, action, resource is CyNode::Token) when { resource.kind == "sandbox" && resource.user != principal };"#;
    let policies = Policies::parse([("one", kind)]).expect("a rule without flaw");
    let token = |kind: &str, user| Resource::Token {
        id: "1".to_owned(),
        user,
        kind: kind.to_owned(),
    };
    let allowed = |resource| {
        policies
            .decide(
                &user(OWNER),
                Action::TokenShow,
                &resource,
                &CallContext::default(),
            )
            .allowed
    };
    assert!(allowed(token("sandbox", STRANGER)));
    assert!(!allowed(token("sandbox", OWNER)) && !allowed(token("user", STRANGER)));

    let key = r#"permit (principal, action, resource is CyNode::Setting) when { resource.key like "sandbox.*" };"#;
    let policies = Policies::parse([("one", key)]).expect("a rule without flaw");
    let allowed = |key: &str| {
        policies
            .decide(
                &user(OWNER),
                Action::SettingPut,
                &Resource::Setting {
                    key: key.to_owned(),
                },
                &CallContext::default(),
            )
            .allowed
    };
    assert!(allowed("sandbox.default_image"));
    assert!(!allowed("agents.sandbox."));

    let sandbox_task = r#"permit (principal is CyNode::Sandbox, action, resource in CyNode::Task::"00000000-0000-0000-0000-00000000000b") when { resource in principal.task };"#;
    let policies = Policies::parse([("one", sandbox_task)]).expect("a rule without flaw");
    let decide = |task| {
        policies
            .decide(
                &Principal::Sandbox {
                    token: Uuid::from_u128(9),
                    task,
                },
                Action::FileRead,
                &session(),
                &CallContext::default(),
            )
            .allowed
    };
    assert!(decide(crate::people::TASK) && !decide(crate::people::OTHER_TASK));
}

#[test]
fn a_user_who_asks_about_themselves_is_known_as_the_caller() {
    let policies = Policies::parse([(
        "one",
        "permit (principal, action, resource is CyNode::User) when { !resource.admin };",
    )])
    .expect("a rule without flaw");
    let show = |of| {
        policies.decide(
            &user(OWNER),
            Action::UserShow,
            &Resource::User { id: of },
            &CallContext::default(),
        )
    };
    assert!(show(OWNER).allowed);
    let of_another = show(STRANGER);
    assert!(
        !of_another.allowed && of_another.errors.len() == 1,
        "{of_another:?}"
    );
}

/// Fails for every caller, because the sum overflows; the condition keeps Cedar from detecting that
/// at validation.
const FAILING: &str = "when { 9223372036854775807 + (if context.pty then 1 else 2) > 0 };";

#[test]
fn a_rule_that_fails_denies_whatever_others_permit() {
    for effect in ["permit", "forbid"] {
        let failing = format!("@id(\"broken\") {effect} (principal, action, resource) {FAILING}");
        let policies = Policies::parse([
            ("all", "permit (principal, action, resource);"),
            ("site", &failing),
        ])
        .expect("Cedar does not evaluate sums at validation");
        let decision = policies.decide(
            &user(OWNER),
            Action::SessionExec,
            &session(),
            &CallContext::default(),
        );
        assert!(!decision.allowed);
        assert_eq!(
            decision.rules,
            ["site/broken"],
            "other rules than the broken one decided"
        );
        assert_eq!(decision.errors.len(), 1);
        assert!(
            decision.errors[0].starts_with("site/broken: ")
                && decision.errors[0].contains("overflow"),
            "{decision:?}"
        );
    }
}

#[test]
fn a_denial_by_rule_and_by_failure_names_both() {
    let failing = format!(
        "forbid (principal, action, resource); permit (principal, action, resource) {FAILING}"
    );
    let policies = Policies::parse([("site", failing.as_str())])
        .expect("Cedar does not evaluate sums at validation");
    assert_eq!(
        policies
            .decide(
                &user(OWNER),
                Action::SessionExec,
                &session(),
                &CallContext::default()
            )
            .rules,
        ["site/1", "site/2"]
    );
}

fn any_head() -> impl Strategy<Value = String> {
    let principal = select(vec![
        "principal",
        "principal is CyNode::User",
        "principal is CyNode::Agent",
        "principal in CyNode::Group::\"reviewers\"",
    ]);
    let groups = ["read", "write", "run", "files", "administer"];
    let names: Vec<&str> = Action::ALL
        .iter()
        .map(|action| action.as_str())
        .chain(groups)
        .collect();
    let action = prop_oneof![
        Just("action".to_owned()),
        select(names).prop_map(|name| format!("action in CyNode::Action::\"{name}\""))
    ];
    let resource = select(vec![
        "resource",
        "resource is CyNode::Session",
        "resource in CyNode::Project::\"00000000-0000-0000-0000-00000000000a\"",
    ]);
    (principal, action, resource)
        .prop_map(|(principal, action, resource)| format!("({principal}, {action}, {resource})"))
}

fn any_condition() -> impl Strategy<Value = &'static str> {
    select(vec![
        "",
        "when { context.pty }",
        "unless { context.pty }",
        "when { context has path && context.path like \"/workspace/*\" }",
        "unless { principal is CyNode::User && principal.admin }",
        "when { resource has owners && principal is CyNode::User && resource.owners.contains(principal) }",
    ])
}

prop_compose! {
    fn any_rule(effect: &'static str)(head in any_head(), condition in any_condition()) -> String {
        format!("{effect} {head} {condition};\n")
    }
}

fn any_document() -> impl Strategy<Value = String> {
    prop::collection::vec(prop_oneof![any_rule("permit"), any_rule("forbid")], 0..6)
        .prop_map(|rules| rules.concat())
}

prop_compose! {
    fn any_call()(pty in any::<bool>(), path in prop::option::of(select(vec!["/workspace/a", "/etc/passwd"]))) -> CallContext {
        CallContext { pty, path: path.map(ToOwned::to_owned), ..CallContext::default() }
    }
}

fn any_question() -> impl Strategy<Value = (Principal, Action, Resource, CallContext)> {
    let principals: Vec<Principal> = everybody()
        .into_iter()
        .map(|(_, principal)| principal)
        .collect();
    (select(principals), select(every_question()), any_call())
        .prop_map(|(principal, (action, _, resource), call)| (principal, action, resource, call))
}

fn parsed(documents: &[(&str, &str)]) -> Policies {
    Policies::parse(documents.iter().copied()).expect("rules without flaw")
}

proptest! {
    // Each case parses and validates whole documents.
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    // invariant: fail-closed
    fn without_rules_everything_is_denied((principal, action, resource, call) in any_question()) {
        for documents in [
            &[][..],
            &[("empty", "")],
            &[("comment", "// permit (principal, action, resource);")],
        ] {
            let decision = parsed(documents).decide(&principal, action, &resource, &call);
            prop_assert!(
                !decision.allowed && decision.rules.is_empty() && decision.errors.is_empty()
            );
        }
    }

    #[test]
    // invariant: fail-closed
    fn a_rule_that_forbids_wins_whatever_others_permit(
        (principal, action, resource, call) in any_question(),
        document in any_document(),
    ) {
        let policies = parsed(&[
            ("site", &document),
            ("stop", "forbid (principal, action, resource);"),
            ("all", "permit (principal, action, resource);"),
        ]);
        let decision = policies.decide(&principal, action, &resource, &call);
        prop_assert!(!decision.allowed);
        prop_assert!(decision.rules.contains(&"stop/1".to_owned()));
    }

    #[test]
    fn the_order_of_documents_does_not_matter(
        (principal, action, resource, call) in any_question(),
        one in any_document(),
        other in any_document(),
    ) {
        let forth = parsed(&[("defaults", DEFAULTS), ("one", &one), ("other", &other)]);
        let back = parsed(&[("other", &other), ("one", &one), ("defaults", DEFAULTS)]);
        prop_assert_eq!(
            forth.decide(&principal, action, &resource, &call),
            back.decide(&principal, action, &resource, &call)
        );
        prop_assert_eq!(forth.rules(), back.rules());
    }

    #[test]
    fn another_permit_never_denies(
        (principal, action, resource, call) in any_question(),
        document in any_document(),
        more in any_rule("permit"),
    ) {
        let before = parsed(&[("site", &document)]).decide(&principal, action, &resource, &call);
        let after = parsed(&[("site", &document), ("more", &more)])
            .decide(&principal, action, &resource, &call);
        prop_assert!(after.allowed || !before.allowed);
    }

    #[test]
    fn another_forbid_never_allows(
        (principal, action, resource, call) in any_question(),
        document in any_document(),
        more in any_rule("forbid"),
    ) {
        let before = parsed(&[("site", &document)]).decide(&principal, action, &resource, &call);
        let after = parsed(&[("site", &document), ("more", &more)])
            .decide(&principal, action, &resource, &call);
        prop_assert!(before.allowed || !after.allowed);
    }

    #[test]
    // invariant: fail-closed
    fn a_failure_never_allows(
        (principal, action, resource, call) in any_question(),
        document in any_document(),
        head in any_head(),
        permit in any::<bool>(),
    ) {
        let failing = format!(
            "{} {head} {FAILING}",
            if permit { "permit" } else { "forbid" }
        );
        let before = parsed(&[("site", &document)]).decide(&principal, action, &resource, &call);
        let after = parsed(&[("site", &document), ("broken", &failing)])
            .decide(&principal, action, &resource, &call);
        prop_assert_eq!(after.allowed, before.allowed && after.errors.is_empty());
    }

    /// The same text, quoted in a rule and passed in the request, matches itself and nothing else.
    #[test]
    // invariant: policies
    fn hostile_names_are_only_compared_literally(name in hostile_name(), other in hostile_name()) {
        prop_assume!(name != other);
        let quoted = format!(
            "\"{}\"",
            name.chars()
                .map(|letter| letter.escape_unicode().to_string())
                .collect::<Vec<String>>()
                .concat()
        );
        let text = format!(
            "permit (principal in CyNode::Group::{quoted}, action, resource == CyNode::Node::{quoted});
             permit (principal, action, resource is CyNode::Image) when {{ resource.reference == {quoted} && context has path && context.path == {quoted} }};"
        );
        let policies = parsed(&[("site", &text)]);
        let member = |group: &str| Principal::User {
            id: OWNER,
            name: group.to_owned(),
            admin: false,
            groups: vec![group.to_owned()],
        };
        let node = |id: &str| Resource::Node { id: id.to_owned() };
        let image = |reference: &str| Resource::Image {
            reference: reference.to_owned(),
            agent_compatible: false,
            pinned: false,
        };
        let call = |path: &str| CallContext {
            path: Some(path.to_owned()),
            ..CallContext::default()
        };
        let node_allowed = |group: &str, id: &str| {
            policies
                .decide(&member(group), Action::NodeShow, &node(id), &call(id))
                .allowed
        };
        let image_allowed = |reference: &str, path: &str| {
            policies
                .decide(
                    &member(""),
                    Action::ImageShow,
                    &image(reference),
                    &call(path),
                )
                .allowed
        };
        prop_assert!(node_allowed(&name, &name) && image_allowed(&name, &name));
        prop_assert!(!node_allowed(&other, &name) && !node_allowed(&name, &other));
        prop_assert!(!image_allowed(&other, &name) && !image_allowed(&name, &other));
    }

    #[test]
    fn hostile_resource_names_never_widen_the_default_rules(name in hostile_name()) {
        let policies = defaults();
        let caller = Principal::User {
            id: STRANGER,
            name: name.clone(),
            admin: false,
            groups: vec![
                name.clone(),
                "admin".to_owned(),
                "administrators".to_owned(),
            ],
        };
        let place = Place::default();
        for (action, resource) in [
            (
                Action::ArtifactGet,
                Resource::Artifact {
                    id: name.clone(),
                    place: place.clone(),
                },
            ),
            (
                Action::TokenRevoke,
                Resource::Token {
                    id: name.clone(),
                    user: OWNER,
                    kind: name.clone(),
                },
            ),
            (Action::SettingPut, Resource::Setting { key: name.clone() }),
            (
                Action::PreferencePut,
                Resource::Preference {
                    scope: name.clone(),
                    key: name.clone(),
                    place,
                },
            ),
            (Action::PolicyPut, Resource::Policy { id: name.clone() }),
            (Action::NodeDrain, Resource::Node { id: name.clone() }),
            (
                Action::ImageUpdate,
                Resource::Image {
                    reference: name.clone(),
                    agent_compatible: true,
                    pinned: true,
                },
            ),
        ] {
            let call = CallContext {
                path: Some(name.clone()),
                branch: Some(name.clone()),
                program: Some(name.clone()),
                image: Some(name.clone()),
                token_kind: Some(name.clone()),
                network: Some(name.clone()),
                pty: true,
                limits: None,
            };
            let decision = policies.decide(&caller, action, &resource, &call);
            prop_assert!(
                !decision.allowed && decision.errors.is_empty(),
                "{decision:?}"
            );
        }
    }
}

/// Names that would change their meaning if they were ever parsed as Cedar.
fn hostile_name() -> impl Strategy<Value = String> {
    let written = vec![
        "\"",
        "\\",
        "\\\"",
        "\n",
        "\r\n",
        "\0",
        "*",
        "a\u{202e}b",
        "\u{feff}",
        "éä💥",
        "\" || true || \"",
        "\") || true //",
        "\"); permit (principal, action, resource); //",
        "\u{0}\", action, resource); permit(principal",
        "__cedar::x",
        "{\"__entity\": {\"type\": \"CyNode::User\", \"id\": \"x\"}}",
        "${principal}",
        "?principal",
    ];
    prop_oneof![select(written).prop_map(ToOwned::to_owned), any::<String>()]
}
