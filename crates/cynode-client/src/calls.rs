//! The state of calls whose response was lost.

use cynode_api::{Call, CallId};
use http::Method;

use crate::{
    Result, SessionClient,
    client::{json, send},
};

impl SessionClient {
    /// The worker's record of the call with this id (`cynode_api::CALL_HEADER`).
    pub async fn call_state(&self, id: CallId) -> Result<Call> {
        self.get(&format!("/v1/worker/calls/{id}"), &()).await
    }

    /// The same; if the call has not arrived yet, the worker will refuse it.
    pub async fn bar_call(&self, id: CallId) -> Result<Call> {
        json(send(self.request(Method::POST, &format!("/v1/worker/calls/{id}/bar"))).await?).await
    }
}
