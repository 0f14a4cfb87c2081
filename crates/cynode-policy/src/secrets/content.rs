//! Scans the content of one file for shapes, as strictly as its path demands.

use super::{
    SCAN_CHUNK_BYTES, Scanner, ShapeAction, WORD_CONTEXT_BYTES,
    paths::{PathClass, classify},
    shapes::PRIVATE_KEY,
};

/// A git configuration is scanned for credentials in URLs up to this size, and one of npm for
/// settings. The rest is scanned for shapes only.
pub(super) const MAX_GIT_CONFIG_BYTES: usize = 1024 * 1024;
const URL_PASSWORD: &str = "a password in a URL";
/// What is reported for content that only its old version could complete.
pub const UNSCANNED: &str = "content that was not scanned";

/// Scans the content of a file for shapes, chunk by chunk.
pub struct ContentScan {
    scanner: Scanner,
    action: ShapeAction,
    path_class: PathClass,
    /// The tail of the content so far, long enough for an incomplete shape.
    recent: Vec<u8>,
    is_cut: bool,
    is_unscanned: bool,
    /// Distinct shapes.
    found: Vec<&'static str>,
    git_config: Vec<u8>,
}

impl Scanner {
    /// Starts a scan of the file at `path`.
    #[must_use]
    pub fn content(&self, path: &str, action: ShapeAction) -> ContentScan {
        let path_class = if action == ShapeAction::Off {
            PathClass::Anywhere
        } else {
            classify(path)
        };
        ContentScan {
            scanner: self.clone(),
            action,
            path_class,
            recent: Vec::new(),
            is_cut: false,
            is_unscanned: false,
            found: Vec::new(),
            git_config: Vec::new(),
        }
    }
}

impl ContentScan {
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.action == ShapeAction::Off {
            return;
        }
        if self.path_class == PathClass::GitConfig {
            let room = MAX_GIT_CONFIG_BYTES - self.git_config.len();
            self.git_config
                .extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
        for piece in bytes.chunks(SCAN_CHUNK_BYTES) {
            self.recent.extend_from_slice(piece);
            self.scan_recent(false);
            let keep = WORD_CONTEXT_BYTES + self.scanner.0.shapes.longest();
            if self.recent.len() > keep {
                self.recent.drain(..self.recent.len() - keep);
                self.is_cut = true;
            }
        }
    }

    /// Notes that the file will have more than what was fed, so that a credential may be missed. It
    /// is refused where credentials are, and reported elsewhere.
    pub fn mark_unscanned(&mut self) {
        self.is_unscanned = true;
    }

    /// The shapes to report, or the shape for which the file is refused.
    pub fn finish(mut self) -> Result<Vec<&'static str>, &'static str> {
        if self.action == ShapeAction::Off {
            return Ok(Vec::new());
        }
        self.scan_recent(true);
        if let Some(shape) = url_credential(&self.git_config, &self.scanner) {
            return Err(shape);
        }
        let refused = match (self.action, self.path_class) {
            (ShapeAction::Refuse, _) | (_, PathClass::Credentials) => self.found.first(),
            (_, PathClass::KeyInHome) => self.found.iter().find(|shape| **shape == PRIVATE_KEY),
            (_, PathClass::GitConfig | PathClass::Anywhere) => None,
        };
        refused.map_or(Ok(()), |shape| Err(*shape))?;
        if self.is_unscanned {
            if self.action == ShapeAction::Refuse || self.path_class != PathClass::Anywhere {
                return Err(UNSCANNED);
            }
            self.found.push(UNSCANNED);
        }
        Ok(self.found)
    }

    fn scan_recent(&mut self, is_end: bool) {
        let (scanner, found) = (&self.scanner, &mut self.found);
        scanner.0.shapes.each(
            &self.recent,
            if self.is_cut { WORD_CONTEXT_BYTES } else { 0 },
            is_end,
            |shape| {
                if !shape.is_ours && !found.contains(&shape.what) {
                    found.push(shape.what);
                }
                true
            },
        );
    }
}

/// Omits the bytes: they may belong to a secret.
impl std::fmt::Debug for ContentScan {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("ContentScan")
            .field("path_class", &self.path_class)
            .field("action", &self.action)
            .finish_non_exhaustive()
    }
}

