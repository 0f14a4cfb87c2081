//! Seals credentials to the public key of one egress role (HPKE, RFC 9180: X25519, HKDF-SHA256 and
//! ChaCha20-Poly1305).
//!
//! Invariant: what is sealed for one role and one credential id opens only with that role's key,
//! that role's name and that id. Whoever stores the ciphertext can't move it to another credential.

use rustls::crypto::{
    aws_lc_rs::hpke::DH_KEM_X25519_HKDF_SHA256_CHACHA20_POLY1305 as SUITE,
    hpke::{EncapsulatedSecret, Hpke as _, HpkePrivateKey, HpkePublicKey},
};
use sha2::{Digest as _, Sha256};

/// The length of keys and of encapsulated keys.
pub const KEY_BYTES: usize = 32;
/// Digits of a key id.
const KEY_ID_DIGITS: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum SealError {
    #[error("the key must have {KEY_BYTES} bytes and has {0}")]
    KeyLength(usize),
    #[error("the private key does not belong to the public key")]
    Mismatch,
    #[error("generating a key pair")]
    Generate(#[source] rustls::Error),
    #[error("sealing to the public key")]
    Seal(#[source] rustls::Error),
    /// Another key, another role, another id, or changed bytes: they can't be told apart.
    #[error("the sealed value does not open with this key, role and id")]
    Open(#[source] rustls::Error),
}

/// A sealed value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedValue {
    pub encapsulated: Vec<u8>,
    pub ciphertext: Vec<u8>,
}

/// A role's key pair.
pub struct SealingKey {
    public: Vec<u8>,
    private: HpkePrivateKey,
}

impl std::fmt::Debug for SealingKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SealingKey")
            .field("id", &self.id())
            .finish_non_exhaustive()
    }
}

impl SealingKey {
    pub fn generate() -> Result<Self, SealError> {
        let (public, private) = SUITE.generate_key_pair().map_err(SealError::Generate)?;
        Ok(Self {
            public: public.0,
            private,
        })
    }

    /// Restores a key pair. Fails if the halves don't belong together.
    pub fn from_parts(public: &[u8], private: &[u8]) -> Result<Self, SealError> {
        for half in [public, private] {
            check_length(half)?;
        }
        let key = Self {
            public: public.to_vec(),
            private: HpkePrivateKey::from(private.to_vec()),
        };
        let probe = seal("probe", "", public, b"probe")?;
        match key.open("probe", "", &probe) {
            Ok(opened) if opened == b"probe" => Ok(key),
            _ => Err(SealError::Mismatch),
        }
    }

    pub fn public(&self) -> &[u8] {
        &self.public
    }

    /// The secret half, for the role's own key file.
    pub fn private(&self) -> &[u8] {
        self.private.secret_bytes()
    }

    pub fn id(&self) -> String {
        key_id(&self.public)
    }

    /// Opens what was sealed for this role and credential id.
    pub fn open(&self, role: &str, id: &str, sealed: &SealedValue) -> Result<Vec<u8>, SealError> {
        check_length(&sealed.encapsulated)?;
        SUITE
            .open(
                &EncapsulatedSecret(sealed.encapsulated.clone()),
                role.as_bytes(),
                id.as_bytes(),
                &sealed.ciphertext,
                &self.private,
            )
            .map_err(SealError::Open)
    }
}

/// Seals a value for a role and a credential id.
pub fn seal(
    role: &str,
    id: &str,
    public_key: &[u8],
    plaintext: &[u8],
) -> Result<SealedValue, SealError> {
    check_length(public_key)?;
    let (encapsulated, ciphertext) = SUITE
        .seal(
            role.as_bytes(),
            id.as_bytes(),
            plaintext,
            &HpkePublicKey(public_key.to_vec()),
        )
        .map_err(SealError::Seal)?;
    Ok(SealedValue {
        encapsulated: encapsulated.0,
        ciphertext,
    })
}

/// Names a public key: the first digits of its SHA-256.
#[must_use]
pub fn key_id(public_key: &[u8]) -> String {
    let mut digits = hex::encode(Sha256::digest(public_key));
    digits.truncate(KEY_ID_DIGITS);
    digits
}

fn check_length(key: &[u8]) -> Result<(), SealError> {
    if key.len() == KEY_BYTES {
        Ok(())
    } else {
        Err(SealError::KeyLength(key.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "01a1de8e-ade2-704f-9f63-00761396ca9f";

    #[test]
    fn a_sealed_value_opens_with_its_key_role_and_id_only() {
        let key = SealingKey::generate().expect("a key");
        let sealed = seal("git", ID, key.public(), b"a secret value").expect("sealed");
        assert_eq!(
            key.open("git", ID, &sealed).expect("opened"),
            b"a secret value"
        );
        let other = SealingKey::generate().expect("a key");
        assert!(matches!(
            other.open("git", ID, &sealed),
            Err(SealError::Open(_))
        ));
        assert!(matches!(
            key.open("web", ID, &sealed),
            Err(SealError::Open(_))
        ));
        assert!(matches!(
            key.open("git", "another id", &sealed),
            Err(SealError::Open(_))
        ));
    }

    #[test]
    fn truncated_and_changed_values_do_not_open() {
        let key = SealingKey::generate().expect("a key");
        let sealed = seal("git", ID, key.public(), b"a secret value").expect("sealed");
        for length in 0..sealed.ciphertext.len() {
            let cut = SealedValue {
                ciphertext: sealed.ciphertext[..length].to_vec(),
                ..sealed.clone()
            };
            assert!(key.open("git", ID, &cut).is_err(), "{length} bytes opened");
        }
        for at in 0..sealed.ciphertext.len() {
            let mut changed = sealed.clone();
            changed.ciphertext[at] ^= 1;
            assert!(key.open("git", ID, &changed).is_err(), "byte {at}");
        }
        for length in 0..KEY_BYTES {
            let cut = SealedValue {
                encapsulated: sealed.encapsulated[..length].to_vec(),
                ..sealed.clone()
            };
            assert!(matches!(
                key.open("git", ID, &cut),
                Err(SealError::KeyLength(_))
            ));
        }
        let mut changed = sealed;
        changed.encapsulated[0] ^= 1;
        assert!(key.open("git", ID, &changed).is_err());
    }

    #[test]
    fn a_stored_key_pair_is_the_same_and_halves_of_two_pairs_are_refused() {
        let (one, two) = (
            SealingKey::generate().expect("a key"),
            SealingKey::generate().expect("a key"),
        );
        let again = SealingKey::from_parts(one.public(), one.private()).expect("restored");
        assert_eq!(again.id(), one.id());
        assert_eq!(one.id().len(), 16);
        assert_ne!(one.id(), two.id());
        assert_eq!(key_id(one.public()), one.id());
        assert!(matches!(
            SealingKey::from_parts(one.public(), two.private()),
            Err(SealError::Mismatch)
        ));
        assert!(matches!(
            SealingKey::from_parts(&one.public()[1..], one.private()),
            Err(SealError::KeyLength(31))
        ));
        let shown = format!("{one:?}");
        assert!(!shown.contains(&hex::encode(one.private())), "{shown}");
    }
}
