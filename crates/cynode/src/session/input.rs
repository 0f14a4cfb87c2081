//! A file on standard input, which is sent with the request of a command.

use std::{
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom},
    os::fd::AsFd as _,
};

use bytes::Bytes;
use cynode_api::exec_limits::MAX_FORM_STDIN_BYTES;
use futures_util::Stream;

use super::transfer::feed;
use crate::archive::{self, PieceWriter};

/// A regular file on standard input, which can be sent again if a response is lost.
#[derive(Debug)]
pub struct InputFile {
    file: File,
    start: u64,
}

impl InputFile {
    /// `None` if standard input is not a regular file, or is too large for a request.
    pub fn from_stdin() -> io::Result<Option<Self>> {
        Self::from_file(File::from(io::stdin().as_fd().try_clone_to_owned()?))
    }

    fn from_file(mut file: File) -> io::Result<Option<Self>> {
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Ok(None);
        }
        let start = file.stream_position()?;
        Ok(
            (metadata.len().saturating_sub(start) <= MAX_FORM_STDIN_BYTES)
                .then_some(Self { file, start }),
        )
    }

    /// The content from the initial position.
    pub fn stream(&self) -> io::Result<impl Stream<Item = io::Result<Bytes>> + Send + use<>> {
        let (mut file, start) = (self.file.try_clone()?, self.start);
        let (to, from) = archive::channel();
        // The stream carries the error.
        drop(tokio::task::spawn_blocking(move || {
            feed(PieceWriter::new(to), |writer| {
                file.seek(SeekFrom::Start(start))?;
                io::copy(&mut (&mut file).take(MAX_FORM_STDIN_BYTES + 1), writer).map(drop)
            })
        }));
        Ok(archive::stream(from))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::TryStreamExt as _;

    use super::*;

    #[tokio::test]
    async fn a_file_is_sent_from_its_position_repeatedly() {
        let mut file = tempfile::tempfile().expect("a file");
        io::Write::write_all(&mut file, &b"a".repeat(200_000)).expect("written");
        file.seek(SeekFrom::Start(5)).expect("moved");
        let input = InputFile::from_file(file)
            .expect("metadata")
            .expect("a regular file");
        for _ in 0..2 {
            let pieces: Vec<Bytes> = input
                .stream()
                .expect("open")
                .try_collect()
                .await
                .expect("whole");
            assert_eq!(pieces.concat().len(), 199_995);
        }
        let (reader, _writer) = io::pipe().expect("a pipe");
        assert!(
            InputFile::from_file(File::from(std::os::fd::OwnedFd::from(reader)))
                .expect("metadata")
                .is_none()
        );
    }
}
