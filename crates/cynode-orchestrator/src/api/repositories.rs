//! Repositories: registered by administrators, with the rules for what is promoted to them.

use std::{collections::BTreeSet, net::IpAddr};

use axum::{Json, extract::State};
use cynode_api::{
    AllowedAddress, ErrorCode, Page, Problem, Repository, RepositoryCheck, RepositoryCreate,
    RepositoryId, RepositoryRules, is_git_reference, is_repository_name, repository_limits,
};
use cynode_service::{ApiError, QueryParams, checks};
use globset::GlobBuilder;
use http::StatusCode;
use reqwest::Url;
use time::OffsetDateTime;

use super::{
    Body, Id, check_version,
    credentials::{ProjectQuery, check_called},
};
use crate::{Orchestrator, caller::Person};

/// The longest time that a check may take.
const MAX_CHECK_SECONDS: u32 = 3_600;
const MAX_IMAGE_BYTES: usize = 1_024;

/// Register a repository of a project.
#[utoipa::path(post, path = "/v1/repositories", tag = "git", request_body = RepositoryCreate,
    responses((status = 201, body = Repository), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn create(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Body(body): Body<RepositoryCreate>,
) -> Result<(StatusCode, Json<Repository>), ApiError> {
    check_version(body.version)?;
    check(&body)?;
    if let Some(id) = body.credential_id {
        let credential = orchestrator.db.credential(id).await?.credential;
        if credential.project_id != body.project_id || credential.disabled_at.is_some() {
            return Err(ApiError::invalid(
                "credential_id: must be a credential of the same project that is not disabled",
            ));
        }
        if !is_below(&body.url, &credential.url) {
            return Err(ApiError::invalid(format!(
                "credential_id: the credential is valid at {} only, and url is not there",
                credential.url
            )));
        }
    }
    let repository = Repository {
        id: RepositoryId::generate(),
        project_id: body.project_id,
        name: body.name,
        provider: body.provider,
        url: body.url,
        api_url: body.api_url,
        credential_id: body.credential_id,
        default_branch: body.default_branch,
        ca: body.ca,
        addresses: body.addresses,
        rules: body.rules,
        checks: body.checks,
        revision: 0,
        created_by: caller.user_name.clone(),
        created_at: OffsetDateTime::now_utc(),
    };
    let repository = orchestrator.db.insert_repository(&repository).await?;
    orchestrator.egress_changed().await;
    Ok((StatusCode::CREATED, Json(repository)))
}

/// List the repositories of the caller's projects, and of projects that the caller has tasks in.
#[utoipa::path(get, path = "/v1/repositories", tag = "git", params(ProjectQuery),
    responses((status = 200, body = Page<Repository>), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn list(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    QueryParams(query): QueryParams<ProjectQuery>,
) -> Result<Json<Page<Repository>>, ApiError> {
    let project = query.project_id;
    let page = query.page()?;
    Ok(Json(
        orchestrator
            .db
            .list_repositories(&caller.scope, project, &page)
            .await?,
    ))
}

/// Show a repository.
#[utoipa::path(get, path = "/v1/repositories/{id}", tag = "git", params(("id" = RepositoryId, Path)),
    responses((status = 200, body = Repository), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn show(
    State(orchestrator): State<Orchestrator>,
    Person(caller): Person,
    Id(id): Id<RepositoryId>,
) -> Result<Json<Repository>, ApiError> {
    Ok(Json(orchestrator.db.repository(&caller.scope, id).await?))
}

/// Remove a repository that no promotion is under way to.
#[utoipa::path(delete, path = "/v1/repositories/{id}", tag = "git", params(("id" = RepositoryId, Path)),
    responses((status = 204), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub(super) async fn remove(
    State(orchestrator): State<Orchestrator>,
    Person(_): Person,
    Id(id): Id<RepositoryId>,
) -> Result<StatusCode, ApiError> {
    orchestrator.db.remove_repository(id).await?;
    orchestrator.egress_changed().await;
    Ok(StatusCode::NO_CONTENT)
}

fn check(body: &RepositoryCreate) -> Result<(), ApiError> {
    check_called(&body.name)?;
    check_url("url", &body.url)?;
    if let Some(url) = &body.api_url {
        check_url("api_url", url)?;
    }
    if !body.default_branch.as_deref().is_none_or(is_git_reference) {
        return Err(ApiError::invalid(
            "default_branch: must be the name of a branch",
        ));
    }
    body.ca.as_deref().map_or(Ok(()), check_ca)?;
    check_addresses(&body.addresses)?;
    check_rules(&body.rules)?;
    check_checks(&body.checks)
}

/// The role checks the addresses of the host when it dials it.
fn check_url(field: &str, url: &str) -> Result<(), ApiError> {
    let refused = |why: &str| {
        // Not repeated: it may contain a credential.
        ApiError::invalid(format!(
            "{field}: {why}; expected https://host[:port]/path without credentials"
        ))
    };
    if url.len() > repository_limits::MAX_URL_BYTES {
        return Err(refused("it is too long"));
    }
    let parsed = Url::parse(url).map_err(|_| refused("it is not a URL"))?;
    if parsed.scheme() != "https" {
        return Err(refused("its scheme must be https"));
    }
    if !parsed.username().is_empty() || parsed.password().is_some() || url.contains('@') {
        return Err(refused("it must not contain credentials"));
    }
    if parsed.query().is_some() || parsed.fragment().is_some() || parsed.host_str().is_none() {
        return Err(refused(
            "it must have a host, and neither query nor fragment",
        ));
    }
    if field == "url" && parsed.path().trim_matches('/').is_empty() {
        return Err(refused("it names no repository"));
    }
    Ok(())
}

/// Whether a URL is at another's host and port, and at or below its path.
fn is_below(url: &str, place: &str) -> bool {
    let (Ok(url), Ok(place)) = (Url::parse(url), Url::parse(place)) else {
        return false;
    };
    let prefix = place.path().trim_end_matches('/');
    let is_within = url
        .path()
        .strip_prefix(prefix)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    url.host_str() == place.host_str()
        && url.port_or_known_default() == place.port_or_known_default()
        && is_within
}

fn check_ca(ca: &str) -> Result<(), ApiError> {
    if ca.len() > repository_limits::MAX_CA_BYTES {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!("ca: exceeds {} bytes", repository_limits::MAX_CA_BYTES),
        ));
    }
    let certificates = reqwest::Certificate::from_pem_bundle(ca.as_bytes());
    if ca.contains("PRIVATE KEY") || !certificates.is_ok_and(|found| !found.is_empty()) {
        return Err(ApiError::invalid(
            "ca: must be PEM certificates, and nothing else",
        ));
    }
    Ok(())
}

fn check_addresses(addresses: &[AllowedAddress]) -> Result<(), ApiError> {
    if addresses.len() > repository_limits::MAX_ADDRESSES {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!("addresses: more than {}", repository_limits::MAX_ADDRESSES),
        ));
    }
    for address in addresses {
        if address.port == 0 || !is_range(&address.cidr) {
            return Err(ApiError::invalid(
                "addresses: each must be a range such as 10.1.0.0/16 or an address, with a port",
            ));
        }
    }
    Ok(())
}

