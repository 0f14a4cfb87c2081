//! Remedies for failures to communicate with the server. They depend on what answers at the address
//! and on the source of the address and the token.

use cynode_client::{Peer, SessionClient};

use super::{environment, target, trust};
use crate::{
    cli::Globals,
    failure::{Failure, RemoteProblem},
    state::StateDir,
};

/// How the server was chosen, and what answers there.
#[derive(Clone, Debug)]
struct ConnectionContext {
    url: String,
    /// The address comes from `CYNODE_URL`, not from the state directory.
    url_from_environment: bool,
    /// The token comes from `CYNODE_TOKEN`, not from `token_file`.
    token_from_environment: bool,
    token_file: String,
    /// The URL of the user API on this machine, if one runs.
    local: Option<String>,
    /// `None` if there is no HTTP response.
    peer: Option<Peer>,
    /// The original message, which ends with the root cause.
    message: String,
}

/// Adds the cause and its remedy to a failure.
pub async fn explain(globals: &Globals, failure: Failure) -> Failure {
    let Some(problem) = failure.remote_problem else {
        return failure;
    };
    let (Ok(target), Ok(state)) = (target(globals), StateDir::new(globals)) else {
        return failure;
    };
    let peer = if problem == RemoteProblem::Connection {
        None
    } else {
        SessionClient::identify(&target.url, trust(globals, target.authority.as_deref()))
            .await
            .ok()
    };
    let local = state
        .endpoints()
        .ok()
        .flatten()
        .and_then(|endpoints| endpoints.api);
    let file = if target.surface == Some(cynode_client::Surface::Worker) {
        "worker.token"
    } else {
        "admin.token"
    };
    let context = ConnectionContext {
        url: target.url.trim_end_matches('/').to_owned(),
        url_from_environment: environment("CYNODE_URL").is_some(),
        token_from_environment: environment("CYNODE_TOKEN").is_some(),
        token_file: state.path().join(file).display().to_string(),
        local,
        peer,
        message: failure.message().to_owned(),
    };
    let failure = match context.cause(problem) {
        Some(cause) => failure.with_message(cause),
        None => failure,
    };
    match context.remedy(problem) {
        Some(remedy) => failure.remedy(remedy),
        None => failure,
    }
}

impl ConnectionContext {
    /// The cause, if the server's message does not name it.
    fn cause(&self, problem: RemoteProblem) -> Option<String> {
        let url = &self.url;
        match (problem, self.peer) {
            (RemoteProblem::Route | RemoteProblem::Token, Some(Peer::Control)) => Some(format!(
                "{url} is an orchestrator's port for nodes, not its user API"
            )),
            (RemoteProblem::Route, Some(Peer::Worker)) => {
                Some(format!("{url} is a worker, which only serves sessions"))
            }
            (RemoteProblem::Token, Some(Peer::Worker)) => {
                Some(format!("{url} is a worker, and the token is not its token"))
            }
            (
                RemoteProblem::Route
                | RemoteProblem::Token
                | RemoteProblem::Protocol
                | RemoteProblem::Answer,
                Some(Peer::Other),
            ) => Some(format!("{url} is not CyNode")),
            _ => None,
        }
    }

    fn remedy(&self, problem: RemoteProblem) -> Option<String> {
        match (problem, self.peer) {
            (RemoteProblem::Token, Some(Peer::Worker)) => {
                let token = if self.token_from_environment {
                    "worker.token in the worker's state directory".to_owned()
                } else {
                    self.token_file.clone()
                };
                Some(format!(
                    "A worker accepts one token ({token}). Other tokens are for the user API. {}",
                    self.correct_address()
                ))
            }
            (RemoteProblem::Token, Some(Peer::Orchestrator)) if self.token_from_environment => {
                let unset = if self.local.is_some() && !self.url_from_environment {
                    format!(", or unset it to use {}", self.token_file)
                } else {
                    String::new()
                };
                Some(format!(
                    "The token in CYNODE_TOKEN is mistyped, expired, revoked or from another \
                     CyNode: create one with 'cynode token create'{unset}."
                ))
            }
            (RemoteProblem::Token, Some(Peer::Orchestrator)) => Some(format!(
                "{} is not a token of the CyNode at {}: see 'cynode status', or set CYNODE_TOKEN.",
                self.token_file, self.url
            )),
            (RemoteProblem::Route, Some(Peer::Orchestrator)) => Some(format!(
                "The orchestrator has another version than this program ({}): update the older.",
                env!("CARGO_PKG_VERSION")
            )),
            (
                RemoteProblem::Token | RemoteProblem::Route,
                Some(Peer::Control | Peer::Worker | Peer::Other),
            )
            | (RemoteProblem::Protocol | RemoteProblem::Answer, Some(Peer::Other)) => {
                Some(self.correct_address())
            }
            // A server that is too slow may well speak HTTP.
            (RemoteProblem::Protocol, None) if !self.mentions(&["timed out"]) => Some(format!(
                "The server does not speak plain HTTP; for TLS use https://. {}",
                self.correct_address()
            )),
            (RemoteProblem::Connection, _) => self.connection(),
            (RemoteProblem::Token | RemoteProblem::Route, None)
            | (RemoteProblem::Protocol | RemoteProblem::Answer, _) => None,
        }
    }

    /// Whether the original message has one of these.
    fn mentions(&self, words: &[&str]) -> bool {
        words.iter().any(|word| self.message.contains(word))
    }

