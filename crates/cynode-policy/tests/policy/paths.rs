//! Path normalization for rules.

use cynode_policy::within_workspace;
use proptest::prelude::*;

#[test]
fn paths_are_normalized_as_rules_write_them() {
    for (path, seen) in [
        ("", "/workspace"),
        (".", "/workspace"),
        ("a", "/workspace/a"),
        ("a/b/", "/workspace/a/b"),
        ("./a//b/./c", "/workspace/a/b/c"),
        ("a/../b", "/workspace/b"),
        ("..", "/"),
        ("../workspace2/a", "/workspace2/a"),
        ("../etc/passwd", "/etc/passwd"),
        ("../../../../etc/passwd", "/etc/passwd"),
        ("/", "/"),
        ("//", "/"),
        ("/..", "/"),
        ("/../../a", "/a"),
        ("//workspace///a/", "/workspace/a"),
        ("/workspace/../etc", "/etc"),
        ("/workspace/a/..", "/workspace"),
        ("...", "/workspace/..."),
        ("a/..b/b..", "/workspace/a/..b/b.."),
        (" ", "/workspace/ "),
        ("~/a", "/workspace/~/a"),
        ("a\\..\\b", "/workspace/a\\..\\b"),
        ("a\n/../b", "/workspace/b"),
        ("é/./💥", "/workspace/é/💥"),
    ] {
        assert_eq!(within_workspace(path), seen, "{path:?}");
    }
}

prop_compose! {
    fn any_path()(words in prop::collection::vec(prop_oneof![Just("..".to_owned()), Just(".".to_owned()), Just(String::new()), "[a-z.é\n\\\\ ]{1,4}", any::<String>()], 0..8), is_absolute in any::<bool>()) -> String {
        format!("{}{}", if is_absolute { "/" } else { "" }, words.join("/"))
    }
}

proptest! {
    #[test]
    fn a_normalized_path_is_absolute_without_dots_or_empty_parts(path in any_path()) {
        let seen = within_workspace(&path);
        prop_assert!(seen.starts_with('/'));
        prop_assert!(
            seen == "/"
                || seen[1..]
                    .split('/')
                    .all(|word| !["", ".", ".."].contains(&word)),
            "{seen}"
        );
    }

    #[test]
    fn normalizing_is_idempotent(path in any_path()) {
        let seen = within_workspace(&path);
        prop_assert_eq!(within_workspace(&seen), seen);
    }

    #[test]
    fn a_relative_path_starts_at_the_workspace(path in any_path()) {
        prop_assume!(!path.starts_with('/'));
        prop_assert_eq!(within_workspace(&path), within_workspace(&format!("/workspace/{path}")));
    }

    #[test]
    fn detours_do_not_change_a_normalized_path(
        path in any_path(),
        word in "[a-z]{1,4}",
        more in "[a-z]{1,4}",
    ) {
        let straight = within_workspace(&format!("{path}/{more}"));
        prop_assert_eq!(&within_workspace(&format!("{path}/{word}/../{more}")), &straight);
        prop_assert_eq!(&within_workspace(&format!("{path}//./{more}/.")), &straight);
        prop_assert_eq!(straight.ends_with(&format!("/{more}")), true);
    }
}
