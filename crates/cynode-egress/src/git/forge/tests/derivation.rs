//! Where an API is, and which credential it may see.

use cynode_api::{Repository, RepositoryId, RepositoryRules};

use super::{super::ForgeUrlError, *};

fn repository(provider: ForgeKind, url: &str, api_url: Option<&str>) -> Repository {
    Repository {
        id: RepositoryId::generate(),
        project_id: ProjectId::generate(),
        name: "app".to_owned(),
        provider,
        url: url.to_owned(),
        api_url: api_url.map(str::to_owned),
        credential_id: None,
        default_branch: None,
        ca: None,
        addresses: Vec::new(),
        rules: RepositoryRules::default(),
        checks: Vec::new(),
        revision: 1,
        created_by: "admin".to_owned(),
        created_at: time::OffsetDateTime::UNIX_EPOCH,
    }
}

fn derive(
    provider: ForgeKind,
    url: &str,
    api_url: Option<&str>,
) -> Result<ForgeApi, ForgeUrlError> {
    ForgeApi::derive(&repository(provider, url, api_url))
}

#[test]
fn the_api_is_derived_from_the_url() {
    use ForgeKind::{Gitea, Github, Gitlab};
    for (kind, url, api_url, base, project) in [
        (
            Github,
            "https://github.com/org/app.git",
            None,
            "https://api.github.com",
            "org/app",
        ),
        (
            Github,
            "https://ghe.example/org/app",
            None,
            "https://ghe.example/api/v3",
            "org/app",
        ),
        (
            Gitlab,
            "https://gitlab.com/a/b/c.git",
            None,
            "https://gitlab.com/api/v4",
            "a/b/c",
        ),
        (
            Gitea,
            "https://git.example:8443/o/r/",
            None,
            "https://git.example:8443/api/v1",
            "o/r",
        ),
        (
            Gitlab,
            "https://example.org/gitlab/a/b",
            Some("https://example.org/gitlab/api/v4/"),
            "https://example.org/gitlab/api/v4",
            "a/b",
        ),
    ] {
        let api = derive(kind, url, api_url).expect(url);
        assert_eq!((api.base.as_str(), api.project.as_str()), (base, project));
    }
    let api = derive(Gitlab, "https://gitlab.com/a/b/c.git", None).expect("an API");
    assert_eq!(api.encoded_project(), "a%2Fb%2Fc");
}

#[test]
fn an_api_elsewhere_and_odd_urls_are_refused() {
    use ForgeKind::{Git, Gitea, Github, Gitlab};
    for (kind, url, api_url, expected) in [
        (
            Git,
            "https://git.example/o/r",
            None,
            ForgeUrlError::Unsupported,
        ),
        (Github, "http://github.com/o/r", None, ForgeUrlError::Url),
        (
            Github,
            "https://me:x@github.com/o/r",
            None,
            ForgeUrlError::Url,
        ),
        (
            Github,
            "https://github.com/o/r?x=1",
            None,
            ForgeUrlError::Url,
        ),
        (Github, "https://github.com/o", None, ForgeUrlError::Path),
        (
            Github,
            "https://github.com/o/r/x",
            None,
            ForgeUrlError::Path,
        ),
        (
            Gitea,
            "https://git.example/o/%2e%2e",
            None,
            ForgeUrlError::Path,
        ),
        (
            Gitlab,
            "https://git.example/o/a%2Fb",
            None,
            ForgeUrlError::Path,
        ),
        (
            Github,
            "https://github.com/o/r",
            Some("https://evil.example/"),
            ForgeUrlError::ForeignApi,
        ),
        (
            Gitea,
            "https://git.example/o/r",
            Some("https://git.example:8443/api/v1"),
            ForgeUrlError::ForeignApi,
        ),
        (
            Gitea,
            "https://git.example/o/r",
            Some("http://git.example/api/v1"),
            ForgeUrlError::Url,
        ),
        (
            Github,
            "https://ghe.example/o/r",
            Some("https://api.github.com"),
            ForgeUrlError::ForeignApi,
        ),
    ] {
        assert_eq!(
            derive(kind, url, api_url).err(),
            Some(expected),
            "{url} {api_url:?}"
        );
    }
}

#[test]
fn a_credential_is_presented_only_where_it_is_for() {
    let api = derive(ForgeKind::Github, "https://github.com/org/app.git", None).expect("an API");
    let credential = |host: &str, port, path_prefix: &str| CredentialPlaintext {
        version: 1,
        project_id: ProjectId::generate(),
        scheme: "https".to_owned(),
        host: host.to_owned(),
        port,
        path_prefix: path_prefix.to_owned(),
        username: String::new(),
        secret: SECRET.to_owned(),
    };
    for prefix in ["/", "/org", "/org/", "/org/app", "/org/app.git"] {
        assert!(
            api.accepts(&credential("github.com", 443, prefix)),
            "{prefix}"
        );
    }
    for (host, port, prefix) in [
        ("api.github.com", 443, "/"),
        ("git.example", 443, "/"),
        ("github.com", 8443, "/"),
        ("github.com", 443, "/or"),
        ("github.com", 443, "/org/app2"),
        ("github.com", 443, "/other"),
    ] {
        assert!(
            !api.accepts(&credential(host, port, prefix)),
            "{host}{prefix}"
        );
    }
    let refused = connect(api, &[LOCAL], None, &credential("git.example", 443, "/"));
    assert!(matches!(refused.err(), Some(ForgeError::ForeignCredential)));
}

#[test]
fn people_are_led_to_the_forge_only() {
    let api = derive(ForgeKind::Gitea, "https://git.example/o/r.git", None).expect("an API");
    let shown = |url: &str| api.pull(7, Some(url)).url;
    let good = "https://git.example/o/r/pulls/7";
    assert_eq!(shown(good), good);
    for url in [
        "https://evil.example/o/r/pulls/7",
        "http://git.example/o/r/pulls/7",
        "https://git.example:8443/o/r/pulls/7",
        "https://me@git.example/o/r/pulls/7",
        "javascript:alert(1)",
        "",
    ] {
        assert_eq!(shown(url), good, "{url}");
    }
}