fn is_range(cidr: &str) -> bool {
    let (address, prefix) = match cidr.split_once('/') {
        Some((address, prefix)) => (address, Some(prefix)),
        None => (cidr, None),
    };
    let longest = match address.parse() {
        Ok(IpAddr::V4(_)) => 32,
        Ok(IpAddr::V6(_)) => 128,
        Err(_) => return false,
    };
    prefix.is_none_or(|prefix| {
        prefix.bytes().all(|byte| byte.is_ascii_digit())
            && prefix.parse::<u8>().is_ok_and(|prefix| prefix <= longest)
    })
}

fn check_rules(rules: &RepositoryRules) -> Result<(), ApiError> {
    let RepositoryRules {
        allow_paths,
        deny_paths,
        allow_sensitive,
        allow_flagged,
        protected_branches,
        max_files,
        max_file_bytes,
        max_change_bytes,
        ..
    } = rules;
    for (field, globs) in [
        ("rules.allow_paths", allow_paths),
        ("rules.deny_paths", deny_paths),
        ("rules.allow_sensitive", allow_sensitive),
        ("rules.allow_flagged", allow_flagged),
        ("rules.protected_branches", protected_branches),
    ] {
        if globs.len() > repository_limits::MAX_GLOBS {
            return Err(ApiError::new(
                ErrorCode::TooLarge,
                format!("{field}: more than {}", repository_limits::MAX_GLOBS),
            ));
        }
        if let Some(glob) = globs.iter().find(|glob| !is_glob(glob)) {
            return Err(ApiError::invalid(format!(
                "{field}: '{}' is not a glob",
                glob.chars().take(100).collect::<String>()
            )));
        }
    }
    let is_zero = *max_files == Some(0) || [max_file_bytes, max_change_bytes].contains(&&Some(0));
    if is_zero {
        return Err(ApiError::invalid("rules: a limit must be at least 1"));
    }
    Ok(())
}

