//! The content of one file, looked through for shapes as its place demands.

use super::{
    BEFORE, PIECE, Scanner, ShapeAction,
    places::{Place, place},
    shapes::PRIVATE_KEY,
};

/// A configuration of git's is looked at for credentials in URLs as far as this. Longer ones are looked at for shapes.
const MAX_GIT_CONFIG: usize = 1024 * 1024;
const URL_PASSWORD: &str = "a password in a URL";

/// Looks for shapes in the content of a file that comes in pieces.
pub struct ContentScan {
    scanner: Scanner,
    action: ShapeAction,
    place: Place,
    /// The end of what has come, as much as a shape that is not yet whole can need.
    recent: Vec<u8>,
    is_cut: bool,
    /// Each once.
    found: Vec<&'static str>,
    git_config: Vec<u8>,
}

impl Scanner {
    /// Starts on the content of the file at `path`.
    #[must_use]
    pub fn content(&self, path: &str, action: ShapeAction) -> ContentScan {
        let place = if action == ShapeAction::Off {
            Place::Anywhere
        } else {
            place(path)
        };
        ContentScan {
            scanner: self.clone(),
            action,
            place,
            recent: Vec::new(),
            is_cut: false,
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
        if self.place == Place::GitConfig {
            let room = MAX_GIT_CONFIG - self.git_config.len();
            self.git_config
                .extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
        for piece in bytes.chunks(PIECE) {
            self.recent.extend_from_slice(piece);
            self.look(false);
            let keep = BEFORE + self.scanner.0.shapes.longest();
            if self.recent.len() > keep {
                self.recent.drain(..self.recent.len() - keep);
                self.is_cut = true;
            }
        }
    }

    /// The shapes that are let in and reported, or the one for which the file is refused.
    pub fn finish(mut self) -> Result<Vec<&'static str>, &'static str> {
        if self.action == ShapeAction::Off {
            return Ok(Vec::new());
        }
        self.look(true);
        if let Some(shape) = url_credential(&self.git_config, &self.scanner) {
            return Err(shape);
        }
        let refused = match (self.action, self.place) {
            (ShapeAction::Refuse, _) | (_, Place::Credentials) => self.found.first(),
            (_, Place::KeyInHome) => self.found.iter().find(|shape| **shape == PRIVATE_KEY),
            (_, Place::GitConfig | Place::Anywhere) => None,
        };
        refused.map_or(Ok(()), |shape| Err(*shape))?;
        Ok(self.found)
    }

    fn look(&mut self, is_end: bool) {
        let (scanner, found) = (&self.scanner, &mut self.found);
        scanner.0.shapes.each(
            &self.recent,
            if self.is_cut { BEFORE } else { 0 },
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

/// Without the bytes, which may be of a secret.
impl std::fmt::Debug for ContentScan {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("ContentScan")
            .field("place", &self.place)
            .field("action", &self.action)
            .finish_non_exhaustive()
    }
}

/// A credential in the authority of a URL: `https://user:password@host`, or a token in place of the user.
fn url_credential(text: &[u8], scanner: &Scanner) -> Option<&'static str> {
    const MARK: &[u8] = b"://";
    let ends = |byte: &u8| {
        byte.is_ascii_whitespace()
            || matches!(byte, b'/' | b'"' | b'\'' | b'<' | b'>' | b'?' | b'#')
    };
    let mut rest = text;
    while let Some(at) = rest.windows(MARK.len()).position(|window| window == MARK) {
        rest = &rest[at + MARK.len()..];
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
    use super::{super::Held, *};

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
        let scanner = Scanner::new(Held::new([7; 32]), true);
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
                "each once"
            );
        }
        assert_eq!(scan(".env", "KEY=\n", flag, 3), Ok(vec![]));
    }

    #[test]
    fn what_a_border_of_two_pieces_cuts_is_no_token() {
        // One letter too many for a token; a reader that takes the end of a piece for the end of the file sees one.
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
            "the end of the file is one"
        );
    }

    #[test]
    fn a_configuration_of_git_holds_no_credential_in_its_urls() {
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
            "only in git's"
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
    fn a_scan_keeps_no_more_of_a_file_than_a_shape_can_need() {
        let scanner = Scanner::new(Held::new([7; 32]), true);
        let mut scan = scanner.content(".git/config", ShapeAction::Flag);
        for size in [1, 999, PIECE, 3 * PIECE, 2 * MAX_GIT_CONFIG] {
            scan.feed(&vec![b'.'; size]);
            assert!(
                scan.recent.len() < 500 && scan.git_config.len() <= MAX_GIT_CONFIG,
                "{}",
                scan.recent.len()
            );
        }
    }
}
