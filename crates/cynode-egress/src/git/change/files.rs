//! File sets: a tar of files to write, and a list of paths to delete.
//!
//! Format, version 1: regular files and symbolic links are written as they are, with the
//! executable bit; directories are ignored; `.cynode/deleted` lists paths to delete, one in each
//! line, and nothing else may be below `.cynode`.

use bytes::Bytes;
use cynode_archive::{Archive, Entry, Kind, Reader};
use cynode_patch::escaped;

use super::{
    ChangeError, Conflict,
    edits::{BaseFiles, EditedFile, Edits, FileMode, whole_file},
    objects::MAX_CONTENT_BYTES,
};

const DELETED: &[u8] = b".cynode/deleted";
/// The list of deleted files.
const MAX_DELETED_BYTES: u64 = 16 * 1024 * 1024;

pub(super) async fn edits(base: &BaseFiles, tar: &[u8]) -> Result<Edits, ChangeError> {
    let (mut edits, deleted) = cynode_service::compute::run(tar.len(), || read(tar)).await?;
    let mut missing = Vec::new();
    for path in deleted {
        if base.get(&path).is_none() {
            missing.push(whole_file(&path, "no such file".to_owned()));
        }
        if !edits.add(path.clone(), None)? {
            return Err(invalid(&path, "is written or deleted twice"));
        }
    }
    if missing.is_empty() {
        Ok(edits)
    } else {
        Err(Conflict::new(base, missing, false).into())
    }
}

fn invalid(path: &[u8], problem: &str) -> ChangeError {
    ChangeError::Invalid(format!(
        "the file set is invalid: '{}' {problem}",
        escaped(path)
    ))
}

fn read(tar: &[u8]) -> Result<(Edits, Vec<Vec<u8>>), ChangeError> {
    let broken = |error: cynode_archive::ReadError| {
        ChangeError::Invalid(format!("the file set is not a valid archive: {error}"))
    };
    let mut archive = Archive::new(Reader::new(tar));
    let mut edits = Edits::default();
    let mut deleted = None;
    let mut is_empty = true;
    while let Some(entry) = archive.next_entry().map_err(broken)? {
        is_empty = false;
        let path = cynode_archive::components(&entry.path)
            .collect::<Vec<_>>()
            .join(&b'/');
        let is_ours = path == b".cynode" || path.starts_with(b".cynode/");
        let mode = match entry.kind {
            Kind::Directory => continue,
            Kind::File if entry.mode & 0o111 != 0 => FileMode::Executable,
            Kind::File => FileMode::Regular,
            Kind::Symlink => FileMode::Symlink,
            Kind::HardLink | Kind::Special => {
                return Err(invalid(&path, "is neither a file nor a symbolic link"));
            }
        };
        if is_ours && (path != DELETED || mode == FileMode::Symlink || deleted.is_some()) {
            return Err(invalid(&path, "is reserved for the list of deleted files"));
        }
        let limit = if is_ours {
            MAX_DELETED_BYTES
        } else {
            MAX_CONTENT_BYTES
        };
        if entry.size > limit {
            return Err(ChangeError::TooLarge(format!(
                "'{}' in the file set has more than {limit} bytes",
                escaped(&path)
            )));
        }
        let content = content(&mut archive, entry).map_err(broken)?;
        if is_ours {
            deleted = Some(content);
        } else if !edits.add(path.clone(), Some(EditedFile { mode, content }))? {
            return Err(invalid(&path, "is there twice"));
        }
    }
    if is_empty && !archive.has_end_marker() {
        return Err(ChangeError::Invalid(
            "the file set is not an archive".to_owned(),
        ));
    }
    let deleted = deleted.unwrap_or_default();
    let paths = deleted
        .split(|byte| *byte == b'\n')
        .filter(|path| !path.is_empty())
        .map(<[u8]>::to_vec)
        .collect();
    Ok((edits, paths))
}

fn content(
    archive: &mut Archive<Reader<&[u8]>>,
    entry: Entry,
) -> Result<Bytes, cynode_archive::ReadError> {
    if entry.kind == Kind::Symlink {
        return Ok(Bytes::from(entry.link));
    }
    let mut content = Vec::new();
    archive.read(|piece| {
        content.extend_from_slice(piece);
        Ok(())
    })?;
    Ok(Bytes::from(content))
}
