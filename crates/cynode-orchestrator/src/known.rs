//! Who a token and what a session were found to be the last time.
//!
//! Asking the database takes a quarter of a millisecond of the three that an audited command takes, and nearly always it says what
//! it said before. So a call may go on with what is remembered up to where its intent is written, and the database is asked
//! meanwhile.
//!
//! What must stay true: what is remembered is only ever a guess. Nothing is done, and nobody refused, by one that was not made sure
//! of by a question that was asked after the call came.

use std::{collections::HashMap, time::Instant};

use cynode_api::{SessionId, TokenKind};
use cynode_service::ApiError;
use parking_lot::Mutex;
use uuid::Uuid;

use crate::{
    Orchestrator,
    db::{self, Authenticated, Found, PlacedSession},
};

/// So many are remembered; then all are forgotten.
const MOST: usize = 4_096;
/// Of somebody in more groups nothing is.
pub(crate) const MOST_GROUPS: usize = 64;

type Facts = (Authenticated, Option<PlacedSession>);

#[derive(Debug, Default)]
pub(crate) struct Known(Mutex<HashMap<([u8; 32], SessionId), Facts>>);

impl Known {
    pub(crate) fn guess(&self, token_hash: [u8; 32], session_id: SessionId) -> Option<Guess> {
        let facts = self.0.lock().get(&(token_hash, session_id)).cloned()?;
        Some(Guess {
            token_hash,
            session_id,
            facts,
        })
    }

    /// Remembers what was found, of people and of sessions that there are. What is found no more is forgotten.
    pub(crate) fn learn(&self, token_hash: [u8; 32], session_id: SessionId, found: &Found) {
        let worth = |(who, placed): &&Facts| {
            who.kind == TokenKind::User && placed.is_some() && who.groups.len() <= MOST_GROUPS
        };
        let mut known = self.0.lock();
        match found.as_ref().filter(worth) {
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

/// It was not so, or nobody can say.
#[derive(Debug)]
pub(crate) struct Wrong {
    /// What the database says now.
    pub(crate) found: Result<Found, ApiError>,
    /// When it was asked.
    pub(crate) at: Instant,
    /// The call that was begun by the guess, and ended with nothing done.
    pub(crate) call_id: Option<Uuid>,
}

impl Guess {
    /// Asks the database.
    pub(crate) async fn make_sure(&self, orchestrator: &Orchestrator) -> Result<(), Wrong> {
        let at = Instant::now();
        let found = db::soon(
            orchestrator
                .db
                .authenticate(&self.token_hash, Some(self.session_id)),
        )
        .await;
        match &found {
            Ok(Some(facts)) if *facts == self.facts => return Ok(()),
            Ok(found) => orchestrator
                .known
                .learn(self.token_hash, self.session_id, found),
            Err(_) => {}
        }
        Err(Wrong {
            found,
            at,
            call_id: None,
        })
    }
}
