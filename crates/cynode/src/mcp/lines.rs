//! The lines of standard input, and of standard output.

use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader},
    sync::mpsc,
};

use bytes::Bytes;

/// The longest line that is read. Longer messages than the gateway takes are answered with their
/// id, if they fit.
pub const MAX_LINE_BYTES: usize = 64 * 1024 * 1024;
/// Answers that wait until the client reads them; then calls wait.
const MAX_WAITING_ANSWERS: usize = 64;

/// A line of the client.
#[derive(Debug, PartialEq, Eq)]
pub enum ClientLine {
    Text(Bytes),
    /// Longer than the limit; it was read away.
    TooLong,
}

/// Splits bytes into lines. Cancelling `next` loses nothing.
#[derive(Debug)]
pub struct Lines<R> {
    reader: BufReader<R>,
    line: Vec<u8>,
    limit: usize,
    is_too_long: bool,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub fn new(reader: R, limit: usize) -> Self {
        Self {
            reader: BufReader::with_capacity(64 * 1024, reader),
            line: Vec::new(),
            limit,
            is_too_long: false,
        }
    }

    /// The next line that is not blank; `None` at the end.
    pub async fn next(&mut self) -> std::io::Result<Option<ClientLine>> {
        loop {
            let bytes = self.reader.fill_buf().await?;
            let is_end = bytes.is_empty();
            let newline = bytes.iter().position(|byte| *byte == b'\n');
            let part = newline.map_or(bytes, |at| &bytes[..at]);
            if self.line.len() + part.len() > self.limit {
                self.is_too_long = true;
                self.line = Vec::new();
            }
            if !self.is_too_long {
                self.line.extend_from_slice(part);
            }
            let read = newline.map_or(bytes.len(), |at| at + 1);
            self.reader.consume(read);
            if newline.is_none() && !is_end {
                continue;
            }
            let line = std::mem::take(&mut self.line);
            if std::mem::take(&mut self.is_too_long) {
                return Ok(Some(ClientLine::TooLong));
            }
            let text = line.trim_ascii();
            if !text.is_empty() {
                return Ok(Some(ClientLine::Text(Bytes::copy_from_slice(text))));
            }
            if is_end {
                return Ok(None);
            }
        }
    }
}

/// Where lines for the client go.
pub type Output = mpsc::Sender<Vec<u8>>;

/// Writes lines to the client until it is gone, or until nobody has more.
pub fn write_to<W: AsyncWrite + Unpin + Send + 'static>(
    mut writer: W,
) -> (Output, tokio::task::JoinHandle<()>) {
    let (output, mut lines) = mpsc::channel::<Vec<u8>>(MAX_WAITING_ANSWERS);
    let task = tokio::spawn(async move {
        while let Some(mut line) = lines.recv().await {
            line.push(b'\n');
            if writer.write_all(&line).await.is_err() || writer.flush().await.is_err() {
                return;
            }
        }
    });
    (output, task)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn lines(input: &[u8], limit: usize) -> Vec<ClientLine> {
        let mut lines = Lines::new(input, limit);
        let mut all = Vec::new();
        while let Some(line) = lines.next().await.expect("read") {
            all.push(line);
        }
        all
    }

    fn text(line: &str) -> ClientLine {
        ClientLine::Text(Bytes::copy_from_slice(line.as_bytes()))
    }

    #[tokio::test]
    async fn lines_end_with_a_newline_or_with_the_input() {
        assert_eq!(
            lines(b"\n a \r\n\n{\"b\":1}\nc", 100).await,
            [text("a"), text("{\"b\":1}"), text("c")]
        );
        assert_eq!(lines(b"", 100).await, []);
    }

    #[tokio::test]
    // invariant: bounded
    async fn a_line_beyond_the_limit_is_read_away() {
        assert_eq!(
            lines(b"1234\n12345\n123456\n\n1", 5).await,
            [text("1234"), text("12345"), ClientLine::TooLong, text("1")]
        );
        assert_eq!(lines(b"123456", 5).await, [ClientLine::TooLong]);
        // Longer than a piece of the reader.
        let long = [vec![b'x'; 300_000], b"\nend".to_vec()].concat();
        assert_eq!(
            lines(&long, 299_999).await,
            [ClientLine::TooLong, text("end")]
        );
        assert_eq!(lines(&long, 300_000).await.len(), 2);
    }

    #[tokio::test]
    async fn writing_ends_when_the_client_is_gone() {
        let (reader, writer) = tokio::io::duplex(16);
        let (output, task) = write_to(writer);
        drop(reader);
        output.send(b"a".to_vec()).await.expect("taken");
        task.await.expect("ended");
        assert!(output.is_closed());
    }
}