/// A credential in the authority of a URL: `https://user:password@host`, or a token in place of the
/// user.
fn url_credential(text: &[u8], scanner: &Scanner) -> Option<&'static str> {
    const SCHEME_END: &[u8] = b"://";
    let ends = |byte: &u8| {
        byte.is_ascii_whitespace()
            || matches!(byte, b'/' | b'"' | b'\'' | b'<' | b'>' | b'?' | b'#')
    };
    let mut rest = text;
    while let Some(at) = rest
        .windows(SCHEME_END.len())
        .position(|window| window == SCHEME_END)
    {
        rest = &rest[at + SCHEME_END.len()..];
        let authority = &rest[..rest.iter().position(ends).unwrap_or(rest.len())];
        let Some(end) = authority.iter().rposition(|byte| *byte == b'@') else {
            continue;
        };
        let user = &authority[..end];
        if user
            .iter()
            .position(|byte| *byte == b':')
            .is_some_and(|colon| colon + 1 < user.len())
        {
            return Some(URL_PASSWORD);
        }
        if let Some(shape) = scanner.0.shapes.find(user, 0, true) {
            return Some(shape);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::{super::HeldSecrets, *};

    fn token() -> String {
        ["gh", "p_", &"A7q3Zx9LmK2vRt5YwB8n".repeat(2)[..36]].concat()
    }

    fn key() -> String {
        [
            "-----BEGIN ",
            "OPENSSH PRIVATE",
            " KEY-----\n",
            &"A7q3Zx9LmK2vRt5YwB8n".repeat(4),
            "\n",
        ]
        .concat()
    }

    fn scan(
        path: &str,
        content: &str,
        action: ShapeAction,
        piece: usize,
    ) -> Result<Vec<&'static str>, &'static str> {
        let scanner = Scanner::new(HeldSecrets::new([7; 32]), true);
        let mut scan = scanner.content(path, action);
        content
            .as_bytes()
            .chunks(piece)
            .for_each(|piece| scan.feed(piece));
        scan.finish()
    }

    #[test]
    fn a_shape_is_flagged_in_source_and_refused_where_a_live_one_would_be() {
        let (flag, refuse, off) = (ShapeAction::Flag, ShapeAction::Refuse, ShapeAction::Off);
        let text = format!("KEY={}\n", token());
        for piece in [1, 7, 30, 10_000] {
            assert_eq!(
                scan("tests/auth.rs", &text, flag, piece),
                Ok(vec!["a GitHub token"])
            );
            assert_eq!(
                scan("tests/auth.rs", &text, refuse, piece),
                Err("a GitHub token")
            );
            assert_eq!(
                scan(".env.local", &text, flag, piece),
                Err("a GitHub token")
            );
            assert_eq!(scan(".env.local", &text, off, piece), Ok(vec![]));
            assert_eq!(
                scan("/home/agent/id_rsa", &key(), flag, piece),
                Err(PRIVATE_KEY)
            );
            assert_eq!(
                scan("/home/agent/id_rsa", &text, flag, piece),
                Ok(vec!["a GitHub token"])
            );
            assert_eq!(
                scan(
                    "tests/id_rsa",
                    &format!("{}{text}{text}", key()),
                    flag,
                    piece
                ),
                Ok(vec![PRIVATE_KEY, "a GitHub token"]),
                "distinct"
            );
        }
        assert_eq!(scan(".env", "KEY=\n", flag, 3), Ok(vec![]));
    }

    #[test]
    fn content_that_was_not_scanned_is_treated_as_a_credential() {
        let scan = |path: &str, action, text: &str| {
            let scanner = Scanner::new(HeldSecrets::new([7; 32]), true);
            let mut scan = scanner.content(path, action);
            scan.feed(text.as_bytes());
            scan.mark_unscanned();
            scan.finish()
        };
        let (flag, refuse, off) = (ShapeAction::Flag, ShapeAction::Refuse, ShapeAction::Off);
        assert_eq!(scan("a.png", flag, "x"), Ok(vec![UNSCANNED]));
        assert_eq!(
            scan("a.png", flag, &token()),
            Ok(vec!["a GitHub token", UNSCANNED])
        );
        assert_eq!(scan("a.png", refuse, "x"), Err(UNSCANNED));
        assert_eq!(scan("a.png", off, &token()), Ok(vec![]));
        for path in [".env", ".git/config", "/home/agent/id_rsa"] {
            assert_eq!(scan(path, flag, "x"), Err(UNSCANNED), "{path}");
        }
        assert_eq!(scan(".env", flag, &token()), Err("a GitHub token"));
    }

    #[test]
    fn a_token_is_found_across_chunks() {
        // One letter too long for a token: a scan that takes the end of a chunk for the end of the
        // file would report one.
        let text = format!("{}A\n", token());
        for piece in 1..text.len() {
            assert_eq!(
                scan("a", &text, ShapeAction::Flag, piece),
                Ok(vec![]),
                "{piece}"
            );
        }
        assert_eq!(
            scan("a", &token(), ShapeAction::Flag, 5),
            Ok(vec!["a GitHub token"]),
            "a token at the end of the file was not found"
        );
    }

    #[test]
    fn credentials_in_urls_of_a_git_configuration_are_refused() {
        let config = |url: &str| {
            format!(
                "[core]\n\tbare = false\n[remote \"origin\"]\n\turl = {url}\n\tfetch = +refs/heads/*\n"
            )
        };
        let refused = |url: &str| scan(".git/config", &config(url), ShapeAction::Flag, 11);
        assert_eq!(
            refused("https://me:hunter2@example.org/a.git"),
            Err(URL_PASSWORD)
        );
        assert_eq!(
            refused("https://x-access-token:abc@example.org/a.git"),
            Err(URL_PASSWORD)
        );
        assert_eq!(
            refused(&format!("https://{}@github.com/a.git", token())),
            Err("a GitHub token")
        );
        for url in [
            "https://example.org/a.git",
            "ssh://git@example.org:22/a",
            "https://me@example.org/a@b:c",
            "git@example.org:a/b.git",
            "https://me:@example.org/",
        ] {
            assert_eq!(refused(url), Ok(vec![]), "{url}");
        }
        assert_eq!(
            scan(
                "docs/config",
                &config("https://me:hunter2@example.org/"),
                ShapeAction::Flag,
                11
            ),
            Ok(vec![]),
            "a URL outside a git configuration was flagged"
        );
        assert_eq!(
            scan(
                ".git/config",
                &config("https://me:hunter2@example.org/"),
                ShapeAction::Off,
                11
            ),
            Ok(vec![])
        );
    }

    #[test]
    fn the_memory_of_a_scan_is_bounded() {
        let scanner = Scanner::new(HeldSecrets::new([7; 32]), true);
        let mut scan = scanner.content(".git/config", ShapeAction::Flag);
        for size in [
            1,
            999,
            SCAN_CHUNK_BYTES,
            3 * SCAN_CHUNK_BYTES,
            2 * MAX_GIT_CONFIG_BYTES,
        ] {
            scan.feed(&vec![b'.'; size]);
            assert!(
                scan.recent.len() < 500 && scan.git_config.len() <= MAX_GIT_CONFIG_BYTES,
                "{}",
                scan.recent.len()
            );
        }
    }
}
