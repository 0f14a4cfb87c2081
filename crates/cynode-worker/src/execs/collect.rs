//! The output of a foreground exec's answer: within the limit all of it, over it the start and the end.

use std::collections::VecDeque;

use cynode_api::{Stream, Truncated};

#[derive(Debug)]
struct Half {
    limit: usize,
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total: u64,
}

impl Half {
    fn new(limit: usize) -> Self {
        Self { limit, head: Vec::new(), tail: VecDeque::new(), total: 0 }
    }

    fn push(&mut self, data: &[u8]) {
        self.total += data.len() as u64;
        let head = self.limit.div_ceil(2);
        let (first, rest) = data.split_at(data.len().min(head - self.head.len()));
        self.head.extend_from_slice(first);
        let tail = self.limit - head;
        let rest = &rest[rest.len().saturating_sub(tail)..];
        let excess = (self.tail.len() + rest.len()).saturating_sub(tail);
        self.tail.drain(..excess.min(self.tail.len()));
        self.tail.extend(rest);
    }

    fn finish(&self) -> (Vec<u8>, bool) {
        let mut bytes = self.head.clone();
        bytes.extend(&self.tail);
        (bytes, self.total > self.limit as u64)
    }
}

#[derive(Debug)]
pub(crate) struct Collector {
    stdout: Half,
    stderr: Half,
}

impl Collector {
    pub(crate) fn new(limit: usize) -> Self {
        Self { stdout: Half::new(limit), stderr: Half::new(limit) }
    }

    pub(crate) fn push(&mut self, stream: Stream, data: &[u8]) {
        match stream {
            Stream::Stdout => self.stdout.push(data),
            Stream::Stderr => self.stderr.push(data),
        }
    }

    /// Both streams and whether each was cut.
    pub(crate) fn finish(&self) -> (Vec<u8>, Vec<u8>, Truncated) {
        let ((stdout, stdout_cut), (stderr, stderr_cut)) = (self.stdout.finish(), self.stderr.finish());
        (stdout, stderr, Truncated { stdout: stdout_cut, stderr: stderr_cut })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_is_cut_and_the_ends_are_kept() {
        for piece in [1, 3, 7, 100] {
            let mut collector = Collector::new(10);
            let input: Vec<u8> = (0..100).collect();
            for part in input.chunks(piece) {
                collector.push(Stream::Stdout, part);
            }
            let (stdout, stderr, truncated) = collector.finish();
            assert_eq!(stdout, [0, 1, 2, 3, 4, 95, 96, 97, 98, 99]);
            assert!(truncated.stdout && !truncated.stderr && stderr.is_empty());
        }
    }

    #[test]
    fn output_that_fits_is_whole() {
        let mut collector = Collector::new(10);
        collector.push(Stream::Stderr, b"0123456");
        collector.push(Stream::Stderr, b"789");
        assert_eq!(collector.finish(), (Vec::new(), b"0123456789".to_vec(), Truncated::default()));
    }
}
