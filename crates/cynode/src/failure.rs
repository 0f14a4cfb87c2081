//! Failures of commands: a message, a remedy, and a stable exit code.

use std::{ffi::OsString, io, process::ExitCode};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use cynode_api::{ErrorCode, Problem};
use cynode_client::Error;
use serde_json::{Map, Value, json};

use crate::{cli::OutputFormat, output, sanitize};

/// The request is invalid, or its object does not exist or is in the wrong state.
pub const USAGE: u8 = 64;
/// The server does not answer, or can't serve the request now.
pub const UNREACHABLE: u8 = 69;
pub const INTERNAL: u8 = 70;
pub const DENIED: u8 = 77;
const START_REMEDY: &str = "See 'cynode status'; start CyNode with 'cynode up'.";
/// The detail of a 404 for an unknown route, as opposed to a missing object.
const NO_SUCH_ROUTE: &str = "no such address";
/// 128 + SIGPIPE, as a shell reports it.
const BROKEN_PIPE: u8 = 141;

/// A failure to communicate with a server. Its remedy depends on the source of the address and the
/// token, which only `connect::explain` knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteProblem {
    /// The server refused the token.
    Token,
    /// The server has no such route: it may run another role.
    Route,
    /// The connection failed.
    Connection,
    /// The peer accepted the connection, and no HTTP response came.
    Protocol,
    /// The peer sent an HTTP response that is not one of the API.
    Answer,
}

#[derive(Debug)]
pub struct Failure {
    pub exit: u8,
    code: String,
    message: String,
    remedy: Option<String>,
    /// The failure was printed already.
    reported: bool,
    pub remote_problem: Option<RemoteProblem>,
    /// The server's problem document, for `--output json`.
    problem: Option<Box<Problem>>,
    /// Further members of that document.
    extensions: Option<Box<Map<String, Value>>>,
}

impl Failure {
    pub fn new(exit: u8, code: &str, message: impl Into<String>) -> Self {
        Self {
            exit,
            code: code.to_owned(),
            message: message.into(),
            remedy: None,
            reported: false,
            remote_problem: None,
            problem: None,
            extensions: None,
        }
    }

    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(USAGE, "usage", message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(INTERNAL, "internal", message)
    }

    /// The failure of something that ran on the server and ended with a code of the API.
    pub fn of_code(code: &str, message: impl Into<String>) -> Self {
        match ErrorCode::ALL.iter().find(|known| known.as_str() == code) {
            Some(known) => Self::new(exit_of(known.status()), code, message).remedy(known.remedy()),
            None => Self::new(INTERNAL, code, message),
        }
    }

    /// A failure that was printed already, or needs no message.
    pub fn reported(exit: u8) -> Self {
        Self {
            reported: true,
            ..Self::new(exit, "", "")
        }
    }

    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    /// Adds a member to the document that `--output json` prints.
    #[must_use]
    pub fn with_extension(mut self, name: &str, value: Value) -> Self {
        self.extensions
            .get_or_insert_default()
            .insert(name.to_owned(), value);
        self
    }

    /// Replaces the message.
    #[must_use]
    pub fn with_message(mut self, message: impl Into<String>) -> Self {
        self.message = message.into();
        self
    }

    #[must_use]
    fn with_remote_problem(mut self, problem: RemoteProblem) -> Self {
        self.remote_problem = Some(problem);
        self
    }

    pub fn code(&self) -> &str {
        &self.code
    }

    pub fn is(&self, code: &str) -> bool {
        self.code == code
    }

    /// Whether the server refused the request, which then has no effect.
    pub fn is_refusal(&self) -> bool {
        let status = self.problem.as_ref().map(|problem| problem.status);
        status.is_some_and(|status| (400..500).contains(&status))
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    /// The places in a file that are wrong, and what is wrong there.
    pub fn violations(&self) -> impl Iterator<Item = (&str, &str)> {
        let listed = self
            .extensions
            .as_ref()
            .and_then(|members| members.get("violations")?.as_array());
        listed.into_iter().flatten().filter_map(|violation| {
            Some((violation["path"].as_str()?, violation["message"].as_str()?))
        })
    }

    pub fn remedy_text(&self) -> Option<&str> {
        self.remedy.as_deref()
    }

    /// Prints the failure to stderr: a message with its remedy, or a problem document as one line
    /// of JSON.
    pub fn report(&self, format: OutputFormat) -> ExitCode {
        match format {
            _ if self.reported => {}
            OutputFormat::Json => output::message(&ascii(&self.document().to_string())),
            OutputFormat::Table => {
                // Details may contain names that a sandbox chose.
                output::message(&format!(
                    "cynode: error[{}]: {}",
                    sanitize::line(&self.code),
                    sanitize::line(&self.message)
                ));
                for (path, message) in self.violations() {
                    output::message(&sanitize::line(&format!("  {path}: {message}")));
                }
                if let Some(remedy) = &self.remedy {
                    output::message(&format!("  remedy: {}", sanitize::line(remedy)));
                }
            }
        }
        ExitCode::from(self.exit)
    }

    /// An RFC 9457 problem document. A server's document keeps its status and extensions; a local
    /// failure has no status.
    fn document(&self) -> Value {
        let mut document = match &self.problem {
            Some(problem) => json!(problem),
            None => json!({
                "type": format!("urn:cynode:error:{}", self.code),
                "title": title(self.exit),
            }),
        };
        if let Value::Object(members) = &mut document {
            members.extend(self.extensions.iter().flat_map(|members| *members.clone()));
            let remedy = self.remedy.as_deref().unwrap_or(default_remedy(self.exit));
            let fields = [
                ("code", json!(self.code)),
                ("detail", json!(self.message)),
                ("remedy", json!(remedy)),
                ("exit", json!(self.exit)),
            ];
            members.extend(
                fields
                    .map(|(name, value)| (name.to_owned(), value))
                    .into_iter()
                    .collect::<Map<_, _>>(),
            );
        }
        document
    }
}

const fn title(exit: u8) -> &'static str {
    match exit {
        USAGE => "The request is not valid",
        UNREACHABLE => "The server can't be reached",
        DENIED => "Permission denied",
        _ => "Internal error",
    }
}

