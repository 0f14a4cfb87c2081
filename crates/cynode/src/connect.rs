//! Chooses the server of a command: `CYNODE_URL` and `CYNODE_TOKEN`, or else the files of the state
//! directory.

mod explain;

use std::path::{Path, PathBuf};

use cynode_client::{SessionClient, Surface, Trust, UserClient};

pub use explain::explain;

use crate::{
    cli::Globals,
    failure::{Failure, UNREACHABLE, USAGE},
    state::{Endpoints, StateDir},
};

#[derive(Clone, Debug, PartialEq, Eq)]
struct ServerTarget {
    url: String,
    token: String,
    /// `None` if the address comes from the environment and is not in the state directory.
    surface: Option<Surface>,
    /// The CA of its certificate, if the state directory names one.
    authority: Option<PathBuf>,
}

/// The CA to trust: `--ca`, or else the one from the state directory.
pub fn trust<'a>(globals: &'a Globals, local: Option<&'a Path>) -> Trust<'a> {
    let given = globals
        .ca
        .as_deref()
        .filter(|path| !path.as_os_str().is_empty());
    given.or(local).map_or(Trust::Environment, Trust::Also)
}

/// A client for sessions, which orchestrators and workers serve.
pub async fn client(globals: &Globals) -> Result<SessionClient, Failure> {
    let target = target(globals)?;
    let surface = match target.surface {
        Some(surface) => surface,
        None => {
            SessionClient::find_surface(
                &target.url,
                &target.token,
                trust(globals, target.authority.as_deref()),
            )
            .await?
        }
    };
    Ok(SessionClient::trusting(
        &target.url,
        &target.token,
        surface,
        trust(globals, target.authority.as_deref()),
    )?)
}

/// A client for the user API, which only orchestrators serve.
pub fn user_client(globals: &Globals) -> Result<UserClient, Failure> {
    let target = target(globals)?;
    if target.surface == Some(Surface::Worker) {
        return Err(Failure::new(
            USAGE,
            "no_orchestrator",
            format!("only a worker runs here, at {}", target.url),
        )
        .remedy(
            "Start CyNode without --worker-only, or set CYNODE_URL and CYNODE_TOKEN to those of \
             an orchestrator.",
        ));
    }
    Ok(UserClient::trusting(
        &target.url,
        &target.token,
        trust(globals, target.authority.as_deref()),
    )?)
}

/// A client with the token of an agent, for the server of [`user_client`].
pub fn agent_client(globals: &Globals, token: &str) -> Result<SessionClient, Failure> {
    let target = target(globals)?;
    Ok(SessionClient::trusting(
        &target.url,
        token,
        Surface::User,
        trust(globals, target.authority.as_deref()),
    )?)
}

/// Checks that a program finds the server with a credential when `CYNODE_TOKEN` is not in its
/// environment.
pub fn check_stored_credential(globals: &Globals) -> Result<(), Failure> {
    find(environment("CYNODE_URL"), None, &StateDir::new(globals)?).map(drop)
}

/// Whether the environment names the server.
pub fn is_url_set() -> bool {
    environment("CYNODE_URL").is_some()
}

fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn target(globals: &Globals) -> Result<ServerTarget, Failure> {
    find(
        environment("CYNODE_URL"),
        environment("CYNODE_TOKEN"),
        &StateDir::new(globals)?,
    )
}

fn find(
    url: Option<String>,
    token: Option<String>,
    state: &StateDir,
) -> Result<ServerTarget, Failure> {
    let endpoints = state.endpoints()?;
    let local = endpoints.as_ref().and_then(preferred);
    match (url, token, local) {
        (Some(url), Some(token), _) => {
            let surface = endpoints
                .as_ref()
                .and_then(|endpoints| surface_of(endpoints, &url));
            let authority = endpoints
                .and_then(|endpoints| endpoints.ca)
                .filter(|_| surface.is_some());
            Ok(ServerTarget {
                url,
                token,
                surface,
                authority,
            })
        }
        // The stored token must only be sent to the stored address.
        (Some(url), None, Some(local)) if is_same_url(&url, &local.url) => {
            with_stored_token(local, state)
        }
        (Some(_), None, _) => Err(Failure::usage("CYNODE_URL is set but CYNODE_TOKEN is not")
            .remedy("Set both, or neither.")),
        (None, Some(token), Some(local)) => Ok(ServerTarget { token, ..local }),
        (None, None, Some(local)) => with_stored_token(local, state),
        (None, _, None) => Err(Failure::new(
            UNREACHABLE,
            "unreachable",
            format!(
                "CyNode is not running here (state directory {})",
                state.path().display()
            ),
        )
        .remedy("Start it with 'cynode up', or set CYNODE_URL and CYNODE_TOKEN.")),
    }
}

