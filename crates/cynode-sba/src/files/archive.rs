//! Exports a directory as a tar archive.
//!
//! Invariants: a complete archive is well-formed, even if files grew or shrank during the export
//! (they are truncated or padded with zeros); it contains every regular file, directory and link,
//! or the export fails.

use std::os::fd::OwnedFd;

use cynode_api::FileType;
use cynode_sba_proto::{MAX_DATA, Reply};
use rustix::{
    fs::{
        Access, AtFlags, CWD, FileType as Kind, Mode, OFlags, Stat, accessat, fstat, openat,
        readlinkat, statat,
    },
    io::Errno,
};
use tar::{EntryType, Header};

use super::{
    digest::for_each_chunk,
    error::{Failure, FailureContext, Outcome},
    path::{self, Files},
    walk::{AtLimit, Entry, Step, walk},
};
use crate::peer::Peer;

pub(super) const BLOCK: usize = 512;
/// Longest name that fits into a plain header.
const MAX_SHORT_NAME_BYTES: usize = 100;

impl Files {
    pub(super) fn export_tar(&self, path: &[u8], peer: &mut Peer) -> Outcome<()> {
        let full_path = self.locate(path)?;
        let top: OwnedFd = openat(
            CWD,
            &full_path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .doing("exporting", path::bytes(&full_path))?;
        // Once the archive has started, an error can only abort it, so check for errors first.
        let for_check = openat(
            &top,
            ".",
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .doing("exporting", path::bytes(&full_path))?;
        walk(for_check, None, AtLimit::Fail, can_be_packed)?;
        peer.reply(&Reply::Body).map_err(Failure::Connection)?;
        let mut archive = TarWriter {
            peer,
            buffer: Vec::with_capacity(MAX_DATA),
        };
        walk(top, None, AtLimit::Fail, |entry| archive.add(entry))?;
        archive.write(&[0; 2 * BLOCK])?;
        archive.flush()?;
        peer.end().map_err(Failure::Connection)
    }
}

/// Checks whether an entry can be packed, as far as that is known without reading it.
fn can_be_packed(entry: &Entry<'_>) -> Outcome<Step> {
    match entry.kind {
        Kind::Directory => match entry.open_directory() {
            Ok(directory) => Ok(Step::Into(directory)),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(Step::Over),
            Err(errno) => Err(Failure::system(errno, "exporting", entry.path)),
        },
        Kind::RegularFile => match accessat(
            entry.directory,
            entry.name,
            Access::READ_OK,
            AtFlags::empty(),
        ) {
            Ok(()) | Err(Errno::NOENT | Errno::LOOP) => Ok(Step::Over),
            Err(errno) => Err(Failure::system(errno, "exporting", entry.path)),
        },
        _ => Ok(Step::Over),
    }
}

struct TarWriter<'a> {
    peer: &'a mut Peer,
    buffer: Vec<u8>,
}

impl TarWriter<'_> {
    fn add(&mut self, entry: &Entry<'_>) -> Outcome<Step> {
        let stat = match statat(entry.directory, entry.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(Step::Over),
            Err(errno) => return Err(Failure::system(errno, "exporting", entry.path)),
        };
        match Kind::from_raw_mode(stat.st_mode) {
            Kind::Directory => match entry.open_directory() {
                Ok(directory) => {
                    let mut name = entry.path.to_vec();
                    name.push(b'/');
                    self.header(EntryType::Directory, &name, &stat, 0, b"")?;
                    Ok(Step::Into(directory))
                }
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(Step::Over),
                Err(errno) => Err(Failure::system(errno, "exporting", entry.path)),
            },
            Kind::Symlink => {
                match readlinkat(entry.directory, entry.name, Vec::new()) {
                    Ok(target) => {
                        self.header(EntryType::Symlink, entry.path, &stat, 0, target.as_bytes())?;
                    }
                    Err(Errno::NOENT | Errno::INVAL) => {}
                    Err(errno) => return Err(Failure::system(errno, "exporting", entry.path)),
                }
                Ok(Step::Over)
            }
            Kind::RegularFile => self.file(entry).map(|()| Step::Over),
            // Sockets, FIFOs and devices are meaningless elsewhere.
            _ => Ok(Step::Over),
        }
    }

