//! The role's key, and the credentials that it opens.
//!
//! Invariant: a secret leaves this module only for the project, scheme, host, port and path that
//! were sealed with it. What the database says of a credential is not used.

use std::{io, path::Path};

use cynode_api::{CredentialPlaintext, ProjectId, SealedCredential};
use cynode_service::{
    files::replace,
    seal::{SealError, SealedValue, SealingKey},
};
use serde::{Deserialize, Serialize};

use crate::{git::command::Credential, location::RepositoryLocation};

/// The version of plaintexts and of the key file.
const VERSION: u32 = 1;

/// Why a credential is not used. None says what is in it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VaultError {
    #[error("the credential is sealed to the key {found}, and this role has the key {own}")]
    OtherKey { found: String, own: String },
    #[error("the credential does not open")]
    Open(#[source] SealError),
    #[error("the credential's content is not valid")]
    Content,
    #[error("the credential is not for this repository")]
    OtherPlace,
}

/// The key of the git role.
#[derive(Debug)]
pub(crate) struct Vault {
    role: &'static str,
    key: SealingKey,
}

/// The key file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredKey {
    version: u32,
    public: String,
    private: String,
}

impl Vault {
    /// Reads the role's key, and creates it if there is none. A damaged file is an error: another
    /// key would make every stored credential useless.
    pub(crate) fn open(path: &Path, role: &'static str) -> io::Result<Self> {
        match fs_err::read(path) {
            Ok(bytes) => {
                let key = parse_key(&bytes).ok_or_else(|| {
                    io::Error::new(
                        io::ErrorKind::InvalidData,
                        format!(
                            "{} is not a key of this role: restore it from a backup, or remove \
                             it and rotate every credential",
                            path.display()
                        ),
                    )
                })?;
                Ok(Self { role, key })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let key = SealingKey::generate().map_err(io::Error::other)?;
                let stored = StoredKey {
                    version: VERSION,
                    public: hex::encode(key.public()),
                    private: hex::encode(key.private()),
                };
                replace(path, &serde_json::to_vec(&stored)?)?;
                Ok(Self { role, key })
            }
            Err(error) => Err(error),
        }
    }

    pub(crate) fn key_id(&self) -> String {
        self.key.id()
    }

    pub(crate) fn public_key(&self) -> &[u8] {
        self.key.public()
    }

    /// Opens a credential for a repository of a project.
    pub(crate) fn open_for(
        &self,
        sealed: &SealedCredential,
        project: ProjectId,
        location: &RepositoryLocation,
    ) -> Result<CredentialPlaintext, VaultError> {
        let own = self.key_id();
        if sealed.key_id != own {
            return Err(VaultError::OtherKey {
                found: sealed.key_id.chars().take(64).collect(),
                own,
            });
        }
        let value = SealedValue {
            encapsulated: sealed.encapsulated.0.clone(),
            ciphertext: sealed.ciphertext.0.clone(),
        };
        let opened = self
            .key
            .open(self.role, &sealed.id.to_string(), &value)
            .map_err(VaultError::Open)?;
        // An error of the parser could quote the secret.
        let plaintext: CredentialPlaintext =
            serde_json::from_slice(&opened).map_err(|_| VaultError::Content)?;
        if plaintext.version != VERSION || !is_one_line(&plaintext) {
            return Err(VaultError::Content);
        }
        let is_for = plaintext.project_id == project
            && plaintext.scheme == location.scheme()
            && plaintext.scheme == "https"
            && plaintext.host.eq_ignore_ascii_case(location.host())
            && plaintext.port == location.port()
            && is_below(location.path(), &plaintext.path_prefix);
        if !is_for {
            return Err(VaultError::OtherPlace);
        }
        Ok(plaintext)
    }
}

/// What git's helper answers.
pub(crate) fn git_credential(plaintext: &CredentialPlaintext) -> Credential {
    Credential {
        path_prefix: plaintext.path_prefix.clone(),
        username: plaintext.username.clone(),
        secret: plaintext.secret.clone(),
    }
}

fn parse_key(bytes: &[u8]) -> Option<SealingKey> {
    let stored: StoredKey = serde_json::from_slice(bytes).ok()?;
    if stored.version != VERSION {
        return None;
    }
    let (public, private) = (
        hex::decode(stored.public).ok()?,
        hex::decode(stored.private).ok()?,
    );
    SealingKey::from_parts(&public, &private).ok()
}

/// A line end would add a line to what git's helper answers.
fn is_one_line(plaintext: &CredentialPlaintext) -> bool {
    [&plaintext.username, &plaintext.secret]
        .iter()
        .all(|text| !text.is_empty() && !text.contains(['\n', '\r', '\0']))
}

