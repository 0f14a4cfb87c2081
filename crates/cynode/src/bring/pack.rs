//! Packs the selected files. Each is scanned as a whole before its first byte is sent.

use std::{
    io::{self, Read, Seek as _, Write},
    path::{Path, PathBuf},
};

use cynode_policy::{LocalScan, Scanner};
use fs_err::os::unix::fs::OpenOptionsExt as _;
use rustix::fs::OFlags;
use tar::{Builder, EntryType};

use super::{
    Skipped,
    select::{Kind, Selection, unreadable},
};
use crate::archive::{Exactly, header};

/// Files up to this size are read once; larger ones are scanned first and then read again.
const WHOLE_BYTES: u64 = 4 * 1024 * 1024;
const PIECE_BYTES: usize = 64 * 1024;

#[derive(Debug, Default)]
pub(super) struct PackedDirectory {
    pub(super) files: u64,
    pub(super) bytes: u64,
    pub(super) skipped: Vec<Skipped>,
}

/// Packs the selected entries. A file that changes in the meantime is packed as it is when it is
/// read.
pub(super) fn pack(
    selection: Selection,
    scanner: &Scanner,
    to: &mut impl Write,
) -> io::Result<PackedDirectory> {
    let mut packer = Packer {
        root: selection.root,
        builder: Builder::new(to),
        packed: PackedDirectory {
            skipped: selection.skipped,
            ..PackedDirectory::default()
        },
    };
    for (path, kind) in selection.entries {
        match kind {
            Kind::Directory => packer.directory(&path)?,
            Kind::File => packer.file(&path, scanner)?,
            Kind::Link(target) => packer.link(&path, &target)?,
        }
    }
    packer.builder.into_inner()?;
    Ok(packer.packed)
}

struct Packer<'a, W: Write> {
    root: PathBuf,
    builder: Builder<&'a mut W>,
    packed: PackedDirectory,
}

impl<W: Write> Packer<'_, W> {
    fn directory(&mut self, path: &Path) -> io::Result<()> {
        let Ok(metadata) = fs_err::symlink_metadata(self.root.join(path)) else {
            return Ok(());
        };
        let mut header = header(&metadata);
        header.set_entry_type(EntryType::Directory);
        header.set_size(0);
        self.builder.append_data(&mut header, path, io::empty())
    }

    fn link(&mut self, path: &Path, target: &Path) -> io::Result<()> {
        let Ok(metadata) = fs_err::symlink_metadata(self.root.join(path)) else {
            return Ok(());
        };
        let mut header = header(&metadata);
        header.set_entry_type(EntryType::Symlink);
        header.set_size(0);
        self.packed.files += 1;
        self.builder.append_link(&mut header, path, target)
    }

    fn file(&mut self, path: &Path, scanner: &Scanner) -> io::Result<()> {
        let full_path = self.root.join(path);
        let mut scan = scanner.local(&full_path.to_string_lossy());
        // The file may have been replaced by a pipe or a link in the meantime.
        let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed();
        let opened = fs_err::OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(&full_path)
            .and_then(|file| file.metadata().map(|metadata| (file, metadata)));
        let (mut file, metadata) = match opened {
            Ok((file, metadata)) if metadata.is_file() => (file, metadata),
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => {
                self.packed.skipped.push(unreadable(path, &error));
                return Ok(());
            }
        };
        let mut header = header(&metadata);
        header.set_entry_type(EntryType::Regular);
        if metadata.len() <= WHOLE_BYTES {
            let mut content = Vec::new();
            (&mut file).take(metadata.len()).read_to_end(&mut content)?;
            scan.feed(&content);
            if self.admits(path, scan) {
                header.set_size(content.len() as u64);
                self.builder.append_data(&mut header, path, &content[..])?;
                self.count(content.len() as u64);
            }
            return Ok(());
        }
        scan_all(&mut file, &mut scan)?;
        if self.admits(path, scan) {
            file.rewind()?;
            header.set_size(metadata.len());
            let content = Exactly::new(file, metadata.len(), &full_path);
            self.builder.append_data(&mut header, path, content)?;
            self.count(metadata.len());
        }
        Ok(())
    }

    fn count(&mut self, bytes: u64) {
        self.packed.files += 1;
        self.packed.bytes += bytes;
    }

    fn admits(&mut self, path: &Path, scan: LocalScan) -> bool {
        match scan.finish() {
            Ok(()) => true,
            Err(what) => {
                let reason = format!("it contains {what}{}", consequence(path));
                self.packed.skipped.push(Skipped::new(path, reason));
                false
            }
        }
    }
}

/// The consequence of skipping a file, where that is not obvious.
fn consequence(path: &Path) -> &'static str {
    let is_git_config = path.ends_with(".git/config");
    if is_git_config {
        "; in the sandbox the repository has no remotes and default settings"
    } else {
        ""
    }
}

fn scan_all(file: &mut fs_err::File, scan: &mut LocalScan) -> io::Result<()> {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match file.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(count) => scan.feed(&piece[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
