//! Arguments of the commands for projects, users, groups and tokens.

use std::time::Duration;

use clap::{Args, Subcommand};
use cynode_api::TokenKind;

use super::ListArgs;
use crate::parse;

#[derive(Debug, Subcommand)]
pub enum Project {
    /// Create a project and print its id
    Create {
        /// Name of the project
        name: String,
        /// Short name for URLs: a-z, 0-9 and '-' [default: made from the name]
        #[arg(long)]
        slug: Option<String>,
        /// Scope of the project
        #[arg(long, value_name = "TEXT")]
        scope: Option<String>,
    },
    /// List projects, the newest first
    List {
        #[command(flatten)]
        list: ListArgs,
    },
    /// Show one project
    Show {
        /// Name, slug, id or part of the id
        project: String,
    },
    /// Change a project
    Update {
        /// Name, slug, id or part of the id
        project: String,
        /// New name
        #[arg(long, required_unless_present = "scope")]
        name: Option<String>,
        /// New scope
        #[arg(long, value_name = "TEXT")]
        scope: Option<String>,
    },
}

#[derive(Debug, Subcommand)]
pub enum User {
    /// Create a user and print the id
    Create {
        /// Name of the user
        name: String,
        /// Create an administrator
        #[arg(long)]
        admin: bool,
    },
    /// List users, the newest first
    List {
        #[command(flatten)]
        list: ListArgs,
    },
    /// Show one user
    Show {
        /// Name, id or part of the id
        user: String,
    },
}

#[derive(Debug, Subcommand)]
pub enum Group {
    /// Create a group and print its id
    Create {
        /// Name of the group
        name: String,
        /// User in the group, by name, id or part of the id; may be repeated
        #[arg(long = "member", value_name = "USER")]
        members: Vec<String>,
    },
    /// List groups, the newest first
    List {
        #[command(flatten)]
        list: ListArgs,
    },
    /// Show one group
    Show {
        /// Name, id or part of the id
        group: String,
    },
}

#[derive(Debug, Subcommand)]
pub enum Token {
    /// Create a token and print it once
    Create(TokenCreate),
    /// List tokens, without their secrets, the newest first
    List {
        /// Also tokens that are revoked or expired
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        list: ListArgs,
    },
    /// Give a token a new secret and print it once; its id stays, the old secret stops working
    Renew {
        /// Id, or a part of it
        token: String,
        /// Lifetime from now on [default: 24h]
        #[arg(long, value_name = "TIME", value_parser = parse::duration)]
        expires: Option<Duration>,
    },
    /// Revoke tokens immediately
    Revoke {
        /// Ids, or parts of them
        #[arg(required = true, value_name = "TOKEN")]
        tokens: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub struct TokenCreate {
    /// Kind: user, project_manager, project_analyst or sandbox
    #[arg(long, default_value = "user")]
    pub kind: TokenKind,
    /// User that the token acts for, by name, id or part of the id [default: yourself]
    #[arg(long)]
    pub user: Option<String>,
    /// Restrict to this project
    #[arg(long)]
    pub project: Option<String>,
    /// Restrict to this task; may be repeated
    #[arg(long = "task", value_name = "TASK")]
    pub tasks: Vec<String>,
    /// Restrict to this job
    #[arg(long)]
    pub job: Option<String>,
    /// Restrict to this session
    #[arg(long)]
    pub session: Option<String>,
    /// Lifetime [default: 24h]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub expires: Option<Duration>,
}
