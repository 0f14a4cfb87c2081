//! SHA-256 of all that a command writes, taken as it passes: of what is not kept, too.

use cynode_api::{Bytes, Stream, StreamHashes};
use sha2::{Digest as _, Sha256};

use super::hex;

#[derive(Clone, Debug, Default)]
pub(super) struct Hashes {
    stdout: Sha256,
    stderr: Sha256,
    bytes: Bytes,
}

impl Hashes {
    pub(super) fn push(&mut self, stream: Stream, data: &[u8]) {
        let (hash, bytes) = match stream {
            Stream::Stdout => (&mut self.stdout, &mut self.bytes.stdout),
            Stream::Stderr => (&mut self.stderr, &mut self.bytes.stderr),
        };
        hash.update(data);
        *bytes += data.len() as u64;
    }

    /// The hashes, if these many bytes are all that there were. Else some never came here.
    pub(super) fn of(&self, bytes: Bytes) -> Option<StreamHashes> {
        (bytes == self.bytes).then(|| StreamHashes {
            stdout: hex(&self.stdout.clone().finalize()),
            stderr: hex(&self.stderr.clone().finalize()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_of_each_stream_and_of_nothing_when_some_is_missing() {
        let mut hashes = Hashes::default();
        let of = |data: &[u8]| hex(&Sha256::digest(data));
        assert_eq!(
            hashes.of(Bytes::default()),
            Some(StreamHashes {
                stdout: of(b""),
                stderr: of(b"")
            })
        );
        hashes.push(Stream::Stdout, b"he");
        hashes.push(Stream::Stderr, b"\xff");
        hashes.push(Stream::Stdout, b"llo");
        let expected = Some(StreamHashes {
            stdout: of(b"hello"),
            stderr: of(b"\xff"),
        });
        assert_eq!(
            hashes.of(Bytes {
                stdout: 5,
                stderr: 1
            }),
            expected
        );
        for (stdout, stderr) in [(6, 1), (5, 2), (5, 0), (4, 1)] {
            assert_eq!(hashes.of(Bytes { stdout, stderr }), None);
        }
    }
}
