//! Remedies for what goes wrong between here and the server: they depend on what answers at the address, and on where the address and
//! the token come from.

use cynode_client::{Peer, WorkerClient};

use super::{environment, target, trust};
use crate::{
    cli::Globals,
    failure::{Failure, Trouble},
    state::StateDir,
};

/// How the server was chosen, and what answers there.
#[derive(Clone, Debug)]
struct Situation {
    url: String,
    /// The address comes from `CYNODE_URL`, not from the state directory.
    is_named: bool,
    /// The token comes from `CYNODE_TOKEN`.
    is_token_named: bool,
    /// Where the token comes from otherwise.
    token_file: String,
    /// The user API of this machine, when one runs.
    local: Option<String>,
    /// `None` when no HTTP answer comes.
    peer: Option<Peer>,
    /// The failure as it was reported: its root cause is at its end.
    message: String,
}

/// The failure with the remedy for its true cause.
pub async fn explain(globals: &Globals, failure: Failure) -> Failure {
    let Some(trouble) = failure.trouble else {
        return failure;
    };
    let (Ok(target), Ok(state)) = (target(globals), StateDir::new(globals)) else {
        return failure;
    };
    let peer = if trouble == Trouble::Connection {
        None
    } else {
        WorkerClient::identify(&target.url, trust(globals, target.authority.as_deref()))
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
    let situation = Situation {
        url: target.url.trim_end_matches('/').to_owned(),
        is_named: environment("CYNODE_URL").is_some(),
        is_token_named: environment("CYNODE_TOKEN").is_some(),
        token_file: state.path().join(file).display().to_string(),
        local,
        peer,
        message: failure.message().to_owned(),
    };
    let failure = match situation.cause(trouble) {
        Some(cause) => failure.because(cause),
        None => failure,
    };
    match situation.remedy(trouble) {
        Some(remedy) => failure.remedy(remedy),
        None => failure,
    }
}

impl Situation {
    /// A message that names the cause, where the server's own does not.
    fn cause(&self, trouble: Trouble) -> Option<String> {
        let url = &self.url;
        match (trouble, self.peer) {
            (Trouble::Route | Trouble::Token, Some(Peer::Control)) => Some(format!(
                "{url} is an orchestrator's port for nodes, not its user API"
            )),
            (Trouble::Route, Some(Peer::Worker)) => {
                Some(format!("{url} is a worker, which has sessions and no more"))
            }
            (Trouble::Token, Some(Peer::Worker)) => {
                Some(format!("{url} is a worker, and this is not its token"))
            }
            (Trouble::Route | Trouble::Token | Trouble::Protocol, Some(Peer::Other)) => {
                Some(format!("{url} is not CyNode"))
            }
            _ => None,
        }
    }

    fn remedy(&self, trouble: Trouble) -> Option<String> {
        match (trouble, self.peer) {
            (Trouble::Token, Some(Peer::Worker)) => {
                let own = if self.is_token_named {
                    "worker.token in the worker's state directory".to_owned()
                } else {
                    self.token_file.clone()
                };
                Some(format!(
                    "A worker takes one token ({own}). A user's token is good at the user API: {}",
                    self.correct_address()
                ))
            }
            (Trouble::Token, Some(Peer::Orchestrator)) if self.is_token_named => {
                let unset = if self.local.is_some() && !self.is_named {
                    format!(", or unset it to use {}", self.token_file)
                } else {
                    String::new()
                };
                Some(format!(
                    "The token in CYNODE_TOKEN is mistyped, expired, revoked or another CyNode's: make one with 'cynode token create'{unset}."
                ))
            }
            (Trouble::Token, Some(Peer::Orchestrator)) => Some(format!(
                "{} does not fit the CyNode that answers at {}: see 'cynode status', or set CYNODE_TOKEN.",
                self.token_file, self.url
            )),
            (Trouble::Route, Some(Peer::Orchestrator)) => Some(format!(
                "The orchestrator is of another version than this program ({}): update the older one.",
                env!("CARGO_PKG_VERSION")
            )),
            (Trouble::Token | Trouble::Route, Some(Peer::Control | Peer::Worker | Peer::Other))
            | (Trouble::Protocol, Some(Peer::Other)) => Some(self.correct_address()),
            (Trouble::Protocol, None) => Some(format!(
                "What listens there does not speak plain HTTP; with TLS the address begins with https://. {}",
                self.correct_address()
            )),
            (Trouble::Connection, _) => self.connection(),
            (Trouble::Token | Trouble::Route, None) | (Trouble::Protocol, Some(_)) => None,
        }
    }

    fn connection(&self) -> Option<String> {
        let says = |words: &[&str]| words.iter().any(|word| self.message.contains(word));
        if says(&["peer certificate"]) {
            return Some(
                "Name the authority that signed the certificate with --ca FILE or CYNODE_CA_FILE."
                    .to_owned(),
            );
        }
        if self.url.starts_with("https:") && says(&["corrupt message", "InvalidContentType"]) {
            return Some(format!(
                "What listens there does not speak TLS: try http://. {}",
                self.correct_address()
            ));
        }
        if !self.is_named {
            return None;
        }
        let what = if says(&["lookup address", "Name or service", "dns"]) {
            "The host name is not known."
        } else {
            "Nothing listens there, or a firewall is in between."
        };
        Some(format!("{what} {}", self.correct_address()))
    }

    /// Where the user API is, as far as this machine knows.
    fn correct_address(&self) -> String {
        match &self.local {
            Some(local) if self.is_named => format!("Check CYNODE_URL: here it is {local}."),
            Some(local) => format!("Here it is {local}; see 'cynode status'."),
            None if self.is_named => {
                "Check CYNODE_URL: its port is 12080 unless configured otherwise.".to_owned()
            }
            None => "See 'cynode status'.".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn situation(peer: Option<Peer>) -> Situation {
        Situation {
            url: "http://h:1".into(),
            is_named: true,
            is_token_named: true,
            token_file: "/s/admin.token".into(),
            local: None,
            peer,
            message: "can't reach http://h:1: refused".into(),
        }
    }

    #[test]
    fn a_refused_token_is_told_from_one_at_the_wrong_port() {
        let remedy = |situation: Situation| situation.remedy(Trouble::Token).expect("a remedy");
        assert!(
            remedy(situation(Some(Peer::Orchestrator)))
                .contains("token in CYNODE_TOKEN is mistyped")
        );
        let on_disk = remedy(Situation {
            is_token_named: false,
            ..situation(Some(Peer::Orchestrator))
        });
        assert!(
            on_disk.starts_with("/s/admin.token does not fit"),
            "{on_disk}"
        );
        let worker = remedy(situation(Some(Peer::Worker)));
        assert!(
            worker.contains("worker.token") && worker.contains("12080"),
            "{worker}"
        );
        let control = situation(Some(Peer::Control));
        assert!(
            control
                .cause(Trouble::Token)
                .is_some_and(|cause| cause.contains("port for nodes"))
                && remedy(control).contains("CYNODE_URL")
        );
    }

    #[test]
    fn a_wrong_port_is_named_by_what_listens_there() {
        let local = Situation {
            local: Some("http://127.0.0.1:7".into()),
            ..situation(Some(Peer::Worker))
        };
        assert_eq!(
            local.remedy(Trouble::Route).as_deref(),
            Some("Check CYNODE_URL: here it is http://127.0.0.1:7.")
        );
        assert!(
            local
                .cause(Trouble::Route)
                .is_some_and(|cause| cause.contains("is a worker"))
        );
        let postgres = situation(None).remedy(Trouble::Protocol).expect("a remedy");
        assert!(
            postgres.contains("does not speak plain HTTP") && postgres.contains("12080"),
            "{postgres}"
        );
        assert!(
            situation(Some(Peer::Orchestrator))
                .remedy(Trouble::Route)
                .is_some_and(|remedy| remedy.contains("another version"))
        );
        for slow in [Peer::Orchestrator, Peer::Worker] {
            assert_eq!(situation(Some(slow)).remedy(Trouble::Protocol), None);
        }
    }

    #[test]
    fn a_connection_that_is_not_made_names_its_cause() {
        let with = |message: &str, url: &str| {
            Situation {
                message: message.into(),
                url: url.into(),
                ..situation(None)
            }
            .remedy(Trouble::Connection)
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
            Situation {
                is_named: false,
                ..situation(None)
            }
            .remedy(Trouble::Connection),
            None
        );
    }
}
