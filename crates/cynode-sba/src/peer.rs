//! A blocking connection, for a child that serves one file operation.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
};

use cynode_sba_proto::{Decoder, Frame, MAX_DATA, Reply, encode, encode_data, encode_message};

#[derive(Debug)]
pub(crate) struct Peer {
    stream: UnixStream,
    decoder: Decoder,
    buffer: Vec<u8>,
}

impl Peer {
    /// `decoder` holds data that was read from the connection already.
    pub(crate) fn new(stream: UnixStream, decoder: Decoder) -> Self {
        Self {
            stream,
            decoder,
            buffer: Vec::new(),
        }
    }

    #[cfg(test)]
    pub(crate) fn from_stream(stream: UnixStream) -> Self {
        Self::new(stream, Decoder::new(cynode_sba_proto::MAX_WORKER_FRAME))
    }

    pub(crate) fn reply(&mut self, reply: &Reply) -> io::Result<()> {
        let mut out = Vec::new();
        encode_message(reply, &mut out);
        self.stream.write_all(&out)
    }

    pub(crate) fn data(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut out = Vec::with_capacity(bytes.len().min(MAX_DATA) + 8);
        for piece in bytes.chunks(MAX_DATA) {
            out.clear();
            encode_data(piece, &mut out);
            self.stream.write_all(&out)?;
        }
        Ok(())
    }

    pub(crate) fn end(&mut self) -> io::Result<()> {
        let mut out = Vec::new();
        encode(&Frame::End, &mut out);
        self.stream.write_all(&out)
    }

    /// The next chunk from the worker; `None` at the end. Fails if the connection closes before the
    /// end.
    pub(crate) fn next_data(&mut self) -> io::Result<Option<Vec<u8>>> {
        self.buffer.resize(MAX_DATA, 0);
        loop {
            match self.decoder.next_frame().map_err(io::Error::other)? {
                Some(Frame::Data(data)) => return Ok(Some(data)),
                Some(Frame::End) => return Ok(None),
                Some(other) => {
                    return Err(io::Error::other(format!("expected data, got {other:?}")));
                }
                None => {}
            }
            let count = self.stream.read(&mut self.buffer)?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.decoder.extend(&self.buffer[..count]);
        }
    }
}