/// The remedy in a problem document of a failure without one.
const fn default_remedy(exit: u8) -> &'static str {
    match exit {
        USAGE => "Correct the request; see 'cynode --help'.",
        UNREACHABLE => START_REMEDY,
        DENIED => "Ask the owner for access.",
        _ => "Retry; see 'cynode status' and the logs.",
    }
}

/// Escapes JSON to ASCII: it stays valid and has no effect on a terminal.
fn ascii(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for character in json.chars() {
        if matches!(character, ' '..='~') {
            text.push(character);
        } else {
            let mut units = [0; 2];
            text.extend(
                character
                    .encode_utf16(&mut units)
                    .iter()
                    .map(|unit| format!("\\u{unit:04x}")),
            );
        }
    }
    text
}

/// Reports an error of clap. Help and version are printed as successes.
pub fn usage(error: &clap::Error, format: OutputFormat) -> ExitCode {
    if !error.use_stderr() {
        return if error.print().is_ok() {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(BROKEN_PIPE)
        };
    }
    if matches!(
        error.kind(),
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    ) {
        return Failure::usage("no command given")
            .remedy("See 'cynode --help'.")
            .report(format);
    }
    let unknown = error
        .get(ContextKind::InvalidArg)
        .filter(|_| error.kind() == ErrorKind::UnknownArgument);
    if let Some(ContextValue::String(argument)) = unknown
        && ["--pty", "--tty"].contains(&argument.as_str())
    {
        return Failure::usage("this command does not support a terminal")
            .remedy(
                "Create the session with --pty, then open a terminal with \
                 'cynode session shell ID [CMD]'.",
            )
            .report(format);
    }
    // clap renders one line for the error and hints below it.
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
    if format == OutputFormat::Json {
        let (message, hints) = text
            .split_once("\n\n")
            .unwrap_or((text, "See 'cynode --help'."));
        return Failure::usage(one_line(message))
            .remedy(one_line(hints))
            .report(format);
    }
    output::message(&format!("cynode: error[usage]: {text}"));
    ExitCode::from(USAGE)
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The output format of a command line that clap may fail to parse.
pub fn format_of(arguments: impl IntoIterator<Item = OsString>) -> OutputFormat {
    let mut arguments = arguments
        .into_iter()
        .take_while(|argument| argument != "--");
    let mut format = OutputFormat::Table;
    while let Some(argument) = arguments.next() {
        let value = if argument == "--output" {
            arguments.next()
        } else {
            argument
                .to_str()
                .and_then(|text| text.strip_prefix("--output="))
                .map(Into::into)
        };
        if let Some(value) = value {
            format = if value == "json" {
                OutputFormat::Json
            } else {
                OutputFormat::Table
            };
        }
    }
    format
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let message = error.chain();
        match error {
            Error::Problem(problem) => from_problem(*problem),
            Error::Status {
                status: 401 | 403, ..
            } => Self::new(DENIED, "denied", message)
                .remedy(
                    "Check the token: CYNODE_TOKEN, or admin.token and worker.token in the state \
                     directory.",
                )
                .with_remote_problem(RemoteProblem::Token),
            Error::Status {
                status: 502..=504, ..
            } => Self::new(UNREACHABLE, "unreachable", message),
            Error::Status { .. } | Error::Answer { .. } => Self::internal(message)
                .remedy(
                    "Check that this address is a CyNode of the same version; see 'cynode status'.",
                )
                .with_remote_problem(RemoteProblem::Answer),
            Error::Unreachable { never_sent, .. } => {
                let problem = if never_sent {
                    RemoteProblem::Connection
                } else {
                    RemoteProblem::Protocol
                };
                Self::new(UNREACHABLE, "unreachable", message)
                    .remedy(START_REMEDY)
                    .with_remote_problem(problem)
            }
            Error::Broken { .. } => {
                Self::new(UNREACHABLE, "unreachable", message).remedy(START_REMEDY)
            }
            Error::Setup(_) => Self::usage(message),
        }
    }
}

