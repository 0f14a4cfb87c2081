//! Names of files that every system reads alike.
//!
//! A tree is checked out on other machines: by people, by CI, on file systems that ignore case,
//! some characters or trailing dots. A name is accepted only if it means the same on all of them.

use std::collections::{HashMap, HashSet};

use cynode_patch::{Location, MAX_PATH_BYTES, spells_git};

/// Longest component that common file systems store.
const MAX_COMPONENT_BYTES: usize = 255;

/// Characters that take no room and change how a name is shown, or that a file system ignores.
pub(crate) fn is_hidden(character: char) -> bool {
    matches!(character,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
        | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{feff}' | '\u{ffa0}'
        | '\u{fff0}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

/// Why no rule can admit a name.
pub(crate) fn check(path: &[u8]) -> Result<(), String> {
    let Ok(text) = std::str::from_utf8(path) else {
        return Err("the name is not UTF-8".to_owned());
    };
    if path.len() > MAX_PATH_BYTES {
        return Err("the name is too long".to_owned());
    }
    if text.contains(char::is_control) {
        return Err("the name has control characters".to_owned());
    }
    if text.contains(is_hidden) || text.contains(['\u{2028}', '\u{2029}']) {
        return Err("the name has invisible characters".to_owned());
    }
    // Windows also takes backslashes for separators.
    for part in text.split(['/', '\\']) {
        if matches!(part, "" | "." | "..") {
            return Err("the name has an empty component, '.' or '..'".to_owned());
        }
        if spells_git(part.as_bytes()) {
            return Err("the name is in a .git directory".to_owned());
        }
        if part.len() > MAX_COMPONENT_BYTES {
            return Err(format!(
                "a component of the name has more than {MAX_COMPONENT_BYTES} bytes"
            ));
        }
    }
    match Location::parse(path) {
        Ok(location) if location.as_bytes() == path => Ok(()),
        Ok(_) => Err("the name is not in its shortest form".to_owned()),
        Err(reason) => Err(reason.to_owned()),
    }
}

/// The name as the most lenient file system compares it.
pub(crate) fn fold(path: &[u8]) -> String {
    let text = String::from_utf8_lossy(path);
    let parts: Vec<String> = text.split('/').map(fold_component).collect();
    parts.join("/")
}

fn fold_component(part: &str) -> String {
    let visible: String = part.chars().filter(|it| !is_hidden(*it)).collect();
    visible
        .trim_end_matches(['.', ' '])
        .chars()
        // Also joins letters that have a common capital, such as the long s.
        .flat_map(char::to_uppercase)
        .flat_map(char::to_lowercase)
        .collect()
}

/// Finds, for each of some paths of a tree, another path or directory of the tree that a file
/// system could take for it or for one of its directories.
pub(crate) fn collisions<'a>(
    created: impl IntoIterator<Item = &'a [u8]>,
    tree: impl IntoIterator<Item = &'a [u8]>,
) -> HashMap<&'a [u8], Vec<u8>> {
    let created: Vec<&[u8]> = created.into_iter().collect();
    let mut spellings: HashMap<String, HashSet<&[u8]>> = HashMap::new();
    for path in &created {
        for prefix in prefixes(path) {
            spellings.entry(fold(prefix)).or_default();
        }
    }
    let mut previous: &[u8] = b"";
    for path in tree {
        for prefix in prefixes(path) {
            // Neighbours share their directories.
            if previous.starts_with(prefix) && previous.get(prefix.len()) == Some(&b'/') {
                continue;
            }
            if let Some(found) = spellings.get_mut(&fold(prefix)) {
                found.insert(prefix);
            }
        }
        previous = path;
    }
    let mut found = HashMap::new();
    for path in created {
        let other = prefixes(path).find_map(|prefix| {
            let others = spellings.get(&fold(prefix))?;
            others.iter().filter(|other| **other != prefix).min()
        });
        if let Some(other) = other {
            found.insert(path, other.to_vec());
        }
    }
    found
}

/// The directories of a path from the topmost, and the path itself.
fn prefixes(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    let ends = path
        .iter()
        .enumerate()
        .filter(|(_, byte)| **byte == b'/')
        .map(|(index, _)| index)
        .chain([path.len()]);
    ends.map(|end| &path[..end])
}

