//! The datagrams between the role and its runner.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
};

use cynode_api::Base64Bytes;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, Interest},
    net::{UnixDatagram, UnixStream},
};

/// The longest datagram: the arguments of a command and the certificates of its remote.
pub(super) const MAX_DATAGRAM_BYTES: usize = 160 * 1024;
/// Descriptors of one datagram: a reply socket and three streams.
pub(super) const MAX_DESCRIPTORS: usize = 4;
/// The longest reply.
const MAX_REPLY_BYTES: u64 = 4 * 1024;
/// The longest name of a mirror or of an operation.
const MAX_NAME_BYTES: usize = 120;

/// The first datagram: what the runner must know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RunnerSettings {
    /// The runner's directory.
    pub(crate) directory: PathBuf,
    pub(crate) git: PathBuf,
    /// Address space of one process.
    pub(crate) memory_bytes: u64,
    /// The largest file.
    pub(crate) file_bytes: u64,
    /// Whether the runner's user runs nothing else, so that its processes can be counted.
    pub(crate) is_separate: bool,
    /// Whether commands start through the launcher. Not in tests, whose program is not CyNode's.
    pub(crate) launches: bool,
}

/// A datagram to the runner. Each brings a reply socket; some bring streams.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum RunnerRequest {
    Configure(RunnerSettings),
    Prepare {
        mirror: String,
    },
    /// With standard input, output and error.
    Run(Box<RunRequest>),
    Accept {
        mirror: String,
        quarantine: String,
    },
    Forget {
        mirror: String,
        name: String,
    },
    /// Creates the directory of an operation.
    Scratch {
        mirror: String,
        name: String,
    },
    /// Copies a file of an operation to standard output.
    Read {
        mirror: String,
        name: String,
        file: String,
    },
    /// The bytes of a mirror on the disk, and the number of its packs.
    Measure {
        mirror: String,
    },
    Remove {
        mirror: String,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RunRequest {
    pub(super) mirror: String,
    pub(super) args: Vec<Base64Bytes>,
    pub(super) index: Option<String>,
    pub(super) quarantine: Option<String>,
    pub(super) timeout_ms: u64,
    pub(super) remote: Option<WireRemote>,
}

/// The remote of a command, without its credential.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct WireRemote {
    pub(super) scheme: String,
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) ca: Option<String>,
    /// Where the helper asks for the credential, if there is one.
    pub(super) credential_socket: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum RunnerReply {
    Done,
    /// The length of the file that is being copied.
    Length(u64),
    Measured {
        bytes: u64,
        packs: u64,
    },
    Exit(i32),
    Killed,
    Timeout,
    Failed(String),
}

/// Names become parts of paths.
pub(super) fn is_name(name: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && !name.starts_with(['.', '-'])
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}

/// Sends a datagram with descriptors.
pub(super) async fn send(
    socket: &UnixDatagram,
    request: &RunnerRequest,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let text = serde_json::to_vec(request)?;
    if text.len() > MAX_DATAGRAM_BYTES || descriptors.len() > MAX_DESCRIPTORS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a command is longer than {MAX_DATAGRAM_BYTES} bytes"),
        ));
    }
    let sent = socket
        .async_io(Interest::WRITABLE, || {
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() {
                ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
            }
            rustix::net::sendmsg(
                socket.as_fd(),
                &[IoSlice::new(&text)],
                &mut ancillary,
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            )
            .map_err(io::Error::from)
        })
        .await?;
    if sent == text.len() {
        Ok(())
    } else {
        Err(io::Error::from(io::ErrorKind::WriteZero))
    }
}

/// Receives a datagram. `None` when the other side is gone.
pub(super) async fn receive<T: DeserializeOwned>(
    socket: &UnixDatagram,
    buffer: &mut [u8],
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let (length, descriptors) = socket
        .async_io(Interest::READABLE, || {
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let received = rustix::net::recvmsg(
                socket.as_fd(),
                &mut [IoSliceMut::new(buffer)],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
            )?;
            let mut descriptors = Vec::new();
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    descriptors.extend(rights);
                }
            }
            if received
                .flags
                .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
            {
                return Err(io::Error::from(io::ErrorKind::InvalidData));
            }
            Ok((received.bytes, descriptors))
        })
        .await?;
    if length == 0 {
        return Ok(None);
    }
    Ok(Some((
        serde_json::from_slice(&buffer[..length])?,
        descriptors,
    )))
}

/// Answers a request. Fails if nobody waits.
pub(super) async fn reply(socket: &mut UnixStream, reply: &RunnerReply) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    socket.write_all(&line).await
}

/// Reads one reply. An end before it means that the runner is gone.
pub(super) async fn read_reply(socket: &mut UnixStream) -> io::Result<RunnerReply> {
    let mut line = Vec::new();
    let mut limited = socket.take(MAX_REPLY_BYTES);
    loop {
        let byte = limited.read_u8().await?;
        if byte == b'\n' {
            return Ok(serde_json::from_slice(&line)?);
        }
        line.push(byte);
    }
}