    fn connection(&self) -> Option<String> {
        if self.mentions(&["peer certificate"]) {
            return Some(
                "Pass the CA that signed the certificate with --ca FILE or CYNODE_CA_FILE."
                    .to_owned(),
            );
        }
        if self.url.starts_with("https:")
            && self.mentions(&["corrupt message", "InvalidContentType"])
        {
            return Some(format!(
                "The server does not speak TLS: try http://. {}",
                self.correct_address()
            ));
        }
        if !self.url_from_environment {
            return None;
        }
        let cause = if self.mentions(&["lookup address", "Name or service", "dns"]) {
            "The host name can't be resolved."
        } else {
            "Nothing listens there, or a firewall blocks the connection."
        };
        Some(format!("{cause} {}", self.correct_address()))
    }

    /// The address of the user API, as far as this machine knows it.
    fn correct_address(&self) -> String {
        match &self.local {
            Some(local) if self.url_from_environment => {
                format!("Check CYNODE_URL: the user API of this machine is {local}.")
            }
            Some(local) => {
                format!("The user API of this machine is {local}; see 'cynode status'.")
            }
            None if self.url_from_environment => {
                "Check CYNODE_URL: the default port of the user API is 12080.".to_owned()
            }
            None => "See 'cynode status'.".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(peer: Option<Peer>) -> ConnectionContext {
        ConnectionContext {
            url: "http://h:1".into(),
            url_from_environment: true,
            token_from_environment: true,
            token_file: "/s/admin.token".into(),
            local: None,
            peer,
            message: "can't reach http://h:1: refused".into(),
        }
    }

    #[test]
    fn a_refused_token_is_distinguished_from_a_wrong_port() {
        let remedy =
            |context: ConnectionContext| context.remedy(RemoteProblem::Token).expect("a remedy");
        assert!(
            remedy(context(Some(Peer::Orchestrator))).contains("token in CYNODE_TOKEN is mistyped")
        );
        let on_disk = remedy(ConnectionContext {
            token_from_environment: false,
            ..context(Some(Peer::Orchestrator))
        });
        assert!(
            on_disk.starts_with("/s/admin.token is not a token"),
            "{on_disk}"
        );
        let worker = remedy(context(Some(Peer::Worker)));
        assert!(
            worker.contains("worker.token") && worker.contains("12080"),
            "{worker}"
        );
        let control = context(Some(Peer::Control));
        assert!(
            control
                .cause(RemoteProblem::Token)
                .is_some_and(|cause| cause.contains("port for nodes"))
                && remedy(control).contains("CYNODE_URL")
        );
    }

    #[test]
    fn a_wrong_port_is_named_by_what_listens_there() {
        let local = ConnectionContext {
            local: Some("http://127.0.0.1:7".into()),
            ..context(Some(Peer::Worker))
        };
        assert_eq!(
            local.remedy(RemoteProblem::Route).as_deref(),
            Some("Check CYNODE_URL: the user API of this machine is http://127.0.0.1:7.")
        );
        assert!(
            local
                .cause(RemoteProblem::Route)
                .is_some_and(|cause| cause.contains("is a worker"))
        );
        let postgres = context(None)
            .remedy(RemoteProblem::Protocol)
            .expect("a remedy");
        assert!(
            postgres.contains("does not speak plain HTTP") && postgres.contains("12080"),
            "{postgres}"
        );
        assert!(
            context(Some(Peer::Orchestrator))
                .remedy(RemoteProblem::Route)
                .is_some_and(|remedy| remedy.contains("another version"))
        );
        for slow in [Peer::Orchestrator, Peer::Worker] {
            assert_eq!(context(Some(slow)).remedy(RemoteProblem::Protocol), None);
        }
    }

    #[test]
    fn only_a_peer_that_sends_no_http_is_said_to_speak_another_protocol() {
        let broken_json: Failure = cynode_client::Error::Answer {
            url: "http://h:1/v1/tasks".into(),
            source: "EOF while parsing a list".into(),
        }
        .into();
        let refused: Failure = cynode_client::Error::Status {
            url: "http://h:1/v1/tasks".into(),
            status: 418,
            body: String::new(),
        }
        .into();
        for failure in [broken_json, refused] {
            let problem = failure.remote_problem.expect("a problem with the server");
            // Nothing was learned about the server: the failure keeps its own remedy.
            assert_eq!(context(None).remedy(problem), None, "{failure:?}");
            assert!(
                failure
                    .remedy_text()
                    .is_some_and(|remedy| remedy.contains("a CyNode of the same version")),
                "{failure:?}"
            );
            let other = context(Some(Peer::Other));
            assert_eq!(
                (
                    other.cause(problem).as_deref(),
                    other
                        .remedy(problem)
                        .is_some_and(|remedy| remedy.starts_with("Check CYNODE_URL"))
                ),
                (Some("http://h:1 is not CyNode"), true)
            );
        }
        let slow = ConnectionContext {
            message: "can't reach http://h:1: operation timed out".into(),
            ..context(None)
        };
        assert_eq!(slow.remedy(RemoteProblem::Protocol), None);
    }

    #[test]
    fn a_failed_connection_names_its_cause() {
        let with = |message: &str, url: &str| {
            ConnectionContext {
                message: message.into(),
                url: url.into(),
                ..context(None)
            }
            .remedy(RemoteProblem::Connection)
        };
        let remedy = |message: &str, url: &str| with(message, url).expect("a remedy");
        assert!(
            remedy("can't reach: Connection refused", "http://h:1")
                .starts_with("Nothing listens there")
        );
        assert!(
            remedy(
                "can't reach: invalid peer certificate: UnknownIssuer",
                "https://h:1"
            )
            .contains("--ca")
        );
        assert!(
            remedy(
                "can't reach: received corrupt message of type InvalidContentType",
                "https://h:1"
            )
            .contains("http://")
        );
        assert!(remedy("failed to lookup address information", "http://h:1").contains("host name"));
        assert_eq!(
            ConnectionContext {
                url_from_environment: false,
                ..context(None)
            }
            .remedy(RemoteProblem::Connection),
            None
        );
    }
}
