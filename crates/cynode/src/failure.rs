//! cynode's own failures: one line, a remedy, and an exit code that scripts can rely on.

use std::{ffi::OsString, io, process::ExitCode};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use cynode_api::{ErrorCode, Problem};
use cynode_client::Error;
use serde_json::{Map, Value, json};

use crate::{cli::Format, output, sanitize};

/// The request is wrong, or the thing it names is not there or not in the right state.
pub const USAGE: u8 = 64;
/// Nobody answers, or the one who answers can't do it now.
pub const UNREACHABLE: u8 = 69;
pub const INTERNAL: u8 = 70;
pub const DENIED: u8 = 77;
const START: &str = "See 'cynode status'; start CyNode with 'cynode up'.";
/// The detail of a 404 for an address, as against a thing, that is not there.
const NO_SUCH_ROUTE: &str = "no such address";
/// As a shell says it of a program that wrote to a closed pipe.
const BROKEN_PIPE: u8 = 141;

/// A failure to talk with a server. The remedy depends on how the address and the token were chosen, which only
/// `connect::explain` knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The server refused the token.
    Token,
    /// The server has no such route: it may be another role.
    Route,
    /// No connection was made.
    Connection,
    /// A connection was made, and what came over it is not the API.
    Protocol,
}

#[derive(Debug)]
pub struct Failure {
    pub exit: u8,
    code: String,
    message: String,
    remedy: Option<String>,
    /// Nothing is printed.
    quiet: bool,
    pub trouble: Option<Trouble>,
    /// The server's own words, for `--output json`.
    problem: Option<Box<Problem>>,
}

impl Failure {
    pub fn new(exit: u8, code: &str, message: impl Into<String>) -> Self {
        Self {
            exit,
            code: code.to_owned(),
            message: message.into(),
            remedy: None,
            quiet: false,
            trouble: None,
            problem: None,
        }
    }

    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(USAGE, "usage", message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(INTERNAL, "internal", message)
    }

    /// Ends without a word: it was said already.
    pub fn said(exit: u8) -> Self {
        Self {
            quiet: true,
            ..Self::new(exit, "", "")
        }
    }

    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    /// The same failure, in words that name its cause.
    #[must_use]
    pub fn because(mut self, message: impl Into<String>) -> Self {
        self.message = message.into();
        self
    }

    #[must_use]
    fn trouble(mut self, trouble: Trouble) -> Self {
        self.trouble = Some(trouble);
        self
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    pub fn remedy_text(&self) -> Option<&str> {
        self.remedy.as_deref()
    }

    /// Prints the failure on stderr: a line and its remedy, or a problem document in one line of JSON.
    pub fn report(&self, format: Format) -> ExitCode {
        match format {
            _ if self.quiet => {}
            Format::Json => output::note(&ascii(&self.document().to_string())),
            Format::Table => {
                // Details may hold names that a sandbox chose.
                output::note(&format!(
                    "cynode: error[{}]: {}",
                    sanitize::line(&self.code),
                    sanitize::line(&self.message)
                ));
                if let Some(remedy) = &self.remedy {
                    output::note(&format!("  remedy: {}", sanitize::line(remedy)));
                }
            }
        }
        ExitCode::from(self.exit)
    }

    /// An RFC 9457 problem document. One of the server's keeps its status and extensions; one of ours has no status.
    fn document(&self) -> Value {
        let mut document = match &self.problem {
            Some(problem) => json!(problem),
            None => {
                json!({ "type": format!("urn:cynode:error:{}", self.code), "title": title(self.exit) })
            }
        };
        if let Value::Object(members) = &mut document {
            let remedy = self.remedy.as_deref().unwrap_or(default_remedy(self.exit));
            let own = [
                ("code", json!(self.code)),
                ("detail", json!(self.message)),
                ("remedy", json!(remedy)),
                ("exit", json!(self.exit)),
            ];
            members.extend(
                own.map(|(name, value)| (name.to_owned(), value))
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
        _ => "Something went wrong inside",
    }
}

/// The remedy in a problem document when the failure has none of its own.
const fn default_remedy(exit: u8) -> &'static str {
    match exit {
        USAGE => "Correct it as the detail says; see 'cynode --help'.",
        UNREACHABLE => START,
        DENIED => "Ask whoever owns it.",
        _ => "Try again; see 'cynode status' and the log.",
    }
}

/// JSON in ASCII: nothing in it acts on a terminal, and it stays valid.
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

/// Help and version are no failures; everything else that clap says is one of usage.
pub fn usage(error: &clap::Error, format: Format) -> ExitCode {
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
        return Failure::usage("a command is missing")
            .remedy("See 'cynode --help'.")
            .report(format);
    }
    let unknown = error
        .get(ContextKind::InvalidArg)
        .filter(|_| error.kind() == ErrorKind::UnknownArgument);
    if matches!(unknown, Some(ContextValue::String(argument)) if ["--pty", "--tty"].contains(&argument.as_str()))
    {
        let message = "this command has no terminal to give";
        return Failure::usage(message).remedy("Create the session with --pty, then open a terminal with 'cynode session shell ID [CMD]'.").report(format);
    }
    // clap's own words: one line for the error, and hints below it.
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
    if format == Format::Json {
        let (message, hints) = text
            .split_once("\n\n")
            .unwrap_or((text, "See 'cynode --help'."));
        return Failure::usage(one_line(message))
            .remedy(one_line(hints))
            .report(format);
    }
    output::note(&format!("cynode: error[usage]: {text}"));
    ExitCode::from(USAGE)
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The format that a command line asks for, also when clap can't read the rest of it.
pub fn format_of(arguments: impl IntoIterator<Item = OsString>) -> Format {
    let mut arguments = arguments
        .into_iter()
        .take_while(|argument| argument != "--");
    let mut format = Format::Table;
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
                Format::Json
            } else {
                Format::Table
            };
        }
    }
    format
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let message = error.chain();
        match error {
            Error::Problem(problem) => of_problem(*problem),
            Error::Status { status: 401 | 403, .. } => Self::new(DENIED, "denied", message)
                .remedy("Check the token: CYNODE_TOKEN, or admin.token and worker.token in the state directory.")
                .trouble(Trouble::Token),
            Error::Status { status: 502..=504, .. } => Self::new(UNREACHABLE, "unreachable", message),
            Error::Status { .. } | Error::Answer { .. } => {
                Self::internal(message).remedy("Is this address a CyNode of the same version? See 'cynode status'.").trouble(Trouble::Protocol)
            }
            Error::Unreachable { never_sent, .. } => {
                let trouble = if never_sent { Trouble::Connection } else { Trouble::Protocol };
                Self::new(UNREACHABLE, "unreachable", message).remedy(START).trouble(trouble)
            }
            Error::Broken { .. } => Self::new(UNREACHABLE, "unreachable", message).remedy(START),
            Error::Setup(_) => Self::usage(message),
        }
    }
}

