//! Credentials: a value comes in, is sealed to its role at once, and is forgotten.

use axum::{Json, extract::State};
use cynode_api::{
    API_VERSION, Base64Bytes, Credential, CredentialCreate, CredentialId, CredentialPlaintext,
    CredentialRotate, EgressRole, ErrorCode, Page, Problem, ProjectId, SealedCredential,
    credential_limits, is_repository_name,
};
use cynode_service::{ApiError, QueryParams, edge, seal};
use http::StatusCode;
use reqwest::Url;
use serde::{Deserialize, de::DeserializeOwned};
use utoipa::{IntoParams, ToSchema};

use super::{Id, check_no_nul, check_version, page_by_name, page_request};
use crate::{
    Orchestrator,
    caller::Person,
    db::{NewCredential, Order, SealedValue},
};

/// What forges take as the user name beside a token.
const DEFAULT_USERNAME: &str = "x-access-token";
/// Replaces a secret in an error about its body.
const OMITTED: &str = "(the secret)";

/// A JSON body with a member `secret`, which no error repeats.
#[derive(Debug)]
pub(super) struct SecretBody<T>(T);

impl<S: Send + Sync, T: DeserializeOwned> axum::extract::FromRequest<S> for SecretBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: axum::extract::Request, state: &S) -> Result<Self, ApiError> {
        let edge::JsonBytes { bytes, .. } = &edge::JsonBytes::from_request(request, state).await?;
        let read = || {
            let value = edge::parse(bytes)?;
            check_no_nul(bytes, None)?;
            Ok(Self(value))
        };
        read().map_err(|error| without_secret(error, bytes))
    }
}

/// An error about a body without the value of its member `secret`, which a parser may quote.
fn without_secret(error: ApiError, bytes: &[u8]) -> ApiError {
    let body: serde_json::Value = match serde_json::from_slice(bytes) {
        Ok(body) => body,
        // A parser that knows no fields quotes no values.
        Err(plain) if error.detail.contains("invalid ") => {
            return ApiError::invalid(plain.to_string());
        }
        Err(_) => return error,
    };
    let secret = match &body["secret"] {
        serde_json::Value::Null => return error,
        serde_json::Value::String(secret) => secret.clone(),
        other => other.to_string(),
    };
    if secret.is_empty() || !error.detail.contains(&secret) {
        return error;
    }
    let mut error = error;
    error.detail = error.detail.replace(&secret, OMITTED);
    error
}

/// Where a credential is valid.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    host: String,
    port: u16,
    /// Without a slash at its end, except if it is all.
    path_prefix: String,
}

fn place(url: &str) -> Result<Place, ApiError> {
    let refused = |why: &str| {
        // Not repeated: it may contain the credential.
        ApiError::invalid(format!(
            "url: {why}; expected https://host[:port][/path/prefix]"
        ))
    };
    if url.len() > credential_limits::MAX_URL_BYTES {
        return Err(refused("it is too long"));
    }
    let parsed = Url::parse(url).map_err(|_| refused("it is not a URL"))?;
    if parsed.scheme() != "https" {
        return Err(refused("its scheme must be https"));
    }
    if !parsed.username().is_empty() || parsed.password().is_some() || url.contains('@') {
        return Err(refused("it must not contain credentials"));
    }
    if parsed.query().is_some() || parsed.fragment().is_some() {
        return Err(refused("it must have neither query nor fragment"));
    }
    let host = parsed.host_str().ok_or_else(|| refused("it has no host"))?;
    let path = parsed.path().trim_end_matches('/');
    Ok(Place {
        host: host.to_owned(),
        port: parsed.port_or_known_default().unwrap_or(443),
        path_prefix: if path.is_empty() { "/" } else { path }.to_owned(),
    })
}

fn check_secret(secret: &str) -> Result<(), ApiError> {
    use credential_limits::{MAX_SECRET_BYTES, MIN_SECRET_BYTES};
    if secret.trim_ascii().len() < MIN_SECRET_BYTES {
        return Err(ApiError::invalid(format!(
            "secret: must have at least {MIN_SECRET_BYTES} bytes: shorter ones can't be told from \
             ordinary words in what enters sandboxes"
        )));
    }
    if secret.len() > MAX_SECRET_BYTES {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!("secret: exceeds {MAX_SECRET_BYTES} bytes"),
        ));
    }
    if secret.chars().any(char::is_control) {
        return Err(ApiError::invalid(
            "secret: must be one line without control characters",
        ));
    }
    Ok(())
}

