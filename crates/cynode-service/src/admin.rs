//! `/healthz` and `/readyz`, which need no token, and `/metrics`, which needs one from other
//! machines.

use std::{io, net::IpAddr, path::Path, pin::Pin, sync::Arc};

use axum::{
    Router,
    extract::{Request, State},
    response::IntoResponse,
    routing::get,
};
use cynode_api::{ErrorCode, Problem};
use http::{Extensions, HeaderMap, StatusCode};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

use crate::{
    ApiError,
    auth::{self, Token, Tokens},
    files::read_or_create_token,
    listen::Peer,
};

/// Returns why the role is not ready, if it is not.
pub type Readiness =
    Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>> + Send + Sync>;

/// Authorizes a remote reader of the metrics by token; the address is for audit.
pub type MetricsReader = Arc<
    dyn Fn(String, Option<IpAddr>) -> Pin<Box<dyn Future<Output = Result<(), ApiError>> + Send>>
        + Send
        + Sync,
>;

/// Shorter tokens could be guessed.
const MIN_TOKEN_BYTES: usize = 16;

/// Reads the token in `metrics_token_file`, and generates it if the file does not exist.
pub fn metrics_token(file: Option<&Path>) -> io::Result<Option<Token>> {
    let Some(path) = file else { return Ok(None) };
    let token = read_or_create_token(path)?;
    if token.len() < MIN_TOKEN_BYTES {
        let message = format!(
            "{} holds a token of {} bytes, and needs at least {MIN_TOKEN_BYTES}: remove the file \
             to generate a new one",
            path.display(),
            token.len()
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    Ok(Some(Token::new(&token)))
}

/// Accepts the metrics token and the tokens of the role's API.
#[must_use]
pub fn by_tokens(own: Option<Token>, tokens: Tokens) -> MetricsReader {
    Arc::new(move |offered, _| {
        let admitted =
            own.as_ref().is_some_and(|own| own.admits(&offered)) | tokens.admits(&offered);
        Box::pin(std::future::ready(if admitted {
            Ok(())
        } else {
            Err(no_reader("the token is not valid here"))
        }))
    })
}

/// The refusal of an unauthorized reader of the metrics.
pub fn no_reader(detail: &str) -> ApiError {
    let remedy = "From other machines /metrics needs 'Authorization: Bearer' with the token in \
                  metrics_token_file, or a token of an administrator or the worker.";
    Problem::new(ErrorCode::Unauthorized, detail)
        .with_remedy(remedy)
        .into()
}

/// Whether a request originates on this machine. A local proxy that adds forwarding headers acts
/// for a remote client.
fn is_local(extensions: &Extensions, headers: &HeaderMap) -> bool {
    let passed_on = ["forwarded", "x-forwarded-for", "x-real-ip", "via"]
        .iter()
        .any(|name| headers.contains_key(*name));
    !passed_on
        && extensions
            .get::<Peer>()
            .is_some_and(|Peer(peer)| peer.ip().to_canonical().is_loopback())
}

/// Installs the process's metrics recorder; later calls in the same process (in tests) return the
/// same one.
pub fn metrics_recorder() -> PrometheusHandle {
    static RECORDER: std::sync::OnceLock<PrometheusHandle> = std::sync::OnceLock::new();
    RECORDER
        .get_or_init(|| {
            let builder = PrometheusBuilder::new()
                .set_buckets(&[
                    0.000_5, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512,
                    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0,
                ])
                .expect("the list of buckets is not empty");
            let recorder = builder.build_recorder();
            let handle = recorder.handle();
            // Fails only if a recorder is already installed, which then stays in use.
            drop(metrics::set_global_recorder(recorder));
            handle
        })
        .clone()
}

pub fn routes<S: Clone + Send + Sync + 'static>(
    readiness: Readiness,
    reader: MetricsReader,
) -> Router<S> {
    let handle = metrics_recorder();
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .with_state(readiness)
        .route("/metrics", get(metrics))
        .with_state((handle, reader))
}

async fn metrics(
    State((handle, reader)): State<(PrometheusHandle, MetricsReader)>,
    request: Request,
) -> Result<impl IntoResponse, ApiError> {
    if !is_local(request.extensions(), request.headers()) {
        let offered = auth::offered(request.headers()).map_err(|error| {
            if error.is(ErrorCode::Unauthorized) {
                no_reader(&error.detail)
            } else {
                error
            }
        })?;
        reader(
            offered.to_owned(),
            request
                .extensions()
                .get::<Peer>()
                .map(|Peer(peer)| peer.ip()),
        )
        .await?;
    }
    Ok((
        [("content-type", "text/plain; version=0.0.4")],
        handle.render(),
    ))
}

async fn readyz(State(readiness): State<Readiness>) -> impl IntoResponse {
    match readiness().await {
        Ok(()) => (StatusCode::OK, "ready\n".to_owned()),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tower::ServiceExt as _;

    use super::*;

    fn router() -> Router {
        let tokens = Tokens::new(vec![Token::new("role")]);
        routes(
            Arc::new(|| Box::pin(async { Ok(()) })),
            by_tokens(Some(Token::new("scraper")), tokens),
        )
    }

    async fn status(path: &str, peer: Option<&str>, headers: &[(&str, &str)]) -> u16 {
        let mut request = http::Request::get(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut request = request.body(Body::empty()).expect("a request");
        if let Some(peer) = peer {
            request
                .extensions_mut()
                .insert(Peer(peer.parse().expect("an address")));
        }
        router()
            .oneshot(request)
            .await
            .expect("an answer")
            .status()
            .as_u16()
    }

    #[tokio::test]
    async fn metrics_are_open_on_loopback_and_need_a_token_beyond_it() {
        for local in [
            "127.0.0.1:1",
            "127.8.8.8:1",
            "[::1]:1",
            "[::ffff:127.0.0.1]:1",
        ] {
            assert_eq!(status("/metrics", Some(local), &[]).await, 200, "{local}");
        }
        for remote in [
            Some("10.0.0.1:1"),
            Some("192.0.2.1:1"),
            Some("[fe80::1]:1"),
            Some("[::ffff:10.0.0.1]:1"),
            Some("0.0.0.0:1"),
            None,
        ] {
            assert_eq!(status("/metrics", remote, &[]).await, 401, "{remote:?}");
            for wrong in [
                "Bearer",
                "Bearer ",
                "Bearer scrape",
                "Bearer scraperr",
                "Basic scraper",
                "scraper",
            ] {
                assert_eq!(
                    status("/metrics", remote, &[("authorization", wrong)]).await,
                    401,
                    "{remote:?} {wrong}"
                );
            }
            for good in ["Bearer scraper", "bearer role"] {
                assert_eq!(
                    status("/metrics", remote, &[("authorization", good)]).await,
                    200,
                    "{remote:?} {good}"
                );
            }
            assert_eq!(
                status(
                    "/metrics",
                    remote,
                    &[
                        ("authorization", "Bearer role"),
                        ("authorization", "Bearer x")
                    ]
                )
                .await,
                400
            );
            // These reveal nothing but the role's health.
            assert_eq!(
                (
                    status("/healthz", remote, &[]).await,
                    status("/readyz", remote, &[]).await
                ),
                (200, 200)
            );
        }
        // A local proxy forwards for remote clients.
        for name in ["Forwarded", "X-Forwarded-For", "X-Real-IP", "Via"] {
            assert_eq!(
                status("/metrics", Some("127.0.0.1:1"), &[(name, "192.0.2.1")]).await,
                401,
                "{name}"
            );
            assert_eq!(
                status(
                    "/metrics",
                    Some("127.0.0.1:1"),
                    &[(name, "192.0.2.1"), ("authorization", "Bearer scraper")]
                )
                .await,
                200,
                "{name}"
            );
        }
    }

    #[tokio::test]
    async fn the_roles_token_admits_alone_if_metrics_has_none() {
        let reader = by_tokens(None, Tokens::new(vec![Token::new("role")]));
        assert!(reader("role".to_owned(), None).await.is_ok());
        for wrong in ["", "scraper"] {
            let refused = reader(wrong.to_owned(), None).await.expect_err(wrong);
            assert!(refused.remedy.contains("metrics_token_file"), "{refused:?}");
        }
        assert!(
            by_tokens(None, Tokens::default())(String::new(), None)
                .await
                .is_err()
        );
    }

    #[test]
    fn the_token_is_made_once_and_kept() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("metrics.token");
        assert!(metrics_token(None).expect("none").is_none());
        let made = metrics_token(Some(&path)).expect("made").expect("a token");
        let text = fs_err::read_to_string(&path).expect("there");
        assert!(made.admits(text.trim()));
        assert_eq!(
            fs_err::metadata(&path).expect("there").permissions().mode() & 0o777,
            0o600
        );
        assert!(
            metrics_token(Some(&path))
                .expect("read")
                .expect("a token")
                .admits(text.trim())
        );
        assert!(metrics_token(Some(&directory.path().join("missing/metrics.token"))).is_err());
        fs_err::write(&path, "x".repeat(15)).expect("written");
        assert!(
            metrics_token(Some(&path))
                .expect_err("too short")
                .to_string()
                .contains("at least 16")
        );
        fs_err::write(&path, "x".repeat(16)).expect("written");
        assert!(metrics_token(Some(&path)).expect("long enough").is_some());
    }
}
