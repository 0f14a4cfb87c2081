//! Paths at which programs keep live credentials.
//!
//! Names are compared without regard to case: a workspace is also unpacked on file systems that make no difference.

/// What a path says about content with the shape of a credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A file in which programs keep credentials: any shape there is refused.
    Credentials,
    /// Where a private key is refused, and other shapes are not.
    KeyInHome,
    /// A configuration of git's: credentials in its URLs are refused.
    GitConfig,
    Anywhere,
}

const FILES: &[&str] = &[".netrc", ".git-credentials", ".npmrc", ".pypirc"];
const DIRECTORIES: &[&str] = &[".aws", ".ssh"];

/// Goes by the words of the path alone: a link inside the sandbox can lead elsewhere.
pub(super) fn place(path: &str) -> Place {
    let path = path.to_ascii_lowercase();
    let mut words: Vec<&str> = Vec::new();
    for word in path.split('/') {
        match word {
            "" | "." => {}
            ".." => drop(words.pop()),
            word => words.push(word),
        }
    }
    let Some((name, above)) = words.split_last() else {
        return Place::Anywhere;
    };
    let is_below = |directory: &str| above.contains(&directory);
    if name.starts_with(".env")
        || FILES.contains(name)
        || DIRECTORIES.iter().any(|directory| is_below(directory))
    {
        return Place::Credentials;
    }
    match (above, *name) {
        ([.., ".docker"], "config.json") => Place::Credentials,
        ([.., "home", _] | [.., "root"], name) if name.starts_with("id_") => Place::KeyInHome,
        // Of submodules and worktrees too: `.git/modules/<name>/config`.
        (_, "config" | "config.worktree") if is_below(".git") => Place::GitConfig,
        _ => Place::Anywhere,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_where_programs_keep_them() {
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
            assert_eq!(place(path), Place::Credentials, "{path}");
        }
        for path in [
            "/home/agent/id_rsa",
            "rootfs/home/me/id_ed25519",
            "/root/id_ecdsa",
        ] {
            assert_eq!(place(path), Place::KeyInHome, "{path}");
        }
        for path in [
            ".git/config",
            "sub/.git/config",
            ".git/modules/lib/config",
            "/workspace/.git/worktrees/w/config.worktree",
        ] {
            assert_eq!(place(path), Place::GitConfig, "{path}");
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
            assert_eq!(place(path), Place::Anywhere, "{path}");
        }
    }
}
