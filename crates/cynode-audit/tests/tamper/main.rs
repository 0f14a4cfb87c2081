//! Nobody who can write the database but not sign can change the trail without being found.
//!
//! A trail is written at random, by several streams whose records are interleaved, with checkpoints in between; then
//! somebody tampers with it in one way. Each way must be found and what was touched must be named.

mod checkpoints;
mod records;
mod retention;
mod trail;
mod unsigned;
