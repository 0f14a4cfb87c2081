//! Signing and public keys for checkpoints.

use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};

const PREFIX: &str = "ed25519:";

/// An Ed25519 key, kept outside the database.
pub struct SigningKey(Ed25519KeyPair);

impl std::fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SigningKey(…)")
    }
}

impl SigningKey {
    #[must_use]
    pub fn from_seed(seed: [u8; 32]) -> Self {
        Self(Ed25519KeyPair::from_seed_unchecked(&seed).expect("any 32 bytes are a valid seed"))
    }

    #[must_use]
    pub fn public(&self) -> PublicKey {
        PublicKey(
            self.0
                .public_key()
                .as_ref()
                .try_into()
                .expect("a public key has 32 bytes"),
        )
    }

    pub(crate) fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.0.sign(message).as_ref().to_vec()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublicKey([u8; 32]);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key is 'ed25519:' followed by 32 bytes in base64url")]
pub struct MalformedKey;

impl PublicKey {
    #[must_use]
    pub fn to_text(&self) -> String {
        format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(self.0))
    }

    pub fn from_text(text: &str) -> Result<Self, MalformedKey> {
        let bytes = text
            .trim()
            .strip_prefix(PREFIX)
            .and_then(|text| URL_SAFE_NO_PAD.decode(text).ok())
            .ok_or(MalformedKey)?;
        bytes.try_into().map(Self).map_err(|_| MalformedKey)
    }

    pub(crate) fn verify(&self, message: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&ED25519, &self.0)
            .verify(message, signature)
            .is_ok()
    }
}

impl std::fmt::Display for PublicKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.to_text())
    }
}

impl std::str::FromStr for PublicKey {
    type Err = MalformedKey;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::from_text(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_verifies_what_it_signed_and_nothing_else() {
        let (key, other) = (
            SigningKey::from_seed([1; 32]),
            SigningKey::from_seed([2; 32]),
        );
        let signature = key.sign(b"word");
        assert!(key.public().verify(b"word", &signature));
        assert!(
            !key.public().verify(b"wort", &signature)
                && !other.public().verify(b"word", &signature)
        );
        assert!(
            !key.public().verify(b"word", &signature[1..]) && !key.public().verify(b"word", b"")
        );
    }

    #[test]
    fn a_public_key_round_trips_as_text() {
        let key = SigningKey::from_seed([3; 32]).public();
        assert_eq!(PublicKey::from_text(&key.to_text()), Ok(key));
        for text in [
            "",
            "ed25519:",
            "ed25519:AAAA",
            "rsa:AAAA",
            &key.to_text()[8..],
            &format!("{key}A"),
        ] {
            assert_eq!(PublicKey::from_text(text), Err(MalformedKey), "{text}");
        }
    }

    #[test]
    fn the_debug_output_of_a_signing_key_hides_it() {
        assert_eq!(
            format!("{:?}", SigningKey::from_seed([65; 32])),
            "SigningKey(…)"
        );
    }
}
