//! Tokens recognized by their shape.
//!
//! Invariants: a shape is specific enough that ordinary text, code and data don't match. A token
//! starts at a word boundary and ends with its last letter. The lookahead per candidate is bounded.

use aho_corasick::{AhoCorasick, Input, MatchKind};

use super::{WORD_CONTEXT_BYTES, encoded};

/// The prefix of this system's tokens, and the minimum number of letters after it.
const TOKEN_PREFIX: &str = "cyn_";
const MIN_TOKEN_LETTERS: usize = 43;

pub(super) struct Shape {
    pub(super) what: &'static str,
    /// A token of this system.
    pub(super) is_ours: bool,
    prefix: Vec<u8>,
    suffix: Suffix,
}

/// The text after the prefix.
#[derive(Clone, Copy)]
enum Suffix {
    /// Exactly one of these numbers of letters.
    Exactly(Letters, &'static [usize]),
    /// At least this many letters.
    AtLeast(Letters, usize),
    /// A digit, then at least this many letters.
    Digit(Letters, usize),
    /// The rest of a PEM label, with key material shortly after it.
    PrivateKey,
    /// A token of this system in base64, after this many other bytes.
    EncodedToken(usize),
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

/// Of several prefixes with a common start, the longer comes first.
const WELL_KNOWN: &[(&str, &str, Suffix)] = &[
    (
        "a GitHub token",
        "ghp_",
        Suffix::Exactly(ALPHANUMERIC, &[36]),
    ),
    (
        "a GitHub token",
        "gho_",
        Suffix::Exactly(ALPHANUMERIC, &[36]),
    ),
    (
        "a GitHub token",
        "ghu_",
        Suffix::Exactly(ALPHANUMERIC, &[36]),
    ),
    (
        "a GitHub token",
        "ghs_",
        Suffix::Exactly(ALPHANUMERIC, &[36]),
    ),
    (
        "a GitHub token",
        "ghr_",
        Suffix::Exactly(ALPHANUMERIC, &[36, 76]),
    ),
    (
        "a GitHub token",
        "github_pat_",
        Suffix::Exactly(WORD, &[82]),
    ),
    ("a GitLab token", "glpat-", Suffix::AtLeast(URL_SAFE, 20)),
    ("an AWS access key", "AKIA", Suffix::Exactly(UPPER, &[16])),
    ("an AWS access key", "ASIA", Suffix::Exactly(UPPER, &[16])),
    ("a Slack token", "xoxa-", Suffix::Digit(DASHED, 20)),
    ("a Slack token", "xoxb-", Suffix::Digit(DASHED, 20)),
    ("a Slack token", "xoxp-", Suffix::Digit(DASHED, 20)),
    ("a Slack token", "xoxr-", Suffix::Digit(DASHED, 20)),
    ("a Slack token", "xoxs-", Suffix::Digit(DASHED, 20)),
    ("a Google API key", "AIza", Suffix::Exactly(URL_SAFE, &[35])),
    (
        "an Anthropic API key",
        "sk-ant-",
        Suffix::AtLeast(URL_SAFE, 40),
    ),
    (
        "an OpenAI API key",
        "sk-proj-",
        Suffix::AtLeast(URL_SAFE, 40),
    ),
    (
        "an OpenAI API key",
        "sk-svcacct-",
        Suffix::AtLeast(URL_SAFE, 40),
    ),
    (
        "an OpenAI API key",
        "sk-admin-",
        Suffix::AtLeast(URL_SAFE, 40),
    ),
    (
        "an OpenAI API key",
        "sk-",
        Suffix::Exactly(ALPHANUMERIC, &[48]),
    ),
    (
        "a Stripe key",
        "sk_live_",
        Suffix::AtLeast(ALPHANUMERIC, 24),
    ),
    (
        "a Stripe key",
        "rk_live_",
        Suffix::AtLeast(ALPHANUMERIC, 24),
    ),
    ("an npm token", "npm_", Suffix::Exactly(ALPHANUMERIC, &[36])),
    ("a PyPI token", "pypi-AgEI", Suffix::AtLeast(URL_SAFE, 50)),
    (
        "a Hugging Face token",
        "hf_",
        Suffix::Exactly(ALPHANUMERIC, &[34]),
    ),
    (PRIVATE_KEY, "-----BEGIN ", Suffix::PrivateKey),
    (
        "an age secret key",
        "AGE-SECRET-KEY-1",
        Suffix::Exactly(BECH32, &[58]),
    ),
];

/// The longest label of a private key, as in `ENCRYPTED PRIVATE KEY`.
const MAX_LABEL_BYTES: usize = 32;
/// The distance from a label within which key material must follow, and the length of its first
/// line. The label alone occurs in many programs that read or write keys.
const MAX_MATERIAL_DISTANCE: usize = 256;
const MIN_MATERIAL_LETTERS: usize = 32;

pub(super) struct Shapes {
    prefixes: AhoCorasick,
    /// One for each prefix.
    shapes: Vec<Shape>,
    longest: usize,
}

impl Shapes {
    /// The system's own shapes, with `well_known` also third-party ones.
    pub(super) fn new(well_known: bool) -> Self {
        let ours = Shape {
            what: "a CyNode token",
            is_ours: true,
            prefix: TOKEN_PREFIX.into(),
            suffix: Suffix::AtLeast(URL_SAFE, MIN_TOKEN_LETTERS),
        };
        let encodings = encoded::encodings(TOKEN_PREFIX.as_bytes(), &encoded::STANDARD);
        let encoded = encodings
            .into_iter()
            .enumerate()
            .map(|(shift, prefix)| Shape {
                prefix,
                suffix: Suffix::EncodedToken(shift),
                ..ours
            });
        let mut shapes: Vec<Shape> = encoded.collect();
        shapes.push(ours);
        if well_known {
            shapes.extend(WELL_KNOWN.iter().map(|(what, prefix, suffix)| Shape {
                what,
                is_ours: false,
                prefix: (*prefix).into(),
                suffix: *suffix,
            }));
        }
        let prefixes = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostFirst)
            .build(shapes.iter().map(|shape| &shape.prefix))
            .expect("a few short prefixes fit any automaton");
        let longest = shapes.iter().map(Shape::longest).max().unwrap_or_default();
        Self {
            prefixes,
            shapes,
            longest,
        }
    }

    /// The number of bytes that the longest candidate can need.
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

    /// Visits the shapes from an offset on, until `visit` returns false.
    pub(super) fn each(
        &self,
        bytes: &[u8],
        mut from: usize,
        is_end: bool,
        mut visit: impl FnMut(&Shape) -> bool,
    ) {
        while from < bytes.len() {
            let Some(found) = self.prefixes.find(Input::new(bytes).range(from..)) else {
                return;
            };
            let shape = &self.shapes[found.pattern().as_usize()];
            if shape.is_at(bytes, found.start(), is_end) && !visit(shape) {
                return;
            }
            from = found.start() + 1;
        }
    }
}

impl Shape {
    fn is_at(&self, bytes: &[u8], start: usize, is_end: bool) -> bool {
        let rest = &bytes[start + self.prefix.len()..];
        let begins_word = || begins_word(&bytes[start.saturating_sub(WORD_CONTEXT_BYTES)..start]);
        match self.suffix {
            Suffix::Exactly(letters, counts) => {
                let limit = counts.iter().copied().max().unwrap_or_default();
                let count = run(rest, letters, limit + 1);
                counts.contains(&count) && (is_end || count < rest.len()) && begins_word()
            }
            Suffix::AtLeast(letters, count) => run(rest, letters, count) == count && begins_word(),
            Suffix::Digit(letters, count) => {
                rest.first().is_some_and(u8::is_ascii_digit)
                    && run(rest, letters, count) == count
                    && begins_word()
            }
            Suffix::PrivateKey => is_private_key(rest),
            Suffix::EncodedToken(shift) => {
                let Some(group) = start.checked_sub(encoded::FIRST_LETTER[shift]) else {
                    return false;
                };
                let end = bytes.len().min(group + encoded_length());
                let decoded = encoded::decode_start(&bytes[group..end]);
                let ours = decoded
                    .get(shift..)
                    .and_then(|decoded| decoded.strip_prefix(TOKEN_PREFIX.as_bytes()));
                ours.is_some_and(|letters| {
                    run(letters, URL_SAFE, MIN_TOKEN_LETTERS) == MIN_TOKEN_LETTERS
                })
            }
        }
    }

