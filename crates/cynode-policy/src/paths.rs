//! Path normalization for rules.

/// The base of relative paths, as inside a sandbox.
const WORKSPACE: &str = "/workspace";

/// Normalizes a path for rules: absolute, relative ones resolved against `/workspace`, without `.`,
/// `..`, or redundant slashes.
///
/// The result is purely lexical, so a symbolic link inside the sandbox can point elsewhere: a rule
/// about paths limits what callers request. The sandbox's own permissions limit what its user can
/// touch.
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
