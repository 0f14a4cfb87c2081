//! What callers of this crate rely on.

mod default_rules;
mod documents;
mod paths;
mod people;
mod rules;
mod secrets;
mod shapes;
