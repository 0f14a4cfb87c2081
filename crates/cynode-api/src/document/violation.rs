//! Violations of a document's format, each with its path.
//!
//! Names and values in a document are hostile: paths and messages contain printable ASCII only, and
//! their length is bounded.

use std::fmt;

use serde::{Serialize, Serializer};

/// Violations that are listed; further ones are counted.
pub const MAX_VIOLATIONS: usize = 64;
/// Characters of a field's name in a violation; the rest is cut.
pub const MAX_SHOWN_NAME: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ViolationCode {
    /// Not JSON.
    Syntax,
    /// More bytes, values or names than allowed in the whole document.
    TooLarge,
    TooDeep,
    UnsupportedVersion,
    MissingField,
    UnknownField,
    DuplicateField,
    WrongType,
    InvalidValue,
}

impl ViolationCode {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Syntax => "syntax",
            Self::TooLarge => "too_large",
            Self::TooDeep => "too_deep",
            Self::UnsupportedVersion => "unsupported_version",
            Self::MissingField => "missing_field",
            Self::UnknownField => "unknown_field",
            Self::DuplicateField => "duplicate_field",
            Self::WrongType => "wrong_type",
            Self::InvalidValue => "invalid_value",
        }
    }
}

impl Serialize for ViolationCode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Violation {
    /// The path to the field, such as `steps[3].args.argv`; `$` is the document itself.
    pub path: String,
    pub code: ViolationCode,
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.message)
    }
}

/// The violations of a document; not empty when returned as an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violations {
    /// At most 64.
    pub errors: Vec<Violation>,
    /// Number of violations that are not listed.
    pub omitted: usize,
}

impl Violations {
    #[must_use]
    pub fn none() -> Self {
        Self {
            errors: Vec::new(),
            omitted: 0,
        }
    }

    /// A single violation that ends validation.
    #[must_use]
    pub fn single(code: ViolationCode, path: &[Segment<'_>], message: String) -> Self {
        let mut violations = Self::none();
        violations.add(code, path, || message);
        violations
    }

    pub fn add(
        &mut self,
        code: ViolationCode,
        path: &[Segment<'_>],
        message: impl FnOnce() -> String,
    ) {
        if self.errors.len() < MAX_VIOLATIONS {
            self.errors.push(Violation {
                path: render(path),
                code,
                message: message(),
            });
        } else {
            self.omitted += 1;
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.errors.is_empty()
    }
}

impl fmt::Display for Violations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, violation) in self.errors.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{violation}")?;
        }
        match self.omitted {
            0 => Ok(()),
            omitted => write!(f, "; and {omitted} more"),
        }
    }
}

impl std::error::Error for Violations {}

/// One part of the path to a value.
#[derive(Clone, Copy, Debug)]
pub enum Segment<'a> {
    Field(&'a str),
    Index(usize),
}

fn render(path: &[Segment<'_>]) -> String {
    if path.is_empty() {
        return "$".to_owned();
    }
    let segments = path.iter().enumerate();
    segments
        .map(|(position, segment)| match segment {
            Segment::Index(index) => format!("[{index}]"),
            Segment::Field(name) if !is_plain(name) => format!("[{}]", quote(name)),
            Segment::Field(name) if position == 0 => (*name).to_owned(),
            Segment::Field(name) => format!(".{name}"),
        })
        .collect()
}

fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= MAX_SHOWN_NAME
        && !name.starts_with(|first: char| first.is_ascii_digit() || first == '-')
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
}

/// Quotes a text of the document: in printable ASCII, cut to [`MAX_SHOWN_NAME`] characters.
#[must_use]
pub fn quote(text: &str) -> String {
    let mut shown = String::from("\"");
    for character in text.chars().take(MAX_SHOWN_NAME) {
        match character {
            '"' | '\\' => shown.extend(['\\', character]),
            ' '..='~' => shown.push(character),
            _ => shown.extend(character.escape_unicode()),
        }
    }
    let is_cut = text.chars().nth(MAX_SHOWN_NAME).is_some();
    shown.push_str(if is_cut { "\"..." } else { "\"" });
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_fields_and_indices() {
        use Segment::{Field, Index};
        for (path, expected) in [
            (&[][..], "$"),
            (&[Field("steps"), Index(3), Field("args")], "steps[3].args"),
            (&[Field("env"), Field("A B")], r#"env["A B"]"#),
            (&[Field("7")], r#"["7"]"#),
            (&[Field("")], r#"[""]"#),
            (&[Field("a\"\\\n\u{202e}")], r#"["a\"\\\u{a}\u{202e}"]"#),
        ] {
            assert_eq!(render(path), expected);
        }
    }

    #[test]
    fn a_long_name_is_cut() {
        let path = render(&[Segment::Field(&"n".repeat(1_000_000))]);
        assert_eq!(path, format!(r#"["{}"...]"#, "n".repeat(MAX_SHOWN_NAME)));
        let whole = "n".repeat(MAX_SHOWN_NAME);
        assert_eq!(render(&[Segment::Field(&whole)]), whole);
    }

    #[test]
    fn violations_beyond_the_limit_are_counted() {
        let mut violations = Violations::none();
        for index in 0..=MAX_VIOLATIONS {
            violations.add(
                ViolationCode::WrongType,
                &[Segment::Index(index)],
                String::new,
            );
        }
        assert_eq!(violations.errors.len(), MAX_VIOLATIONS);
        assert_eq!(violations.omitted, 1);
        assert!(violations.to_string().ends_with("; and 1 more"));
    }
}