fn check_username(username: &str) -> Result<(), ApiError> {
    let is_plain = |c: char| !c.is_control() && c != ':';
    if (1..=credential_limits::MAX_USERNAME_BYTES).contains(&username.len())
        && username.chars().all(is_plain)
    {
        Ok(())
    } else {
        Err(ApiError::invalid(format!(
            "username: must be 1 to {} bytes without ':' and control characters",
            credential_limits::MAX_USERNAME_BYTES
        )))
    }
}

/// A value that is about to be sealed.
struct SecretValue<'a> {
    id: CredentialId,
    project_id: ProjectId,
    role: EgressRole,
    url: &'a str,
    username: &'a str,
    secret: String,
}

impl Orchestrator {
    /// Seals a value to the public key that the role itself gives, and keeps only hashes of it.
    async fn seal(&self, value: SecretValue<'_>) -> Result<SealedValue, ApiError> {
        let SecretValue {
            id,
            project_id,
            role,
            url,
            username,
            secret,
        } = value;
        check_secret(&secret)?;
        check_username(username)?;
        let Place {
            host,
            port,
            path_prefix,
        } = place(url)?;
        let held = self.held.hashes(&secret);
        let held = held.ok_or_else(|| ApiError::invalid("secret: is too short"))?;
        let info = self.egress.info().await?;
        if info.role != role.as_str() {
            return Err(ApiError::new(
                ErrorCode::Unavailable,
                format!("the egress role that answers is '{}'", info.role),
            ));
        }
        let plaintext = CredentialPlaintext {
            version: API_VERSION,
            project_id,
            scheme: "https".to_owned(),
            host,
            port,
            path_prefix,
            username: username.to_owned(),
            secret,
        };
        let plaintext = serde_json::to_vec(&plaintext).unwrap_or_default();
        let sealed = seal::seal(
            role.as_str(),
            &id.to_string(),
            &info.public_key.0,
            &plaintext,
        )
        .map_err(|error| {
            tracing::error!(%error, "A credential could not be sealed to the role's public key.");
            ApiError::new(
                ErrorCode::Unavailable,
                "the public key of the role is not valid",
            )
        })?;
        Ok(SealedValue {
            sealed: SealedCredential {
                id,
                key_id: seal::key_id(&info.public_key.0),
                encapsulated: Base64Bytes(sealed.encapsulated),
                ciphertext: Base64Bytes(sealed.ciphertext),
            },
            username: username.to_owned(),
            held,
        })
    }

    /// Puts a change of credentials in force: on this orchestrator now, on others within a second,
    /// in the role within three.
    pub(super) async fn egress_changed(&self) {
        if let Err(error) = self.held.refresh(&self.db).await {
            tracing::warn!(%error, "The hashes of credentials are reloaded later.");
        }
        self.egress.changed.notify_one();
    }
}

