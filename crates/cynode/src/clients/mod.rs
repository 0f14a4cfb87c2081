//! `connect`: configures the MCP clients on this machine, so that they start the bridge.

mod edit;
mod entry;
mod file;
mod journal;
mod locate;
mod table;
#[cfg(test)]
mod tests;
mod work;

use std::process::ExitCode;

use cynode_api::{ErrorCode, Task, TokenId};
use cynode_client::UserClient;
use serde_json::json;

pub use self::table::{CLIENTS, Client};
use self::{
    entry::EntrySpec,
    journal::Journal,
    locate::Machine,
    work::{ClientEntry, ClientReport, State},
};
use crate::{
    bring,
    cli::{Connect, Globals, OutputFormat},
    commands::CommandResult,
    connect,
    failure::{Failure, UNREACHABLE, USAGE},
    mcp::{
        self,
        agent::{self, AgentFile, AgentKey, Lifetime},
    },
    output, sanitize,
};

/// The longest name of an entry.
const MAX_NAME: usize = 64;

pub async fn run(globals: &Globals, args: Connect) -> CommandResult {
    check_name(&args.name)?;
    let machine = Machine::of_environment();
    let clients = chosen(&machine, &args.clients)?;
    let directory = directory(&machine, &args)?;
    let journal = Journal::new(&mcp::state_directory()?);
    let server = if args.remove {
        None
    } else {
        Some(server(globals).await?)
    };
    let mut reports = Vec::new();
    for client in clients {
        let Some((place, project)) = locate::place(client, args.user) else {
            continue;
        };
        let token = match &server {
            Some(server) if args.with_token => {
                Some(token(server, client, &directory, args.write).await?)
            }
            _ => None,
        };
        let target = match &server {
            Some(server) => target(globals, &machine, &args, &directory, server, token)?,
            None => EntrySpec::named(&args.name),
        };
        let work = ClientEntry {
            client,
            place,
            path: machine.path(place, &directory)?,
            directory: directory.clone(),
            project: project.then(|| directory.clone()),
            target,
            journal: &journal,
            is_detected: machine.has(client),
        };
        let mut report = if args.remove {
            work.remove()
        } else if args.write {
            work.write(args.with_token)
        } else {
            work.show(args.with_token)
        };
        let forgets_token = match report.state {
            State::Removed | State::Absent => true,
            // A token that replaces another is the same one, renewed.
            State::Written => !args.with_token && !report.removed_tokens.is_empty(),
            State::Shown | State::Present | State::Unchanged | State::Refused => false,
        };
        if forgets_token {
            let tokens = &report.removed_tokens;
            if let Some(left) = revoke_tokens(globals, client, &directory, tokens).await? {
                report.warning = Some(left.warning());
                report.remedy = Some(left.remedy());
            }
        }
        reports.push(report);
    }
    print(globals, &args, &reports)
}

fn check_name(name: &str) -> Result<(), Failure> {
    let is_good = (1..=MAX_NAME).contains(&name.len())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'));
    if is_good {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "--name: must be 1 to {MAX_NAME} of a-z, A-Z, 0-9, '-' and '_'"
    )))
}

/// The clients that were named, or else those that are found.
fn chosen(machine: &Machine, named: &[String]) -> Result<Vec<&'static Client>, Failure> {
    let known = || {
        let ids: Vec<&str> = CLIENTS.iter().map(|client| client.id).collect();
        ids.join(", ")
    };
    if !named.is_empty() {
        let find = |id: &String| {
            table::find(id).ok_or_else(|| {
                Failure::new(
                    USAGE,
                    "unknown_client",
                    format!("there is no MCP client '{id}'"),
                )
                .remedy(format!("Name one of {}.", known()))
            })
        };
        return named.iter().map(find).collect();
    }
    let found: Vec<&Client> = CLIENTS.iter().filter(|it| machine.has(it)).collect();
    if found.is_empty() {
        return Err(
            Failure::new(USAGE, "no_client", "no MCP client is found on this machine")
                .remedy(format!("Name one of {}.", known())),
        );
    }
    Ok(found)
}

