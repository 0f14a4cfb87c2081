//! `cynode-sba run`, through the real binary.
#![expect(
    clippy::disallowed_methods,
    reason = "starts the program under test and makes files for it"
)]

mod limits;
mod modes;
mod steps;
mod support;
