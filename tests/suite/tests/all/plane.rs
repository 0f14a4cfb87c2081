//! The control plane: what `up` runs besides the worker, the user API, and the commands that speak with it.

mod away;
mod backup;
mod callers;
mod commands;
mod description;
mod faults;
mod nodes;
mod postgres;
mod stack;
mod two;
