//! What became of a call whose answer was lost.

use cynode_api::{Call, CallId};

use crate::{Result, WorkerClient};

impl WorkerClient {
    /// What the worker remembers of a call that was sent with this id (`cynode_api::CALL_HEADER`).
    pub async fn call_state(&self, id: CallId) -> Result<Call> {
        self.get(&format!("/v1/worker/calls/{id}"), &()).await
    }
}
