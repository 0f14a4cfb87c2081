//! Tokens recognized by their shape. Samples are assembled at run time: other scanners scan this
//! repository.

use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use cynode_policy::{HeldSecrets, Hit, Scanner};
use proptest::prelude::*;

pub(crate) const ALPHANUMERIC: &str = "0aZ9bY8cX7dW6eV5fU4gT3hS2iR1jQ";
const URL_SAFE: &str = "0aZ9-Y8cX_dW6eV5-U4gT3_S2iR1jQ";
const UPPER: &str = "0AZ9BY8CX7DW6EV5FU4GT3HS2JR7KQ";

/// `count` letters of an alphabet.
pub(crate) fn letters(alphabet: &str, count: usize) -> String {
    alphabet.chars().cycle().take(count).collect()
}

pub(crate) fn our_token() -> String {
    format!("cyn{}{}", '_', letters(URL_SAFE, 43))
}

fn scanner() -> Scanner {
    Scanner::new(HeldSecrets::new([7; 32]), true)
}

/// The hit in a text, which must be the same for chunks of every size.
fn found(text: &str) -> Option<&'static str> {
    let scanner = scanner();
    let whole = scanner.find(text.as_bytes()).map(|hit| hit.what);
    for size in [1, 3, 17, 100] {
        let mut watch = scanner.watch();
        let in_pieces = text
            .as_bytes()
            .chunks(size)
            .find_map(|piece| watch.feed(piece))
            .map(|hit| hit.what);
        assert!(
            in_pieces == whole || whole.is_none(),
            "{size}: {in_pieces:?}"
        );
    }
    whole
}

/// Each with its prefix, its letters and their number, and whether more may follow.
fn tokens() -> Vec<(&'static str, [&'static str; 2], &'static str, usize, bool)> {
    vec![
        ("a CyNode token", ["cyn", "_"], URL_SAFE, 43, true),
        ("a GitHub token", ["gh", "p_"], ALPHANUMERIC, 36, false),
        ("a GitHub token", ["gh", "o_"], ALPHANUMERIC, 36, false),
        ("a GitHub token", ["gh", "u_"], ALPHANUMERIC, 36, false),
        ("a GitHub token", ["gh", "s_"], ALPHANUMERIC, 36, false),
        ("a GitHub token", ["gh", "r_"], ALPHANUMERIC, 36, false),
        ("a GitHub token", ["gh", "r_"], ALPHANUMERIC, 76, false),
        ("a GitHub token", ["github_", "pat_"], "a0_B", 82, false),
        ("a GitLab token", ["gl", "pat-"], URL_SAFE, 20, true),
        ("an AWS access key", ["AK", "IA"], UPPER, 16, false),
        ("an AWS access key", ["AS", "IA"], UPPER, 16, false),
        ("a Slack token", ["xo", "xa-"], "2-aZ", 20, true),
        ("a Slack token", ["xo", "xb-"], "1234567890-Ab", 20, true),
        ("a Slack token", ["xo", "xp-"], "1234567890-Ab", 20, true),
        ("a Slack token", ["xo", "xr-"], "1234567890-Ab", 20, true),
        ("a Slack token", ["xo", "xs-"], "1234567890-Ab", 20, true),
        ("a Google API key", ["AI", "za"], URL_SAFE, 35, false),
        ("an Anthropic API key", ["sk-", "ant-"], URL_SAFE, 40, true),
        ("an OpenAI API key", ["sk-", "proj-"], URL_SAFE, 40, true),
        ("an OpenAI API key", ["sk-", "svcacct-"], URL_SAFE, 40, true),
        ("an OpenAI API key", ["sk-", "admin-"], URL_SAFE, 40, true),
        ("an OpenAI API key", ["sk", "-"], ALPHANUMERIC, 48, false),
        ("a Stripe key", ["sk_", "live_"], ALPHANUMERIC, 24, true),
        ("a Stripe key", ["rk_", "live_"], ALPHANUMERIC, 24, true),
        ("an npm token", ["np", "m_"], ALPHANUMERIC, 36, false),
        ("a PyPI token", ["pypi-", "AgEI"], URL_SAFE, 50, true),
        ("a Hugging Face token", ["h", "f_"], ALPHANUMERIC, 34, false),
        (
            "an age secret key",
            ["AGE-SECRET-", "KEY-1"],
            "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L",
            58,
            false,
        ),
    ]
}

