//! Parsers of strings with a special form: images, audio and durations.

use serde_json::Number;

/// Prefixes of images that servers decode themselves. They would fetch every other URL, even
/// `file:`.
const IMAGE_PREFIXES: &[&str] = &[
    "data:image/png;base64,",
    "data:image/jpeg;base64,",
    "data:image/jpg;base64,",
    "data:image/webp;base64,",
    "data:image/gif;base64,",
];

pub(crate) fn is_image_url(text: &str) -> bool {
    IMAGE_PREFIXES
        .iter()
        .find_map(|prefix| text.strip_prefix(prefix))
        .is_some_and(is_base64)
}

/// Returns whether a string is padded, non-empty base64. No URL is: the alphabet has no colon.
pub(crate) fn is_base64(text: &str) -> bool {
    let digits = text
        .strip_suffix("==")
        .or_else(|| text.strip_suffix('='))
        .unwrap_or(text);
    !digits.is_empty()
        && text.len().is_multiple_of(4)
        && digits
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/'))
}

/// Parses a duration of Ollama, a number of seconds, into milliseconds. `None` for a negative one,
/// which Ollama reads as "for ever".
pub(crate) fn milliseconds_of_number(seconds: &Number) -> Option<u64> {
    if let Some(seconds) = seconds.as_u64() {
        return seconds.checked_mul(1_000);
    }
    let milliseconds = (seconds.as_f64()? * 1_000.0).ceil();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the range is checked"
    )]
    (0.0..=1e15)
        .contains(&milliseconds)
        .then_some(milliseconds as u64)
}

pub(crate) fn milliseconds_of_text(text: &str) -> Option<u64> {
    let mut rest = text;
    let mut total = 0_u64;
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let count: u64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let (unit, factor) = [("ms", 1), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)]
            .into_iter()
            .find(|(unit, _)| rest.starts_with(unit))?;
        rest = &rest[unit.len()..];
        total = total.checked_add(count.checked_mul(factor)?)?;
    }
    (!text.is_empty()).then_some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_images_in_base64_are_image_urls() {
        for text in [
            "data:image/png;base64,AAAA",
            "data:image/jpeg;base64,AAA=",
            "data:image/jpg;base64,AA==",
            "data:image/webp;base64,+/09azAZ",
            "data:image/gif;base64,R0lG",
        ] {
            assert!(is_image_url(text), "{text}");
        }
        for text in [
            "",
            "data:",
            "data:image/png;base64,",
            "data:image/png;base64,A",
            "data:image/png;base64,A===",
            "data:image/png;base64,====",
            "data:image/png;base64,AA=A",
            "data:image/png;base64,AAAA ",
            "data:image/png;base64,AA\nAA",
            "data:image/png;base64,AA_-",
            "data:image/png,AAAA",
            "data:image/svg+xml;base64,AAAA",
            "data:text/html;base64,AAAA",
            "data:;base64,AAAA",
            "data:image/png;charset=x;base64,AAAA",
            "DATA:image/png;base64,AAAA",
            " data:image/png;base64,AAAA",
            "http://127.0.0.1/x.png",
            "https://example.com/x.png",
            "HTTPS://example.com/x.png",
            "file:///etc/passwd",
            "ftp://example.com/x",
            "//example.com/x.png",
            "/etc/passwd",
            "x.png",
            "AAAA",
        ] {
            assert!(!is_image_url(text), "{text}");
        }
    }

    #[test]
    fn durations_are_read_as_go_writes_them() {
        for (text, milliseconds) in [
            ("0s", 0),
            ("1s", 1_000),
            ("300s", 300_000),
            ("5m", 300_000),
            ("5m0s", 300_000),
            ("1h30m0s", 5_400_000),
            ("1500ms", 1_500),
            ("1m500ms", 60_500),
        ] {
            assert_eq!(milliseconds_of_text(text), Some(milliseconds), "{text}");
        }
        for text in [
            "",
            "0",
            "5",
            "-1",
            "-1s",
            "+1s",
            "s",
            "m5",
            "5 m",
            " 5m",
            "5m ",
            "5M",
            "1.5s",
            "1d",
            "1us",
            "inf",
            "99999999999999999999s",
            "18446744073709551615h",
            "5m-1s",
        ] {
            assert_eq!(milliseconds_of_text(text), None, "{text}");
        }
    }

    #[test]
    fn numbers_are_seconds() {
        let number = |text: &str| {
            let number: Number = serde_json::from_str(text).expect("a number");
            milliseconds_of_number(&number)
        };
        for (text, milliseconds) in [
            ("0", 0),
            ("300", 300_000),
            ("300.0", 300_000),
            ("0.0005", 1),
            ("1e2", 100_000),
            ("-0", 0),
        ] {
            assert_eq!(number(text), Some(milliseconds), "{text}");
        }
        for text in ["-1", "-0.5", "-1e300", "1e300", "18446744073709551615"] {
            assert_eq!(number(text), None, "{text}");
        }
    }
}
