//! Validates image references. Engines report invalid ones as internal errors.

use cynode_service::ApiError;

pub(super) fn check_reference(text: &str) -> Result<(), ApiError> {
    if is_reference(text) {
        Ok(())
    } else {
        Err(ApiError::invalid(
            "image_ref: must be an image reference or \"default\"",
        ))
    }
}

/// Hex digits of the longest digest, SHA-512.
const MAX_DIGEST: usize = 128;

/// Matches `[host[:port]/]path[:tag][@digest]`, as registries define it.
fn is_reference(text: &str) -> bool {
    let (rest, digest) = text
        .split_once('@')
        .map_or((text, None), |(rest, digest)| (rest, Some(digest)));
    // A colon before a slash starts a port.
    let (name, tag) = match rest.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
        _ => (rest, None),
    };
    let path = match name.split_once('/') {
        Some((host, path)) if is_host(host) => path,
        _ => name,
    };
    name.len() <= 255
        && path.split('/').all(is_component)
        && tag.is_none_or(is_tag)
        && digest.is_none_or(is_digest)
}

/// A host has a dot or a port, or is `localhost`; anything else begins a path.
fn is_host(text: &str) -> bool {
    let (name, port) = text
        .split_once(':')
        .map_or((text, None), |(name, port)| (name, Some(port)));
    let is_name = (name.contains('.') || port.is_some() || name == "localhost")
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-'));
    is_name
        && port
            .is_none_or(|port| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Lowercase letters and digits with single separators between them.
fn is_component(text: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let mut separators = text
        .split(|character: char| u8::try_from(character).is_ok_and(is_word))
        .filter(|separators| !separators.is_empty());
    text.bytes().next().is_some_and(is_word)
        && text.bytes().last().is_some_and(is_word)
        && separators.all(|separators| {
            matches!(separators, "." | "_" | "__") || separators.bytes().all(|byte| byte == b'-')
        })
}

fn is_tag(text: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.len() <= 128
        && text.bytes().next().is_some_and(is_word)
        && text
            .bytes()
            .all(|byte| is_word(byte) || matches!(byte, b'.' | b'-'))
}

fn is_digest(text: &str) -> bool {
    text.split_once(':').is_some_and(|(kind, hex)| {
        is_component(kind)
            && (32..=MAX_DIGEST).contains(&hex.len())
            && hex.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_and_invalid_image_references_are_distinguished() {
        let hex = "0123456789abcdef".repeat(4);
        for good in [
            "busybox",
            "localhost/cynode/sba-runner:latest",
            "docker.io/library/debian:12",
            "127.0.0.1:5000/a/b_c/d__e/f--g.h:V1.2-x",
            "Registry.example:443/x",
            &format!("sha256:{hex}"),
            &format!("localhost/x@sha256:{hex}"),
            &format!("localhost/x:y@sha256:{hex}"),
            &hex,
        ] {
            assert!(is_reference(good), "{good}");
        }
        let (long, endless) = ("x".repeat(256), format!("a@sha512:{}", "0".repeat(129)));
        for bad in [
            "",
            "w\u{ca}",
            "A",
            "A/b",
            "a//b",
            "/a",
            "a/",
            "a:",
            ":a",
            "a:b:c",
            "a..b",
            "a___b",
            "_a",
            "a_",
            "a b",
            "a@",
            "a@sha256:12",
            "a@@b",
            "a:.x",
            "h:p/x",
            "a\nb",
            &long,
            &endless,
        ] {
            assert!(!is_reference(bad), "{bad}");
        }
    }
}
