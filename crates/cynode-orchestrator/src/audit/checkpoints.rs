//! Checkpoints: each second, or after a thousand records, where the streams stand is signed and written to the database and to
//! a file of this orchestrator. What others signed is copied into the file too: who changes the database can't change that. Of many
//! lines one is made from time to time (`cynode_audit::fold`), in the database and, when it stands on what is there, in the file.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use cynode_audit::{Checkpoint, Hash, Signed, SigningKey};
use cynode_service::ApiError;
use fs_err::OpenOptions;
use parking_lot::Mutex;

use crate::{Orchestrator, db::Db};

/// How often, at the least, while there is anything to sign.
const EVERY: Duration = Duration::from_secs(1);

/// The key, and the file.
#[derive(Clone, Debug)]
pub(crate) struct Checkpoints {
    pub(crate) key: Arc<SigningKey>,
    path: PathBuf,
    file: Arc<Mutex<File>>,
    /// So many lines are folded into one.
    most: u64,
}

/// What the file holds.
#[derive(Clone, Copy, Debug)]
struct File {
    /// Its last line.
    number: u64,
    hash: Hash,
    lines: u64,
    /// So many of them nothing that came later stands on: this orchestrator was away meanwhile. They stay.
    kept: u64,
    /// A line does not stand on the one before it. Somebody changed checkpoints in the database; all lines are evidence.
    broken: bool,
    /// With so many more it is tried to fold them.
    fold_at: u64,
}

impl File {
    const fn new(most: u64) -> Self {
        Self { number: 0, hash: Checkpoint::FIRST, lines: 0, kept: 0, broken: false, fold_at: most }
    }

    /// Takes the next line, and says whether it stands on the last.
    fn take(&mut self, number: u64, signed: Option<&Signed>) -> bool {
        let follows = self.number.checked_add(1) == Some(number);
        let stands = follows && signed.is_some_and(|signed| signed.checkpoint.number == number && signed.checkpoint.prev == self.hash);
        if !stands {
            self.broken |= follows;
            self.kept = self.lines;
        }
        (self.number, self.hash) = (number, signed.map_or([0; 32], |signed| signed.hash));
        self.lines += 1;
        stands
    }
}

impl Checkpoints {
    /// Opens the file. A last line that a crash cut off is taken away; the database has it whole.
    pub(crate) fn open(key: SigningKey, path: PathBuf, most: u32) -> std::io::Result<Self> {
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
        let most = u64::from(most);
        let mut file = File::new(most);
        for line in lines.lines() {
            let signed = Signed::parse(line).ok();
            file.take(signed.as_ref().map_or(file.number + 1, |signed| signed.checkpoint.number), signed.as_ref());
        }
        Ok(Self { key: Arc::new(key), path, file: Arc::new(Mutex::new(file)), most })
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
        let mut file = self.file.lock();
        let signed = Signed::parse(line).ok();
        // Somebody was faster, and has copied what came after it.
        if signed.as_ref().is_some_and(|signed| signed.checkpoint.number < file.number) {
            return Ok(());
        }
        cynode_service::files::replace(&self.path, format!("{line}\n").as_bytes())?;
        if let Some(signed) = signed {
            *file = File { number: signed.checkpoint.number, hash: signed.hash, lines: 1, ..File::new(self.most) };
        }
        Ok(())
    }

    /// Copies lines that came after the number, unless the file has changed since.
    fn copy(&self, after: u64, new: &[(u64, String)]) -> std::io::Result<()> {
        let mut file = self.file.lock();
        // Retention may have begun it anew meanwhile.
        if file.number != after {
            return Ok(());
        }
        let (before, mut next, mut from) = (file.lines, *file, None);
        for (at, (number, line)) in new.iter().enumerate() {
            let signed = Signed::parse(line).ok();
            let stands = next.take(*number, signed.as_ref());
            if !stands {
                from = None;
            } else if !next.broken && signed.is_some_and(|signed| signed.checkpoint.full && signed.verify(&self.key.public())) {
                // It says what all say that it stands on, and they need not stay.
                from = Some(at);
            }
        }
        let text = |lines: &[(u64, String)]| lines.iter().flat_map(|(_, line)| [line.as_str(), "\n"]).collect::<String>();
        if let Some(from) = from {
            let mut all: Vec<String> = self.lines()?.into_iter().take(usize::try_from(next.kept).unwrap_or(usize::MAX)).collect();
            let of_new = next.kept.saturating_sub(before);
            all.extend(new.iter().take(usize::try_from(of_new).unwrap_or(usize::MAX)).map(|(_, line)| line.clone()));
            next.lines = all.len() as u64 + (new.len() - from) as u64;
            next.fold_at = self.most;
            let kept: String = all.iter().flat_map(|line| [line.as_str(), "\n"]).collect();
            cynode_service::files::replace(&self.path, format!("{kept}{}", text(&new[from..])).as_bytes())?;
        } else {
            self.add(&text(new))?;
        }
        *file = next;
        Ok(())
    }

    /// The last line of a file that has become long. Not at once again: folding may be refused.
    fn is_long(&self) -> Option<(u64, Hash)> {
        let mut file = self.file.lock();
        let since = file.lines - file.kept.min(file.lines);
        (!file.broken && since >= file.fold_at).then(|| {
            file.fold_at = since + self.most;
            (file.number, file.hash)
        })
    }

    fn add(&self, text: &str) -> std::io::Result<()> {
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
    let lives = tokio::spawn(live(orchestrator.clone()));
    sign(&orchestrator).await;
    drop(lives.await);
}

/// Says that the writers live, whatever a checkpoint waits for and whoever has the pool's connections.
async fn live(orchestrator: Orchestrator) {
    let mut own = orchestrator.db.own();
    loop {
        let streams = [orchestrator.audit.stream(), orchestrator.pump.stream()];
        if let Err(error) = own.with(EVERY * 5, async |connection| Db::seen_streams(connection, &streams).await).await {
            tracing::debug!(error = %error.0, "The database was not told that this writer lives.");
        }
        if orchestrator.closing.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_none() {
            return;
        }
    }
}

async fn sign(orchestrator: &Orchestrator) {
    loop {
        if let Err(error) = round(orchestrator).await {
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
    orchestrator.db.sign_audit(&orchestrator.checkpoints.key, |stream, seq| orchestrator.audit.remembered(stream, seq)).await?;
    let checkpoints = orchestrator.checkpoints.clone();
    let last = checkpoints.file.lock().number;
    let new = orchestrator.db.checkpoints(last).await?;
    if new.is_empty() {
        return Ok(());
    }
    let written = tokio::task::spawn_blocking(move || checkpoints.copy(last, &new)).await;
    if let Ok(Err(error)) = written {
        tracing::error!(%error, path = %orchestrator.checkpoints.path().display(), "The file of checkpoints can't be written.");
    }
    if let Some(last) = orchestrator.checkpoints.is_long() {
        orchestrator.db.fold_checkpoints(&orchestrator.checkpoints.key, last).await?;
    }
    Ok(())
}
