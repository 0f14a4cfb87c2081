//! Transfers of bytes into a sandbox.

use std::{pin::pin, time::Duration};

use axum::body::Bytes;
use cynode_api::FileChanges;
use cynode_sba_proto::{Frame, Reply};
use cynode_service::ApiError;
use futures_util::{Stream, StreamExt as _};

use super::{Channel, LinkError, REPLY_TIMEOUT, unavailable, unexpected, validate_changes};

/// How long the agent may take to process what it received.
const IMPORT_TIMEOUT: Duration = Duration::from_secs(300);

impl Channel {
    /// Sends an archive to an agent that was requested to import one, and waits until it is
    /// unpacked. Returns the changes, if the agent reports them.
    pub(crate) async fn import(
        &mut self,
        pieces: impl Stream<Item = Result<Bytes, ApiError>>,
    ) -> Result<Option<FileChanges>, ApiError> {
        let mut pieces = pin!(pieces);
        while let Some(piece) = pieces.next().await {
            if let Err(error) = self.send_data(&piece?).await {
                return Err(self.send_error(error).await);
            }
        }
        if let Err(error) = self.send(&Frame::End).await {
            return Err(self.send_error(error).await);
        }
        match self.reply(IMPORT_TIMEOUT).await? {
            Reply::Ok { changed } => Ok(changed.map(validate_changes)),
            other => Err(unexpected(&format!("{other:?}"))),
        }
    }

    /// The error that made the agent stop reading.
    pub(crate) async fn send_error(&mut self, error: LinkError) -> ApiError {
        if !matches!(error, LinkError::Gone) {
            return unavailable(error);
        }
        // The agent has rejected the request and replies with the reason.
        match self.reply(REPLY_TIMEOUT).await {
            Err(error) => error,
            Ok(other) => unexpected(&format!("{other:?}")),
        }
    }
}