    fn file(&mut self, entry: &Entry<'_>) -> Outcome<()> {
        let flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match openat(entry.directory, entry.name, flags, Mode::empty()) {
            Ok(file) => std::fs::File::from(file),
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(()),
            Err(errno) => return Err(Failure::system(errno, "exporting", entry.path)),
        };
        let stat = fstat(&file).doing("exporting", entry.path)?;
        if path::kind(&stat) != FileType::File {
            return Ok(());
        }
        let size = path::size(&stat);
        self.header(EntryType::Regular, entry.path, &stat, size, b"")?;
        let mut left = size;
        let mut send_failure = None;
        let read = for_each_chunk(&file, 0, size, |piece| {
            left -= piece.len() as u64;
            self.write(piece).map_err(|failure| {
                send_failure = Some(failure);
                std::io::Error::other("the worker disconnected")
            })
        });
        if let Some(failure) = send_failure {
            return Err(failure);
        }
        read.doing("exporting", entry.path)?;
        let block = BLOCK as u64;
        left += (block - size % block) % block;
        while left > 0 {
            let count = usize::try_from(left).map_or(BLOCK, |left| left.min(BLOCK));
            self.write(&[0; BLOCK][..count])?;
            left -= count as u64;
        }
        Ok(())
    }

    fn header(
        &mut self,
        kind: EntryType,
        name: &[u8],
        stat: &Stat,
        size: u64,
        link: &[u8],
    ) -> Outcome<()> {
        for (kind, value) in [
            (EntryType::GNULongLink, link),
            (EntryType::GNULongName, name),
        ] {
            if value.len() > MAX_SHORT_NAME_BYTES {
                self.gnu_long_name(kind, value)?;
            }
        }
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(path::permissions(stat) & 0o1777);
        header.set_uid(stat.st_uid.into());
        header.set_gid(stat.st_gid.into());
        header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
        header.set_size(size);
        let old = header.as_old_mut();
        fill(&mut old.name, name);
        fill(&mut old.linkname, link);
        header.set_cksum();
        self.write(header.as_bytes())
    }

    /// Writes a name that doesn't fit into a header, as a GNU extension.
    fn gnu_long_name(&mut self, kind: EntryType, value: &[u8]) -> Outcome<()> {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(value.len() as u64 + 1);
        fill(&mut header.as_old_mut().name, b"././@LongLink");
        header.set_cksum();
        self.write(header.as_bytes())?;
        self.write(value)?;
        self.write(&vec![0; BLOCK - value.len() % BLOCK])
    }

