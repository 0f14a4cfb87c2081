//! Finds the git program that the git egress role runs.

use std::{
    path::Path,
    process::{Command, Stdio},
};

/// The first version with `http.curloptResolve`, by which git dials the checked addresses only.
const MIN_VERSION: (u32, u32) = (2, 37);

/// Why there is no usable git.
#[derive(Debug, PartialEq, Eq)]
pub enum Unusable {
    Missing(String),
    /// The line that it prints, which names a version that is too old or none.
    Version(String),
}

impl Unusable {
    pub fn message(&self) -> String {
        let (major, minor) = MIN_VERSION;
        match self {
            Self::Missing(error) => format!("git can't be run: {error}"),
            Self::Version(line) => format!("'{line}': version {major}.{minor} or later is needed"),
        }
    }

    pub const fn remedy() -> &'static str {
        "Install git (scripts/setup does), or name another one with --set \
         egress.git.git=/path/to/git."
    }
}

/// The version of a git program, as it prints it.
#[expect(
    clippy::disallowed_methods,
    reason = "only the program itself knows its version"
)]
pub fn version(program: &Path) -> Result<String, Unusable> {
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| Unusable::Missing(format!("{}: {error}", program.display())))?;
    let line = String::from_utf8_lossy(&output.stdout)
        .lines()
        .next()
        .unwrap_or_default()
        .to_owned();
    check(line)
}

fn check(line: String) -> Result<String, Unusable> {
    let version = line.strip_prefix("git version ").unwrap_or_default();
    let mut numbers = version.split('.').map_while(|part| part.parse().ok());
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) if (major, minor) >= MIN_VERSION => Ok(version.to_owned()),
        _ => Err(Unusable::Version(line)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_before_the_first_usable_one_is_refused() {
        for (line, version) in [
            ("git version 2.37.0", "2.37.0"),
            ("git version 2.39.5", "2.39.5"),
            ("git version 2.47.3 (Apple Git-1)", "2.47.3 (Apple Git-1)"),
            ("git version 3.0.rc1", "3.0.rc1"),
        ] {
            assert_eq!(check(line.to_owned()).as_deref(), Ok(version));
        }
        for line in [
            "git version 2.36.9",
            "git version 1.99",
            "git version x",
            "busybox",
            "",
        ] {
            assert_eq!(
                check(line.to_owned()),
                Err(Unusable::Version(line.to_owned()))
            );
        }
        assert!(matches!(
            super::version(Path::new("/nowhere/git")),
            Err(Unusable::Missing(_))
        ));
    }
}
