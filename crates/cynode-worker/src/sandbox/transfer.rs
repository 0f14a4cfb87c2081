//! Bytes on their way into a sandbox.

use std::{pin::pin, time::Duration};

use axum::body::Bytes;
use cynode_api::FileChanges;
use cynode_sba_proto::{Frame, Reply};
use cynode_service::ApiError;
use futures_util::{Stream, StreamExt as _};

use super::{ANSWER, Channel, LinkError, checked, unavailable, unexpected};

/// How long an agent may take to be done with what it was sent.
const PATIENCE: Duration = Duration::from_secs(300);

impl Channel {
    /// Sends an archive to an agent that was asked to import one, and waits until it is unpacked. What that changed, if the agent says it.
    pub(crate) async fn import(
        &mut self,
        pieces: impl Stream<Item = Result<Bytes, ApiError>>,
    ) -> Result<Option<FileChanges>, ApiError> {
        let mut pieces = pin!(pieces);
        while let Some(piece) = pieces.next().await {
            if let Err(error) = self.send_data(&piece?).await {
                return Err(self.not_taken(error).await);
            }
        }
        if let Err(error) = self.send(&Frame::End).await {
            return Err(self.not_taken(error).await);
        }
        match self.reply(PATIENCE).await? {
            Reply::Ok { changed } => Ok(changed.map(checked)),
            other => Err(unexpected(&format!("{other:?}"))),
        }
    }

    /// Why an agent did not take what it was to receive.
    pub(crate) async fn not_taken(&mut self, error: LinkError) -> ApiError {
        if !matches!(error, LinkError::Gone) {
            return unavailable(error);
        }
        // It has refused, and says why.
        match self.reply(ANSWER).await {
            Err(error) => error,
            Ok(other) => unexpected(&format!("{other:?}")),
        }
    }
}
