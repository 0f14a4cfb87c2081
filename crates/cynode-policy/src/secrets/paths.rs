//! Paths where programs keep live credentials.
//!
//! Names are compared case-insensitively: workspaces are also unpacked on case-insensitive file
//! systems.

/// How a path affects content with the shape of a credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathClass {
    /// A file for credentials: any shape is refused.
    Credentials,
    /// A private key is refused, other shapes are not.
    KeyInHome,
    /// A git configuration: credentials in its URLs are refused.
    GitConfig,
    Anywhere,
}

const CREDENTIAL_FILES: &[&str] = &[".netrc", ".git-credentials", ".npmrc", ".pypirc"];
const CREDENTIAL_DIRECTORIES: &[&str] = &[".aws", ".ssh"];
/// Further ones. The gate goes by what is in them: they hold much else.
const LOCAL_CREDENTIAL_DIRECTORIES: &[&str] = &[".azure", ".gnupg", ".password-store"];

/// The names on the way to a file. Purely lexical: a symbolic link can point elsewhere.
pub(super) fn split(path: &str) -> Vec<&str> {
    let mut words = Vec::new();
    for word in path.split('/') {
        match word {
            "" | "." => {}
            ".." => drop(words.pop()),
            word => words.push(word),
        }
    }
    words
}

/// Whether a directory of somebody's machine holds credentials, by its names in lower case.
pub(super) fn is_credential_directory(words: &[&str]) -> bool {
    match words {
        [.., ".config", "gcloud"] => true,
        [.., name] => {
            CREDENTIAL_DIRECTORIES.contains(name) || LOCAL_CREDENTIAL_DIRECTORIES.contains(name)
        }
        [] => false,
    }
}

pub(super) fn classify(path: &str) -> PathClass {
    let path = path.to_ascii_lowercase();
    let words = split(&path);
    let Some((name, above)) = words.split_last() else {
        return PathClass::Anywhere;
    };
    let is_below = |directory: &str| above.contains(&directory);
    if name.starts_with(".env")
        || CREDENTIAL_FILES.contains(name)
        || CREDENTIAL_DIRECTORIES
            .iter()
            .any(|directory| is_below(directory))
    {
        return PathClass::Credentials;
    }
    match (above, *name) {
        ([.., ".docker"], "config.json") => PathClass::Credentials,
        ([.., "home", _] | [.., "root"], name) if name.starts_with("id_") => PathClass::KeyInHome,
        // Includes submodules and worktrees: `.git/modules/<name>/config`.
        (_, "config" | "config.worktree") if is_below(".git") => PathClass::GitConfig,
        _ => PathClass::Anywhere,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    // invariant: no-secrets-inside
    fn known_credential_paths_are_recognized() {
        for path in [
            ".env",
            "/workspace/.env",
            "app/.env.production",
            ".envrc",
            "a/.ENV",
            "./x/../.netrc",
            "/home/agent/.netrc",
            ".git-credentials",
            ".npmrc",
            "packages/a/.npmrc",
            ".pypirc",
            ".aws/credentials",
            "/root/.aws/sso/cache/token.json",
            "home//me/.docker/./config.json",
            ".ssh/id_ed25519",
            ".ssh/keys/deploy",
        ] {
            assert_eq!(classify(path), PathClass::Credentials, "{path}");
        }
        for path in [
            "/home/agent/id_rsa",
            "rootfs/home/me/id_ed25519",
            "/root/id_ecdsa",
        ] {
            assert_eq!(classify(path), PathClass::KeyInHome, "{path}");
        }
        for path in [
            ".git/config",
            "sub/.git/config",
            ".git/modules/lib/config",
            "/workspace/.git/worktrees/w/config.worktree",
        ] {
            assert_eq!(classify(path), PathClass::GitConfig, "{path}");
        }
        for path in [
            "",
            "/",
            "..",
            "env",
            "src/env.rs",
            "tests/fixtures/id_rsa",
            "id_rsa",
            "home/agent/keys/id_rsa",
            ".aws",
            "aws/credentials",
            "docker/config.json",
            ".docker/other.json",
            "config",
            ".github/config",
            ".git/hooks/config.sample",
            ".env/../readme",
            "x.npmrc",
        ] {
            assert_eq!(classify(path), PathClass::Anywhere, "{path}");
        }
    }
}
