//! Proves that nobody can change the trail undetected with write access to the database but without
//! the signing key.
//!
//! Each test writes a random trail of several interleaved streams with checkpoints in between, then
//! tampers with it in one way. Verification must detect it and name the affected record or
//! checkpoint.

mod checkpoints;
mod records;
mod retention;
mod trail;
mod unsigned;
