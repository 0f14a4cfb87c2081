//! Tokens: random ones for callers, derived ones for nodes.
//!
//! Node tokens are derived from the orchestrators' key and an epoch that rises with each rotation,
//! so that the database contains no valid token.

use std::{io, path::Path, sync::Arc};

use aws_lc_rs::{
    aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey},
    hmac, rand,
};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use cynode_api::{JobId, NodeId, PromotionId, SessionId, TOKEN_PREFIX, TokenId};

/// The orchestrators' key, shared by all orchestrators of a database.
#[derive(Clone)]
pub(crate) struct Keys(Arc<hmac::Key>);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys(…)")
    }
}

impl Keys {
    /// Reads the key, or creates it.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let text = cynode_service::files::read_or_create_token(path)?;
        Ok(Self(Arc::new(hmac::Key::new(
            hmac::HMAC_SHA256,
            text.as_bytes(),
        ))))
    }

    /// Authenticates the orchestrators to the node's Worker API.
    pub(crate) fn worker_token(&self, node: NodeId, epoch: i64) -> String {
        self.derived("worker", node, epoch)
    }

    /// Authenticates the node to the orchestrators.
    pub(crate) fn node_token(&self, node: NodeId, epoch: i64) -> String {
        self.derived("node", node, epoch)
    }

    /// Distinguishes this key from others.
    pub(crate) fn fingerprint(&self) -> String {
        URL_SAFE_NO_PAD.encode(hmac::sign(&self.0, b"fingerprint"))
    }

    /// The seed of the audit signing key.
    pub(crate) fn audit_seed(&self) -> [u8; 32] {
        self.seed(b"audit checkpoints")
    }

    /// The seed of the fingerprints of held secrets.
    pub(crate) fn secrets_seed(&self) -> [u8; 32] {
        self.seed(b"held secrets")
    }

    /// The id of the session that a token's calls use when they name none. All orchestrators
    /// compute the same id, and nobody else can predict it.
    pub(crate) fn own_session(&self, token: TokenId, generation: i64) -> SessionId {
        let text = format!("own session\0{token}\0{generation}");
        let tag = hmac::sign(&self.0, text.as_bytes());
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&tag.as_ref()[..16]);
        SessionId::from_uuid(uuid::Builder::from_custom_bytes(bytes).into_uuid())
    }

    /// The id of the job that checks a commit. Nobody else can predict it, so that no other job can
    /// pass for the check.
    pub(crate) fn check_job(
        &self,
        promotion: PromotionId,
        round: u32,
        revision: i64,
        check: &str,
        commit: &str,
    ) -> JobId {
        let text = format!("check\0{promotion}\0{round}\0{revision}\0{commit}\0{check}");
        let tag = hmac::sign(&self.0, text.as_bytes());
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&tag.as_ref()[..16]);
        JobId::from_uuid(uuid::Builder::from_custom_bytes(bytes).into_uuid())
    }

    /// Encrypts what finds a credential in input. The hashes are keyed already; encrypted, they say
    /// nothing at all to whoever reads the database.
    pub(crate) fn encrypt_held(&self, mut forms: Vec<u8>) -> Vec<u8> {
        let key = RandomizedNonceKey::new(&AES_256_GCM, &self.seed(b"held credentials"))
            .expect("a key of 32 bytes");
        let nonce = key
            .seal_in_place_append_tag(Aad::empty(), &mut forms)
            .expect("a short text");
        let mut encrypted = nonce.as_ref().to_vec();
        encrypted.append(&mut forms);
        encrypted
    }

    /// `None` for what another key encrypted.
    pub(crate) fn decrypt_held(&self, encrypted: &[u8]) -> Option<Vec<u8>> {
        let key = RandomizedNonceKey::new(&AES_256_GCM, &self.seed(b"held credentials")).ok()?;
        let (nonce, forms) = encrypted.split_at_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let mut forms = forms.to_vec();
        let length = key
            .open_in_place(nonce, Aad::empty(), &mut forms)
            .ok()?
            .len();
        forms.truncate(length);
        Some(forms)
    }

    fn seed(&self, purpose: &[u8]) -> [u8; 32] {
        let tag = hmac::sign(&self.0, purpose);
        tag.as_ref().try_into().expect("a tag of 32 bytes")
    }

    fn derived(&self, purpose: &str, node: NodeId, epoch: i64) -> String {
        let tag = hmac::sign(&self.0, format!("{purpose}\0{node}\0{epoch}").as_bytes());
        format!("{TOKEN_PREFIX}{}", URL_SAFE_NO_PAD.encode(tag))
    }
}

/// A new token of 256 random bits.
pub(crate) fn random_token() -> String {
    let mut bytes = [0; 32];
    rand::fill(&mut bytes).expect("the system has randomness");
    format!("{TOKEN_PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encrypted_hashes_open_only_with_the_key() {
        let directory = tempfile::tempdir().expect("a directory");
        let open = |name: &str| Keys::open(&directory.path().join(name)).expect("made");
        let encrypted = open("key").encrypt_held(b"forms".to_vec());
        assert!(memchr::memmem::find(&encrypted, b"forms").is_none());
        assert_eq!(
            open("key").decrypt_held(&encrypted).as_deref(),
            Some(b"forms".as_slice())
        );
        assert_eq!(open("other").decrypt_held(&encrypted), None);
        assert_eq!(open("key").decrypt_held(&encrypted[1..]), None);
        assert_eq!(open("key").decrypt_held(b""), None);
    }

    #[test]
    fn own_sessions_are_stable_and_differ_by_key_token_and_generation() {
        let directory = tempfile::tempdir().expect("a directory");
        let open = |name: &str| Keys::open(&directory.path().join(name)).expect("made");
        let (keys, other_keys) = (open("key"), open("other"));
        let (one, other) = (TokenId::generate(), TokenId::generate());
        let ids = [
            keys.own_session(one, 1),
            keys.own_session(one, 2),
            keys.own_session(other, 1),
            other_keys.own_session(one, 1),
        ];
        for (index, id) in ids.iter().enumerate() {
            assert_eq!(
                (id.as_uuid().get_version_num(), id.as_uuid().get_variant()),
                (8, uuid::Variant::RFC4122)
            );
            assert!(!ids[index + 1..].contains(id));
        }
        assert_eq!(open("key").own_session(one, 1), ids[0]);
    }

    #[test]
    fn derived_tokens_are_stable_and_differ_by_use_node_and_epoch() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("key");
        let keys = Keys::open(&path).expect("made");
        let (one, other) = (NodeId::generate(), NodeId::generate());
        let tokens = [
            keys.worker_token(one, 1),
            keys.worker_token(one, 2),
            keys.worker_token(other, 1),
            keys.node_token(one, 1),
        ];
        for (index, token) in tokens.iter().enumerate() {
            assert!(
                token.starts_with(TOKEN_PREFIX) && token.len() > 40,
                "{token}"
            );
            assert!(!tokens[index + 1..].contains(token));
        }
        assert_eq!(
            Keys::open(&path).expect("read").worker_token(one, 1),
            tokens[0]
        );
        assert_eq!(format!("{keys:?}"), "Keys(…)");
    }
}
