//! Bearer tokens, compared by hash and in constant time.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use cynode_api::ErrorCode;
use http::{HeaderMap, header};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use crate::{
    ApiError,
    connections::{self, CallerId},
};

/// The hash of a token.
#[derive(Clone)]
pub struct Token(Arc<[u8; 32]>);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Token {
    #[must_use]
    pub fn new(token: &str) -> Self {
        Self(Arc::new(Sha256::digest(token.as_bytes()).into()))
    }

    #[must_use]
    pub fn admits(&self, offered: &str) -> bool {
        Sha256::digest(offered.as_bytes())
            .ct_eq(self.0.as_slice())
            .into()
    }
}

/// The set of valid tokens, which can change while a role runs.
#[derive(Clone, Debug, Default)]
pub struct Tokens(Arc<parking_lot::RwLock<Vec<Token>>>);

impl Tokens {
    #[must_use]
    pub fn new(tokens: Vec<Token>) -> Self {
        Self(Arc::new(parking_lot::RwLock::new(tokens)))
    }

    /// Replaces all valid tokens.
    pub fn set(&self, tokens: Vec<Token>) {
        *self.0.write() = tokens;
    }

    #[must_use]
    pub fn admits(&self, offered: &str) -> bool {
        // Compares all of them, for constant time.
        self.0
            .read()
            .iter()
            .fold(false, |found, token| token.admits(offered) | found)
    }
}

/// Refuses requests without a valid token.
pub async fn require(State(token): State<Tokens>, request: Request, next: Next) -> Response {
    match offered(request.headers()) {
        Ok(offered) if token.admits(offered) => {
            match connections::assign_to_caller(request.extensions(), CallerId::Orchestrator) {
                Ok(()) => next.run(request).await,
                Err(error) => error.into_response(),
            }
        }
        Ok(_) => {
            ApiError::new(ErrorCode::Unauthorized, "the token is not valid here").into_response()
        }
        Err(error) => error.into_response(),
    }
}

/// The bearer token of a request.
pub fn offered(headers: &HeaderMap) -> Result<&str, ApiError> {
    if headers
        .get_all(header::AUTHORIZATION)
        .iter()
        .nth(1)
        .is_some()
    {
        // A proxy in between might have checked the other one.
        return Err(ApiError::invalid("Authorization: was sent more than once"));
    }
    let offered = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| {
            let (scheme, token) = value.split_once(' ')?;
            scheme
                .eq_ignore_ascii_case("bearer")
                .then_some(token.trim())
        });
    offered.ok_or_else(|| ApiError::new(ErrorCode::Unauthorized, "no bearer token was sent"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_several_tokens_is_valid_until_they_are_replaced() {
        let tokens = Tokens::new(vec![Token::new("one"), Token::new("two")]);
        assert!(tokens.admits("one") && tokens.admits("two") && !tokens.admits("three"));
        tokens.set(vec![Token::new("three")]);
        assert!(tokens.admits("three") && !tokens.admits("one"));
        assert!(!Tokens::default().admits(""));
    }

    #[test]
    fn a_token_admits_only_itself() {
        let token = Token::new("cyn_secret");
        assert!(token.admits("cyn_secret"));
        assert!(!token.admits("cyn_secre"));
        assert!(!token.admits(""));
        assert_eq!(format!("{token:?}"), "Token(…)");
    }
}
