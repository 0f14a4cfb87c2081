//! The control plane: the roles that `up` runs besides the worker, the user API, and the commands
//! that use it.

mod audit;
mod backup;
mod callers;
mod cluster;
mod commands;
mod crowds;
mod description;
mod directories;
mod examples;
mod faults;
mod hostile;
mod images;
mod mcp;
mod names;
pub(crate) mod nodes;
mod outage;
mod partition;
mod patches;
mod peak;
mod policy;
mod postgres;
mod previous;
mod quotas;
mod readme;
mod renew;
mod retention;
mod schemathesis;
mod secrets;
mod simulated;
mod stack;
mod streams;
mod tables;
mod tls;
mod two;
mod upgrade;
mod work;
