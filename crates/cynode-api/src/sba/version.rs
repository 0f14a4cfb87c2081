//! The version of the job format, which authors and runners of jobs agree on.

use std::{fmt, str::FromStr};

use serde::{Serialize, Serializer};

use super::{
    document::JsonValue,
    violation::{Segment, ViolationCode, Violations, quote},
};

const FIELD: &str = "protocol_version";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProtocolVersion {
    pub major: u32,
    pub minor: u32,
}

impl ProtocolVersion {
    /// The newest version that this build knows.
    pub const CURRENT: Self = Self { major: 1, minor: 0 };

    /// Reads the version of a document. Callers check it first: the rules of one major version don't
    /// apply to another.
    pub(super) fn of(document: &JsonValue) -> Result<Self, Violations> {
        let JsonValue::Object(members) = document else {
            let message = "must be an object".to_owned();
            return Err(Violations::single(ViolationCode::WrongType, &[], message));
        };
        let refuse = |code, message: String| {
            Err(Violations::single(code, &[Segment::Field(FIELD)], message))
        };
        let mut versions = members.iter().filter(|(name, _)| name == FIELD);
        let Some((_, value)) = versions.next() else {
            return refuse(ViolationCode::MissingField, "is missing".to_owned());
        };
        if versions.next().is_some() {
            return refuse(ViolationCode::DuplicateField, "is given twice".to_owned());
        }
        let JsonValue::Text(text) = value else {
            let message = "must be a string such as \"1.0\"".to_owned();
            return refuse(ViolationCode::WrongType, message);
        };
        match text.parse::<Self>() {
            Err(InvalidVersion) => refuse(
                ViolationCode::InvalidValue,
                format!("{} is not a version such as \"1.0\"", quote(text)),
            ),
            Ok(version) if version.major != Self::CURRENT.major => refuse(
                ViolationCode::UnsupportedVersion,
                format!(
                    "version {version} is not supported; send {}.x",
                    Self::CURRENT.major
                ),
            ),
            Ok(version) => Ok(version),
        }
    }
}

impl fmt::Display for ProtocolVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Serialize for ProtocolVersion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The error for a text that is not a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidVersion;

impl fmt::Display for InvalidVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a version such as 1.0")
    }
}

impl std::error::Error for InvalidVersion {}

impl FromStr for ProtocolVersion {
    type Err = InvalidVersion;

    fn from_str(text: &str) -> Result<Self, InvalidVersion> {
        let (major, minor) = text.split_once('.').ok_or(InvalidVersion)?;
        Ok(Self {
            major: number(major)?,
            minor: number(minor)?,
        })
    }
}

/// Parses at most six digits, without leading zeros or a sign.
fn number(text: &str) -> Result<u32, InvalidVersion> {
    let is_canonical = matches!(text.len(), 1..=6)
        && text.bytes().all(|byte| byte.is_ascii_digit())
        && (text == "0" || !text.starts_with('0'));
    is_canonical
        .then(|| text.parse().ok())
        .flatten()
        .ok_or(InvalidVersion)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_two_numbers() {
        for (text, major, minor) in [("1.0", 1, 0), ("0.9", 0, 9), ("1.999999", 1, 999_999)] {
            let version = ProtocolVersion { major, minor };
            assert_eq!(text.parse(), Ok(version));
            assert_eq!(version.to_string(), text);
        }
        for text in [
            "",
            "1",
            "1.",
            ".0",
            "1.0.0",
            "01.0",
            "1.00",
            "+1.0",
            "-1.0",
            "1.0 ",
            "v1.0",
            "1,0",
            "1.1000000",
            "1.\u{0661}",
        ] {
            assert!(text.parse::<ProtocolVersion>().is_err(), "{text}");
        }
    }
}
