//! Local files on their way to the other side.

use std::{io, path::Path};

use cynode_api::Flags;
use cynode_client::Body;

use crate::{
    archive::{self, PieceWriter},
    failure::{Failure, INTERNAL, USAGE},
    output::{self, Progress},
};

/// Sends a directory as a tar archive, piece by piece. Also says what was left out.
pub async fn send_tree<T>(
    root: &Path,
    send: impl AsyncFnOnce(Body) -> cynode_client::Result<T>,
) -> Result<(T, Vec<String>), Failure> {
    let (to, from) = archive::channel();
    let progress = Progress::start("copying");
    let root = root.to_owned();
    let packer = tokio::task::spawn_blocking(move || {
        feed(PieceWriter::new(to), |writer| {
            archive::pack_tree(&root, writer)
        })
    });
    let sent = send(body(from, progress)).await;
    let (packed, sent) = joined(packer.await, sent)?;
    Ok((sent, packed.skipped))
}

/// Runs a producer into the channel; a failure ends the stream as broken, so that nobody takes the half for the whole.
pub(super) fn feed<T>(
    mut writer: PieceWriter,
    produce: impl FnOnce(&mut PieceWriter) -> io::Result<T>,
) -> io::Result<T> {
    let produced =
        produce(&mut writer).and_then(|value| io::Write::flush(&mut writer).map(|()| value));
    if let Err(error) = &produced {
        writer.fail(error);
    }
    produced
}

/// The local error when reading failed by itself, else what the other side said.
pub(super) fn joined<T, U>(
    reader: Result<io::Result<T>, tokio::task::JoinError>,
    sent: Result<U, cynode_client::Error>,
) -> Result<(T, U), Failure> {
    match (
        reader.map_err(|error| Failure::internal(error.to_string()))?,
        sent,
    ) {
        (Err(error), _) if error.kind() != io::ErrorKind::BrokenPipe => Err(local(&error)),
        (_, Err(error)) => Err(error.into()),
        (result, Ok(sent)) => result
            .map(|result| (result, sent))
            .map_err(|error| local(&error)),
    }
}

pub(super) fn body(
    mut from: tokio::sync::mpsc::Receiver<io::Result<bytes::Bytes>>,
    progress: Progress,
) -> Body {
    let mut total = 0;
    Body::wrap_stream(futures_util::stream::poll_fn(move |context| {
        let piece = from.poll_recv(context);
        if let std::task::Poll::Ready(Some(Ok(piece))) = &piece {
            total += piece.len() as u64;
            progress.bytes("copying", total);
        }
        piece
    }))
}

/// Notes what looks like a credential and was let in.
pub(crate) fn flagged(flags: &Flags) {
    const SHOWN: usize = 10;
    for file in flags.flagged.iter().take(SHOWN) {
        output::note(&format!(
            "cynode: {} holds what looks like {}",
            crate::sanitize::line(&file.path),
            crate::sanitize::line(&file.shape)
        ));
    }
    let more = flags
        .flagged_total
        .saturating_sub(SHOWN.min(flags.flagged.len()) as u64);
    if more > 0 {
        output::note(&format!(
            "cynode: {more} more hold what looks like credentials"
        ));
    }
}

pub(super) fn left_out(named: &[String], count: u64) -> Result<(), Failure> {
    if count == 0 {
        return Ok(());
    }
    for skipped in named {
        output::note(&format!("left out: {}", crate::sanitize::line(skipped)));
    }
    Err(Failure::new(
        INTERNAL,
        "partial_copy",
        format!("{count} entries were left out; the rest is copied"),
    ))
}

/// A failure on this side's files is the person's to put right.
pub fn local(error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::NotFound
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::IsADirectory
        | io::ErrorKind::AlreadyExists => Failure::new(USAGE, "local_file", error.to_string()),
        _ => Failure::from(io::Error::new(error.kind(), error.to_string())),
    }
}
