//! `/healthz`, `/readyz` and `/metrics`, which need no token.

use std::{pin::Pin, sync::Arc};

use axum::{Router, extract::State, response::IntoResponse, routing::get};
use http::StatusCode;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

/// Says why the role can't do its job, when it can't.
pub type Readiness = Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>> + Send + Sync>;

/// Installs the process's metrics recorder; a second call in one process (a test) gives the same.
pub fn metrics_recorder() -> PrometheusHandle {
    static RECORDER: std::sync::OnceLock<PrometheusHandle> = std::sync::OnceLock::new();
    RECORDER
        .get_or_init(|| {
            let builder = PrometheusBuilder::new()
                .set_buckets(&[0.000_5, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
                .expect("the list of buckets is not empty");
            let recorder = builder.build_recorder();
            let handle = recorder.handle();
            // Only fails when another recorder is installed, and then that one counts.
            drop(metrics::set_global_recorder(recorder));
            handle
        })
        .clone()
}

pub fn routes<S: Clone + Send + Sync + 'static>(readiness: Readiness) -> Router<S> {
    let handle = metrics_recorder();
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .with_state(readiness)
        .route("/metrics", get(async move || ([("content-type", "text/plain; version=0.0.4")], handle.render())))
        .with_state(())
}

async fn readyz(State(readiness): State<Readiness>) -> impl IntoResponse {
    match readiness().await {
        Ok(()) => (StatusCode::OK, "ready\n".to_owned()),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}
