//! What became of a call whose answer was lost.

use cynode_api::{Call, CallId};

use http::Method;

use crate::{
    Result, WorkerClient,
    client::{json, send},
};

impl WorkerClient {
    /// What the worker remembers of a call that was sent with this id (`cynode_api::CALL_HEADER`).
    pub async fn call_state(&self, id: CallId) -> Result<Call> {
        self.get(&format!("/v1/worker/calls/{id}"), &()).await
    }

    /// The same; and if it has not come, it is refused should it still come.
    pub async fn bar_call(&self, id: CallId) -> Result<Call> {
        json(send(self.request(Method::POST, &format!("/v1/worker/calls/{id}/bar"))).await?).await
    }
}
