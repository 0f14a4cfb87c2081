//! Log lines of a role: to a rotated file, to the terminal, and the last ones in memory.

use std::{
    collections::VecDeque,
    io::{self, Write},
    path::{Path, PathBuf},
};

use fs_err::os::unix::fs::OpenOptionsExt;
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::output;

/// Size at which a log file is rotated.
const MAX_BYTES: u64 = 10 * 1024 * 1024;
/// Rotated files to keep.
const MAX_ROTATED_FILES: u32 = 3;
/// Longer lines are split.
const MAX_LINE: usize = 64 * 1024;
const MAX_TAIL_LINES: usize = 20;

/// A log file that is rotated when it is full: `worker.log`, `worker.log.1`, …
#[derive(Debug)]
struct Rotating {
    path: PathBuf,
    file: fs_err::File,
    size: u64,
    limit: u64,
}

impl Rotating {
    fn open(path: &Path, limit: u64) -> io::Result<Self> {
        let file = fs_err::OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(path)?;
        let size = file.metadata()?.len();
        Ok(Self {
            path: path.to_owned(),
            file,
            size,
            limit,
        })
    }

    fn write_line(&mut self, line: &str) -> io::Result<()> {
        if self.size > 0 && self.size + line.len() as u64 >= self.limit {
            self.rotate()?;
        }
        self.file.write_all(format!("{line}\n").as_bytes())?;
        self.size += line.len() as u64 + 1;
        Ok(())
    }

    fn rotate(&mut self) -> io::Result<()> {
        let numbered = |number: u32| {
            let mut name = self.path.clone().into_os_string();
            name.push(format!(".{number}"));
            PathBuf::from(name)
        };
        for number in (1..MAX_ROTATED_FILES).rev() {
            match fs_err::rename(numbered(number), numbered(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs_err::rename(&self.path, numbered(1))?;
        *self = Self::open(&self.path, self.limit)?;
        Ok(())
    }
}

/// The sinks of a role's log lines.
#[derive(Debug)]
pub struct LogSink {
    name: &'static str,
    file: Rotating,
    tail: VecDeque<String>,
    to_stderr: bool,
}

impl LogSink {
    pub fn open(name: &'static str, path: &Path, to_stderr: bool) -> io::Result<Self> {
        Ok(Self {
            name,
            file: Rotating::open(path, MAX_BYTES)?,
            tail: VecDeque::new(),
            to_stderr,
        })
    }

    fn write(&mut self, line: &str) {
        if self.to_stderr {
            output::message(&format!("{} | {line}", self.name));
        }
        if self.tail.len() == MAX_TAIL_LINES {
            self.tail.pop_front();
        }
        self.tail.push_back(line.to_owned());
        // A full disk must not stop the role.
        drop(self.file.write_line(line));
    }

    /// Prints the last lines, unless the terminal has shown them already.
    pub fn print_tail(&self) {
        if !self.to_stderr {
            for line in &self.tail {
                output::message(&format!("{} | {line}", self.name));
            }
        }
    }
}

/// Copies lines until the role closes its end.
pub async fn pump(mut from: impl AsyncRead + Unpin, to: &parking_lot::Mutex<LogSink>) {
    let mut splitter = LineSplitter::default();
    let mut buffer = vec![0; 8192];
    loop {
        match from.read(&mut buffer).await {
            Ok(0) | Err(_) => break,
            Ok(count) => splitter.push(&buffer[..count], |line| to.lock().write(line)),
        }
    }
    splitter.finish(|line| to.lock().write(line));
}

#[derive(Debug, Default)]
struct LineSplitter {
    line: Vec<u8>,
}

impl LineSplitter {
    fn push(&mut self, bytes: &[u8], mut write: impl FnMut(&str)) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, is_complete) = part
                .strip_suffix(b"\n")
                .map_or((part, false), |text| (text, true));
            self.line.extend_from_slice(text);
            if is_complete || self.line.len() >= MAX_LINE {
                write(&String::from_utf8_lossy(&self.line));
                self.line.clear();
            }
        }
    }

    fn finish(&mut self, mut write: impl FnMut(&str)) {
        if !self.line.is_empty() {
            write(&String::from_utf8_lossy(&std::mem::take(&mut self.line)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_joined_across_pieces() {
        let mut splitter = LineSplitter::default();
        let mut lines = Vec::new();
        for piece in ["a", "b\nc\n", "\n", "d"] {
            splitter.push(piece.as_bytes(), |line| lines.push(line.to_owned()));
        }
        splitter.finish(|line| lines.push(line.to_owned()));
        assert_eq!(lines, ["ab", "c", "", "d"]);
    }

    #[test]
    fn a_full_file_is_rotated_and_old_files_are_deleted() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let path = directory.path().join("worker.log");
        let mut log = Rotating::open(&path, 15).expect("open");
        for number in 0..20 {
            log.write_line(&format!("line {number:04}"))
                .expect("written");
        }
        let mut names: Vec<_> = fs_err::read_dir(directory.path())
            .expect("directory")
            .map(|entry| entry.expect("entry").file_name())
            .collect();
        names.sort();
        assert_eq!(
            names,
            ["worker.log", "worker.log.1", "worker.log.2", "worker.log.3"]
        );
        assert_eq!(fs_err::read_to_string(&path).expect("text"), "line 0019\n");
        assert_eq!(
            fs_err::read_to_string(directory.path().join("worker.log.3")).expect("text"),
            "line 0016\n"
        );
    }
}
