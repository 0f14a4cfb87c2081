//! Texts that must have a form.

use base64::{Engine, engine::general_purpose::STANDARD};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{limits::MAX_FAILURE_CODE_BYTES, shape::Form, version::ProtocolVersion};

impl Form {
    /// What is wrong with a text, if anything.
    pub(super) fn fault(self, text: &str) -> Option<&'static str> {
        let (holds, fault) = match self {
            Self::Free => return None,
            Self::NoNul => (!text.contains('\0'), "must not contain NUL"),
            Self::Line => (
                !text.contains(char::is_control),
                "must not contain control characters",
            ),
            Self::Uuid => (is_uuid(text), "must be a UUID with hyphens"),
            Self::Base64 => (
                STANDARD.decode(text).is_ok(),
                "must be base64 with padding and without line breaks",
            ),
            Self::Mode => (
                file_mode(text).is_some(),
                "must be permission bits in octal, such as 0644, up to 0777",
            ),
            Self::VariableName => return variable_fault(text),
            Self::Version => (
                text.parse::<ProtocolVersion>().is_ok(),
                "must be a version such as 1.0",
            ),
            Self::FailureCode => (
                is_failure_code(text),
                "must be lowercase letters, digits and underscores, and begin with a letter",
            ),
            Self::Time => (
                OffsetDateTime::parse(text, &Rfc3339).is_ok(),
                "must be a time as in RFC 3339",
            ),
            Self::Hexadecimal => (
                text.bytes().all(|byte| byte.is_ascii_hexdigit()),
                "must be hexadecimal",
            ),
        };
        (!holds).then_some(fault)
    }

    /// The form as a regular expression; none if any text has it. Only jobs have a schema.
    #[cfg(test)]
    pub(super) fn pattern(self) -> Option<&'static str> {
        Some(match self {
            Self::Free => return None,
            Self::NoNul => r"^[^\x00]*$",
            Self::Line => r"^[^\x00-\x1f\x7f-\x9f]*$",
            Self::Uuid => {
                "^[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}$"
            }
            Self::Base64 => {
                "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?$"
            }
            Self::Mode => "^0?[0-7]{1,3}$",
            Self::VariableName => {
                r"^(?!CYNODE_)(?!OLLAMA_BASE_URL$)(?![^=\x00]*_[Pp][Rr][Oo][Xx][Yy]$)[^=\x00]+$"
            }
            Self::Version => r"^1\.(0|[1-9][0-9]{0,5})$",
            Self::FailureCode | Self::Time | Self::Hexadecimal => unreachable!("not in jobs"),
        })
    }
}

/// Only the usual spelling: the others would give one job several names.
fn is_uuid(text: &str) -> bool {
    text.len() == 36 && uuid::Uuid::try_parse(text).is_ok()
}

/// The permission bits that a text of octal digits stands for.
pub(super) fn file_mode(text: &str) -> Option<u32> {
    let is_octal = text.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
    let has_length = matches!(text.len(), 1..=3) || (text.len() == 4 && text.starts_with('0'));
    (is_octal && has_length)
        .then(|| u32::from_str_radix(text, 8).ok())
        .flatten()
}

fn is_failure_code(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_lowercase())
        && text.len() <= MAX_FAILURE_CODE_BYTES
        && text
            .bytes()
            .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'))
}

fn variable_fault(name: &str) -> Option<&'static str> {
    if name.is_empty() || name.contains(['=', '\0']) {
        Some("is not the name of a variable")
    } else if is_node_variable(name) {
        Some("is set by the node; a job can't override it")
    } else {
        None
    }
}

/// Whether only the node sets a variable: what describes the sandbox, and where its proxies are.
#[must_use]
pub fn is_node_variable(name: &str) -> bool {
    name.starts_with("CYNODE_")
        || name == "OLLAMA_BASE_URL"
        || name.to_ascii_lowercase().ends_with("_proxy")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_have_the_form_or_a_fault() {
        let long_code = "c".repeat(65);
        for (form, good, bad) in [
            (Form::NoNul, &["", "a\nb", "ä"][..], &["a\0"][..]),
            (
                Form::Line,
                &["llama3.2", "a b ä"],
                &["a\n", "\u{7f}", "\u{85}"],
            ),
            (
                Form::Uuid,
                &["01890a5d-ac96-774b-bcce-b302099a8057"],
                &[
                    "",
                    "01890a5dac96774bbcceb302099a8057",
                    "{01890a5d-ac96-774b-bcce-b302099a8057}",
                    "01890a5d-ac96-774b-bcce-b302099a805g",
                    "01890a5d-ac96-774b-bcceb-302099a8057",
                ],
            ),
            (
                Form::Base64,
                &["", "AA==", "AAA=", "AAAA", "+/A="],
                &["A", "AA", "AB==", "AAB=", "AAAA\n", "-_A=", "=", "AA==="],
            ),
            (
                Form::Mode,
                &["0644", "755", "0", "0777"],
                &["", "8", "1755", "00644", "+644"],
            ),
            (
                Form::VariableName,
                &["PATH", "a b", "ollama_base_url", "proxy", "http_proxy_x"],
                &[
                    "",
                    "A=B",
                    "A\0",
                    "CYNODE_",
                    "OLLAMA_BASE_URL",
                    "http_proxy",
                    "ALL_PROXY",
                ],
            ),
            (
                Form::FailureCode,
                &["step_failed", "e2"],
                &["", "2e", "A", "_a", "a-b", &long_code],
            ),
            (Form::Hexadecimal, &["00aF"], &["0g", "0x"]),
            (
                Form::Time,
                &["2026-11-15T10:00:00Z", "2026-11-15T10:00:00.5+01:00"],
                &["", "2026-11-15", "2026-13-15T10:00:00Z"],
            ),
        ] {
            for text in good {
                assert_eq!(form.fault(text), None, "{form:?} {text:?}");
            }
            for text in bad {
                assert!(form.fault(text).is_some(), "{form:?} {text:?}");
            }
        }
    }
}
