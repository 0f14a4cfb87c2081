//! Scans a file of somebody's machine that is about to be copied into a sandbox with its directory.
//!
//! Stricter than a [`ContentScan`](super::ContentScan): the gate refuses a whole call, so it goes by
//! what looks like a credential. Here a file only stays out, and is named, so its name is enough.

use super::{
    ContentScan, Scanner, ShapeAction, Watch,
    content::MAX_GIT_CONFIG_BYTES,
    paths::{PathClass, classify, is_credential_directory, split},
    shapes::PRIVATE_KEY,
};

const CREDENTIALS: &str = "a file for credentials";
const KEY_STORE: &str = "a store of keys";
const NPM_CREDENTIAL: &str = "an npm credential";

/// Hold variables without values, or with samples.
const SAMPLES: &[&str] = &[".dist", ".example", ".sample", ".template"];
/// Files that hold credentials beside those that the gate knows.
const CREDENTIAL_FILES: &[&str] = &[".pgpass", ".my.cnf", ".vault-token", ".terraformrc"];
/// The same, in the directory with this name.
const CREDENTIAL_FILES_IN: &[(&str, &str)] = &[
    (".cargo", "credentials"),
    (".cargo", "credentials.toml"),
    (".composer", "auth.json"),
    (".kube", "config"),
    ("gh", "hosts.yml"),
];
const KEY_FILES: &[&str] = &[
    "id_dsa",
    "id_ecdsa",
    "id_ecdsa_sk",
    "id_ed25519",
    "id_ed25519_sk",
    "id_rsa",
];
const KEY_STORES: &[&str] = &[".jks", ".kdbx", ".keystore", ".p12", ".pfx"];
/// Hold certificates as well as keys, so the content decides.
const KEY_MATERIAL: &[&str] = &[".key", ".p8", ".pem", ".ppk"];
/// What files of keys begin with, whatever their names: PEM blocks, one of which may be a key, what
/// `openssl pkcs12` writes before them, and PuTTY's header.
const KEY_BEGINNINGS: &[&[u8]] = &[b"-----BEGIN ", b"Bag Attributes", b"PuTTY-User-Key-File-"];
const PUTTY_BEGINNING: &[u8] = b"PuTTY-User-Key-File-";
/// The beginning of a file that shows what kind of file it is. Credentials in JSON are shorter.
const MAX_BEGINNING_BYTES: usize = 64 * 1024;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Scans one file, chunk by chunk.
#[derive(Debug)]
pub struct LocalScan {
    content: ContentScan,
    /// Finds the system's own tokens.
    system: Watch,
    system_token: Option<&'static str>,
    /// The name is one of files that hold keys or certificates.
    may_hold_key: bool,
    beginning: Vec<u8>,
    is_longer: bool,
    /// The beginning of an npm configuration.
    npm_config: Option<Vec<u8>>,
}

/// Why everything below a local directory stays out, if it does.
#[must_use]
pub fn local_directory(path: &str) -> Option<&'static str> {
    let lower = path.to_ascii_lowercase();
    is_credential_directory(&split(&lower)).then_some("a directory for credentials")
}

/// Why a local file stays out whatever it contains, if it does: what it is.
#[must_use]
pub fn local_file(path: &str) -> Option<&'static str> {
    let lower = path.to_ascii_lowercase();
    let words = split(&lower);
    let (name, above) = words.split_last()?;
    let is_any = |names: &[&str]| names.contains(name);
    let ends_in = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
    if is_any(KEY_FILES) {
        return Some(PRIVATE_KEY);
    }
    if ends_in(KEY_STORES) {
        return Some(KEY_STORE);
    }
    let parent = above.last().copied().unwrap_or_default();
    if is_any(CREDENTIAL_FILES) || CREDENTIAL_FILES_IN.contains(&(parent, name)) {
        return Some(CREDENTIALS);
    }
    let is_below_directory = (1..words.len()).any(|end| is_credential_directory(&words[..end]));
    let is_decided_by_content = *name == ".npmrc" || name.starts_with(".env") && ends_in(SAMPLES);
    let is_for_credentials = classify(path) == PathClass::Credentials && !is_decided_by_content;
    (is_below_directory || is_for_credentials).then_some(CREDENTIALS)
}

impl Scanner {
    /// Starts a scan of the local file at `path`.
    #[must_use]
    pub fn local(&self, path: &str) -> LocalScan {
        let lower = path.to_ascii_lowercase();
        let name = lower.rsplit('/').next().unwrap_or_default();
        LocalScan {
            content: self.content(path, ShapeAction::Flag),
            system: self.system_only().watch(),
            system_token: None,
            may_hold_key: KEY_MATERIAL.iter().any(|ending| name.ends_with(ending)),
            beginning: Vec::new(),
            is_longer: false,
            npm_config: (name == ".npmrc").then(Vec::new),
        }
    }
}