fn surface_of(endpoints: &Endpoints, url: &str) -> Option<Surface> {
    let is = |endpoint: &Option<String>| {
        endpoint
            .as_ref()
            .is_some_and(|endpoint| is_same_url(endpoint, url))
    };
    if is(&endpoints.api) {
        return Some(Surface::User);
    }
    is(&endpoints.worker).then_some(Surface::Worker)
}

fn is_same_url(one: &str, other: &str) -> bool {
    one.trim_end_matches('/') == other.trim_end_matches('/')
}

/// The orchestrator if one runs here, else the worker; without a token.
fn preferred(endpoints: &Endpoints) -> Option<ServerTarget> {
    let target = |url: &String, surface| ServerTarget {
        url: url.clone(),
        token: String::new(),
        surface: Some(surface),
        authority: endpoints.ca.clone(),
    };
    endpoints
        .api
        .as_ref()
        .map(|url| target(url, Surface::User))
        .or_else(|| {
            endpoints
                .worker
                .as_ref()
                .map(|url| target(url, Surface::Worker))
        })
}

fn with_stored_token(target: ServerTarget, state: &StateDir) -> Result<ServerTarget, Failure> {
    let name = match target.surface {
        Some(Surface::User) => "admin.token",
        _ => "worker.token",
    };
    let token = state.token(name)?.ok_or_else(|| {
        Failure::new(
            UNREACHABLE,
            "unreachable",
            format!("{} is missing", state.path().join(name).display()),
        )
        .remedy("Restart CyNode with 'cynode up', or set CYNODE_TOKEN.")
    })?;
    Ok(ServerTarget { token, ..target })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(api: bool) -> (tempfile::TempDir, StateDir) {
        let directory = tempfile::tempdir().expect("temporary directory");
        let globals = Globals {
            output: crate::cli::OutputFormat::Table,
            state_dir: Some(directory.path().to_owned()),
            config: None,
            ca: None,
        };
        let state = StateDir::new(&globals).expect("state");
        fs_err::write(directory.path().join("worker.token"), "w\n").expect("token");
        fs_err::write(directory.path().join("admin.token"), "a\n").expect("token");
        let endpoints = Endpoints {
            version: 1,
            api: api.then(|| "http://api:1".into()),
            worker: Some("http://worker:1".into()),
            pid: 1,
            ..Endpoints::default()
        };
        state.write_endpoints(&endpoints).expect("endpoints");
        (directory, state)
    }

    fn find_target(
        url: Option<&str>,
        token: Option<&str>,
        state: &StateDir,
    ) -> Result<(String, String), u8> {
        find(url.map(Into::into), token.map(Into::into), state)
            .map(|target| (target.url, target.token))
            .map_err(|failure| failure.exit)
    }

    #[test]
    fn the_environment_wins_over_the_files_and_the_orchestrator_over_the_worker() {
        let (_directory, worker) = state(false);
        assert_eq!(
            find_target(None, None, &worker),
            Ok(("http://worker:1".into(), "w".into()))
        );
        assert_eq!(
            find_target(None, Some("mine"), &worker),
            Ok(("http://worker:1".into(), "mine".into()))
        );
        assert_eq!(
            find_target(Some("http://far:1"), Some("mine"), &worker),
            Ok(("http://far:1".into(), "mine".into()))
        );
        let (_directory, api) = state(true);
        assert_eq!(
            find_target(None, None, &api),
            Ok(("http://api:1".into(), "a".into()))
        );
    }

    #[test]
    fn the_token_on_disk_is_not_sent_to_another_address() {
        let (_directory, state) = state(false);
        assert_eq!(
            find_target(Some("http://far:1"), None, &state),
            Err(crate::failure::USAGE)
        );
        assert_eq!(
            find_target(Some("http://worker:1/"), None, &state),
            Ok(("http://worker:1".into(), "w".into()))
        );
    }

    #[test]
    fn without_files_nothing_is_reachable() {
        let (directory, state) = state(false);
        fs_err::remove_file(directory.path().join("endpoints.json")).expect("removed");
        assert_eq!(find_target(None, None, &state), Err(UNREACHABLE));
    }
}