/// Why a symbolic link may lead out of the tree, whatever else is in it. `is_link` says whether a
/// path of the tree is a symbolic link.
pub(crate) fn check_link(
    path: &[u8],
    target: &[u8],
    is_link: impl Fn(&[u8]) -> bool,
) -> Result<(), String> {
    let Ok(text) = std::str::from_utf8(target) else {
        return Err("its target is not UTF-8".to_owned());
    };
    if text.is_empty() || text.len() > MAX_PATH_BYTES || text.contains(char::is_control) {
        return Err("its target is empty, too long, or has control characters".to_owned());
    }
    let is_drive = text.as_bytes().get(1) == Some(&b':');
    if text.starts_with(['/', '\\', '~']) || is_drive || text.contains('\\') {
        return Err("its target is not relative".to_owned());
    }
    let mut place: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
    place.pop();
    let mut has_descended = false;
    let parts: Vec<&str> = text
        .split('/')
        .filter(|part| !matches!(*part, "" | "."))
        .collect();
    for (index, part) in parts.iter().enumerate() {
        if *part == ".." {
            // After a name, the name could be a link, and '..' then leads elsewhere.
            if has_descended {
                return Err("its target has '..' after a name".to_owned());
            }
            if place.pop().is_none() {
                return Err("its target is outside of the repository".to_owned());
            }
            continue;
        }
        if spells_git(part.as_bytes()) {
            return Err("its target is in a .git directory".to_owned());
        }
        has_descended = true;
        place.push(part.as_bytes());
        if index + 1 < parts.len() && is_link(&place.join(&b'/')) {
            return Err("its target passes through another symbolic link".to_owned());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_some_system_reads_differently_are_refused() {
        for name in [
            "/etc/passwd",
            "../x",
            "a/../b",
            "a//b",
            "./a",
            "a/",
            "",
            ".git/config",
            "a/.GIT/hooks/x",
            ".git./config",
            ".git /config",
            ".git::$INDEX_ALLOCATION/config",
            "git~1/config",
            ".gi\u{200c}t/config",
            "a\\.git\\config",
            "a\\..\\..\\x",
            "a\nb",
            "a\u{7f}",
            "gpj.\u{202e}exe",
            "a\u{200b}b",
        ] {
            assert!(check(name.as_bytes()).is_err(), "{name:?}");
        }
        assert!(check(b"\xff").is_err());
        assert!(check(&[b'x'; 256]).is_err());
        for name in [".gitignore", "a/b c/ä.txt", "..a", "a..", "git", "a-b_c+d"] {
            assert_eq!(check(name.as_bytes()), Ok(()), "{name:?}");
        }
    }

    #[test]
    fn names_collide_as_on_the_most_lenient_file_system() {
        let tree = ["src/Main.rs", "src/main.rs", "docs/a", "x/y"];
        let found = |created: &str| {
            let mut all: Vec<&[u8]> = tree.iter().map(|path| path.as_bytes()).collect();
            all.push(created.as_bytes());
            all.sort_unstable();
            collisions([created.as_bytes()], all)
                .into_values()
                .next()
                .map(|other| String::from_utf8_lossy(&other).into_owned())
        };
        assert_eq!(found("src/MAIN.rs").as_deref(), Some("src/Main.rs"));
        assert_eq!(found("Docs/b").as_deref(), Some("docs"));
        assert_eq!(found("X").as_deref(), Some("x"));
        assert_eq!(found("docs/a.").as_deref(), Some("docs/a"));
        assert_eq!(found("docs/b"), None);
        assert_eq!(found("x/z"), None);
    }

    #[test]
    fn a_link_stays_inside_whatever_the_tree_has() {
        let check = |path: &str, target: &str| {
            check_link(path.as_bytes(), target.as_bytes(), |it| it == b"lib/link")
        };
        for (path, target) in [
            ("a", "/etc/passwd"),
            ("a", ".."),
            ("a", "../x"),
            ("d/a", "../../x"),
            ("a", "b/../../x"),
            ("a", "b/../c"),
            ("a", "lib/link/passwd"),
            ("d/a", "../lib/link/x"),
            ("a", ".git/config"),
            ("d/a", "../.GIT/config"),
            ("a", "C:/x"),
            ("a", "..\\x"),
            ("a", "~/x"),
            ("a", ""),
            ("a", "b\n"),
        ] {
            assert!(check(path, target).is_err(), "{path} -> {target}");
        }
        for (path, target) in [
            ("a", "b"),
            ("d/a", "../b"),
            ("d/e/a", "../../lib/link"),
            ("a", "./b/c"),
        ] {
            assert_eq!(check(path, target), Ok(()), "{path} -> {target}");
        }
    }
}
