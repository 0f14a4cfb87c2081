//! Starts the git role.
//!
//! Invariant: the role listens only after it has dropped root, and ends when its runner does.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_service::{
    admin, auth,
    files::{read_or_create_token, replace},
    listen::{self, ListenError, Prepared},
    private, shutdown,
};
use rustix::fs::{FlockOperation, Mode, flock};
use uuid::Uuid;

use crate::{
    Config,
    api::{self, Api},
    dial::{Dialer, SystemResolver},
    git::{
        mirror::{MirrorLimits, Mirrors},
        runner::{DIRECTORIES, RunnerClient, Split, settings, split},
    },
    operation::GitRole,
    state::{RuleStore, SystemClock},
    trail::RoleTrail,
    vault::Vault,
};

/// The role's name: in the audit stream, and what credentials are sealed for.
pub(crate) const ROLE: &str = "git";
/// Threads that serve calls; git's processes do the work.
const THREADS: usize = 2;
/// How long to wait for the lock before the directory counts as used by another role.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("another git role uses the directory {0}")]
    Locked(PathBuf),
    #[error("{operation}")]
    State {
        operation: String,
        source: io::Error,
    },
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("the process that runs git can't be used: {0}")]
    Runner(String),
    #[error("the process that runs git has ended")]
    RunnerEnded,
}

fn state(operation: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let operation = operation.into();
    move |source| Error::State { operation, source }
}

/// Runs the git role until it is told to stop. Must be called on the only thread of the process,
/// outside of an async runtime: under root this process becomes another user.
pub fn run_git(config: Config) -> Result<(), Error> {
    // Certificates may be readable by root alone.
    let listener = listen::prepare(config.listen, &config.tls, config.insecure_listen)?;
    listen::raise_open_files();
    let parts = split(&config).map_err(state("starting the process that runs git"))?;
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .map_err(state("starting threads"))?
        .block_on(Box::pin(serve(config, listener, parts)))
}

async fn serve(config: Config, listener: Prepared, parts: Split) -> Result<(), Error> {
    let directory = config.directory();
    let _lock = lock(&directory)?;
    let vault = Vault::open(&directory.join("key"), ROLE).map_err(state("reading the key"))?;
    let instance = instance(&directory.join("instance")).map_err(state("reading the instance"))?;
    let trail = RoleTrail::open(directory.join(DIRECTORIES.audit), ROLE, instance)
        .map_err(state("opening the audit trail"))?;
    let token = read_or_create_token(&config.token_file()).map_err(state("reading the token"))?;
    let metrics_token = admin::metrics_token(config.metrics_token_file.as_deref())
        .map_err(state("reading egress.git.metrics_token_file"))?;
    let is_separate = parts.runner_uid != rustix::process::geteuid().as_raw();
    let runner = RunnerClient::connect(
        parts.control,
        settings(&config, &directory.join(DIRECTORIES.mirrors), is_separate),
        directory.join(DIRECTORIES.calls),
        parts.runner_uid,
        config.max_commands,
    )
    .await
    .map_err(|error| Error::Runner(error.to_string()))?;
    let bound = listener.bind().await?;
    let stop = shutdown::on_signals().map_err(state("watching signals"))?;
    let url = bound.url();
    replace(&directory.join("url"), url.as_bytes()).map_err(state("writing the address"))?;
    let limits = MirrorLimits {
        bytes: config.mirror_bytes,
        command: config.command_timeout(),
        transfer: config.transfer_timeout(),
    };
    let role = Arc::new(GitRole {
        vault,
        rules: RuleStore::new(Arc::new(SystemClock), Some(bound.address)),
        dialer: Dialer::new(Arc::new(SystemResolver)),
        mirrors: Arc::new(Mirrors::new(runner.clone(), limits)),
        audit: Arc::new(trail.clone()),
        instance,
    });
    let tokens = auth::Tokens::new(vec![auth::Token::new(&token)]);
    let router = api::router(
        Api::new(role, trail.clone(), stop.clone()),
        tokens.clone(),
        admin::by_tokens(metrics_token, tokens),
    );
    tracing::info!(%url, %instance, is_separate, "The git role is ready to serve.");
    let connections = config.max_connections;
    let served = listen::serve(bound, router, stop.clone(), connections);
    tokio::pin!(served);
    let result = tokio::select! {
        served = &mut served => served.map_err(state("serving")),
        () = runner.closed() => {
            // Under root it can't be started again from here.
            stop.cancel();
            drop(served.await);
            Err(Error::RunnerEnded)
        }
    };
    trail.flush().await;
    result
}

/// Locks the directory for this process while it lives.
fn lock(directory: &Path) -> Result<fs_err::File, Error> {
    let lock = private::open_lock(&directory.join("lock")).map_err(state("opening the lock"))?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    while flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        if Instant::now() >= deadline {
            return Err(Error::Locked(directory.to_owned()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(lock)
}

/// The role's identity in its audit stream, created once.
fn instance(path: &Path) -> io::Result<Uuid> {
    match fs_err::read_to_string(path) {
        Ok(text) => text.trim().parse().map_err(|_| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{} is not a UUID: restore or remove it", path.display()),
            )
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let instance = Uuid::now_v7();
            replace(path, format!("{instance}\n").as_bytes())?;
            Ok(instance)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_is_created_once_and_a_damaged_one_is_not_replaced() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("instance");
        let first = instance(&path).expect("created");
        assert_eq!(instance(&path).expect("read"), first);
        fs_err::write(&path, "x").expect("written");
        assert!(instance(&path).is_err());
    }
}