#[test]
fn a_token_is_found_and_its_near_misses_are_not() {
    for (what, begins, alphabet, count, may_be_longer) in tokens() {
        let begins = begins.concat();
        let token = format!("{begins}{}", letters(alphabet, count));
        for text in [
            token.clone(),
            format!("{token}\n"),
            format!("token={token}&"),
            format!("\"{token}\""),
            format!("Bearer {token}, and more"),
        ] {
            assert_eq!(found(&text), Some(what), "{text}");
        }

        let longer = format!("{begins}{}", letters(alphabet, count + 1));
        assert_eq!(found(&longer), may_be_longer.then_some(what), "{longer}");
        let shorter = format!("{begins}{}", letters(alphabet, count - 1));
        assert_eq!(found(&shorter), None, "{shorter}");
        let broken = format!(
            "{begins}{}~{}",
            letters(alphabet, count / 2),
            letters(alphabet, count - count / 2)
        );
        assert_eq!(found(&broken), None, "{broken}");
        assert_eq!(
            found(&format!("x{token}")),
            None,
            "found within a word: x{token}"
        );
        assert_eq!(
            found(&format!("_{token}")),
            None,
            "found within a word: _{token}"
        );
        let other_case: String = begins
            .chars()
            .map(|letter| {
                if letter.is_ascii_uppercase() {
                    letter.to_ascii_lowercase()
                } else {
                    letter.to_ascii_uppercase()
                }
            })
            .collect();
        assert_eq!(
            found(&token.replace(&begins, &other_case)),
            None,
            "{other_case}"
        );
    }
}

#[test]
fn characters_outside_a_tokens_alphabet_end_it() {
    let upper = letters(UPPER, 15);
    assert_eq!(found(&format!("AK{}{upper}a", "IA")), None);
    assert_eq!(
        found(&format!("AGE-SECRET-{}{}B", "KEY-1", "Q".repeat(57))),
        None
    );
    assert_eq!(
        found(&format!("xo{}your-token-goes-in-here-please", "xb-")),
        None,
        "found without a leading number"
    );
    assert_eq!(
        found(&format!(
            "sk-{}",
            "this-is-how-a-branch-could-be-called-after-all-of-it-was-said"
        )),
        None
    );
}

#[test]
fn an_escape_sequence_before_a_token_does_not_hide_it() {
    let token = format!("gh{}{}", "p_", letters(ALPHANUMERIC, 36));
    for before in [
        "\\n", "\\t", "\\r", "\\\"", "%3D", "%20", "%0a", "\\x3d", "\\u003d", "\\u0026", "a\\n",
        "é", "-", "=",
    ] {
        assert_eq!(
            found(&format!("{before}{token}")),
            Some("a GitHub token"),
            "{before}"
        );
    }
    for before in [
        "n",
        "3D",
        "%D",
        "%3G",
        "%3DD",
        "\\xz0",
        "x3d",
        "\\u03d",
        "u003d",
        "\\u003g",
        "\\z",
        "\\u00033d",
    ] {
        assert_eq!(found(&format!("{before}{token}")), None, "{before}");
    }
}

#[test]
fn foreign_shapes_are_scanned_only_on_request() {
    let ours_alone = Scanner::new(HeldSecrets::new([7; 32]), false);
    let others = format!("gh{}{}", "p_", letters(ALPHANUMERIC, 36));
    assert_eq!(ours_alone.find(others.as_bytes()), None);
    assert_eq!(
        ours_alone.find(our_token().as_bytes()),
        Some(Hit {
            what: "a CyNode token"
        })
    );
}

#[test]
fn a_token_after_many_near_misses_is_found() {
    for (what, begins, alphabet, count, _) in tokens() {
        let begins = begins.concat();
        let text = format!(
            "{}{}{} {begins}{} ",
            begins.repeat(40),
            "-",
            format!("x{begins} ").repeat(40),
            letters(alphabet, count)
        );
        assert_eq!(found(&text), Some(what), "{text}");
    }
}

fn private_key(label: &str, line_end: &str) -> String {
    let line = letters("MIIEvQIBADANBgkqhkiG9w0BAQEFAASC", 64);
    format!(
        "{0}BEGIN {label}{0}{line_end}{line}{line_end}{line}{line_end}{0}END {label}{0}{line_end}",
        "-----"
    )
}

#[test]
fn a_private_key_is_found_by_its_label_and_what_follows() {
    for kind in ["", "RSA ", "EC ", "DSA ", "OPENSSH ", "ENCRYPTED "] {
        for line_end in ["\n", "\r\n", "\\n", "\\r\\n", "\n    ", "\" +\n  \""] {
            assert_eq!(
                found(&private_key(&format!("{kind}PRIVATE {}", "KEY"), line_end)),
                Some("a private key"),
                "{kind}{line_end:?}"
            );
        }
    }
    let with_headers = private_key(&format!("RSA PRIVATE {}", "KEY"), "\n").replacen(
        '\n',
        "\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0123456789ABCDEF0123456789\n\n",
        1,
    );
    assert_eq!(found(&with_headers), Some("a private key"));
    assert_eq!(
        found(&private_key(&format!("PGP PRIVATE {} BLOCK", "KEY"), "\n")),
        Some("a private key")
    );
    assert_eq!(
        found(&format!(
            "x{}",
            private_key(&format!("PRIVATE {}", "KEY"), "\n")
        )),
        Some("a private key"),
        "a private key within a word was not found"
    );
}