fn of_problem(problem: Problem) -> Failure {
    let errno = problem
        .extensions
        .get("errno")
        .and_then(|errno| errno.as_str())
        .unwrap_or_default();
    let exit = match problem.status {
        // A command that can't be started ends as a shell would say it.
        _ if problem.is(ErrorCode::ExecFailed) && errno == "ENOENT" => 127,
        _ if problem.is(ErrorCode::ExecFailed) => 126,
        401 | 403 => DENIED,
        400..=499 => USAGE,
        502..=504 => UNREACHABLE,
        _ => INTERNAL,
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
    failure.trouble = match problem.status {
        401 => Some(Trouble::Token),
        404 if problem.detail == NO_SUCH_ROUTE => Some(Trouble::Route),
        _ => None,
    };
    failure.problem = Some(Box::new(problem));
    failure
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::said(BROKEN_PIPE),
            io::ErrorKind::PermissionDenied => Self::new(DENIED, "denied", error.to_string())
                .remedy("Run as the user that owns it."),
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
    fn refusals_have_the_exit_codes_of_the_contract() {
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
        let own = Failure::usage("x").remedy("y").document();
        assert_eq!(
            own,
            json!({"type": "urn:cynode:error:usage", "title": title(USAGE), "detail": "x", "code": "usage", "remedy": "y", "exit": 64})
        );
    }

    #[test]
    fn the_format_is_found_in_a_command_line_that_is_wrong_otherwise() {
        let format = |arguments: &[&str]| format_of(arguments.iter().map(OsString::from));
        assert_eq!(
            format(&["x", "--nonsense", "--output", "json"]),
            Format::Json
        );
        assert_eq!(format(&["--output=json", "x"]), Format::Json);
        assert_eq!(format(&["x", "--output"]), Format::Table);
        assert_eq!(format(&["x", "--output", "xml"]), Format::Table);
        assert_eq!(
            format(&["exec", "--", "curl", "--output", "json"]),
            Format::Table
        );
    }

    #[test]
    fn a_command_that_is_not_there_ends_as_in_a_shell() {
        let problem = |errno: &str| {
            Failure::from(Error::Problem(Box::new(
                Problem::new(ErrorCode::ExecFailed, "x").with("errno", errno),
            )))
            .exit
        };
        assert_eq!((problem("ENOENT"), problem("EACCES")), (127, 126));
    }
}