impl LocalScan {
    pub fn feed(&mut self, bytes: &[u8]) {
        self.content.feed(bytes);
        let room = MAX_BEGINNING_BYTES - self.beginning.len();
        self.is_longer |= bytes.len() > room;
        self.beginning
            .extend_from_slice(&bytes[..bytes.len().min(room)]);
        if self.system_token.is_none() {
            self.system_token = self.system.feed(bytes).map(|hit| hit.what);
        }
        if let Some(config) = &mut self.npm_config {
            let room = MAX_GIT_CONFIG_BYTES - config.len();
            config.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
    }

    /// What the file contains if it stays out.
    pub fn finish(self) -> Result<(), &'static str> {
        if let Some(token) = self.system_token {
            return Err(token);
        }
        if self.npm_config.as_deref().is_some_and(has_npm_credential) {
            return Err(NPM_CREDENTIAL);
        }
        let beginning = text_of(&self.beginning);
        if beginning.starts_with(PUTTY_BEGINNING) {
            return Err(PRIVATE_KEY);
        }
        let is_of_keys = self.may_hold_key
            || KEY_BEGINNINGS.iter().any(|it| beginning.starts_with(it))
            || !self.is_longer && is_json_credential(beginning);
        let shapes = self.content.finish()?;
        if is_of_keys && shapes.contains(&PRIVATE_KEY) {
            return Err(PRIVATE_KEY);
        }
        Ok(())
    }
}

/// The text without what may precede its first word.
fn text_of(bytes: &[u8]) -> &[u8] {
    let text = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
    text.trim_ascii_start()
}

/// Whether a text is a JSON object with a private key as a member, such as the credential of a
/// service account. Objects that have keys deeper inside are test vectors and the like.
fn is_json_credential(text: &[u8]) -> bool {
    if text.first() != Some(&b'{') {
        return false;
    }
    let members = serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(text);
    members.is_ok_and(|members| {
        ["private_key", "privateKey"].iter().any(|name| {
            let key = members.get(*name).and_then(serde_json::Value::as_str);
            key.is_some_and(|key| key.trim_start().starts_with("-----BEGIN "))
        })
    })
}

/// Whether a line sets a token or a password to a value, and not to one of the environment.
fn has_npm_credential(text: &[u8]) -> bool {
    const KEYS: &[&[u8]] = &[b"_auth", b"_authtoken", b"_password"];
    text.split(|byte| matches!(byte, b'\n' | b'\r'))
        .any(|line| {
            let Some(equals) = line.iter().position(|byte| *byte == b'=') else {
                return false;
            };
            let key = line[..equals].trim_ascii().to_ascii_lowercase();
            let key = key.rsplit(|byte| *byte == b':').next().unwrap_or_default();
            let value = line[equals + 1..].trim_ascii();
            let value = value.strip_prefix(b"\"").unwrap_or(value);
            KEYS.contains(&key) && !value.is_empty() && !value.starts_with(b"${")
        })
}

#[cfg(test)]
mod tests {
    use super::{super::HeldSecrets, *};