fn from_problem(problem: Problem) -> Failure {
    let errno = problem
        .extensions
        .get("errno")
        .and_then(|errno| errno.as_str())
        .unwrap_or_default();
    let exit = match problem.status {
        // A command that can't start has the exit code that a shell would give it.
        _ if problem.is(ErrorCode::ExecFailed) && errno == "ENOENT" => 127,
        _ if problem.is(ErrorCode::ExecFailed) => 126,
        status => exit_of(status),
    };
    let message = if problem.detail.is_empty() {
        &problem.title
    } else {
        &problem.detail
    };
    let mut failure = Failure::new(exit, &problem.code, message);
    if !problem.remedy.is_empty() {
        failure.remedy = Some(problem.remedy.clone());
    }
    if let (INTERNAL, Some(id)) = (exit, &problem.request_id) {
        failure.message = format!("{} (request {id})", failure.message);
    }
    failure.remote_problem = match problem.status {
        401 => Some(RemoteProblem::Token),
        404 if problem.detail == NO_SUCH_ROUTE => Some(RemoteProblem::Route),
        _ => None,
    };
    failure.problem = Some(Box::new(problem));
    failure
}

/// The exit code for the status of a refusal.
const fn exit_of(status: u16) -> u8 {
    match status {
        401 | 403 => DENIED,
        400..=499 => USAGE,
        502..=504 => UNREACHABLE,
        _ => INTERNAL,
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::reported(BROKEN_PIPE),
            io::ErrorKind::PermissionDenied => Self::new(DENIED, "denied", error.to_string())
                .remedy("Run this as the owner of the file."),
            _ => Self::internal(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit(code: ErrorCode) -> u8 {
        Failure::from(Error::Problem(Box::new(Problem::new(code, "x")))).exit
    }

    #[test]
    fn error_codes_map_to_exit_codes() {
        assert_eq!(exit(ErrorCode::Unauthorized), DENIED);
        assert_eq!(exit(ErrorCode::PermissionDenied), DENIED);
        assert_eq!(exit(ErrorCode::SessionNotFound), USAGE);
        assert_eq!(exit(ErrorCode::InvalidRequest), USAGE);
        assert_eq!(exit(ErrorCode::NoCapacity), UNREACHABLE);
        assert_eq!(exit(ErrorCode::Internal), INTERNAL);
        assert_eq!(exit(ErrorCode::NoSpace), INTERNAL);
    }

    #[test]
    fn a_failure_as_json_is_a_problem_document_of_one_line_in_ascii() {
        let problem = Problem::new(ErrorCode::DeniedByPolicy, "no \u{202e}\u{1f600}\n")
            .with("rules", json!(["a"]));
        let failure = Failure::from(Error::Problem(Box::new(Problem {
            request_id: Some("r".into()),
            ..problem
        })));
        let text = ascii(&failure.document().to_string());
        assert!(
            text.bytes().all(|byte| (b' '..=b'~').contains(&byte)),
            "{text}"
        );
        let document: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(document["detail"], "no \u{202e}\u{1f600}\n");
        assert_eq!(
            (
                &document["status"],
                &document["code"],
                &document["rules"][0]
            ),
            (&json!(403), &json!("denied_by_policy"), &json!("a"))
        );
        assert_eq!(
            (&document["exit"], &document["request_id"]),
            (&json!(77), &json!("r"))
        );
        let local = Failure::usage("x").remedy("y").document();
        assert_eq!(
            local,
            json!({
                "type": "urn:cynode:error:usage", "title": title(USAGE), "detail": "x",
                "code": "usage", "remedy": "y", "exit": 64,
            })
        );
    }

    #[test]
    fn the_format_is_found_in_an_invalid_command_line() {
        let format = |arguments: &[&str]| format_of(arguments.iter().map(OsString::from));
        assert_eq!(
            format(&["x", "--nonsense", "--output", "json"]),
            OutputFormat::Json
        );
        assert_eq!(format(&["--output=json", "x"]), OutputFormat::Json);
        assert_eq!(format(&["x", "--output"]), OutputFormat::Table);
        assert_eq!(format(&["x", "--output", "xml"]), OutputFormat::Table);
        assert_eq!(
            format(&["exec", "--", "curl", "--output", "json"]),
            OutputFormat::Table
        );
    }

    #[test]
    fn a_command_that_can_not_start_has_the_exit_code_of_a_shell() {
        let problem = |errno: &str| {
            Failure::from(Error::Problem(Box::new(
                Problem::new(ErrorCode::ExecFailed, "x").with("errno", errno),
            )))
            .exit
        };
        assert_eq!((problem("ENOENT"), problem("EACCES")), (127, 126));
    }
}