/// The directory that the sandbox begins with. A whole home directory only if it is named.
fn directory(machine: &Machine, args: &Connect) -> Result<std::path::PathBuf, Failure> {
    if let Some(directory) = &args.workspace {
        return bring::root(directory);
    }
    let current = bring::root(&std::env::current_dir()?)?;
    if current.parent().is_none() || machine.is_home(&current) {
        return Err(Failure::usage(format!(
            "{} is not a project",
            sanitize::line(&current.to_string_lossy())
        ))
        .remedy("Go to the directory of a project, or name one with --workspace DIR."));
    }
    Ok(current)
}

/// A server that answers, with a credential that it accepts.
async fn server(globals: &Globals) -> Result<UserClient, Failure> {
    let user = connect::user_client(globals)?;
    user.newest::<Task>(Vec::new(), 1, |_| true).await?;
    Ok(user)
}

/// What the client is to start or to call.
fn target(
    globals: &Globals,
    machine: &Machine,
    args: &Connect,
    directory: &std::path::Path,
    server: &UserClient,
    token: Option<String>,
) -> Result<EntrySpec, Failure> {
    let text = |path: &std::path::Path| {
        path.to_str().map(str::to_owned).ok_or_else(|| {
            Failure::usage(format!(
                "{} is not UTF-8, so no configuration can name it",
                sanitize::line(&path.to_string_lossy())
            ))
        })
    };
    let mut arguments = vec!["mcp".to_owned()];
    arguments.extend(["--workspace".to_owned(), text(directory)?]);
    if args.gitignore {
        arguments.push("--gitignore".to_owned());
    }
    if token.is_none() {
        connect::check_stored_credential(globals).map_err(|failure| {
            Failure::usage(format!(
                "CYNODE_TOKEN is set in this environment only, so the bridge would start without \
                 it: {}",
                failure.message()
            ))
            .remedy(
                "Use --with-token, which writes a token for one task to the client's file, or run \
                 this where 'cynode up' runs.",
            )
        })?;
    }
    // Clients start programs with few variables of the environment.
    let mut environment = Vec::new();
    if connect::is_url_set() {
        environment.push(("CYNODE_URL".to_owned(), server.base().to_owned()));
    } else if let Some(state) = machine.state_directory(globals)? {
        arguments.extend(["--state-dir".to_owned(), text(&state)?]);
    }
    // The bridge and the user's commands share what they remember of the directory.
    if let Some(home) = machine.state_home() {
        environment.push((locate::STATE_HOME.to_owned(), text(home)?));
    }
    if let Some(ca) = &globals.ca {
        arguments.extend(["--ca".to_owned(), text(&std::path::absolute(ca)?)?]);
    }
    Ok(EntrySpec {
        name: args.name.clone(),
        program: text(&program()?)?,
        arguments,
        environment,
        http: token.map(|token| (format!("{}{}", server.base(), mcp::PATH), token)),
    })
}

fn program() -> Result<std::path::PathBuf, Failure> {
    let program = std::env::current_exe()?;
    if program.is_file() {
        return Ok(program);
    }
    Err(Failure::internal(format!(
        "this program is no longer at {}",
        sanitize::line(&program.to_string_lossy())
    ))
    .remedy("Run the program where it is now."))
}

/// The token that a client's file gets. It is made only if it is written there.
async fn token(
    server: &UserClient,
    client: &Client,
    directory: &std::path::Path,
    is_written: bool,
) -> Result<String, Failure> {
    if client.http.is_none() {
        return Ok(String::new());
    }
    if !is_written {
        return Ok("TOKEN".to_owned());
    }
    let file = token_file(server, client, directory)?;
    Ok(file.current(|| Ok(server.clone())).await?.token)
}

fn token_file(
    server: &UserClient,
    client: &Client,
    directory: &std::path::Path,
) -> Result<AgentFile, Failure> {
    let key = AgentKey {
        server: server.base().to_owned(),
        directory: directory.to_owned(),
        uploads_directory: false,
        task: None,
        purpose: format!("in the file of {}", client.id),
    };
    let state = mcp::state_directory()?;
    Ok(AgentFile::new(&state, key, Lifetime::IN_FILE))
}

/// A token that a client's file had and that could not be revoked.
struct LiveToken {
    /// Unknown if this user's state directory does not have the token.
    id: Option<TokenId>,
    reason: String,
}

impl LiveToken {
    fn warning(&self) -> String {
        format!(
            "the token that was in the file is still valid: {}",
            sanitize::line(&self.reason)
        )
    }

