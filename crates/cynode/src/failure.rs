//! cynode's own failures: one line, a remedy, and an exit code that scripts can rely on.

use std::{io, process::ExitCode};

use clap::error::ErrorKind;
use cynode_api::{ErrorCode, Problem};
use cynode_client::Error;

use crate::{output, sanitize};

/// The request is wrong, or the thing it names is not there or not in the right state.
pub const USAGE: u8 = 64;
/// Nobody answers, or the one who answers can't do it now.
pub const UNREACHABLE: u8 = 69;
pub const INTERNAL: u8 = 70;
pub const DENIED: u8 = 77;
/// As a shell says it of a program that wrote to a closed pipe.
const BROKEN_PIPE: u8 = 141;

#[derive(Debug)]
pub struct Failure {
    pub exit: u8,
    code: String,
    message: String,
    remedy: Option<String>,
    /// Nothing is printed.
    quiet: bool,
}

impl Failure {
    pub fn new(exit: u8, code: &str, message: impl Into<String>) -> Self {
        Self { exit, code: code.to_owned(), message: message.into(), remedy: None, quiet: false }
    }

    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(USAGE, "usage", message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(INTERNAL, "internal", message)
    }

    /// Ends without a word: it was said already.
    pub fn said(exit: u8) -> Self {
        Self { quiet: true, ..Self::new(exit, "", "") }
    }

    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    pub fn remedy_text(&self) -> Option<&str> {
        self.remedy.as_deref()
    }

    pub fn report(&self) -> ExitCode {
        if !self.quiet {
            // Details may hold names that a sandbox chose.
            output::note(&format!("cynode: error[{}]: {}", sanitize::line(&self.code), sanitize::line(&self.message)));
            if let Some(remedy) = &self.remedy {
                output::note(&format!("  remedy: {}", sanitize::line(remedy)));
            }
        }
        ExitCode::from(self.exit)
    }
}

/// Help and version are no failures; everything else that clap says is one of usage.
pub fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        return if error.print().is_ok() { ExitCode::SUCCESS } else { ExitCode::from(BROKEN_PIPE) };
    }
    if matches!(error.kind(), ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand) {
        output::note("cynode: error[usage]: a command is missing\n  remedy: See 'cynode --help'.");
        return ExitCode::from(USAGE);
    }
    // clap's own words: one line for the error, and hints below it.
    let text = error.render().to_string();
    output::note(&format!("cynode: error[usage]: {}", text.strip_prefix("error: ").unwrap_or(&text).trim_end()));
    ExitCode::from(USAGE)
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let message = error.chain();
        match error {
            Error::Problem(problem) => of_problem(*problem),
            Error::Status { status: 401 | 403, .. } => {
                Self::new(DENIED, "denied", message).remedy("Check the token: CYNODE_TOKEN, or admin.token and worker.token in the state directory.")
            }
            Error::Status { status: 502..=504, .. } => Self::new(UNREACHABLE, "unreachable", message),
            Error::Status { .. } | Error::Answer { .. } => Self::internal(message).remedy("Is this address a CyNode of the same version? See 'cynode status'."),
            Error::Unreachable { .. } | Error::Broken { .. } => {
                Self::new(UNREACHABLE, "unreachable", message).remedy("See 'cynode status'; start CyNode with 'cynode up'.")
            }
            Error::Setup(_) => Self::usage(message),
        }
    }
}

fn of_problem(problem: Problem) -> Failure {
    let errno = problem.extensions.get("errno").and_then(|errno| errno.as_str()).unwrap_or_default();
    let exit = match problem.status {
        // A command that can't be started ends as a shell would say it.
        _ if problem.is(ErrorCode::ExecFailed) && errno == "ENOENT" => 127,
        _ if problem.is(ErrorCode::ExecFailed) => 126,
        401 | 403 => DENIED,
        400..=499 => USAGE,
        502..=504 => UNREACHABLE,
        _ => INTERNAL,
    };
    let message = if problem.detail.is_empty() { problem.title } else { problem.detail };
    let mut failure = Failure::new(exit, &problem.code, message);
    if !problem.remedy.is_empty() {
        failure.remedy = Some(problem.remedy);
    }
    if let (INTERNAL, Some(id)) = (exit, problem.request_id) {
        failure.message = format!("{} (request {id})", failure.message);
    }
    failure
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::said(BROKEN_PIPE),
            io::ErrorKind::PermissionDenied => Self::new(DENIED, "denied", error.to_string()).remedy("Run as the user that owns it."),
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
    fn a_command_that_is_not_there_ends_as_in_a_shell() {
        let problem = |errno: &str| Failure::from(Error::Problem(Box::new(Problem::new(ErrorCode::ExecFailed, "x").with("errno", errno)))).exit;
        assert_eq!((problem("ENOENT"), problem("EACCES")), (127, 126));
    }
}
