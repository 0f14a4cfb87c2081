//! Checkpoints: each second, or after a thousand records, where the streams stand is signed and written to the database and to
//! a file of this orchestrator. What others signed is copied into the file too: who changes the database can't change that. Of many
//! lines one is made from time to time (`cynode_audit::fold`), in the database and, when it stands on what is there, in the file.
//!
//! What must stay true: signing waits for nobody. It has a connection of its own, on which no lock is waited for longer than a second,
//! and goes by what it signed and committed itself. While the database takes no checkpoint all the same, the heads of this
//! process's streams are signed into another file (`interim`), and that checkpoints are overdue is told.

use std::{
    collections::{BTreeMap, HashMap},
    io::Write as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use cynode_api::ErrorCode;
use cynode_audit::{Checkpoint, Hash, Head, Signed, SigningKey};
use cynode_service::ApiError;
use fs_err::OpenOptions;
use parking_lot::Mutex;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    Orchestrator,
    db::{Db, Own, Signature, Signs},
};

/// How often, at the least, while there is anything to sign.
const EVERY: Duration = Duration::from_secs(1);
/// How long a step of it may take; then its connection is given up.
const STEP: Duration = Duration::from_secs(6);
/// After so long without a checkpoint heads are signed beside the database.
const INTERIM: Duration = Duration::from_secs(3);

/// The key, and the file.
#[derive(Clone, Debug)]
pub(crate) struct Checkpoints {
    pub(crate) key: Arc<SigningKey>,
    path: PathBuf,
    file: Arc<Mutex<File>>,
    signed: Arc<Mutex<SignedStreams>>,
    /// The heads that are signed beside the database, of this process and of ones before it that could not have them signed there.
    interim: Arc<Mutex<BTreeMap<Uuid, Head>>>,
    /// Since when the database has had records of our stream that we did not write.
    ahead_since: Arc<Mutex<Option<Instant>>>,
    /// So many lines are folded into one.
    most: u64,
}

/// What the checkpoints say whose signatures are good.
#[derive(Debug, Default)]
struct SignedStreams {
    /// How far each stream is signed.
    streams: HashMap<Uuid, u64>,
    cursor: i64,
    truncated: u64,
}

impl SignedStreams {
    fn learn(&mut self, checkpoint: &Checkpoint) {
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
        Self {
            number: 0,
            hash: Checkpoint::FIRST,
            lines: 0,
            kept: 0,
            broken: false,
            fold_at: most,
        }
    }

