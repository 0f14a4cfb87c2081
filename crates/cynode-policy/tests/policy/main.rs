//! Tests of the crate's public contract.

mod default_rules;
mod documents;
mod paths;
mod people;
mod rules;
mod secrets;
mod shapes;