/// The longest possible candidate, fed byte by byte.
#[test]
fn a_private_key_is_found_at_the_latest_allowed_position() {
    let label = format!("{} PRIVATE {}", "A".repeat(20), "KEY");
    assert_eq!(label.len(), 32);
    for line in [
        letters(ALPHANUMERIC, 32),
        letters("a+b/", 32),
        letters("+", 32),
        letters("/", 32),
    ] {
        let latest = format!("{0}BEGIN {label}{0}{1}{line}", "-----", ".".repeat(224));
        let mut watch = scanner().watch();
        let hit = format!("{}{latest}", ".".repeat(1_000))
            .as_bytes()
            .chunks(1)
            .find_map(|piece| watch.feed(piece));
        assert_eq!(
            hit,
            Some(Hit {
                what: "a private key"
            }),
            "{line}"
        );
        let too_late = latest.replacen('.', "..", 1);
        assert_eq!(found(&too_late), None, "{line}");
    }
}

#[test]
fn text_that_only_resembles_a_private_key_passes() {
    let key = private_key(&format!("PRIVATE {}", "KEY"), "\n");
    for text in [
        private_key("CERTIFICATE", "\n"),
        private_key("PUBLIC KEY", "\n"),
        private_key(&format!("private {}", "key"), "\n"),
        private_key(&format!("PRIVATE {}X", "KEY"), "\n"),
        private_key(&format!("{} PRIVATE {}", "A".repeat(40), "KEY"), "\n"),
        key[..28].to_owned(),
        format!("if line == \"{}\" {{ return Kind::Private }}", &key[..27]),
        format!("{}{}{}", &key[..27], " .".repeat(128), &key[27..]),
        format!("{}\n{}\n", &key[..27], letters(ALPHANUMERIC, 31)),
        key.replacen("-----", "----", 2),
    ] {
        assert_eq!(found(&text), None, "{text}");
    }
}

#[test]
fn our_tokens_are_found_in_base64() {
    let token = our_token();
    for before in ["", "a", "ab", "admin:", "user:", "some:", "é:", "\u{7}\0"] {
        for after in ["", "\n", "aa", "é", "~~~"] {
            let text = format!("{before}{token}{after}");
            for encoded in [STANDARD.encode(&text), URL_SAFE_NO_PAD.encode(&text)] {
                assert_eq!(
                    found(&format!("Authorization: Basic {encoded}\r\n")),
                    Some("a CyNode token"),
                    "{text}"
                );
                assert_eq!(found(&encoded), Some("a CyNode token"), "{text}");
            }
        }
        let short = format!("{before}{}", &token[..token.len() - 1]);
        assert_eq!(found(&STANDARD.encode(&short)), None, "{short}");
        let broken = format!("{before}{}", token.replace("_dW", "~dW"));
        assert_eq!(found(&STANDARD.encode(&broken)), None, "{broken}");
    }
}

#[test]
fn our_token_is_found_in_base64_with_any_surroundings() {
    let token = our_token();
    for before in [
        &[0xff][..],
        &[0xfb],
        &[0xff, 0xff],
        &[0xfb, 0xef],
        &[0, 0xff],
    ] {
        let bytes = [before, token.as_bytes()].concat();
        assert_eq!(
            found(&STANDARD.encode(&bytes)),
            Some("a CyNode token"),
            "{before:?}"
        );
        assert_eq!(
            found(&URL_SAFE_NO_PAD.encode(&bytes)),
            Some("a CyNode token"),
            "{before:?}"
        );
    }
    // Trailing letters that belong to no token.
    for after in ["A", "AB", "ABC", "ABCD"] {
        assert_eq!(
            found(&format!("{}{after}", URL_SAFE_NO_PAD.encode(&token))),
            Some("a CyNode token"),
            "{after}"
        );
    }
}

/// Texts without any token: words, code, hashes, data.
fn innocent() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        "[a-z]{1,12}",
        "[a-f0-9]{40}",
        "[A-Z_]{3,20}",
        "[A-Za-z0-9+/]{64}",
        "[A-Za-z0-9_-]{20,90}",
        Just("sk-".to_owned()),
        Just("task-list".to_owned()),
        Just("npm_config_cache".to_owned()),
        Just("hf_hub".to_owned()),
        Just("cyn_".to_owned()),
        Just("-----BEGIN CERTIFICATE-----".to_owned()),
        "\\PC{0,10}",
    ];
    prop::collection::vec(word, 0..30).prop_map(|words| words.join(" "))
}

proptest! {
    #[test]
    fn text_without_a_token_passes(text in innocent()) {
        prop_assert_eq!(found(&text), None);
    }

    #[test]
    fn bytes_without_a_token_pass(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
        prop_assert_eq!(scanner().find(&bytes), None);
    }

    /// Surrounded by bytes that are not UTF-8.
    #[test]
    fn a_token_is_found_at_any_position(
        before in prop::collection::vec(any::<u8>(), 0..500),
        after in prop::collection::vec(any::<u8>(), 0..500),
        token in prop::sample::select(tokens()),
        size in 1_usize..600,
    ) {
        let (what, begins, alphabet, count, _) = token;
        let token = format!(" {}{} ", begins.concat(), letters(alphabet, count));
        let bytes = [&before, token.as_bytes(), &after].concat();
        prop_assert_eq!(scanner().find(&bytes), Some(Hit { what }));
        let mut watch = scanner().watch();
        prop_assert_eq!(bytes.chunks(size).find_map(|piece| watch.feed(piece)), Some(Hit { what }));
    }
}
