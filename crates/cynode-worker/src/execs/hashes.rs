//! SHA-256 of everything a command writes, including output that is not retained.

use cynode_api::{ByteCounts, Stream, StreamHashes};
use sha2::{Digest as _, Sha256};

#[derive(Clone, Debug, Default)]
pub(super) struct Hashes {
    stdout: Sha256,
    stderr: Sha256,
    bytes: ByteCounts,
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

    /// The digests, or `None` if the lengths differ: then some output never passed through here.
    pub(super) fn digests(&self, bytes: ByteCounts) -> Option<StreamHashes> {
        (bytes == self.bytes).then(|| StreamHashes {
            stdout: hex::encode(self.stdout.clone().finalize()),
            stderr: hex::encode(self.stderr.clone().finalize()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stream_has_a_hash_unless_output_is_missing() {
        let mut hashes = Hashes::default();
        let sha256 = |data: &[u8]| hex::encode(Sha256::digest(data));
        assert_eq!(
            hashes.digests(ByteCounts::default()),
            Some(StreamHashes {
                stdout: sha256(b""),
                stderr: sha256(b"")
            })
        );
        hashes.push(Stream::Stdout, b"he");
        hashes.push(Stream::Stderr, b"\xff");
        hashes.push(Stream::Stdout, b"llo");
        let expected = Some(StreamHashes {
            stdout: sha256(b"hello"),
            stderr: sha256(b"\xff"),
        });
        assert_eq!(
            hashes.digests(ByteCounts {
                stdout: 5,
                stderr: 1
            }),
            expected
        );
        for (stdout, stderr) in [(6, 1), (5, 2), (5, 0), (4, 1)] {
            assert_eq!(hashes.digests(ByteCounts { stdout, stderr }), None);
        }
    }
}
