//! Checkpoints: each second, or after a thousand records, where the streams stand is signed and written to the database and to
//! a file of this orchestrator. What others signed is copied into the file too: who changes the database can't change that.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use cynode_audit::{Signed, SigningKey};
use cynode_service::ApiError;
use fs_err::OpenOptions;
use parking_lot::Mutex;

use crate::Orchestrator;

/// How often, at the least, while there is anything to sign.
const EVERY: Duration = Duration::from_secs(1);

/// The key, and the file.
#[derive(Clone, Debug)]
pub(crate) struct Checkpoints {
    pub(crate) key: Arc<SigningKey>,
    path: PathBuf,
    /// The number of the last line in the file.
    last: Arc<Mutex<u64>>,
}

impl Checkpoints {
    /// Opens the file. A last line that a crash cut off is taken away; the database has it whole.
    pub(crate) fn open(key: SigningKey, path: PathBuf) -> std::io::Result<Self> {
        let text = match fs_err::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        if whole < text.len() {
            OpenOptions::new().write(true).open(&path)?.set_len(whole as u64)?;
        }
        let lines = String::from_utf8_lossy(&text[..whole]);
        let last = lines.lines().rev().find_map(|line| Signed::parse(line).ok()).map_or(0, |signed| signed.checkpoint.number);
        Ok(Self { key: Arc::new(key), path, last: Arc::new(Mutex::new(last)) })
    }

    /// The lines of the file.
    pub(crate) fn lines(&self) -> std::io::Result<Vec<String>> {
        match fs_err::read_to_string(&self.path) {
            Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Begins the file anew with a line from which on everything counts. What was before has been removed by retention.
    pub(crate) fn restart(&self, line: &str) -> std::io::Result<()> {
        let mut last = self.last.lock();
        cynode_service::files::replace(&self.path, format!("{line}\n").as_bytes())?;
        *last = Signed::parse(line).map_or(*last, |signed| signed.checkpoint.number);
        Ok(())
    }

    fn add(&self, lines: &[String]) -> std::io::Result<()> {
        let mut text = lines.join("\n");
        text.push('\n');
        let mut file = OpenOptions::new().create(true).append(true).open(&self.path)?;
        let before = file.metadata()?.len();
        // Half a line would be there for ever.
        file.write_all(text.as_bytes()).and_then(|()| file.sync_data()).inspect_err(|_| drop(file.set_len(before)))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Signs and copies until the orchestrator stops.
pub(crate) async fn keep(orchestrator: Orchestrator) {
    loop {
        if let Err(error) = round(&orchestrator).await {
            tracing::debug!(error = %error.0, "No checkpoint could be made; the next round does.");
        }
        tokio::select! {
            () = orchestrator.closing.cancelled() => break,
            () = orchestrator.audit.due.notified() => {}
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}

/// Signs what the last calls wrote.
pub(crate) async fn sign_last(orchestrator: &Orchestrator) {
    if let Err(error) = round(orchestrator).await {
        tracing::debug!(error = %error.0, "The last records are signed by whoever comes next.");
    }
}

async fn round(orchestrator: &Orchestrator) -> Result<(), ApiError> {
    orchestrator.db.seen_streams(&[orchestrator.audit.stream(), orchestrator.pump.stream()]).await?;
    orchestrator.db.sign_audit(&orchestrator.checkpoints.key, |stream, seq| orchestrator.audit.remembered(stream, seq)).await?;
    let checkpoints = orchestrator.checkpoints.clone();
    let last = *checkpoints.last.lock();
    let new = orchestrator.db.checkpoints(last).await?;
    let Some(newest) = new.last().map(|(number, _)| *number) else { return Ok(()) };
    let lines: Vec<String> = new.into_iter().map(|(_, line)| line).collect();
    let written = tokio::task::spawn_blocking(move || {
        let mut known = checkpoints.last.lock();
        // Retention may have begun it anew meanwhile.
        if *known != last {
            return Ok(());
        }
        checkpoints.add(&lines)?;
        *known = newest;
        Ok::<_, std::io::Error>(())
    });
    let written = written.await;
    if let Ok(Err(error)) = written {
        tracing::error!(%error, path = %orchestrator.checkpoints.path().display(), "The file of checkpoints can't be written.");
    }
    Ok(())
}
