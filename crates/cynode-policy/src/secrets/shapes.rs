//! Tokens that are known by their looks.
//!
//! What must stay true: a shape is exact enough that ordinary text, code and data do not have it. A token begins where a word begins
//! and ends where its letters end. How far a candidate is looked at is bounded.

use aho_corasick::{AhoCorasick, Input, MatchKind};

use super::{BEFORE, encoded};

/// How every token of this system begins, and how many letters follow at least.
const OURS: &str = "cyn_";
const OURS_LETTERS: usize = 43;

pub(super) struct Shape {
    pub(super) what: &'static str,
    /// A token of this system.
    pub(super) is_ours: bool,
    begins: Vec<u8>,
    then: Then,
}

/// What follows the beginning.
#[derive(Clone, Copy)]
enum Then {
    /// So many letters, one of these numbers, and no more.
    Exactly(Letters, &'static [usize]),
    /// So many letters or more.
    AtLeast(Letters, usize),
    /// A digit, and then so many letters or more.
    Digit(Letters, usize),
    /// The rest of a PEM label, and key material soon after it.
    PrivateKey,
    /// One of our tokens in base64, after so many other bytes.
    OursEncoded(usize),
}

type Letters = fn(u8) -> bool;

const ALPHANUMERIC: Letters = |byte| byte.is_ascii_alphanumeric();
const WORD: Letters = |byte| byte.is_ascii_alphanumeric() || byte == b'_';
const URL_SAFE: Letters = |byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
const DASHED: Letters = |byte| byte.is_ascii_alphanumeric() || byte == b'-';
const UPPER: Letters = |byte| byte.is_ascii_uppercase() || byte.is_ascii_digit();
const BECH32: Letters = |byte| UPPER(byte) && !matches!(byte, b'1' | b'B' | b'I' | b'O');
const BASE64: Letters = |byte| byte.is_ascii_alphanumeric() || byte == b'+' || byte == b'/';

pub(super) const PRIVATE_KEY: &str = "a private key";

/// Where several begin alike, the longer beginning comes first.
const WELL_KNOWN: &[(&str, &str, Then)] = &[
    ("a GitHub token", "ghp_", Then::Exactly(ALPHANUMERIC, &[36])),
    ("a GitHub token", "gho_", Then::Exactly(ALPHANUMERIC, &[36])),
    ("a GitHub token", "ghu_", Then::Exactly(ALPHANUMERIC, &[36])),
    ("a GitHub token", "ghs_", Then::Exactly(ALPHANUMERIC, &[36])),
    (
        "a GitHub token",
        "ghr_",
        Then::Exactly(ALPHANUMERIC, &[36, 76]),
    ),
    ("a GitHub token", "github_pat_", Then::Exactly(WORD, &[82])),
    ("a GitLab token", "glpat-", Then::AtLeast(URL_SAFE, 20)),
    ("an AWS access key", "AKIA", Then::Exactly(UPPER, &[16])),
    ("an AWS access key", "ASIA", Then::Exactly(UPPER, &[16])),
    ("a Slack token", "xoxa-", Then::Digit(DASHED, 20)),
    ("a Slack token", "xoxb-", Then::Digit(DASHED, 20)),
    ("a Slack token", "xoxp-", Then::Digit(DASHED, 20)),
    ("a Slack token", "xoxr-", Then::Digit(DASHED, 20)),
    ("a Slack token", "xoxs-", Then::Digit(DASHED, 20)),
    ("a Google API key", "AIza", Then::Exactly(URL_SAFE, &[35])),
    (
        "an Anthropic API key",
        "sk-ant-",
        Then::AtLeast(URL_SAFE, 40),
    ),
    ("an OpenAI API key", "sk-proj-", Then::AtLeast(URL_SAFE, 40)),
    (
        "an OpenAI API key",
        "sk-svcacct-",
        Then::AtLeast(URL_SAFE, 40),
    ),
    (
        "an OpenAI API key",
        "sk-admin-",
        Then::AtLeast(URL_SAFE, 40),
    ),
    (
        "an OpenAI API key",
        "sk-",
        Then::Exactly(ALPHANUMERIC, &[48]),
    ),
    ("a Stripe key", "sk_live_", Then::AtLeast(ALPHANUMERIC, 24)),
    ("a Stripe key", "rk_live_", Then::AtLeast(ALPHANUMERIC, 24)),
    ("an npm token", "npm_", Then::Exactly(ALPHANUMERIC, &[36])),
    ("a PyPI token", "pypi-AgEI", Then::AtLeast(URL_SAFE, 50)),
    (
        "a Hugging Face token",
        "hf_",
        Then::Exactly(ALPHANUMERIC, &[34]),
    ),
    (PRIVATE_KEY, "-----BEGIN ", Then::PrivateKey),
    (
        "an age secret key",
        "AGE-SECRET-KEY-1",
        Then::Exactly(BECH32, &[58]),
    ),
];

/// The longest label of a private key, as in `ENCRYPTED PRIVATE KEY`.
const LABEL: usize = 32;
/// How soon after its label key material must begin, and how much of it in one line. The label alone stands in many a program that
/// reads or writes keys.
const MATERIAL_WITHIN: usize = 256;
const MATERIAL: usize = 32;

pub(super) struct Shapes {
    beginnings: AhoCorasick,
    /// One for each beginning.
    shapes: Vec<Shape>,
    longest: usize,
}

impl Shapes {
    /// Our own, and with `well_known` those of others.
    pub(super) fn new(well_known: bool) -> Self {
        let ours = Shape {
            what: "a CyNode token",
            is_ours: true,
            begins: OURS.into(),
            then: Then::AtLeast(URL_SAFE, OURS_LETTERS),
        };
        let encodings = encoded::encodings(OURS.as_bytes(), &encoded::STANDARD);
        let encoded = encodings
            .into_iter()
            .enumerate()
            .map(|(shift, begins)| Shape {
                begins,
                then: Then::OursEncoded(shift),
                ..ours
            });
        let mut shapes: Vec<Shape> = encoded.collect();
        shapes.push(ours);
        if well_known {
            shapes.extend(WELL_KNOWN.iter().map(|(what, begins, then)| Shape {
                what,
                is_ours: false,
                begins: (*begins).into(),
                then: *then,
            }));
        }
        let beginnings = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostFirst)
            .build(shapes.iter().map(|shape| &shape.begins))
            .expect("a few short beginnings fit any automaton");
        let longest = shapes.iter().map(Shape::longest).max().unwrap_or_default();
        Self {
            beginnings,
            shapes,
            longest,
        }
    }

