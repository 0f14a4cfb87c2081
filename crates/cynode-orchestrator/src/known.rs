//! Who a token and what a session were found to be the last time.
//!
//! Asking the database takes as long as half of a short command, and nearly always it says what it said before. So a call may go on
//! with what is remembered up to where its intent is written, and the database is asked meanwhile.
//!
//! What must stay true: what is remembered is only ever a guess. Nothing is done, and nobody refused, by one that was not made sure
//! of by a question that was asked after the call came.

use std::collections::HashMap;

use cynode_api::SessionId;
use cynode_service::ApiError;
use parking_lot::Mutex;

use crate::{
    Orchestrator,
    db::{self, Authenticated, Found, PlacedSession},
};

/// So many are remembered; then all are forgotten.
const MOST: usize = 4_096;

type Facts = (Authenticated, Option<PlacedSession>);

#[derive(Debug, Default)]
pub(crate) struct Known(Mutex<HashMap<([u8; 32], SessionId), Facts>>);

impl Known {
    pub(crate) fn guess(&self, token_hash: [u8; 32], session_id: SessionId) -> Option<Guess> {
        let facts = self.0.lock().get(&(token_hash, session_id)).cloned()?;
        Some(Guess { token_hash, session_id, facts })
    }

    /// Remembers what was found. A token that is no longer good leaves nothing.
    pub(crate) fn learn(&self, token_hash: [u8; 32], session_id: SessionId, found: &Found) {
        let mut known = self.0.lock();
        match found {
            Some(facts) => {
                if known.len() >= MOST {
                    known.clear();
                }
                known.insert((token_hash, session_id), facts.clone());
            }
            None => drop(known.remove(&(token_hash, session_id))),
        }
    }
}

/// What a call goes on with until it is made sure of.
#[derive(Clone, Debug)]
pub(crate) struct Guess {
    pub(crate) token_hash: [u8; 32],
    pub(crate) session_id: SessionId,
    pub(crate) facts: Facts,
}

/// It was not so, or nobody can say: this is what the database says now.
#[derive(Debug)]
pub(crate) struct Wrong(pub(crate) Result<Found, ApiError>);

impl Guess {
    /// Asks the database.
    pub(crate) async fn make_sure(&self, orchestrator: &Orchestrator) -> Result<(), Wrong> {
        let found = db::soon(orchestrator.db.authenticate(&self.token_hash, Some(self.session_id))).await;
        match &found {
            Ok(Some(facts)) if *facts == self.facts => return Ok(()),
            Ok(found) => orchestrator.known.learn(self.token_hash, self.session_id, found),
            Err(_) => {}
        }
        Err(Wrong(found))
    }
}
