//! Detection of held secrets in bytes, in JSON and in streams.

use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD},
};
use cynode_policy::{HeldForm, HeldSecrets, Hit, Scanner, Watch};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::shapes::{ALPHANUMERIC, letters, our_token};

/// Contains bytes that the two base64 alphabets encode differently at every offset.
const PASSWORD: &str = "correct/horse+battery~~~???>>>staple";
const PASSWORD_HIT: Hit = Hit {
    what: "the database's password",
};

fn holding(secrets: &[(&'static str, &[u8])]) -> Scanner {
    let mut held = HeldSecrets::new([7; 32]);
    for (what, secret) in secrets {
        assert!(held.add(what, secret));
    }
    Scanner::new(held, true)
}

fn scanner() -> Scanner {
    holding(&[
        (PASSWORD_HIT.what, PASSWORD.as_bytes()),
        ("a registry's password", b"another one, of a registry"),
    ])
}

#[test]
fn a_held_secret_is_found_within_anything() {
    for text in [
        PASSWORD.to_owned(),
        format!("x{PASSWORD}x"),
        format!("postgres://a:{PASSWORD}@host/db"),
        PASSWORD.repeat(3),
    ] {
        assert_eq!(
            scanner().find(text.as_bytes()),
            Some(PASSWORD_HIT),
            "{text}"
        );
    }
    assert_eq!(
        scanner()
            .find(b"another one, of a registry")
            .map(|hit| hit.what),
        Some("a registry's password")
    );
}

#[test]
fn text_that_only_resembles_a_held_secret_passes() {
    for text in [
        "",
        "correct",
        &PASSWORD[1..],
        &PASSWORD[..PASSWORD.len() - 1],
        &PASSWORD.to_uppercase(),
        &PASSWORD.replacen('c', "C", 1),
        &PASSWORD.replace("staple", "stapel"),
        &PASSWORD.replace('+', " "),
    ] {
        assert_eq!(scanner().find(text.as_bytes()), None, "{text}");
    }
}

/// A credential is held by every orchestrator, and its value by none.
#[test]
fn a_secret_is_held_again_by_its_forms_and_only_with_the_key() {
    let forms = HeldSecrets::new([7; 32])
        .forms(PASSWORD.as_bytes())
        .expect("long enough");
    let stored = serde_json::to_string(&forms).expect("forms are plain data");
    assert!(!stored.contains(&PASSWORD[..12]), "{stored}");
    let again = |key: [u8; 32]| {
        let mut held = HeldSecrets::new(key);
        held.add_forms(
            PASSWORD_HIT.what,
            serde_json::from_str::<Vec<HeldForm>>(&stored).expect("as it was stored"),
        );
        Scanner::new(held, false)
    };
    for text in [PASSWORD.to_owned(), STANDARD.encode(PASSWORD)] {
        assert_eq!(again([7; 32]).find(text.as_bytes()), Some(PASSWORD_HIT));
        assert_eq!(again([8; 32]).find(text.as_bytes()), None);
    }
    assert!(HeldSecrets::new([7; 32]).forms(b"hello world").is_none());
}

#[test]
fn held_secrets_are_replaced_in_all_scanners_that_share_them() {
    let scanner = holding(&[]);
    let (system, mut watch) = (scanner.system_only(), scanner.watch());
    assert_eq!(system.find(PASSWORD.as_bytes()), None);
    let mut held = HeldSecrets::new([7; 32]);
    assert!(held.add(PASSWORD_HIT.what, PASSWORD.as_bytes()));
    scanner.hold(held);
    assert_eq!(system.find(PASSWORD.as_bytes()), Some(PASSWORD_HIT));
    assert_eq!(watch.feed(PASSWORD.as_bytes()), Some(PASSWORD_HIT));
    scanner.hold(HeldSecrets::new([7; 32]));
    assert_eq!(system.find(PASSWORD.as_bytes()), None);
}

#[test]
fn a_secret_shorter_than_twelve_bytes_is_not_held() {
    let mut held = HeldSecrets::new([7; 32]);
    assert!(!held.add("a word", b"hello world"));
    assert!(!held.add("nothing", b""));
    assert!(!held.add("a padded word", b"  hello world \n"));
    assert!(held.add("a phrase", b"hello worlds"));
    let scanner = Scanner::new(held, true);
    assert_eq!(scanner.find(b"hello world"), None);
    assert_eq!(
        scanner.find(b"hello worlds"),
        Some(Hit { what: "a phrase" })
    );
}

#[test]
fn whitespace_around_a_held_secret_is_ignored() {
    let scanner = holding(&[(PASSWORD_HIT.what, format!(" {PASSWORD}\r\n").as_bytes())]);
    assert_eq!(
        scanner.find(format!("PASSWORD={PASSWORD};").as_bytes()),
        Some(PASSWORD_HIT)
    );
}

#[test]
fn overlapping_secrets_are_distinguished() {
    let long = format!("{0}{0}{0}", "the same in all of them, ");
    let scanner = holding(&[
        ("the first", format!("{long}1").as_bytes()),
        ("the second", format!("{long}2").as_bytes()),
        ("the whole", long.as_bytes()),
    ]);
    assert_eq!(
        scanner
            .find(format!("{long}2").as_bytes())
            .map(|hit| hit.what),
        Some("the whole")
    );
    let scanner = holding(&[
        ("the first", format!("1{long}1").as_bytes()),
        ("the second", format!("2{long}2").as_bytes()),
    ]);
    assert_eq!(scanner.find(format!("1{long}2").as_bytes()), None);
    assert_eq!(
        scanner
            .find(format!("1{long}22{long}2").as_bytes())
            .map(|hit| hit.what),
        Some("the second")
    );
}

#[test]
fn a_held_secret_is_found_in_base64_at_each_alignment() {
    for before in ["", "a", "ab", "abc", "user:"] {
        for after in ["", "x", "xy", "xyz"] {
            let text = format!("{before}{PASSWORD}{after}");
            assert_ne!(STANDARD.encode(&text), URL_SAFE.encode(&text));
            for encoded in [
                STANDARD.encode(&text),
                STANDARD_NO_PAD.encode(&text),
                URL_SAFE.encode(&text),
                URL_SAFE_NO_PAD.encode(&text),
            ] {
                assert_eq!(
                    scanner().find(format!("Basic {encoded}\r\n").as_bytes()),
                    Some(PASSWORD_HIT),
                    "{text}"
                );
            }
            for (word, like_it) in [
                ("correct", "corrupt"),
                ("horse", "house"),
                ("staple", "stapel"),
                ("staple", "stable"),
            ] {
                let other = text.replace(word, like_it);
                assert_eq!(
                    scanner().find(STANDARD.encode(&other).as_bytes()),
                    None,
                    "{other}"
                );
            }
        }
    }
}

#[test]
fn the_hash_key_does_not_change_what_is_found() {
    for key in [[0; 32], [255; 32], [1; 32]] {
        let mut held = HeldSecrets::new(key);
        assert!(held.add(PASSWORD_HIT.what, PASSWORD.as_bytes()));
        let scanner = Scanner::new(held, false);
        assert_eq!(
            scanner.find(format!("some {PASSWORD} here").as_bytes()),
            Some(PASSWORD_HIT)
        );
        assert_eq!(scanner.find(PASSWORD.to_uppercase().as_bytes()), None);
    }
}

#[test]
fn debug_output_contains_no_secret() {
    let scanner = scanner();
    let mut watch = scanner.watch();
    let hit = watch.feed(PASSWORD.as_bytes()).expect("it is a secret");
    let printed = format!(
        "{scanner:?} {watch:?} {hit:?} {:?}",
        HeldSecrets::new([7; 32])
    );
    assert_eq!(
        printed,
        "Scanner { held: HeldSecrets { forms: 11, .. }, .. } Watch { scanner: Scanner { held: HeldSecrets { forms: 11, .. }, .. }, .. } Hit { what: \"the database's password\" } HeldSecrets { forms: 0, .. }"
    );
}

#[test]
fn the_path_of_a_secret_in_a_body_is_reported() {
    let token = our_token();
    let found = |body: Value| scanner().find_in_json(&body);
    for (body, place) in [
        (json!({"env": {"HOME": "/", "TOKEN": token}}), "env.TOKEN"),
        (
            json!({"argv": ["curl", "-H", format!("Authorization: Bearer {token}")]}),
            "argv[2]",
        ),
        (json!({"stdin": format!("a\n{token}\n")}), "stdin"),
        (
            json!({"job": {"steps": [{"args": {"env": {"A": token}}}]}}),
            "job.steps[0].args.env.A",
        ),
        (json!([[["", token]]]), "[0][0][1]"),
        (json!(token), ""),
        (json!({"": token}), ""),
        (json!({".a": token}), ".a"),
        (json!({"[a": token}), "[a"),
        (json!({"a.b": {"c[0]": token}}), "a.b.c[0]"),
    ] {
        assert_eq!(
            found(body),
            Some((
                place.to_owned(),
                Hit {
                    what: "a CyNode token"
                }
            )),
            "{place}"
        );
    }
    assert_eq!(
        found(
            json!({"argv": ["ls"], "env": {"HOME": "/"}, "timeout_ms": 1, "pty": false, "stdin": null})
        ),
        None
    );
}

#[test]
// invariant: no-secrets-inside
fn a_name_that_contains_a_secret_is_found_and_not_repeated() {
    for name in [our_token(), PASSWORD.to_owned(), format!("A{PASSWORD}")] {
        let (place, _) = scanner()
            .find_in_json(&json!({"env": {"A": "b", name.clone(): "c"}}))
            .expect("a secret is in the name");
        assert_eq!(place, "env.(name)");
        let (place, _) = scanner()
            .find_in_json(&json!({"env": {name: our_token()}}))
            .expect("a secret is in name and value");
        assert_eq!(place, "env.(name)");
    }
}

#[test]
fn a_long_name_is_truncated_in_the_path() {
    let (place, _) = scanner()
        .find_in_json(&json!({"é".repeat(10_000): our_token()}))
        .expect("it is a secret");
    assert_eq!(place, "é".repeat(64));
}

#[test]
fn a_number_can_be_a_secret() {
    let scanner = holding(&[("an account's number", b"123456789012")]);
    assert_eq!(
        scanner.find_in_json(&json!({"a": 123_456_789_012_u64})),
        Some((
            "a".to_owned(),
            Hit {
                what: "an account's number"
            }
        ))
    );
    assert_eq!(
        scanner.find_in_json(&json!({"a": 123_456_789_013_u64})),
        None
    );
}

#[test]
fn base64_members_are_decoded_and_scanned() {
    let token = format!("gh{}{}", "p_", letters(ALPHANUMERIC, 36));
    let text = format!("é\0?>{token}\n");
    for encoded in [
        STANDARD.encode(&text),
        STANDARD_NO_PAD.encode(&text),
        URL_SAFE.encode(&text),
        URL_SAFE_NO_PAD.encode(&text),
        format!("{}\n", STANDARD.encode(&text)),
    ] {
        let hit = Hit {
            what: "a GitHub token",
        };
        assert_eq!(
            scanner().find_in_json(&json!({"content_b64": encoded})),
            Some(("content_b64".to_owned(), hit))
        );
        assert_eq!(
            scanner().find_in_json(&json!({"parts_b64": ["", encoded]})),
            Some(("parts_b64[1]".to_owned(), hit))
        );
        assert_eq!(scanner().find_in_json(&json!({"content": encoded})), None);
        assert_eq!(
            scanner().find_in_json(&json!({"content_b64": {"other": encoded}})),
            None
        );
    }
    assert_eq!(
        scanner()
            .find_in_json(&json!({"stdin_b64": format!("not base64 {token}")}))
            .map(|(place, _)| place),
        Some("stdin_b64".to_owned())
    );
    assert_eq!(
        scanner().find_in_json(&json!({"stdin_b64": STANDARD.encode("nothing of note")})),
        None
    );
}

#[test]
fn a_watch_is_send() {
    fn can<T: Send + 'static>(_: &T) {}
    can(&scanner().watch());
    can(&scanner());
}

#[test]
fn a_watch_continues_after_a_hit() {
    let mut watch = scanner().watch();
    assert_eq!(watch.feed(PASSWORD.as_bytes()), Some(PASSWORD_HIT));
    assert_eq!(
        watch.feed(&vec![b'.'; 100_000]),
        Some(PASSWORD_HIT),
        "the secret at the end of the last piece was lost"
    );
    assert_eq!(watch.feed(b"."), None);
    assert_eq!(watch.feed(PASSWORD.as_bytes()), Some(PASSWORD_HIT));
    assert_eq!(watch.feed(b""), None);
}

#[test]
fn a_too_long_token_is_not_found_at_any_offset() {
    let long = format!(" gh{}{} ", "p_", letters(ALPHANUMERIC, 37));
    let mut watch = scanner().watch();
    for padding in (64 * 1024 - 100)..(64 * 1024) {
        let text = format!("{}{long}{}", ".".repeat(padding), ".".repeat(1_000));
        assert_eq!(watch.feed(text.as_bytes()), None, "{padding}");
    }
}

#[test]
fn one_piece_can_be_of_any_size() {
    let token = format!(" gh{}{} ", "p_", letters(ALPHANUMERIC, 36));
    for before in [
        0, 10, 1_000, 65_500, 65_520, 65_535, 65_536, 65_600, 200_000,
    ] {
        for secret in [token.as_str(), PASSWORD] {
            let text = format!("{}{secret}{}", ".".repeat(before), ".".repeat(300_000));
            assert!(
                scanner().watch().feed(text.as_bytes()).is_some(),
                "{before}"
            );
        }
    }
}

#[test]
fn a_word_that_began_in_an_earlier_piece_is_one_word() {
    let token = format!("gh{}{}", "p_", letters(ALPHANUMERIC, 36));
    for before in [2_000, 70_000] {
        let mut watch = scanner().watch();
        assert_eq!(watch.feed("x".repeat(before).as_bytes()), None);
        assert_eq!(watch.feed(token.as_bytes()), None);
        assert_eq!(
            watch
                .feed(format!(" {token} ").as_bytes())
                .map(|hit| hit.what),
            Some("a GitHub token")
        );
    }
}

fn feed_all(watch: &mut Watch, bytes: &[u8], sizes: &[usize]) -> Option<Hit> {
    let mut rest = bytes;
    let mut sizes = sizes.iter().cycle();
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(rest.len().min(*sizes.next()?));
        if let Some(hit) = watch.feed(piece) {
            return Some(hit);
        }
        rest = after;
    }
    None
}

/// A value that contains another one somewhere.
fn around(inner: Value) -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        "[a-z ]{0,8}".prop_map(Value::from)
    ];
    let step = (
        any::<bool>(),
        prop::collection::vec(("[a-z_]{1,6}", leaf), 0..4),
        0_usize..4,
    );
    prop::collection::vec(step, 0..12).prop_map(move |steps| {
        steps
            .into_iter()
            .fold(inner.clone(), |inner, (is_array, others, at)| {
                if is_array {
                    let mut values: Vec<Value> =
                        others.into_iter().map(|(_, value)| value).collect();
                    values.insert(at.min(values.len()), inner);
                    Value::Array(values)
                } else {
                    let mut members: serde_json::Map<String, Value> = others.into_iter().collect();
                    members.insert("here".to_owned(), inner);
                    Value::Object(members)
                }
            })
    })
}

