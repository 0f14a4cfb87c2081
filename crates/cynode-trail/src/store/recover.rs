//! Opens the store after a stop or a crash.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    path::{Path, PathBuf},
};

use cynode_api::AuditSubject;

use super::{
    OwnerOf, Position, Store, StoredStream, pending,
    segment::{self, Contents, Segment},
};

/// The length of a header's line.
const MAX_HEADER_BYTES: u64 = 1_024;

impl<O: Copy> Store<O> {
    /// Reads what earlier processes left. Cuts off a torn tail, and sets damaged files aside.
    pub(crate) fn open(
        directory: PathBuf,
        writer: AuditSubject,
        owner_of: OwnerOf<O>,
    ) -> io::Result<Self> {
        fs_err::create_dir_all(&directory)?;
        fs_err::set_permissions(
            &directory,
            std::os::unix::fs::PermissionsExt::from_mode(0o700),
        )?;
        let position = read_position(&directory.join("position.json"))?;
        let mut found: BTreeMap<(u64, u64), PathBuf> = BTreeMap::new();
        for entry in fs_err::read_dir(&directory)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with('.') {
                fs_err::remove_file(entry.path())?;
            } else if let Some(key) = segment::parse_name(&name) {
                found.insert(key, entry.path());
            }
        }
        let mut store = Self {
            directory,
            writer,
            owner_of,
            position,
            streams: VecDeque::new(),
            active: None,
            resend_from: None,
            has_lost: false,
        };
        let newest = found.keys().next_back().copied();
        for ((ordinal, first), path) in found {
            if ordinal < position.ordinal {
                fs_err::remove_file(&path)?;
            } else {
                store.recover_segment(ordinal, &path, newest == Some((ordinal, first)))?;
            }
        }
        store.streams.retain(|stream| !stream.pending.is_empty());
        // The position names the first stream that is left.
        if let Some(first) = store.streams.front()
            && first.ordinal != position.ordinal
        {
            let ordinal = first.ordinal;
            store.store_position(Position {
                ordinal,
                acknowledged: 0,
            })?;
        }
        segment::sync_directory(&store.directory)?;
        Ok(store)
    }

    fn recover_segment(&mut self, ordinal: u64, path: &Path, is_newest: bool) -> io::Result<()> {
        let Some(contents) = Segment::open(path)? else {
            // A crash during its creation leaves the newest one without a whole header.
            return if is_newest && fs_err::metadata(path)?.len() <= MAX_HEADER_BYTES {
                fs_err::remove_file(path)
            } else {
                self.set_aside(path)
            };
        };
        let Contents {
            header,
            segment,
            links,
            is_torn,
        } = contents;
        if header.is_rebased && ordinal > self.position.ordinal {
            // Never came into force.
            return fs_err::remove_file(path);
        }
        let previous = self.streams.back().filter(|last| last.ordinal == ordinal);
        let is_continued = match previous {
            Some(previous) => {
                let head = previous.segments.back().map(|segment| segment.last);
                previous.id == header.stream && head == Some(header.before)
            }
            // Earlier segments of a stream are deleted as they are acknowledged.
            None => header.ordinal == ordinal,
        };
        if !is_continued {
            return self.set_aside(path);
        }
        if is_torn {
            if !is_newest {
                fs_err::copy(path, aside(path))?;
                self.report_damage(path);
            }
            let file = fs_err::OpenOptions::new().write(true).open(path)?;
            file.set_len(segment.bytes)?;
            file.sync_data()?;
        }
        let acknowledged = if ordinal == self.position.ordinal {
            self.position.acknowledged
        } else {
            0
        };
        if segment.last.seq <= acknowledged || links.is_empty() {
            return fs_err::remove_file(path);
        }
        if self
            .streams
            .back()
            .is_none_or(|last| last.ordinal != ordinal)
        {
            self.streams.push_back(StoredStream {
                ordinal,
                id: header.stream,
                is_rebased: header.is_rebased,
                segments: VecDeque::new(),
                pending: VecDeque::new(),
            });
        }
        if let Some(stream) = self.streams.back_mut() {
            let unacknowledged = links.iter().filter(|link| link.seq > acknowledged);
            let owner_of = self.owner_of;
            let added = unacknowledged.map(|link| pending(link, owner_of));
            stream.pending.extend(added);
            stream.segments.push_back(segment);
        }
        Ok(())
    }

    /// Keeps a file that can't be shipped, for a person to look at.
    fn set_aside(&mut self, path: &Path) -> io::Result<()> {
        self.report_damage(path);
        fs_err::rename(path, aside(path))
    }

    fn report_damage(&mut self, path: &Path) {
        self.has_lost = true;
        tracing::error!(
            path = %path.display(),
            "A file of the audit trail is damaged; it is set aside."
        );
    }
}

fn aside(path: &Path) -> PathBuf {
    path.with_extension("unreadable")
}

/// Without a position everything is sent again, which the orchestrator recognizes.
fn read_position(path: &Path) -> io::Result<Position> {
    match fs_err::read(path) {
        Ok(bytes) => match serde_json::from_slice(&bytes) {
            Ok(position) => Ok(position),
            Err(error) => {
                tracing::error!(%error, "The position of the audit trail is unreadable; it is set aside.");
                fs_err::rename(path, aside(path))?;
                Ok(Position::default())
            }
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Position::default()),
        Err(error) => Err(error),
    }
}