    fn write(&mut self, bytes: &[u8]) -> Outcome<()> {
        let mut bytes = bytes;
        while !bytes.is_empty() {
            let count = bytes.len().min(MAX_DATA - self.buffer.len());
            self.buffer.extend_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            if self.buffer.len() == MAX_DATA {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Outcome<()> {
        self.peer.data(&self.buffer).map_err(Failure::Connection)?;
        self.buffer.clear();
        Ok(())
    }
}

fn fill(field: &mut [u8; MAX_SHORT_NAME_BYTES], value: &[u8]) {
    let count = value.len().min(MAX_SHORT_NAME_BYTES);
    field[..count].copy_from_slice(&value[..count]);
}

#[cfg(test)]
mod tests {
    use std::{
        ffi::OsString,
        io::Read,
        os::unix::{
            ffi::OsStringExt,
            fs::{MetadataExt, PermissionsExt, symlink},
        },
    };

    use cynode_api::ErrorCode;

    use super::{super::tests::*, *};

    fn exported(workspace: &TestWorkspace, path: &str) -> Vec<u8> {
        workspace
            .ask(FileOp::ExportTar { path: raw(path) }, b"")
            .body()
            .to_vec()
    }

    #[test]
    fn an_archive_holds_files_directories_and_links_and_nothing_else() {
        let workspace = TestWorkspace::new();
        workspace.put("top/dir/file", "hello");
        workspace.put("top/.git/config", "x");
        std::fs::set_permissions(
            workspace.path("top/dir/file"),
            std::fs::Permissions::from_mode(0o755),
        )
        .expect("mode");
        symlink("../dir//file", workspace.path("top/link")).expect("link");
        workspace.fifo("top/fifo");
        let bytes = exported(&workspace, "top");
        assert_eq!(bytes.len() % BLOCK, 0);
        let mut archive = tar::Archive::new(bytes.as_slice());
        let mut seen = Vec::new();
        for entry in archive.entries().expect("entries") {
            let mut entry = entry.expect("entry");
            let mut content = String::new();
            entry.read_to_string(&mut content).expect("content");
            let link = entry
                .link_name_bytes()
                .map(|link| String::from_utf8_lossy(&link).into_owned());
            seen.push((
                String::from_utf8_lossy(&entry.path_bytes()).into_owned(),
                entry.header().mode().expect("mode"),
                content,
                link,
            ));
        }
        let expected = [
            (".git/", 0o755, "", None),
            (".git/config", 0o644, "x", None),
            ("dir/", 0o755, "", None),
            ("dir/file", 0o755, "hello", None),
            ("link", 0o777, "", Some("../dir//file")),
        ];
        assert_eq!(
            seen,
            expected.map(|(name, mode, content, link)| (
                name.to_owned(),
                mode,
                content.to_owned(),
                link.map(str::to_owned)
            ))
        );
    }

    #[test]
    fn exports_round_trip_through_an_import() {
        let workspace = TestWorkspace::new();
        let long_path = format!("top/{}/{}", "d".repeat(120), "f".repeat(200));
        workspace.put(&long_path, "long");
        workspace.put("top/new\nline", "n");
        workspace.put("top/empty", "");
        workspace.put("top/large", vec![7; 200_000]);
        std::fs::write(
            workspace
                .path("top")
                .join(OsString::from_vec(b"\xff\xfe".repeat(60))),
            "raw",
        )
        .expect("written");
        symlink("t".repeat(300), workspace.path("top/link")).expect("link");
        let bytes = exported(&workspace, "top");
        assert!(matches!(
            workspace
                .ask(FileOp::Import { path: raw("copy") }, &bytes)
                .first(),
            Reply::Ok { changed: Some(_) }
        ));
        assert_eq!(workspace.names("copy"), workspace.names("top"));
        assert_eq!(workspace.get(&long_path.replace("top", "copy")), b"long");
        assert_eq!(workspace.get("copy/large"), vec![7; 200_000]);
        assert_eq!(
            std::fs::read_link(workspace.path("copy/link")).expect("link"),
            std::fs::read_link(workspace.path("top/link")).expect("link")
        );
        let time = |path: &str| {
            std::fs::metadata(workspace.path(path))
                .expect("stat")
                .mtime()
        };
        assert_eq!(time("copy/large"), time("top/large"));
        assert_eq!(exported(&workspace, "copy").len(), bytes.len());
    }

    #[test]
    fn a_tree_that_is_too_deep_is_refused_before_the_archive_begins() {
        let workspace = TestWorkspace::new();
        workspace.put("top/a", vec![7; 200_000]);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut directory =
            openat(CWD, workspace.path("top"), flags, Mode::empty()).expect("opened");
        // Deeper than the longest path (4,096 bytes of names) and the depth limit.
        for _ in 0..300 {
            rustix::fs::mkdirat(&directory, "deeper-and-deeper", Mode::RWXU).expect("made");
            directory =
                openat(&directory, "deeper-and-deeper", flags, Mode::empty()).expect("opened");
        }
        let answer = workspace.ask(FileOp::ExportTar { path: raw("top") }, b"");
        assert!(
            answer.data().is_empty() && matches!(answer.first(), Reply::Error(_)),
            "{answer:?}"
        );
        assert_eq!(answer.error().code, ErrorCode::TooLarge);
        assert!(
            answer.error().message.contains("256 directories deep"),
            "{:?}",
            answer.error()
        );
    }

    #[test]
    fn only_directories_are_exported() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "");
        assert_eq!(
            workspace
                .ask(FileOp::ExportTar { path: raw("file") }, b"")
                .error()
                .code,
            ErrorCode::NotADirectory
        );
        assert_eq!(
            workspace
                .ask(FileOp::ExportTar { path: raw("none") }, b"")
                .error()
                .code,
            ErrorCode::NotFound
        );
        std::fs::create_dir(workspace.path("empty")).expect("made");
        assert_eq!(exported(&workspace, "empty"), vec![0; 2 * BLOCK]);
    }
}
