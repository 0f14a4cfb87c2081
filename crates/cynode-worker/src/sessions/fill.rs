//! Fills a workspace from an artifact: fetched from the orchestrator and unpacked by the agent
//! before the session can be used.

use std::{sync::Arc, time::Duration};

use cynode_api::{ArtifactId, Base64Bytes, ErrorCode, Problem};
use cynode_sba_proto::{FileOp, Request, WORKSPACE};
use cynode_service::ApiError;
use futures_util::TryStreamExt as _;
use http::StatusCode;

use super::{Live, Sessions};
use crate::sandbox::unavailable;

/// Timeout for downloading an artifact.
const ARTIFACT_TIMEOUT: Duration = Duration::from_mins(10);
/// Timeout for the snapshot of what was unpacked.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_mins(5);

/// The orchestrator that this node belongs to.
#[derive(Clone)]
pub(crate) struct Upstream {
    pub(crate) http: reqwest::Client,
    pub(crate) base: String,
    pub(crate) node_token: String,
}

impl std::fmt::Debug for Upstream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upstream")
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}

impl Sessions {
    pub(crate) fn set_upstream(&self, upstream: Option<Upstream>) {
        *self.upstream.lock() = upstream;
    }

    /// The orchestrator that serves artifacts.
    pub(crate) fn upstream(&self) -> Result<Upstream, ApiError> {
        self.upstream.lock().clone().ok_or_else(|| {
            Problem::new(
                ErrorCode::InvalidRequest,
                "workspace_ref: artifacts require an orchestrator, and this node has none",
            )
            .with_remedy(
                "Create the session through the orchestrator, or import a tar archive into it.",
            )
            .into()
        })
    }

    /// Unpacks an artifact into the workspace of a sandbox that is not in use yet.
    pub(super) async fn unpack_artifact(
        &self,
        live: &Arc<Live>,
        id: ArtifactId,
    ) -> Result<(), ApiError> {
        let unreached = |reason: String| {
            ApiError::new(
                ErrorCode::NodeUnreachable,
                format!("failed to fetch artifact {id} from the orchestrator: {reason}"),
            )
        };
        let upstream = self.upstream()?;
        let url = format!("{}/v1/nodes/artifacts/{id}", upstream.base);
        let response = upstream
            .http
            .get(url)
            .bearer_auth(&upstream.node_token)
            .timeout(ARTIFACT_TIMEOUT)
            .send()
            .await;
        let response = response.map_err(|error| unreached(error.without_url().to_string()))?;
        if matches!(response.status(), StatusCode::NOT_FOUND | StatusCode::GONE) {
            // Not retryable.
            return Err(ApiError::new(
                ErrorCode::NotFound,
                format!("workspace_ref: the orchestrator has no artifact {id} for this node"),
            ));
        }
        if !response.status().is_success() {
            return Err(unreached(format!("status {}", response.status())));
        }
        let operation = FileOp::Import {
            path: Base64Bytes(WORKSPACE.as_bytes().to_vec()),
        };
        let mut channel = live
            .link()?
            .open(&Request::File { op: operation })
            .await
            .map_err(unavailable)?;
        channel
            .import(
                response
                    .bytes_stream()
                    .map_err(|error| unreached(error.without_url().to_string())),
            )
            .await?;
        self.take_snapshot(live).await;
        Ok(())
    }

    /// Stores what the session begins with, so that its changes can be exported. A session without
    /// a snapshot works otherwise: its image may have no git, or its agent may be older.
    async fn take_snapshot(&self, live: &Live) {
        let request = Request::File {
            op: FileOp::Snapshot,
        };
        let taken = async {
            let mut channel = live.link()?.open(&request).await.map_err(unavailable)?;
            channel.reply(SNAPSHOT_TIMEOUT).await
        };
        if let Err(error) = taken.await {
            tracing::info!(%error, "A session begins without a snapshot of its workspace.");
        }
    }
}
