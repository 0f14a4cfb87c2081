//! The control plane: what `up` runs besides the worker, the user API, and the commands that speak with it.

mod audit;
mod away;
mod backup;
mod callers;
mod commands;
mod description;
mod faults;
mod hostile;
mod mcp;
pub(crate) mod nodes;
mod outage;
mod policy;
mod postgres;
mod previous;
mod quotas;
mod retention;
mod schemathesis;
mod secrets;
mod simulated;
mod small;
mod stack;
mod streams;
mod tables;
mod tls;
mod two;
mod upgrade;
mod work;