    fn scan(path: &str, content: &str) -> Result<(), &'static str> {
        let mut results = [1, 7, 10_000].map(|piece| {
            let mut scan = Scanner::new(HeldSecrets::new([7; 32]), true).local(path);
            let pieces = content.as_bytes().chunks(piece);
            pieces.for_each(|piece| scan.feed(piece));
            scan.finish()
        });
        results.sort_unstable();
        assert_eq!(results[0], results[2], "{path} depends on how it is split");
        results[0]
    }

    fn github_token() -> String {
        ["gh", "p_", &"A7q3Zx9LmK2vRt5YwB8n".repeat(2)[..36]].concat()
    }

    #[test]
    // invariant: no-secrets-inside
    fn files_for_credentials_are_known_by_name() {
        for path in [
            "/home/me/app/.env",
            ".env.production",
            "sub/.ENV.local",
            ".envrc",
            ".netrc",
            ".git-credentials",
            ".pypirc",
            ".aws/config",
            ".docker/config.json",
            ".ssh/known_hosts",
            ".ssh/.npmrc",
            ".aws/.env.example",
            ".config/gcloud/configurations/default",
            ".kube/config",
            ".config/gh/hosts.yml",
            ".cargo/credentials.toml",
            ".pgpass",
        ] {
            assert_eq!(local_file(path), Some(CREDENTIALS), "{path}");
        }
        for path in ["id_rsa", "deploy/id_ed25519"] {
            assert_eq!(local_file(path), Some(PRIVATE_KEY), "{path}");
        }
        assert_eq!(local_file("android/release.KEYSTORE"), Some(KEY_STORE));
        for path in [
            "",
            "/",
            ".npmrc",
            ".env.example",
            "src/env.rs",
            "id_rsa.pub",
            "certificate.pem",
            ".cargo/config.toml",
            "environment",
        ] {
            assert_eq!(local_file(path), None, "{path}");
        }
        for path in ["/home/me/.aws", ".SSH", ".gnupg", ".config/gcloud"] {
            assert!(local_directory(path).is_some(), "{path}");
        }
        for path in ["", "/", "aws", ".aws/../src", ".config", "gcloud"] {
            assert_eq!(local_directory(path), None, "{path}");
        }
    }

    #[test]
    // invariant: no-secrets-inside
    fn the_content_decides_about_other_files() {
        let token = format!("KEY={}\n", github_token());
        assert_eq!(scan(".env.example", &token), Err("a GitHub token"));
        assert_eq!(scan(".env.example", "KEY=\n"), Ok(()));
        assert_eq!(scan("tests/auth.rs", &token), Ok(()), "a sample");
        let ours = format!("{}_{}", "cyn", "A7q3Zx9LmK2vRt5YwB8n".repeat(3));
        assert!(scan("notes.txt", &ours).is_err());
        let key = [
            "-----BEGIN ",
            "RSA PRIVATE",
            " KEY-----\n",
            &"A7q3Zx9LmK2vRt5YwB8n".repeat(4),
        ]
        .concat();
        assert_eq!(scan("server.PEM", &key), Err(PRIVATE_KEY));
        assert_eq!(scan("server.pem", "-----BEGIN CERTIFICATE-----\n"), Ok(()));
        for before in [
            "",
            "\u{feff}",
            "\r\n  \n",
            "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n",
            "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
            "Bag Attributes\n    localKeyID: 01\nKey Attributes: <No Attributes>\n",
        ] {
            let file = format!("{before}{key}");
            for name in ["deploy", "notes", "tests/data/key.txt", "src/key.rs"] {
                assert_eq!(scan(name, &file), Err(PRIVATE_KEY), "{name} {before:?}");
            }
        }
        assert_eq!(
            scan("key", "PuTTY-User-Key-File-3: ssh-ed25519\n"),
            Err(PRIVATE_KEY)
        );
        let members = |member: &str| {
            let kind = "service_account";
            serde_json::json!({"type": kind, member: key, "client_id": "1"})
        };
        assert_eq!(
            scan("gcp.json", &members("private_key").to_string()),
            Err(PRIVATE_KEY)
        );
        let pretty = format!("\n{:#}\n", members("privateKey"));
        assert_eq!(scan("account", &pretty), Err(PRIVATE_KEY));
        // Samples inside of other files come in, and are named when they are stored.
        let vectors = serde_json::json!({ "tests": [members("private_key")] });
        assert_eq!(scan("vectors.json", &vectors.to_string()), Ok(()));
        assert_eq!(
            scan("src/key.rs", &format!("const KEY: &str = \"{key}\"")),
            Ok(())
        );
        assert_eq!(scan("README", &format!("Like this:\n{key}")), Ok(()));
        assert_eq!(scan("settings.toml", &token), Ok(()));
        assert_eq!(
            scan("key.pub", "-----BEGIN PUBLIC KEY-----\nMFkw\n"),
            Ok(())
        );
        assert_eq!(
            scan(
                ".git/config",
                "url = https://me:hunter2@example.org/a.git\n"
            ),
            Err("a password in a URL")
        );
    }

    #[test]
    fn an_npm_configuration_stays_out_if_it_sets_a_token() {
        for line in [
            "//registry.example.org/:_authToken=abc",
            "_auth = YWJj",
            "//registry.example.org/:_password=\"abc\"",
            "a=b\r\n_authtoken=abc\r\n",
        ] {
            assert_eq!(scan("web/.npmrc", line), Err(NPM_CREDENTIAL), "{line}");
        }
        for line in [
            "registry=https://registry.example.org/",
            "//registry.example.org/:_authToken=${NPM_TOKEN}",
            "//registry.example.org/:_authToken=\"${NPM_TOKEN}\"",
            "_authToken=",
            "; _authToken",
            "save-exact=true",
        ] {
            assert_eq!(scan("web/.npmrc", line), Ok(()), "{line}");
        }
    }
}