    fn remedy(&self) -> String {
        match self.id {
            Some(id) => format!("Revoke it with 'cynode token revoke {id}'."),
            None => "Find it with 'cynode token list', and revoke it with 'cynode token revoke \
                     ID'."
                .to_owned(),
        }
    }
}

/// Revokes the token that was made for a client's file, and those that were in it. Without the
/// server they stay remembered, so that a repetition revokes them.
async fn revoke_tokens(
    globals: &Globals,
    client: &Client,
    directory: &std::path::Path,
    tokens: &[String],
) -> Result<Option<LiveToken>, Failure> {
    let server = connect::user_client(globals);
    let state = mcp::state_directory()?;
    let mut agents = Vec::new();
    if let Ok(server) = &server {
        agents.extend(token_file(server, client, directory)?.stored()?);
    }
    for token in tokens {
        match agent::stored_with_token(&state, token)? {
            Some(stored) => agents.push(stored),
            None if agents.is_empty() => {
                return Ok(Some(LiveToken {
                    id: None,
                    reason: "its id is not known here".to_owned(),
                }));
            }
            // An earlier secret of the same token.
            None => {}
        }
    }
    for stored in agents {
        let id = stored.agent.token_id;
        let revoked = match &server {
            Ok(server) if server.base() == stored.agent.server => {
                match server.revoke_token(id).await {
                    Err(error) if !error.is(ErrorCode::NotFound) => Err(Failure::from(error)),
                    _ => Ok(()),
                }
            }
            Ok(_) => Err(Failure::usage(format!(
                "it is for another server, {}",
                stored.agent.server
            ))),
            Err(failure) => Err(Failure::usage(failure.message())),
        };
        if let Err(failure) = revoked {
            return Ok(Some(LiveToken {
                id: Some(id),
                reason: failure.message().to_owned(),
            }));
        }
        stored.remove()?;
    }
    Ok(None)
}

fn print(globals: &Globals, args: &Connect, reports: &[ClientReport]) -> CommandResult {
    match globals.output {
        OutputFormat::Json => output::json(&json!({ "clients": reports }))?,
        OutputFormat::Table => {
            for report in reports {
                print_report(report)?;
            }
            if !args.write && !args.remove {
                output::message("cynode: nothing is written; see --write");
            }
        }
    }
    if reports.iter().any(|report| report.state == State::Refused) {
        return Ok(ExitCode::from(USAGE));
    }
    if reports.iter().any(|report| report.warning.is_some()) {
        return Ok(ExitCode::from(UNREACHABLE));
    }
    Ok(ExitCode::SUCCESS)
}

fn print_report(report: &ClientReport) -> Result<(), Failure> {
    let file = sanitize::line(&report.file);
    match report.state {
        State::Shown | State::Present => {
            output::line(&format!("# {}: {file}", report.name))?;
            output::line(&report.snippet)?;
        }
        State::Written | State::Removed => {
            output::line(report.diff.trim_end())?;
            let done = if report.state == State::Written {
                "is connected by"
            } else {
                "is no longer connected by"
            };
            output::message(&format!("cynode: {} {done} {file}", report.name));
        }
        State::Unchanged => {
            output::message(&format!(
                "cynode: {} is connected already by {file}",
                report.name
            ));
        }
        State::Absent => {
            output::message(&format!("cynode: {} has no entry in {file}", report.name));
        }
        State::Refused => {
            let problem = report.problem.as_deref().unwrap_or_default();
            output::message(&format!(
                "cynode: error[refused]: {}: {}",
                report.name,
                sanitize::line(problem)
            ));
            if let Some(remedy) = &report.remedy {
                output::message(&format!("  remedy: {}", sanitize::line(remedy)));
            } else {
                output::message("  remedy: Edit the file yourself; this is the entry:");
                output::line(&report.snippet)?;
            }
        }
    }
    if let Some(warning) = &report.warning {
        output::message(&format!("cynode: warning: {}: {warning}", report.name));
        output::message(&format!(
            "  remedy: {}",
            report.remedy.as_deref().unwrap_or_default()
        ));
    }
    if let Some(note) = report.note.filter(|_| report.state == State::Written) {
        output::message(&format!("  {note}"));
    }
    Ok(())
}
