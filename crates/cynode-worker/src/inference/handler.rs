//! Requests of sandboxes, from the listener to an answer.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use cynode_api::ModelServerKind;
use cynode_inference::{
    AllowedModels, Endpoint, Locality, ModelList, Refusal, RefusalCode, Rules, ShownModel,
    TokenLimits, Upstream, UpstreamRequest, limits::MAX_NAME_BYTES, server_version,
};
use cynode_service::{compute, connections::CallerId, fair};
use http::{HeaderValue, StatusCode, header};
use hyper::body::Incoming;
use serde::Deserialize;
use uuid::Uuid;

use super::{
    Inference, ModelClient,
    backend::{Backend, external},
    body::ReadBody,
    call::{Computation, record_refused},
};
use crate::{
    audit::{DecisionOutcome, ModelCall, NodeAction, NodeDecision},
    proxies::{InferenceHandler, ProxyBody, ProxyPeer, ProxyResponse},
};

/// The age of a list that a sandbox gets.
const LIST_AGE: Duration = Duration::from_secs(10);

#[async_trait]
impl InferenceHandler for Arc<Inference> {
    async fn handle(&self, peer: &ProxyPeer, request: http::Request<Incoming>) -> ProxyResponse {
        let (sandbox, models) = peer.sandbox.model_access();
        let client = ModelClient {
            session_id: peer.session_id,
            sandbox,
            models: AllowedModels::new(models),
            request_id: peer.request_id.clone(),
            usage: peer.job_id.and_then(|id| self.usage.get(id)),
            _activity: Some(peer.live.activity()),
        };
        self.answer(client, request.map(ProxyBody::new)).await
    }
}

impl Inference {
    /// Answers a request, or says why not.
    pub(super) async fn answer(
        self: &Arc<Self>,
        client: ModelClient,
        request: http::Request<ProxyBody>,
    ) -> ProxyResponse {
        let request_id = client.request_id.clone();
        let caller = CallerId::User(*client.session_id.as_uuid());
        // Memory for bodies is shared fairly among sandboxes.
        let answered = fair::on_behalf_of(caller, Box::pin(self.try_to_answer(client, request)));
        let mut response = match answered.await {
            Ok(response) => response,
            Err(refusal) => {
                let status = refusal.status();
                metrics::counter!(
                    "cynode_model_refusals_total", "code" => refusal.code.as_str()
                )
                .increment(1);
                let mut response = described(refusal.body(&request_id));
                *response.status_mut() =
                    StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                response
            }
        };
        if let Ok(id) = HeaderValue::from_str(&request_id) {
            response.headers_mut().insert("x-request-id", id);
        }
        response
    }

    async fn try_to_answer(
        self: &Arc<Self>,
        client: ModelClient,
        request: http::Request<ProxyBody>,
    ) -> Result<ProxyResponse, Refusal> {
        let (head, body) = request.into_parts();
        let endpoint = Endpoint::find(head.method.as_str(), &head.uri.to_string())?;
        let Some(backend) = &self.backend else {
            let message = "this node has no model server";
            return Err(Refusal::new(RefusalCode::InferenceUnavailable, message));
        };
        let admitted = self.admit(client.session_id)?;
        if endpoint.runs_model() {
            self.pace(client.session_id)?;
        }
        let mut body = self.read_body(body).await?;
        let room = std::mem::take(&mut body.room);
        let judged = judge(&client, &endpoint, &body).await;
        let requested = judged.is_err().then(|| requested_model(&body.bytes));
        // Releases the permit: it bounds bodies in checks, not requests at the model server.
        drop(body);
        if !endpoint.runs_model() {
            let request = judged?;
            return describe(backend, &client, request).await.map(described);
        }
        let allowed = match judged {
            Ok(request) => {
                let model = request.model.clone().unwrap_or_default();
                let local = local(backend, request).await;
                local.map_err(|refusal| (refusal, model))
            }
            Err(refusal) => Err((refusal, requested.unwrap_or_default())),
        };
        let (request, model) = match allowed {
            Ok(allowed) => allowed,
            Err((refusal, model)) => {
                self.record_denial(&client, &endpoint, model, &refusal)
                    .await?;
                return Err(refusal);
            }
        };
        let computation = Computation {
            inference: Arc::clone(self),
            backend: Arc::clone(backend),
            client,
            request,
            model,
            _admitted: admitted,
            room,
        };
        computation.run().await
    }