/// The value at a reported path.
fn at<'a>(value: &'a Value, place: &str) -> &'a Value {
    place
        .split(['.', '['])
        .filter(|step| !step.is_empty())
        .fold(value, |value, step| match step.strip_suffix(']') {
            Some(index) => &value[index.parse::<usize>().expect("an index is a number")],
            None => &value[step],
        })
}

proptest! {
    #[test]
    // invariant: no-secrets-inside
    fn a_secret_is_found_at_any_offset_and_in_any_split(
        secret in prop_oneof![prop::collection::vec(any::<u8>(), 12..200), prop::collection::vec(any::<u8>(), 1_000..3_000)],
        before in prop::collection::vec(any::<u8>(), 0..300),
        after in prop::collection::vec(any::<u8>(), 0..300),
        sizes in prop::collection::vec(1_usize..150, 1..8),
    ) {
        prop_assume!(secret.trim_ascii().len() >= 12);
        let scanner = holding(&[("a secret", &secret), (PASSWORD_HIT.what, PASSWORD.as_bytes())]);
        let bytes = [&before[..], &secret, &after].concat();
        let hit = Some(Hit { what: "a secret" });
        prop_assert_eq!(scanner.find(&bytes), hit);
        prop_assert_eq!(feed_all(&mut scanner.watch(), &bytes, &sizes), hit);
    }

    #[test]
    fn a_secret_with_one_byte_changed_passes(
        secret in "[!-~]{12,60}",
        at in any::<prop::sample::Index>(),
        bit in 0_u8..7,
    ) {
        let scanner = holding(&[("a secret", secret.as_bytes())]);
        let mut other = secret.clone().into_bytes();
        let at = at.index(other.len());
        other[at] ^= 1 << bit;
        prop_assert_eq!(scanner.find(&other), None);
    }

    #[test]
    fn bytes_without_a_secret_pass(
        bytes in prop::collection::vec(any::<u8>(), 0..2_000),
        sizes in prop::collection::vec(1_usize..150, 1..8),
    ) {
        prop_assert_eq!(scanner().find(&bytes), None);
        prop_assert_eq!(feed_all(&mut scanner().watch(), &bytes, &sizes), None);
    }

    #[test]
    // invariant: no-secrets-inside
    fn a_secret_is_found_in_any_nesting(body in around(json!(format!("a {PASSWORD} b")))) {
        let (place, hit) = scanner().find_in_json(&body).expect("a secret is in it");
        prop_assert_eq!(hit, PASSWORD_HIT);
        let expected = json!(format!("a {PASSWORD} b"));
        prop_assert_eq!(at(&body, &place), &expected);
    }

    #[test]
    fn a_body_without_a_secret_passes(body in around(json!("nothing of note"))) {
        prop_assert_eq!(scanner().find_in_json(&body), None);
    }
}
