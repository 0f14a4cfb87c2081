//! Workspaces that begin with what an artifact holds: fetched from the orchestrator, unpacked by the agent, before anybody
//! can use the session.

use std::{sync::Arc, time::Duration};

use cynode_api::{ArtifactId, Base64Bytes, ErrorCode, Problem};
use cynode_sba_proto::{FileOp, Request, WORKSPACE};
use cynode_service::ApiError;
use futures_util::TryStreamExt as _;
use http::StatusCode;

use super::{Live, Sessions};
use crate::sandbox::unavailable;

/// How long an artifact may take to come.
const PATIENCE: Duration = Duration::from_mins(10);

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

    /// Where artifacts come from.
    pub(crate) fn upstream(&self) -> Result<Upstream, ApiError> {
        self.upstream.lock().clone().ok_or_else(|| {
            Problem::new(
                ErrorCode::InvalidRequest,
                "workspace_ref: artifacts come from an orchestrator, and this node has none",
            )
            .with_remedy(
                "Create the session through the orchestrator, or import a tar archive into it.",
            )
            .into()
        })
    }

    /// Unpacks an artifact into the workspace of a sandbox that nobody uses yet.
    pub(super) async fn unpack_artifact(
        &self,
        live: &Arc<Live>,
        id: ArtifactId,
    ) -> Result<(), ApiError> {
        let unreached = |why: String| {
            ApiError::new(
                ErrorCode::NodeUnreachable,
                format!("the artifact {id} can't be fetched from the orchestrator: {why}"),
            )
        };
        let upstream = self.upstream()?;
        let url = format!("{}/v1/nodes/artifacts/{id}", upstream.base);
        let answer = upstream
            .http
            .get(url)
            .bearer_auth(&upstream.node_token)
            .timeout(PATIENCE)
            .send()
            .await;
        let answer = answer.map_err(|error| unreached(error.without_url().to_string()))?;
        if matches!(answer.status(), StatusCode::NOT_FOUND | StatusCode::GONE) {
            // To ask again would not bring it back.
            return Err(ApiError::new(
                ErrorCode::NotFound,
                format!(
                    "workspace_ref: there is no artifact {id} for this node at the orchestrator"
                ),
            ));
        }
        if !answer.status().is_success() {
            return Err(unreached(format!("it answered {}", answer.status())));
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
                answer
                    .bytes_stream()
                    .map_err(|error| unreached(error.without_url().to_string())),
            )
            .await
            .map(drop)
    }
}
