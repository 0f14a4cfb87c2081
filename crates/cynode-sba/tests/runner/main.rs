//! `cynode-sba run`, through the real binary.
#![expect(
    clippy::disallowed_methods,
    reason = "starts the program under test and makes files for it"
)]

mod agent;
mod agent_failures;
mod limits;
mod model_server;
mod modes;
mod steps;
mod supervised;
mod support;