/// Store a credential for an egress role. The value is sealed to the role's public key and never
/// comes back. From then on it is refused in everything that enters a sandbox.
#[utoipa::path(post, path = "/v1/credentials", tag = "git", request_body = CredentialCreate,
    responses((status = 201, body = Credential), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn create(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    SecretBody(body): SecretBody<CredentialCreate>,
) -> Result<(StatusCode, Json<Credential>), ApiError> {
    check_version(body.version)?;
    check_called(&body.name)?;
    let value = SecretValue {
        id: CredentialId::generate(),
        project_id: body.project_id,
        role: body.role,
        url: &body.url,
        username: body.username.as_deref().unwrap_or(DEFAULT_USERNAME),
        secret: body.secret,
    };
    let value = orchestrator.seal(value).await?;
    let new = NewCredential {
        project_id: body.project_id,
        name: &body.name,
        role: body.role,
        url: &body.url,
        value: &value,
        created_by: &caller.user_name,
    };
    let credential = orchestrator.db.insert_credential(&new).await?;
    orchestrator.egress_changed().await;
    Ok((StatusCode::CREATED, Json(credential)))
}

/// Checks the name of a credential or a repository. One that is an id would be ambiguous.
pub(super) fn check_called(name: &str) -> Result<(), ApiError> {
    if is_repository_name(name) && name.parse::<uuid::Uuid>().is_err() {
        return Ok(());
    }
    Err(ApiError::invalid(format!(
        "name: must be 1 to {} of a-z, 0-9, '.', '_' and '-', begin with a letter or digit, and be \
         no id",
        credential_limits::MAX_NAME_BYTES
    )))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ProjectQuery {
    pub(super) project_id: Option<ProjectId>,
    /// 1 to 1000; 100 by default.
    limit: Option<u32>,
    cursor: Option<String>,
    /// `oldest` first by default.
    #[param(inline)]
    order: Option<Order>,
    /// Any part of the id's text: 1 to 36 of 0-9, a-f and '-'.
    id_part: Option<String>,
    /// The whole name.
    name: Option<String>,
}

impl ProjectQuery {
    pub(super) fn page(self) -> Result<crate::db::PageRequest, ApiError> {
        let page = page_request(self.limit, self.cursor.as_deref(), self.order, self.id_part)?;
        page_by_name(page, self.name)
    }
}

/// List credentials, without their values.
#[utoipa::path(get, path = "/v1/credentials", tag = "git", params(ProjectQuery),
    responses((status = 200, body = Page<Credential>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    QueryParams(query): QueryParams<ProjectQuery>,
) -> Result<Json<Page<Credential>>, ApiError> {
    let project = query.project_id;
    let page = query.page()?;
    Ok(Json(
        orchestrator
            .db
            .list_credentials(&caller.scope, project, &page)
            .await?,
    ))
}

/// Show a credential, without its value.
#[utoipa::path(get, path = "/v1/credentials/{id}", tag = "git", params(("id" = CredentialId, Path)),
    responses((status = 200, body = Credential), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    Id(id): Id<CredentialId>,
) -> Result<Json<Credential>, ApiError> {
    Ok(Json(orchestrator.db.credential(id).await?.credential))
}

/// Replace the value of a credential. It keeps its id, name and place.
#[utoipa::path(post, path = "/v1/credentials/{id}/rotate", tag = "git", params(("id" = CredentialId, Path)), request_body = CredentialRotate,
    responses((status = 200, body = Credential), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn rotate(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    Id(id): Id<CredentialId>,
    SecretBody(body): SecretBody<CredentialRotate>,
) -> Result<Json<Credential>, ApiError> {
    check_version(body.version)?;
    let row = orchestrator.db.credential(id).await?;
    let value = SecretValue {
        id,
        project_id: row.credential.project_id,
        role: row.credential.role,
        url: &row.credential.url,
        username: body.username.as_deref().unwrap_or(&row.username),
        secret: body.secret,
    };
    let value = orchestrator.seal(value).await?;
    let credential = orchestrator.db.rotate_credential(id, &value).await?;
    orchestrator.egress_changed().await;
    Ok(Json(credential))
}

/// A body that says nothing.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Versioned {
    pub(super) version: Option<u32>,
}

/// Disable a credential for good. No role uses it any more; its value stays refused in what enters
/// sandboxes.
#[utoipa::path(post, path = "/v1/credentials/{id}/disable", tag = "git", params(("id" = CredentialId, Path)), request_body = Versioned,
    responses((status = 200, body = Credential), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn disable(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    Id(id): Id<CredentialId>,
    super::Body(body): super::Body<Versioned>,
) -> Result<Json<Credential>, ApiError> {
    check_version(body.version)?;
    let credential = orchestrator.db.disable_credential(id).await?;
    orchestrator.egress_changed().await;
    Ok(Json(credential))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_is_valid_at_one_https_place() {
        let found = |url| place(url).ok();
        assert_eq!(
            found("https://Forge.example:8443/team/"),
            Some(Place {
                host: "forge.example".to_owned(),
                port: 8_443,
                path_prefix: "/team".to_owned(),
            })
        );
        assert_eq!(
            found("https://forge.example").map(|place| (place.port, place.path_prefix)),
            Some((443, "/".to_owned()))
        );
        for url in [
            "http://forge.example",
            "https://",
            "https://a:b@forge.example",
            "https://forge.example/a@b",
            "https://forge.example?x",
            "https://forge.example#x",
            "forge.example",
        ] {
            assert_eq!(found(url), None, "{url}");
        }
        let error = place("https://a:hidden@forge.example").expect_err("refused");
        assert!(!error.detail.contains("hidden"), "{}", error.detail);
    }

    #[test]
    fn no_error_repeats_a_secret() {
        for body in [
            r#"{"secret":"hidden-hidden","version":"hidden-hidden"}"#,
            r#"{"secret":123456789012345}"#,
            r#"{"secret":123456789012345,broken"#,
        ] {
            let error = edge::parse::<CredentialRotate>(body.as_bytes())
                .map(drop)
                .expect_err("malformed");
            let error = without_secret(error, body.as_bytes());
            assert!(
                !error.detail.contains("hidden") && !error.detail.contains("123456789012345"),
                "{}",
                error.detail
            );
        }
        assert!(check_secret("short").is_err());
        assert!(check_secret("          short         ").is_err());
        assert!(check_secret("long enough\nbut two").is_err());
        assert!(check_secret("long enough to be told").is_ok());
    }
}
