//! What callers of this crate rely on.

mod default_rules;
mod documents;
mod people;
mod rules;
