//! Paths as rules see them.

/// Where relative paths begin, as they do inside a sandbox.
const WORKSPACE: &str = "/workspace";

/// The path as rules see it: absolute, relative ones from `/workspace`, without `.`, `..`, or doubled and closing slashes.
///
/// It goes by the words alone and asks no file system, so a link inside the sandbox can lead elsewhere: a rule about paths is about
/// what callers ask for. What the sandbox's user may touch is the sandbox's to decide.
#[must_use]
pub fn within_workspace(path: &str) -> String {
    let start = if path.starts_with('/') { "" } else { WORKSPACE };
    let mut words: Vec<&str> = Vec::new();
    for word in start.split('/').chain(path.split('/')) {
        match word {
            "" | "." => {}
            ".." => drop(words.pop()),
            word => words.push(word),
        }
    }
    format!("/{}", words.join("/"))
}