    /// Records that a model was refused. Other refusals are mistakes, not decisions.
    async fn record_denial(
        &self,
        client: &ModelClient,
        endpoint: &Endpoint,
        model: String,
        refusal: &Refusal,
    ) -> Result<(), Refusal> {
        if refusal.code != RefusalCode::ModelNotAllowed {
            return Ok(());
        }
        let decision = NodeDecision {
            sandbox: client.sandbox,
            action: NodeAction::ModelRequest(ModelCall {
                call: Uuid::now_v7(),
                model,
                endpoint: endpoint.path(),
            }),
            outcome: DecisionOutcome::Denied {
                code: refusal.code.as_str().to_owned(),
            },
        };
        self.trail.record(decision).await.map_err(record_refused)
    }
}

async fn judge(
    client: &ModelClient,
    endpoint: &Endpoint,
    body: &ReadBody<'_>,
) -> Result<UpstreamRequest, Refusal> {
    let rules = Rules {
        models: &client.models,
        limits: TokenLimits::default(),
        upstream: Upstream::Local,
    };
    compute::run(body.bytes.len(), || rules.judge(endpoint, &body.bytes)).await
}

/// A computation that the server itself can do, and the model's name.
async fn local(
    backend: &Backend,
    request: UpstreamRequest,
) -> Result<(UpstreamRequest, String), Refusal> {
    let model = request.model.clone().unwrap_or_default();
    backend.require_local(&model).await?;
    if !request.endpoint.is_openai() {
        require_ollama(backend, &request.endpoint)?;
    }
    Ok((request, model))
}

fn require_ollama(backend: &Backend, endpoint: &Endpoint) -> Result<(), Refusal> {
    if backend.kind() == Some(ModelServerKind::Ollama) {
        return Ok(());
    }
    let message = format!(
        "the node's model server has OpenAI's API only, without {}",
        endpoint.path()
    );
    Err(Refusal::new(RefusalCode::NotFound, message))
}

/// Answers a question about the server or its models, with what the sandbox may know.
async fn describe(
    backend: &Backend,
    client: &ModelClient,
    request: UpstreamRequest,
) -> Result<Vec<u8>, Refusal> {
    let listed = backend.list(LIST_AGE).await?;
    if !request.endpoint.is_openai() {
        require_ollama(backend, &request.endpoint)?;
    }
    let get = async |path: &str| backend.get(path).await.map_err(|error| error.refusal());
    match &request.endpoint {
        Endpoint::Version => server_version(&get("/api/version").await?),
        Endpoint::Tags => Ok(visible(backend, client, &listed, &listed).to_json()),
        Endpoint::Show => {
            let model = request.model.unwrap_or_default();
            backend.require_local(&model).await?;
            let body = request.body.unwrap_or_default();
            let shown = backend.post(&request.endpoint.path(), body).await;
            let shown = ShownModel::read(&shown.map_err(|error| error.refusal())?)?;
            if shown.locality == Locality::External {
                return Err(external(&model));
            }
            Ok(shown.to_json())
        }
        endpoint => {
            let list = match backend.kind() {
                Some(ModelServerKind::Openai) => ModelList::clone(&listed),
                _ => ModelList::read_models(&get("/v1/models").await?)?,
            };
            let list = visible(backend, client, &list, &listed);
            if let Endpoint::Model(_) = endpoint {
                let model = request.model.unwrap_or_default();
                backend.require_local(&model).await?;
                return list.find(&model).map_or_else(
                    || {
                        let message = "the node's model server does not serve the model";
                        Err(Refusal::new(RefusalCode::InferenceUnavailable, message))
                    },
                    |model| Ok(model.to_json()),
                );
            }
            Ok(list.to_json())
        }
    }
}

/// What a sandbox sees of a list.
fn visible(
    backend: &Backend,
    client: &ModelClient,
    list: &ModelList,
    listed: &ModelList,
) -> ModelList {
    let mut visible = list.clone();
    visible.retain_allowed(&client.models);
    backend.remove_external(&mut visible, listed);
    visible
}

/// The model that a refused request names, for the record.
fn requested_model(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Named {
        model: String,
    }
    let named = serde_json::from_slice::<Named>(body);
    let name = named.map(|named| named.model).unwrap_or_default();
    let mut end = name.len().min(MAX_NAME_BYTES);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    let shown = name[..end].chars();
    shown
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

fn described(json: Vec<u8>) -> ProxyResponse {
    let mut response = ProxyResponse::new(ProxyBody::from(json));
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
