//! Git egress: repositories come in as seeds, changesets go out as commits on a task's branch.

mod change;
mod command;
mod forge;
mod push;