fn is_glob(glob: &str) -> bool {
    (1..=repository_limits::MAX_GLOB_BYTES).contains(&glob.len())
        && !glob.chars().any(char::is_control)
        && GlobBuilder::new(glob)
            .literal_separator(true)
            .build()
            .is_ok()
}

fn check_checks(list: &[RepositoryCheck]) -> Result<(), ApiError> {
    if list.len() > repository_limits::MAX_CHECKS {
        return Err(ApiError::new(
            ErrorCode::TooLarge,
            format!("checks: more than {}", repository_limits::MAX_CHECKS),
        ));
    }
    let mut names = BTreeSet::new();
    for check in list {
        if !is_repository_name(&check.name) || !names.insert(&check.name) {
            return Err(ApiError::invalid(format!(
                "checks: each needs a name of its own, of 1 to {} of a-z, 0-9, '.', '_' and '-'",
                repository_limits::MAX_NAME_BYTES
            )));
        }
        checks::check_argv("checks.argv", &check.argv)?;
        if check
            .image_ref
            .as_ref()
            .is_some_and(|image| image.is_empty() || image.len() > MAX_IMAGE_BYTES)
        {
            return Err(ApiError::invalid(format!(
                "checks.image_ref: must have 1 to {MAX_IMAGE_BYTES} bytes"
            )));
        }
        if !check
            .timeout_seconds
            .is_none_or(|seconds| (1..=MAX_CHECK_SECONDS).contains(&seconds))
        {
            return Err(ApiError::invalid(format!(
                "checks.timeout_seconds: must lie between 1 and {MAX_CHECK_SECONDS}"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_serves_what_is_at_or_below_its_place() {
        for (url, place, expected) in [
            (
                "https://f.example/team/site",
                "https://f.example/team",
                true,
            ),
            ("https://f.example/team", "https://f.example/team/", true),
            ("https://f.example:443/a", "https://f.example", true),
            (
                "https://f.example/teams/site",
                "https://f.example/team",
                false,
            ),
            (
                "https://g.example/team/site",
                "https://f.example/team",
                false,
            ),
            (
                "https://f.example:444/team",
                "https://f.example/team",
                false,
            ),
        ] {
            assert_eq!(is_below(url, place), expected, "{url} {place}");
        }
    }

    #[test]
    fn urls_addresses_and_globs_are_checked() {
        assert!(check_url("url", "https://f.example/a.git").is_ok());
        for url in [
            "https://f.example",
            "http://f.example/a",
            "ssh://f.example/a",
            "https://a:hidden@f.example/a",
            "https://f.example/a?x",
        ] {
            let error = check_url("url", url).expect_err(url);
            assert!(!error.detail.contains("hidden"), "{}", error.detail);
        }
        for range in ["10.1.0.0/16", "fd00::/8", "127.0.0.1", "::1/128"] {
            assert!(is_range(range), "{range}");
        }
        for range in [
            "",
            "10.1.0.0/33",
            "x",
            "10.1.0.0/",
            "10.1.0.0/+8",
            "fd00::/129",
        ] {
            assert!(!is_range(range), "{range}");
        }
        assert!(is_glob("src/**/*.rs") && !is_glob("") && !is_glob("[") && !is_glob("a\nb"));
    }
}