/// Whether a path is the prefix or below it, by whole components. Both begin with a slash.
pub(crate) fn is_below(path: &str, prefix: &str) -> bool {
    let components = |text: &str| -> Option<Vec<String>> {
        let parts: Vec<String> = text
            .strip_prefix('/')?
            .trim_end_matches('/')
            .split('/')
            .map(str::to_owned)
            .collect();
        // `a/../b` is below `a` and is not.
        let is_plain = |part: &String| !matches!(part.as_str(), "" | "." | "..");
        if parts == [""] {
            return Some(Vec::new());
        }
        parts.iter().all(is_plain).then_some(parts)
    };
    match (components(path), components(prefix)) {
        (Some(path), Some(prefix)) => path.starts_with(&prefix),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::{Base64Bytes, CredentialId};
    use cynode_service::seal::seal;

    use super::*;

    const SECRET: &str = "planted-secret-value";

    fn plaintext(project: ProjectId) -> CredentialPlaintext {
        CredentialPlaintext {
            version: 1,
            project_id: project,
            scheme: "https".to_owned(),
            host: "git.example".to_owned(),
            port: 443,
            path_prefix: "/team".to_owned(),
            username: "robot".to_owned(),
            secret: SECRET.to_owned(),
        }
    }

    fn sealed(vault: &Vault, plaintext: &CredentialPlaintext) -> SealedCredential {
        let id = CredentialId::generate();
        let text = serde_json::to_vec(plaintext).expect("serializes");
        let value = seal("git", &id.to_string(), vault.public_key(), &text).expect("sealed");
        SealedCredential {
            id,
            key_id: vault.key_id(),
            encapsulated: Base64Bytes(value.encapsulated),
            ciphertext: Base64Bytes(value.ciphertext),
        }
    }

    fn at(url: &str) -> RepositoryLocation {
        RepositoryLocation::parse(url).expect("a location")
    }

    #[test]
    fn a_key_is_kept_and_a_damaged_one_is_not_replaced() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("key");
        let first = Vault::open(&path, "git").expect("created");
        assert_eq!(
            Vault::open(&path, "git").expect("read").key_id(),
            first.key_id()
        );
        fs_err::write(&path, "{}").expect("written");
        assert!(Vault::open(&path, "git").is_err());
        assert_eq!(fs_err::read(&path).expect("there"), b"{}");
    }

    #[test]
    fn a_credential_is_used_where_it_was_sealed_for_and_nowhere_else() {
        let root = tempfile::tempdir().expect("a directory");
        let vault = Vault::open(&root.path().join("key"), "git").expect("created");
        let project = ProjectId::generate();
        let credential = sealed(&vault, &plaintext(project));
        for url in [
            "https://git.example/team/app.git",
            "https://git.example:443/team",
            "https://GIT.example/team/a/b",
        ] {
            let opened = vault
                .open_for(&credential, project, &at(url))
                .expect("opens");
            assert_eq!(opened.secret, SECRET, "{url}");
        }
        for url in [
            "https://git.example/teammate/app.git",
            "https://git.example/other/app.git",
            "https://git.example:8443/team/app.git",
            "https://evil.example/team/app.git",
        ] {
            assert!(
                matches!(
                    vault.open_for(&credential, project, &at(url)),
                    Err(VaultError::OtherPlace)
                ),
                "{url}"
            );
        }
        assert!(matches!(
            vault.open_for(
                &credential,
                ProjectId::generate(),
                &at("https://git.example/team/app.git")
            ),
            Err(VaultError::OtherPlace)
        ));
    }

    #[test]
    fn a_credential_of_another_id_or_key_does_not_open_and_no_error_quotes_it() {
        let root = tempfile::tempdir().expect("a directory");
        let vault = Vault::open(&root.path().join("key"), "git").expect("created");
        let project = ProjectId::generate();
        let place = at("https://git.example/team/app.git");
        let good = sealed(&vault, &plaintext(project));
        let moved = SealedCredential {
            id: CredentialId::generate(),
            ..good.clone()
        };
        assert!(matches!(
            vault.open_for(&moved, project, &place),
            Err(VaultError::Open(_))
        ));
        let other = SealedCredential {
            key_id: "0123456789abcdef".to_owned(),
            ..good
        };
        assert!(matches!(
            vault.open_for(&other, project, &place),
            Err(VaultError::OtherKey { .. })
        ));
        let two_lines = CredentialPlaintext {
            username: format!("robot\npassword={SECRET}"),
            ..plaintext(project)
        };
        let error = vault
            .open_for(&sealed(&vault, &two_lines), project, &place)
            .expect_err("refused");
        assert!(matches!(error, VaultError::Content));
        assert!(!format!("{error:?} {error}").contains(SECRET));
    }

    #[test]
    fn a_path_is_below_a_prefix_by_whole_components() {
        for (path, prefix) in [
            ("/a/b", "/a"),
            ("/a/b", "/a/"),
            ("/a", "/a"),
            ("/a/", "/a"),
            ("/a", "/"),
            ("/", "/"),
        ] {
            assert!(is_below(path, prefix), "{path} {prefix}");
        }
        for (path, prefix) in [
            ("/ab", "/a"),
            ("/a", "/a/b"),
            ("/b/a", "/a"),
            ("/a/../b", "/a"),
            ("/a//b", "/a"),
            ("a", "/a"),
            ("/a", ""),
            ("/a", "a"),
        ] {
            assert!(!is_below(path, prefix), "{path} {prefix}");
        }
    }
}