    /// How many bytes the longest candidate can need.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    pub(super) fn find(&self, bytes: &[u8], from: usize, is_end: bool) -> Option<&'static str> {
        let mut first = None;
        self.each(bytes, from, is_end, |shape| {
            first = Some(shape.what);
            false
        });
        first
    }

    /// Visits the shapes in some bytes from an offset on, until the visitor has seen enough.
    pub(super) fn each(
        &self,
        bytes: &[u8],
        mut from: usize,
        is_end: bool,
        mut goes_on: impl FnMut(&Shape) -> bool,
    ) {
        while from < bytes.len() {
            let Some(found) = self.beginnings.find(Input::new(bytes).range(from..)) else {
                return;
            };
            let shape = &self.shapes[found.pattern().as_usize()];
            if shape.is_at(bytes, found.start(), is_end) && !goes_on(shape) {
                return;
            }
            from = found.start() + 1;
        }
    }
}

impl Shape {
    fn is_at(&self, bytes: &[u8], start: usize, is_end: bool) -> bool {
        let rest = &bytes[start + self.begins.len()..];
        let begins_word = || begins_word(&bytes[start.saturating_sub(BEFORE)..start]);
        match self.then {
            Then::Exactly(letters, counts) => {
                let most = counts.iter().copied().max().unwrap_or_default();
                let count = run(rest, letters, most + 1);
                counts.contains(&count) && (is_end || count < rest.len()) && begins_word()
            }
            Then::AtLeast(letters, count) => run(rest, letters, count) == count && begins_word(),
            Then::Digit(letters, count) => {
                rest.first().is_some_and(u8::is_ascii_digit)
                    && run(rest, letters, count) == count
                    && begins_word()
            }
            Then::PrivateKey => is_private_key(rest),
            Then::OursEncoded(shift) => {
                let Some(group) = start.checked_sub(encoded::FIRST_LETTER[shift]) else {
                    return false;
                };
                let end = bytes.len().min(group + encoded_length());
                let decoded = encoded::decode_start(&bytes[group..end]);
                let ours = decoded
                    .get(shift..)
                    .and_then(|decoded| decoded.strip_prefix(OURS.as_bytes()));
                ours.is_some_and(|letters| run(letters, URL_SAFE, OURS_LETTERS) == OURS_LETTERS)
            }
        }
    }

    /// How many bytes decide whether it is one, that after its last included.
    fn longest(&self) -> usize {
        let rest = match self.then {
            Then::Exactly(_, counts) => counts.iter().copied().max().unwrap_or_default() + 1,
            Then::AtLeast(_, count) | Then::Digit(_, count) => count,
            Then::PrivateKey => LABEL + 5 + MATERIAL_WITHIN,
            Then::OursEncoded(_) => encoded_length(),
        };
        self.begins.len() + rest
    }
}

/// As many letters as are surely a whole token, in groups of four, whatever comes before it in its first group.
fn encoded_length() -> usize {
    (2 + OURS.len() + OURS_LETTERS).div_ceil(3) * 4
}

/// How many letters there are at the start; counting ends at `most`.
fn run(bytes: &[u8], letters: Letters, most: usize) -> usize {
    bytes
        .iter()
        .take(most)
        .take_while(|byte| letters(**byte))
        .count()
}

/// What follows `-----BEGIN `: the label of a private key, and then, not far, a line of it.
fn is_private_key(rest: &[u8]) -> bool {
    let label = run(
        rest,
        |byte| byte.is_ascii_uppercase() || byte == b' ',
        LABEL,
    );
    let (label, rest) = rest.split_at(label);
    let is_label = label.ends_with(b"PRIVATE KEY") || label.ends_with(b"PRIVATE KEY BLOCK");
    let Some(rest) = rest.strip_prefix(b"-----") else {
        return false;
    };
    let near = &rest[..rest.len().min(MATERIAL_WITHIN)];
    is_label
        && near
            .split(|byte| !BASE64(*byte))
            .any(|line| line.len() >= MATERIAL)
}

/// Whether a word begins after these bytes. What an escape ends with is no part of a word: `\nTOKEN`, `%3DTOKEN`, `\u003dTOKEN`.
fn begins_word(before: &[u8]) -> bool {
    let escape = |mark: &[u8], digits: usize| {
        let Some((head, digits)) = before
            .len()
            .checked_sub(digits)
            .map(|length| before.split_at(length))
        else {
            return false;
        };
        head.ends_with(mark) && digits.iter().all(u8::is_ascii_hexdigit)
    };
    !before.last().is_some_and(|last| WORD(*last))
        || matches!(
            before,
            [.., b'\\', b'b' | b'f' | b'n' | b'r' | b't' | b'v' | b'0']
        )
        || escape(b"%", 2)
        || escape(b"\\x", 2)
        || escape(b"\\u", 4)
}
