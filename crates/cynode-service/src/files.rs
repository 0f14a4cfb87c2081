//! Files that must be whole after a crash: written beside the target, then renamed over it.

use std::{io, io::Write as _, path::Path};

use fs_err::os::unix::fs::OpenOptionsExt as _;

/// Replaces `path` atomically with `bytes`, readable by the owner only.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = path.file_name().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?.to_string_lossy();
    let staged = path.with_file_name(format!(".{name}.{}", uuid::Uuid::new_v4().simple()));
    let written = fs_err::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&staged).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_data()
    });
    let replaced = written.and_then(|()| fs_err::rename(&staged, path));
    if replaced.is_err() {
        drop(fs_err::remove_file(&staged));
    }
    replaced
}

/// Reads a token file (one line), making it first when it is not there.
pub fn read_or_create_token(path: &Path) -> io::Result<String> {
    match fs_err::read_to_string(path) {
        Ok(text) if !text.trim().is_empty() => return Ok(text.trim().to_owned()),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let token = format!("cyn_{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple());
    replace(path, format!("{token}\n").as_bytes())?;
    Ok(token)
}
