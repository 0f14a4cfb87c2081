//! The control plane: what `up` runs besides the worker, the user API, and the commands that speak with it.

mod backup;
mod callers;
mod commands;
mod description;
mod faults;
mod hostile;
mod postgres;
mod schemathesis;
mod small;
mod stack;
