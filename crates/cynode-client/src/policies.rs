//! Policies and dry runs of their decisions.

use cynode_api::{Policy, PolicyPut, PolicyTest, PolicyVerdict};
use http::Method;

use crate::{
    Result, UserClient,
    client::{CALL_TIMEOUT, check_status, send},
    user::segment,
};

impl UserClient {
    pub async fn policies(&self) -> Result<Vec<Policy>> {
        self.all("/v1/policies", Vec::new()).await
    }

    pub async fn policy(&self, id: &str) -> Result<Policy> {
        self.0
            .get(&format!("/v1/policies/{}", segment(id)), &())
            .await
    }

    pub async fn put_policy(&self, id: &str, policy: &PolicyPut) -> Result<Policy> {
        self.0
            .call(
                Method::PUT,
                &format!("/v1/policies/{}", segment(id)),
                policy,
            )
            .await
    }

    pub async fn delete_policy(&self, id: &str) -> Result<()> {
        check_status(
            send(
                self.0
                    .request(Method::DELETE, &format!("/v1/policies/{}", segment(id)))
                    .timeout(CALL_TIMEOUT),
            )
            .await?,
        )
        .await
        .map(drop)
    }

    /// Asks for a decision without any effect.
    pub async fn test_policy(&self, test: &PolicyTest) -> Result<PolicyVerdict> {
        self.0.call(Method::POST, "/v1/policies:test", test).await
    }
}
