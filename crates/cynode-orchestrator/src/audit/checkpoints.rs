//! Checkpoints: every second, or after a thousand records, the heads of the streams are signed and
//! written to the database and to a local file. Other orchestrators' checkpoints are copied into
//! the file too, where a change of the database can't reach them. From time to time many lines are
//! folded into one (`cynode_audit::fold`), in the database and, if the chain is intact, in the
//! file.
//!
//! Invariant: signing waits for nobody. It has a dedicated connection with a lock timeout of a
//! second, and relies on what this process signed and committed itself. While the database accepts
//! no checkpoint, the heads of this process's streams are signed into a separate file (`interim`),
//! and the overdue checkpoint is reported.

use std::{
    collections::{BTreeMap, HashMap},
    io::Write as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_audit::{Checkpoint, Hash, Head, SignedCheckpoint, SigningKey};
use fs_err::OpenOptions;
use parking_lot::Mutex;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{Audit, Error, EventPump};
use crate::db::{Db, DedicatedConnection, SigningConditions, SigningOutcome};

/// The longest interval between checkpoints while there is anything to sign.
const INTERVAL: Duration = Duration::from_secs(1);
/// Bounds a step of a round; after it the connection is dropped.
const STEP_TIMEOUT: Duration = Duration::from_secs(6);
/// After this time without a checkpoint, heads are signed into the interim file.
const INTERIM_AFTER: Duration = Duration::from_secs(3);

/// The signing key and the checkpoint file.
#[derive(Clone, Debug)]
pub(crate) struct Checkpoints {
    pub(crate) key: Arc<SigningKey>,
    path: PathBuf,
    file: Arc<Mutex<File>>,
    signed: Arc<Mutex<SignedStreams>>,
    /// The heads in the interim file, of this process and of earlier ones that could not sign them
    /// in the database.
    interim: Arc<Mutex<BTreeMap<Uuid, Head>>>,
    /// Since when the database has had foreign records in the live stream.
    ahead_since: Arc<Mutex<Option<Instant>>>,
    /// The number of lines that are folded into one.
    fold_lines: u64,
}

/// The contents of all checkpoints with valid signatures.
#[derive(Debug, Default)]
struct SignedStreams {
    /// How far each stream is signed.
    streams: HashMap<Uuid, u64>,
    cursor: i64,
    truncated: u64,
}

impl SignedStreams {
    fn add(&mut self, checkpoint: &Checkpoint) {
        if checkpoint.full {
            self.streams
                .retain(|stream, _| checkpoint.heads.contains_key(stream));
        }
        for (stream, head) in &checkpoint.heads {
            let seq = self.streams.entry(*stream).or_default();
            *seq = head.seq.max(*seq);
        }
        self.cursor = self.cursor.max(checkpoint.cursor);
        self.truncated = self.truncated.max(checkpoint.truncated_records);
    }
}

/// The state of the checkpoint file.
#[derive(Clone, Copy, Debug)]
struct File {
    /// Of the last line.
    number: u64,
    hash: Hash,
    lines: u64,
    /// Lines at the start of the file that no later line builds on, because this orchestrator was
    /// away. They are kept.
    kept: u64,
    /// A line does not continue the previous one: checkpoints in the database were changed. All
    /// lines are evidence.
    broken: bool,
    /// The number of new lines at which folding is attempted.
    fold_at: u64,
}

impl File {
    const fn new(fold_lines: u64) -> Self {
        Self {
            number: 0,
            hash: Checkpoint::FIRST,
            lines: 0,
            kept: 0,
            broken: false,
            fold_at: fold_lines,
        }
    }

    /// Adds the next line, and returns whether it continues the chain.
    fn take(&mut self, number: u64, signed: Option<&SignedCheckpoint>) -> bool {
        let follows = self.number.checked_add(1) == Some(number);
        let stands = follows
            && signed.is_some_and(|signed| {
                signed.checkpoint.number == number && signed.checkpoint.prev == self.hash
            });
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
    /// Opens the file. A last line that a crash truncated is removed; the database has it.
    pub(crate) fn open(key: SigningKey, path: PathBuf, fold_lines: u32) -> std::io::Result<Self> {
        let text = match fs_err::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        let whole = text
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(0, |end| end + 1);
        if whole < text.len() {
            OpenOptions::new()
                .write(true)
                .open(&path)?
                .set_len(whole as u64)?;
        }
        let lines = String::from_utf8_lossy(&text[..whole]);
        let fold_lines = u64::from(fold_lines);
        let (mut file, mut streams) = (File::new(fold_lines), SignedStreams::default());
        for line in lines.lines() {
            let signed = SignedCheckpoint::parse(line).ok();
            file.take(
                signed
                    .as_ref()
                    .map_or(file.number + 1, |signed| signed.checkpoint.number),
                signed.as_ref(),
            );
            // Only the holder of the key writes this file.
            if let Some(signed) = &signed {
                streams.add(&signed.checkpoint);
            }
        }
        let signed = Arc::new(Mutex::new(streams));
        let checkpoints = Self {
            key: Arc::new(key),
            path,
            file: Arc::new(Mutex::new(file)),
            signed,
            interim: Arc::default(),
            ahead_since: Arc::default(),
            fold_lines,
        };
        let kept = checkpoints
            .interim_line()?
            .and_then(|line| SignedCheckpoint::parse(&line).ok())
            .filter(|signed| signed.verify(&checkpoints.key.public()));
        *checkpoints.interim.lock() = kept
            .map(|signed| signed.checkpoint.heads)
            .unwrap_or_default();
        Ok(checkpoints)
    }

    /// How far each stream is signed.
    fn streams(&self) -> HashMap<Uuid, u64> {
        self.signed.lock().streams.clone()
    }

    /// The cursor up to which all records are signed.
    pub(crate) fn cursor(&self) -> i64 {
        self.signed.lock().cursor
    }

    fn interim_path(&self) -> PathBuf {
        self.path.with_file_name("audit-heads.jsonl")
    }

    /// The line of the interim file.
    pub(crate) fn interim_line(&self) -> std::io::Result<Option<String>> {
        match fs_err::read_to_string(self.interim_path()) {
            Ok(text) => Ok(Some(text.trim_end().to_owned()).filter(|line| !line.is_empty())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Signs heads into the interim file.
    fn sign_interim(&self, heads: BTreeMap<Uuid, Head>) -> std::io::Result<()> {
        let mut interim = self.interim.lock();
        let mut all = interim.clone();
        all.extend(heads);
        self.replace_interim(&mut interim, all)
    }

    /// Removes from the interim file those of this process's streams that are signed in the
    /// database. Streams of other processes stay: only their writers knew their heads.
    fn prune_interim(&self, own: &BTreeMap<Uuid, Head>) -> std::io::Result<()> {
        let mut interim = self.interim.lock();
        let mut left = interim.clone();
        let signed = self.streams();
        left.retain(|stream, head| {
            !own.contains_key(stream) || signed.get(stream).is_none_or(|seq| *seq < head.seq)
        });
        self.replace_interim(&mut interim, left)
    }

    fn replace_interim(
        &self,
        interim: &mut BTreeMap<Uuid, Head>,
        heads: BTreeMap<Uuid, Head>,
    ) -> std::io::Result<()> {
        if *interim == heads {
            return Ok(());
        }
        if heads.is_empty() {
            fs_err::remove_file(self.interim_path())?;
        } else {
            let checkpoint = Checkpoint {
                // Not part of the chain.
                number: 0,
                at: OffsetDateTime::now_utc(),
                prev: Checkpoint::FIRST,
                full: false,
                cursor: 0,
                heads: heads.clone(),
                cut: BTreeMap::new(),
                truncated_records: self.signed.lock().truncated,
            };
            cynode_service::files::replace(
                &self.interim_path(),
                format!("{}\n", checkpoint.sign(&self.key).to_line()).as_bytes(),
            )?;
        }
        *interim = heads;
        Ok(())
    }

    fn is_ahead_for_long(&self) -> bool {
        self.ahead_since
            .lock()
            .is_some_and(|since| since.elapsed() > INTERIM_AFTER)
    }

    /// Adds the stored lines that have valid signatures.
    fn add_stored(&self, lines: &[(u64, String)]) {
        let public = self.key.public();
        for signed in lines
            .iter()
            .filter_map(|(_, line)| SignedCheckpoint::parse(line).ok())
            .filter(|signed| signed.verify(&public))
        {
            self.signed.lock().add(&signed.checkpoint);
        }
    }

    pub(crate) fn lines(&self) -> std::io::Result<Vec<String>> {
        match fs_err::read_to_string(&self.path) {
            Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Restarts the file with a full checkpoint. Retention has removed everything before it.
    pub(crate) fn restart(&self, line: &str) -> std::io::Result<()> {
        let mut file = self.file.lock();
        let signed = SignedCheckpoint::parse(line).ok();
        // A concurrent copy has already moved past this line.
        if signed
            .as_ref()
            .is_some_and(|signed| signed.checkpoint.number < file.number)
        {
            return Ok(());
        }
        cynode_service::files::replace(&self.path, format!("{line}\n").as_bytes())?;
        if let Some(signed) = signed {
            self.signed.lock().add(&signed.checkpoint);
            // Heads that retention removed need not exist any more.
            let mut interim = self.interim.lock();
            let mut left = interim.clone();
            left.retain(|stream, head| {
                signed.checkpoint.heads.contains_key(stream)
                    && signed
                        .checkpoint
                        .cut
                        .get(stream)
                        .is_none_or(|cut| cut.seq < head.seq)
            });
            self.replace_interim(&mut interim, left)?;
            *file = File {
                number: signed.checkpoint.number,
                hash: signed.hash,
                lines: 1,
                ..File::new(self.fold_lines)
            };
        }
        Ok(())
    }

    /// Appends the lines after a number, unless the file has changed since.
    fn copy(&self, after: u64, new: &[(u64, String)]) -> std::io::Result<()> {
        let mut file = self.file.lock();
        // Retention may have restarted it.
        if file.number != after {
            return Ok(());
        }
        let (before, mut next, mut from) = (file.lines, *file, None);
        for (at, (number, line)) in new.iter().enumerate() {
            let signed = SignedCheckpoint::parse(line).ok();
            let stands = next.take(*number, signed.as_ref());
            if !stands {
                from = None;
            } else if !next.broken
                && signed.is_some_and(|signed| {
                    signed.checkpoint.full && signed.verify(&self.key.public())
                })
            {
                // A full checkpoint covers all lines before it, so they can go.
                from = Some(at);
            }
        }
        let text = |lines: &[(u64, String)]| {
            lines
                .iter()
                .flat_map(|(_, line)| [line.as_str(), "\n"])
                .collect::<String>()
        };
        if let Some(from) = from {
            let mut all: Vec<String> = self
                .lines()?
                .into_iter()
                .take(usize::try_from(next.kept).unwrap_or(usize::MAX))
                .collect();
            let of_new = next.kept.saturating_sub(before);
            all.extend(
                new.iter()
                    .take(usize::try_from(of_new).unwrap_or(usize::MAX))
                    .map(|(_, line)| line.clone()),
            );
            next.lines = all.len() as u64 + (new.len() - from) as u64;
            next.fold_at = self.fold_lines;
            let kept: String = all.iter().flat_map(|line| [line.as_str(), "\n"]).collect();
            cynode_service::files::replace(
                &self.path,
                format!("{kept}{}", text(&new[from..])).as_bytes(),
            )?;
        } else {
            self.add(&text(new))?;
        }
        *file = next;
        Ok(())
    }

    /// The last line, if the file is due for folding. Folding may fail, so the next attempt is
    /// postponed.
    fn is_long(&self) -> Option<(u64, Hash)> {
        let mut file = self.file.lock();
        let since = file.lines - file.kept.min(file.lines);
        (!file.broken && since >= file.fold_at).then(|| {
            file.fold_at = since + self.fold_lines;
            (file.number, file.hash)
        })
    }

    fn add(&self, text: &str) -> std::io::Result<()> {
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.path)?;
        let before = file.metadata()?.len();
        // A partial line would stay for ever.
        file.write_all(text.as_bytes())
            .and_then(|()| file.sync_data())
            .inspect_err(|_| drop(file.set_len(before)))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Signs the streams of this process's writers. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Signer {
    pub(crate) db: Db,
    pub(crate) audit: Audit,
    pub(crate) pump: EventPump,
    pub(crate) checkpoints: Checkpoints,
}

impl Signer {
    /// Signs and copies checkpoints until the orchestrator has answered all calls.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let heartbeat = tokio::spawn(self.clone().heartbeat(closing.clone()));
        self.sign(&closing).await;
        drop(heartbeat.await);
    }

    /// Sends heartbeats of the writers, independently of checkpoints and of the pool.
    async fn heartbeat(self, closing: CancellationToken) {
        let mut connection = self.db.dedicated();
        let mut was_overdue = false;
        loop {
            metrics::gauge!("cynode_audit_unsigned_seconds").set(
                self.audit
                    .heads
                    .unsigned_for()
                    .unwrap_or_default()
                    .as_secs_f64(),
            );
            let overdue = self.audit.heads.overdue();
            if let Some(age) = overdue {
                metrics::counter!("cynode_audit_checkpoints_overdue_total").increment(1);
                if !was_overdue {
                    tracing::error!(
                        seconds = age.as_secs(),
                        "Audit records are overdue for signing, so this self is not ready: the database accepts no checkpoint, or the checkpoint file can't be written."
                    );
                }
            } else if was_overdue {
                tracing::info!("Audit records are being signed again.");
            }
            was_overdue = overdue.is_some();
            let streams = [self.audit.stream(), self.pump.stream()];
            if let Err(error) = connection
                .with(INTERVAL * 5, async |connection| {
                    Db::touch_streams(connection, &streams).await
                })
                .await
            {
                tracing::debug!(%error, "The heartbeat of the audit writer failed.");
            }
            if closing
                .run_until_cancelled(tokio::time::sleep(INTERVAL))
                .await
                .is_none()
            {
                return;
            }
        }
    }

    async fn sign(&self, closing: &CancellationToken) {
        let mut connection = self.db.with_short_timeouts();
        // Old unsigned streams are searched for once.
        let mut all = true;
        loop {
            match self.round(&mut connection, all).await {
                Ok(()) => all = false,
                Err(error) => {
                    tracing::debug!(%error, "No checkpoint could be signed; the next round retries.");
                }
            }
            if self
                .audit
                .heads
                .unsigned_for()
                .is_some_and(|age| age > INTERIM_AFTER)
            {
                let (checkpoints, heads) = (self.checkpoints.clone(), self.audit.heads.newest());
                if let Ok(Err(error)) =
                    tokio::task::spawn_blocking(move || checkpoints.sign_interim(heads)).await
                {
                    tracing::error!(%error, "The interim file of audit heads can't be written.");
                }
            }
            tokio::select! {
                () = closing.cancelled() => break,
                () = self.audit.due.notified() => {}
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    }

    /// Signs all unsigned records on a connection of its own.
    pub(crate) async fn sign_once(&self) -> Result<(), Error> {
        self.round(&mut self.db.with_short_timeouts(), true).await
    }

    async fn round(&self, dedicated: &mut DedicatedConnection, all: bool) -> Result<(), Error> {
        let checkpoints = &self.checkpoints;
        // Other orchestrators' checkpoints first: they need not be signed again.
        copy_new(checkpoints, dedicated).await?;
        let heads = &self.audit.heads;
        let (mark, signed) = (heads.mark(), checkpoints.streams());
        let signs = SigningConditions {
            live: self.audit.stream(),
            late: checkpoints.is_ahead_for_long(),
            all,
        };
        let written = dedicated
            .with(STEP_TIMEOUT, async |connection| {
                Db::sign_audit(
                    connection,
                    &checkpoints.key,
                    &signed,
                    || heads.newest(),
                    signs,
                )
                .await
            })
            .await?;
        let is_ahead = matches!(written, SigningOutcome::Ahead);
        {
            let mut since = checkpoints.ahead_since.lock();
            *since = since.or_else(|| Some(Instant::now())).filter(|_| is_ahead);
        }
        if is_ahead {
            return Err(Error::WriterBehind);
        }
        if let SigningOutcome::Written(written) = written {
            copy_new(checkpoints, dedicated).await?;
            if let Err(error) = dedicated
                .with(STEP_TIMEOUT, async |connection| {
                    Db::record_signed(connection, &written).await
                })
                .await
            {
                tracing::debug!(%error, "The signed positions were not recorded; retention keeps more until the next checkpoint.");
            }
        }
        // Only lines that were read back with a valid signature and are in the file count.
        heads.signed(
            &checkpoints.streams(),
            &mark,
            &[self.audit.stream(), self.pump.stream()],
        );
        if !checkpoints.interim.lock().is_empty() {
            let (checkpoints, streams) = (checkpoints.clone(), heads.newest());
            let forgotten =
                tokio::task::spawn_blocking(move || checkpoints.prune_interim(&streams)).await;
            if let Ok(Err(error)) = forgotten {
                tracing::debug!(%error, "The interim file of audit heads can't be cleaned up.");
            }
        }
        if let Some(last) = checkpoints.is_long() {
            dedicated
                .with(STEP_TIMEOUT, async |connection| {
                    Db::fold_checkpoints(connection, &checkpoints.key, last).await
                })
                .await?;
        }
        Ok(())
    }
}

/// Copies new checkpoints from the database into the file.
async fn copy_new(
    checkpoints: &Checkpoints,
    dedicated: &mut DedicatedConnection,
) -> Result<(), Error> {
    let last = checkpoints.file.lock().number;
    let new = dedicated
        .with(STEP_TIMEOUT, async |connection| {
            Db::checkpoints_by(connection, last).await
        })
        .await?;
    if new.is_empty() {
        return Ok(());
    }
    let copying = checkpoints.clone();
    let written = tokio::task::spawn_blocking(move || {
        copying.add_stored(&new);
        copying.copy(last, &new)
    });
    written.await.unwrap_or_else(|error| Err(std::io::Error::other(error))).map_err(|error| {
        tracing::error!(%error, path = %checkpoints.path().display(), "The checkpoint file can't be written.");
        Error::CheckpointsUnwritable
    })
}
