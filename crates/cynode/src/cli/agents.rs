//! Arguments of the commands that connect agents.

use std::path::PathBuf;

use clap::Args;

#[derive(Clone, Debug, Args)]
#[command(
    after_help = "MCP clients start this; 'cynode connect' configures them. Standard input and \
                  output carry the protocol, messages go to standard error.\nThe agent gets a \
                  token for one task, and with --workspace a sandbox that begins with the files \
                  of the directory. Started again for the same directory, it gets the same token \
                  and sandbox, and nothing is overwritten."
)]
pub struct Mcp {
    /// Begin with the files of this directory; files that hold secrets stay out
    #[arg(long, value_name = "DIR")]
    pub workspace: Option<PathBuf>,
    /// Leave out what git ignores
    #[arg(long, requires = "workspace")]
    pub gitignore: bool,
    /// Task of the agent, by name, id or part of the id [default: a new one]
    #[arg(long)]
    pub task: Option<String>,
    /// Image of the sandbox, by name or reference [default: the default image]
    #[arg(long, value_name = "REF", conflicts_with = "forget")]
    pub image: Option<String>,
    /// Forget the agent of the directory and revoke its token, so that the next one starts over
    #[arg(long)]
    pub forget: bool,
}

#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Without CLIENT, those that are found on this machine.\nProject files are \
                  preferred over the user's; they hold paths of this machine, so don't commit \
                  them."
)]
pub struct Connect {
    /// MCP client, such as claude-code, codex, cursor or vscode
    #[arg(value_name = "CLIENT")]
    pub clients: Vec<String>,
    /// Directory that the agent's sandbox begins with [default: the current one]
    #[arg(long, value_name = "DIR")]
    pub workspace: Option<PathBuf>,
    /// Leave out what git ignores
    #[arg(long)]
    pub gitignore: bool,
    /// Name of the entry
    #[arg(long, value_name = "NAME", default_value = "cynode")]
    pub name: String,
    /// Write the configuration to the clients' files, and show what changes
    #[arg(long)]
    pub write: bool,
    /// Take what was written out of the clients' files again
    #[arg(long, conflicts_with_all = ["write", "with_token", "gitignore"])]
    pub remove: bool,
    /// Use the files of the user, not those of the project
    #[arg(long)]
    pub user: bool,
    /// Let clients call the server directly: its address and a token, which is then in their
    /// files. The workspace begins empty
    #[arg(long, conflicts_with = "gitignore")]
    pub with_token: bool,
}
