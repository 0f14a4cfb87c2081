//! Transfers of local files to a server.

use std::{io, path::Path};

use cynode_api::Flags;
use cynode_client::Body;

use crate::{
    archive::{self, PieceWriter},
    failure::{Failure, INTERNAL, USAGE},
    output::{self, Progress},
};

/// Streams a directory as a tar archive. Also returns the skipped entries.
pub async fn send_tree<T>(
    root: &Path,
    send: impl AsyncFnOnce(Body) -> cynode_client::Result<T>,
) -> Result<(T, Vec<String>), Failure> {
    let (sender, receiver) = archive::channel();
    let root = root.to_owned();
    let total = if output::shows_progress() {
        let root = root.clone();
        // A tree that can't be read fails when it is packed.
        tokio::task::spawn_blocking(move || archive::tree_bytes(&root).ok())
            .await
            .unwrap_or_default()
    } else {
        None
    };
    let progress = Progress::of_total("copying", total);
    let packer = tokio::task::spawn_blocking(move || {
        feed(PieceWriter::new(sender), |writer| {
            archive::pack_tree(&root, writer)
        })
    });
    let sent = send(body(receiver, progress)).await;
    let (packed, sent) = join_transfer(packer.await, sent)?;
    Ok((sent, packed.skipped))
}

/// Writes a producer's output to the channel. A failure ends the stream with an error, so that a
/// partial transfer is not mistaken for a complete one.
pub(crate) fn feed<T>(
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

/// The result of a transfer: a local read error, or else the server's response.
pub(crate) fn join_transfer<T, U>(
    reader: Result<io::Result<T>, tokio::task::JoinError>,
    sent: Result<U, cynode_client::Error>,
) -> Result<(T, U), Failure> {
    match (
        reader.map_err(|error| Failure::internal(error.to_string()))?,
        sent,
    ) {
        (Err(error), _) if error.kind() != io::ErrorKind::BrokenPipe => Err(local_failure(&error)),
        (_, Err(error)) => Err(error.into()),
        (result, Ok(sent)) => result
            .map(|result| (result, sent))
            .map_err(|error| local_failure(&error)),
    }
}

pub(crate) fn body(
    mut receiver: tokio::sync::mpsc::Receiver<io::Result<bytes::Bytes>>,
    progress: Progress,
) -> Body {
    let mut total = 0;
    Body::wrap_stream(futures_util::stream::poll_fn(move |context| {
        let piece = receiver.poll_recv(context);
        if let std::task::Poll::Ready(Some(Ok(piece))) = &piece {
            total += piece.len() as u64;
            progress.set_bytes("copying", total);
        }
        piece
    }))
}

/// Prints which transferred files look like they contain credentials.
pub(crate) fn print_flagged(flags: &Flags) {
    const MAX_SHOWN: usize = 10;
    for file in flags.flagged.iter().take(MAX_SHOWN) {
        output::message(&format!(
            "cynode: {} went in, although it contains what looks like {}",
            crate::sanitize::line(&file.path),
            crate::sanitize::line(&file.shape)
        ));
    }
    let more = flags
        .flagged_total
        .saturating_sub(MAX_SHOWN.min(flags.flagged.len()) as u64);
    if more > 0 {
        output::message(&format!(
            "cynode: {more} more files went in that contain what looks like credentials"
        ));
    }
}

/// Prints skipped entries and fails if there are any. `names` may be incomplete.
pub(super) fn report_skipped(names: &[String], count: u64) -> Result<(), Failure> {
    if count == 0 {
        return Ok(());
    }
    for skipped in names {
        output::message(&format!("skipped: {}", crate::sanitize::line(skipped)));
    }
    Err(Failure::new(
        INTERNAL,
        "partial_copy",
        format!("skipped {count} entries and copied the others"),
    ))
}

/// A failure of a local file; a usage error if the path is wrong.
pub fn local_failure(error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::NotFound
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::IsADirectory
        | io::ErrorKind::AlreadyExists => Failure::new(USAGE, "local_file", error.to_string()),
        _ => Failure::from(io::Error::new(error.kind(), error.to_string())),
    }
}
