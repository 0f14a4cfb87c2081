//! Crash-safe files: written to a temporary name, then renamed over the target.

use std::{
    io,
    io::Write as _,
    path::{Path, PathBuf},
};

use fs_err::os::unix::fs::OpenOptionsExt as _;

/// Replaces `path` atomically with `bytes`, readable by the owner only.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let staged = stage(path, bytes)?;
    let replaced = fs_err::rename(&staged, path);
    if replaced.is_err() {
        drop(fs_err::remove_file(&staged));
    }
    replaced
}

/// Writes the temporary file.
fn stage(path: &Path, bytes: &[u8]) -> io::Result<PathBuf> {
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?
        .to_string_lossy();
    let staged = path.with_file_name(format!(".{name}.{}", uuid::Uuid::new_v4().simple()));
    let written = fs_err::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&staged)
        .and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_data()
        });
    if let Err(error) = written {
        drop(fs_err::remove_file(&staged));
        return Err(error);
    }
    Ok(staged)
}

/// Reads a token file (one line), and creates it if it does not exist. Concurrent callers agree on
/// one token.
pub fn read_or_create_token(path: &Path) -> io::Result<String> {
    let token = || {
        format!(
            "cyn_{}{}\n",
            uuid::Uuid::new_v4().simple(),
            uuid::Uuid::new_v4().simple()
        )
    };
    match fs_err::read_to_string(path) {
        Ok(text) if !text.trim().is_empty() => return Ok(text.trim().to_owned()),
        Ok(_) => replace(path, token().as_bytes())?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let staged = stage(path, token().as_bytes())?;
            let linked = fs_err::hard_link(&staged, path);
            drop(fs_err::remove_file(&staged));
            match linked {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        Err(error) => return Err(error),
    }
    Ok(fs_err::read_to_string(path)?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concurrent_creators_of_a_token_get_the_same_one() {
        let directory =
            std::env::temp_dir().join(format!("cynode-{}", uuid::Uuid::new_v4().simple()));
        fs_err::create_dir(&directory).expect("a directory");
        let path = directory.join("token");
        let tokens: Vec<String> = std::thread::scope(|scope| {
            let makers: Vec<_> = (0..16)
                .map(|_| scope.spawn(|| read_or_create_token(&path).expect("a token")))
                .collect();
            makers
                .into_iter()
                .map(|maker| maker.join().expect("no panic"))
                .collect()
        });
        assert!(
            tokens
                .iter()
                .all(|token| *token == tokens[0] && token.len() > 40),
            "{tokens:?}"
        );
        assert_eq!(
            fs_err::read_dir(&directory).expect("a directory").count(),
            1,
            "a temporary file was left"
        );
        fs_err::remove_dir_all(directory).expect("removed");
    }
}