    /// Takes the next line, and says whether it stands on the last.
    fn take(&mut self, number: u64, signed: Option<&Signed>) -> bool {
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
    /// Opens the file. A last line that a crash cut off is taken away; the database has it whole.
    pub(crate) fn open(key: SigningKey, path: PathBuf, most: u32) -> std::io::Result<Self> {
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
        let most = u64::from(most);
        let (mut file, mut streams) = (File::new(most), SignedStreams::default());
        for line in lines.lines() {
            let signed = Signed::parse(line).ok();
            file.take(
                signed
                    .as_ref()
                    .map_or(file.number + 1, |signed| signed.checkpoint.number),
                signed.as_ref(),
            );
            // Who writes this file has the key.
            if let Some(signed) = &signed {
                streams.learn(&signed.checkpoint);
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
            most,
        };
        let kept = checkpoints
            .interim_line()?
            .and_then(|line| Signed::parse(&line).ok())
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

    /// Up to which record all is signed.
    pub(crate) fn cursor(&self) -> i64 {
        self.signed.lock().cursor
    }

    fn interim_path(&self) -> PathBuf {
        self.path.with_file_name("audit-heads.jsonl")
    }

    /// What was signed beside the database.
    pub(crate) fn interim_line(&self) -> std::io::Result<Option<String>> {
        match fs_err::read_to_string(self.interim_path()) {
            Ok(text) => Ok(Some(text.trim_end().to_owned()).filter(|line| !line.is_empty())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Signs heads beside the database.
    fn sign_beside(&self, heads: BTreeMap<Uuid, Head>) -> std::io::Result<()> {
        let mut interim = self.interim.lock();
        let mut all = interim.clone();
        all.extend(heads);
        self.keep_beside(&mut interim, all)
    }

    /// Forgets of these streams, which are this process's, what is signed in the database too. Of others only their writer knew better.
    fn signed_inside(&self, own: &BTreeMap<Uuid, Head>) -> std::io::Result<()> {
        let mut interim = self.interim.lock();
        let mut left = interim.clone();
        let signed = self.streams();
        left.retain(|stream, head| {
            !own.contains_key(stream) || signed.get(stream).is_none_or(|seq| *seq < head.seq)
        });
        self.keep_beside(&mut interim, left)
    }

    fn keep_beside(
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
                // It is none of the chain.
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
            .is_some_and(|since| since.elapsed() > INTERIM)
    }

    /// Takes note of lines of the table, as far as their signatures are good.
    fn learn(&self, lines: &[(u64, String)]) {
        let public = self.key.public();
        for signed in lines
            .iter()
            .filter_map(|(_, line)| Signed::parse(line).ok())
            .filter(|signed| signed.verify(&public))
        {
            self.signed.lock().learn(&signed.checkpoint);
        }
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
        if signed
            .as_ref()
            .is_some_and(|signed| signed.checkpoint.number < file.number)
        {
            return Ok(());
        }
        cynode_service::files::replace(&self.path, format!("{line}\n").as_bytes())?;
        if let Some(signed) = signed {
            self.signed.lock().learn(&signed.checkpoint);
            // What retention removed need not be there any more.
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
            self.keep_beside(&mut interim, left)?;
            *file = File {
                number: signed.checkpoint.number,
                hash: signed.hash,
                lines: 1,
                ..File::new(self.most)
            };
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
            } else if !next.broken
                && signed.is_some_and(|signed| {
                    signed.checkpoint.full && signed.verify(&self.key.public())
                })
            {
                // It says what all say that it stands on, and they need not stay.
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
            next.fold_at = self.most;
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
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.path)?;
        let before = file.metadata()?.len();
        // Half a line would be there for ever.
        file.write_all(text.as_bytes())
            .and_then(|()| file.sync_data())
            .inspect_err(|_| drop(file.set_len(before)))
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
    let mut was_overdue = false;
    loop {
        metrics::gauge!("cynode_audit_unsigned_seconds").set(
            orchestrator
                .audit
                .heads
                .unsigned_for()
                .unwrap_or_default()
                .as_secs_f64(),
        );
        let overdue = orchestrator.audit.heads.overdue();
        if let Some(age) = overdue {
            metrics::counter!("cynode_audit_checkpoints_overdue_total").increment(1);
            if !was_overdue {
                tracing::error!(
                    seconds = age.as_secs(),
                    "Records of the audit trail are not signed, and this orchestrator is not ready until they are: the database takes no checkpoint, or the file of checkpoints can't be written."
                );
            }
        } else if was_overdue {
            tracing::info!("The audit trail is signed again.");
        }
        was_overdue = overdue.is_some();
        let streams = [orchestrator.audit.stream(), orchestrator.pump.stream()];
        if let Err(error) = own
            .with(EVERY * 5, async |connection| {
                Db::seen_streams(connection, &streams).await
            })
            .await
        {
            tracing::debug!(error = %error.0, "The database was not told that this writer lives.");
        }
        if orchestrator
            .closing
            .run_until_cancelled(tokio::time::sleep(EVERY))
            .await
            .is_none()
        {
            return;
        }
    }
}

async fn sign(orchestrator: &Orchestrator) {
    let mut own = orchestrator.db.impatient();
    // What was left unsigned long ago is looked for once.
    let mut all = true;
    loop {
        match round(orchestrator, &mut own, all).await {
            Ok(()) => all = false,
            Err(error) => {
                tracing::debug!(error = %error.0, "No checkpoint could be made; the next round does.")
            }
        }
        if orchestrator
            .audit
            .heads
            .unsigned_for()
            .is_some_and(|age| age > INTERIM)
        {
            let (checkpoints, heads) = (
                orchestrator.checkpoints.clone(),
                orchestrator.audit.heads.newest(),
            );
            if let Ok(Err(error)) =
                tokio::task::spawn_blocking(move || checkpoints.sign_beside(heads)).await
            {
                tracing::error!(%error, "Heads of the audit trail can't be signed beside the database.");
            }
        }
        tokio::select! {
            () = orchestrator.closing.cancelled() => break,
            () = orchestrator.audit.due.notified() => {}
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}

/// Signs what is not signed yet, by a connection of its own.
pub(crate) async fn sign_once(orchestrator: &Orchestrator) -> Result<(), ApiError> {
    round(orchestrator, &mut orchestrator.db.impatient(), true).await
}

async fn round(orchestrator: &Orchestrator, own: &mut Own, all: bool) -> Result<(), ApiError> {
    let checkpoints = &orchestrator.checkpoints;
    // What others signed need not be signed again.
    copy_new(checkpoints, own).await?;
    let heads = &orchestrator.audit.heads;
    let (mark, signed) = (heads.mark(), checkpoints.streams());
    let signs = Signs {
        live: orchestrator.audit.stream(),
        late: checkpoints.is_ahead_for_long(),
        all,
    };
    let written = own
        .with(STEP, async |connection| {
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
    let is_ahead = matches!(written, Signature::Ahead);
    {
        let mut since = checkpoints.ahead_since.lock();
        *since = since.or_else(|| Some(Instant::now())).filter(|_| is_ahead);
    }
    if is_ahead {
        return Err(ApiError::new(
            ErrorCode::StoreUnavailable,
            "the writer has not heard yet of what it committed",
        ));
    }
    if let Signature::Written(written) = written {
        copy_new(checkpoints, own).await?;
        if let Err(error) = own
            .with(STEP, async |connection| {
                Db::note_signed(connection, &written).await
            })
            .await
        {
            tracing::debug!(error = %error.0, "Retention does not know yet how far the audit trail is signed.");
        }
    }
    // What counts is what came back from the database, with a good signature, and is in the file.
    heads.signed(
        &checkpoints.streams(),
        &mark,
        &[orchestrator.audit.stream(), orchestrator.pump.stream()],
    );
    if !checkpoints.interim.lock().is_empty() {
        let (checkpoints, streams) = (checkpoints.clone(), heads.newest());
        let forgotten =
            tokio::task::spawn_blocking(move || checkpoints.signed_inside(&streams)).await;
        if let Ok(Err(error)) = forgotten {
            tracing::debug!(%error, "Heads that were signed beside the database stay there.");
        }
    }
    if let Some(last) = checkpoints.is_long() {
        own.with(STEP, async |connection| {
            Db::fold_checkpoints(connection, &checkpoints.key, last).await
        })
        .await?;
    }
    Ok(())
}

/// Copies into the file what is new in the table.
async fn copy_new(checkpoints: &Checkpoints, own: &mut Own) -> Result<(), ApiError> {
    let last = checkpoints.file.lock().number;
    let new = own
        .with(STEP, async |connection| {
            Db::checkpoints_by(connection, last).await
        })
        .await?;
    if new.is_empty() {
        return Ok(());
    }
    let copying = checkpoints.clone();
    let written = tokio::task::spawn_blocking(move || {
        copying.learn(&new);
        copying.copy(last, &new)
    });
    written.await.unwrap_or_else(|error| Err(std::io::Error::other(error))).map_err(|error| {
        tracing::error!(%error, path = %checkpoints.path().display(), "The file of checkpoints can't be written.");
        ApiError::new(ErrorCode::Internal, "the file of checkpoints can't be written")
    })
}
