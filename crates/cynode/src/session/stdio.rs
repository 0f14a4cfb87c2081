//! Prints a sandbox's output to stdout and stderr: raw to a pipe, escaped to a terminal.

use std::io::{self, IsTerminal};

use tokio::io::{AsyncWrite, AsyncWriteExt, Stderr, Stdout};

use crate::sanitize::Sanitizer;

#[derive(Debug)]
pub struct Sink<W> {
    out: W,
    sanitizer: Option<Sanitizer>,
}

pub fn stdout(raw: bool) -> Sink<Stdout> {
    Sink {
        out: tokio::io::stdout(),
        sanitizer: (!raw && io::stdout().is_terminal()).then(Sanitizer::default),
    }
}

pub fn stderr(raw: bool) -> Sink<Stderr> {
    Sink {
        out: tokio::io::stderr(),
        sanitizer: (!raw && io::stderr().is_terminal()).then(Sanitizer::default),
    }
}

impl<W: AsyncWrite + Unpin> Sink<W> {
    pub async fn write(&mut self, data: &[u8]) -> io::Result<()> {
        match &mut self.sanitizer {
            None => self.out.write_all(data).await?,
            Some(sanitizer) => {
                let mut text = String::with_capacity(data.len());
                sanitizer.push(data, &mut text);
                self.out.write_all(text.as_bytes()).await?;
            }
        }
        self.out.flush().await
    }

    pub async fn finish(&mut self) -> io::Result<()> {
        if let Some(sanitizer) = &mut self.sanitizer {
            let mut text = String::new();
            sanitizer.finish(&mut text);
            self.out.write_all(text.as_bytes()).await?;
        }
        self.out.flush().await
    }
}
