//! Credentials, repositories and promotions of the user API.

use std::time::Duration;

use cynode_api::{
    API_VERSION, Artifact, ArtifactId, Credential, CredentialCreate, CredentialId,
    CredentialRotate, ExportRequest, Promotion, PromotionCreate, PromotionDecision, PromotionId,
    Repository, RepositoryCreate, RepositoryId, SessionId,
};
use http::Method;
use serde_json::json;

use crate::{
    Result, UserClient,
    client::{CALL_TIMEOUT, check_status, json as read_json, send},
};

/// A dry run waits for the git role, which may fetch the repository first.
const DRY_RUN_TIMEOUT: Duration = Duration::from_mins(15);
/// An export is stored before its response.
const EXPORT_TIMEOUT: Duration = Duration::from_mins(15);

impl UserClient {
    pub async fn create_credential(&self, request: &CredentialCreate) -> Result<Credential> {
        self.0.call(Method::POST, "/v1/credentials", request).await
    }

    /// Replaces the value of a credential, which keeps its id, name and URL.
    pub async fn rotate_credential(
        &self,
        id: CredentialId,
        request: &CredentialRotate,
    ) -> Result<Credential> {
        self.0
            .call(
                Method::POST,
                &format!("/v1/credentials/{id}/rotate"),
                request,
            )
            .await
    }

    /// No role uses the credential any more. It can't be enabled again.
    pub async fn disable_credential(&self, id: CredentialId) -> Result<Credential> {
        self.0
            .call(
                Method::POST,
                &format!("/v1/credentials/{id}/disable"),
                &json!({ "version": API_VERSION }),
            )
            .await
    }

    pub async fn create_repository(&self, request: &RepositoryCreate) -> Result<Repository> {
        self.0.call(Method::POST, "/v1/repositories", request).await
    }

    pub async fn repository(&self, id: RepositoryId) -> Result<Repository> {
        self.0.get(&format!("/v1/repositories/{id}"), &()).await
    }

    pub async fn remove_repository(&self, id: RepositoryId) -> Result<()> {
        check_status(
            send(
                self.0
                    .request(Method::DELETE, &format!("/v1/repositories/{id}"))
                    .timeout(CALL_TIMEOUT),
            )
            .await?,
        )
        .await
        .map(drop)
    }

    /// Starts a promotion without waiting for its end, or inspects one if it is a dry run.
    pub async fn create_promotion(&self, request: &PromotionCreate) -> Result<Promotion> {
        let timeout = if request.dry_run {
            DRY_RUN_TIMEOUT
        } else {
            CALL_TIMEOUT
        };
        read_json(
            send(
                self.0
                    .request(Method::POST, "/v1/promotions")
                    .timeout(timeout)
                    .json(request),
            )
            .await?,
        )
        .await
    }

    pub async fn promotion(&self, id: PromotionId) -> Result<Promotion> {
        self.0.get(&format!("/v1/promotions/{id}"), &()).await
    }

    pub async fn approve_promotion(
        &self,
        id: PromotionId,
        decision: &PromotionDecision,
    ) -> Result<Promotion> {
        self.0
            .call(
                Method::POST,
                &format!("/v1/promotions/{id}/approve"),
                decision,
            )
            .await
    }

    pub async fn reject_promotion(
        &self,
        id: PromotionId,
        decision: &PromotionDecision,
    ) -> Result<Promotion> {
        self.0
            .call(
                Method::POST,
                &format!("/v1/promotions/{id}/reject"),
                decision,
            )
            .await
    }

    pub async fn cancel_promotion(&self, id: PromotionId) -> Result<Promotion> {
        self.0
            .call(
                Method::POST,
                &format!("/v1/promotions/{id}/cancel"),
                &json!({ "version": API_VERSION }),
            )
            .await
    }

    /// What is known of an artifact, without its content.
    pub async fn artifact(&self, id: ArtifactId) -> Result<Artifact> {
        self.0.get(&format!("/v1/artifacts/{id}"), &()).await
    }

    /// Exports a workspace as an artifact of the session's task.
    pub async fn export_artifact(
        &self,
        session: SessionId,
        request: &ExportRequest,
    ) -> Result<Artifact> {
        read_json(
            send(
                self.0
                    .request(Method::POST, &self.0.session(session, "/export"))
                    .timeout(EXPORT_TIMEOUT)
                    .json(request),
            )
            .await?,
        )
        .await
    }
}