    /// The number of bytes that decide a match, including the one after the token.
    fn longest(&self) -> usize {
        let rest = match self.suffix {
            Suffix::Exactly(_, counts) => counts.iter().copied().max().unwrap_or_default() + 1,
            Suffix::AtLeast(_, count) | Suffix::Digit(_, count) => count,
            Suffix::PrivateKey => MAX_LABEL_BYTES + 5 + MAX_MATERIAL_DISTANCE,
            Suffix::EncodedToken(_) => encoded_length(),
        };
        self.prefix.len() + rest
    }
}

/// The number of letters that surely hold a whole token, in groups of four, whatever precedes it in
/// its first group.
fn encoded_length() -> usize {
    (2 + TOKEN_PREFIX.len() + MIN_TOKEN_LETTERS).div_ceil(3) * 4
}

/// The number of letters at the start, up to `limit`.
fn run(bytes: &[u8], letters: Letters, limit: usize) -> usize {
    bytes
        .iter()
        .take(limit)
        .take_while(|byte| letters(**byte))
        .count()
}

/// Whether the text after `-----BEGIN ` is the label of a private key with key material close by.
fn is_private_key(rest: &[u8]) -> bool {
    let label = run(
        rest,
        |byte| byte.is_ascii_uppercase() || byte == b' ',
        MAX_LABEL_BYTES,
    );
    let (label, rest) = rest.split_at(label);
    let is_label = label.ends_with(b"PRIVATE KEY") || label.ends_with(b"PRIVATE KEY BLOCK");
    let Some(rest) = rest.strip_prefix(b"-----") else {
        return false;
    };
    let near = &rest[..rest.len().min(MAX_MATERIAL_DISTANCE)];
    is_label
        && near
            .split(|byte| !BASE64(*byte))
            .any(|line| line.len() >= MIN_MATERIAL_LETTERS)
}

/// Whether a word begins after these bytes. The end of an escape sequence is not part of a word:
/// `\nTOKEN`, `%3DTOKEN`, `\u003dTOKEN`.
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
