//! Where a forge's API is, and how it names a repository.

use cynode_api::{CredentialPlaintext, ForgeKind, Repository};
use reqwest::Url;

use super::PullRequest;

/// A URL that is shown to people.
const MAX_SHOWN_URL_BYTES: usize = 2_048;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ForgeUrlError {
    #[error("the repository has no pull requests: its provider is 'git'")]
    Unsupported,
    #[error("the URL is not an https URL without credentials, query and fragment")]
    Url,
    #[error("the URL's path does not name a repository of this provider")]
    Path,
    #[error("api_url is on another host than the repository")]
    ForeignApi,
}

/// The API of a repository's forge.
#[derive(Clone, Debug)]
pub(crate) struct ForgeApi {
    pub(super) kind: ForgeKind,
    /// Without a slash at its end.
    pub(super) base: String,
    pub(super) host: String,
    pub(super) port: u16,
    /// The repository for people, without `.git`.
    web: Url,
    /// `owner/name`, or a longer path at GitLab.
    pub(super) project: String,
}

impl ForgeApi {
    /// Derives the API from the repository's URL, or takes the registered one.
    pub(crate) fn derive(repository: &Repository) -> Result<Self, ForgeUrlError> {
        let web = parse(&repository.url)?;
        let base = match &repository.api_url {
            Some(url) => parse(url)?,
            None => default_api(repository.provider, &web)?,
        };
        let is_public_github = repository.provider == ForgeKind::Github
            && place(&web) == Some(("github.com", 443))
            && place(&base) == Some(("api.github.com", 443));
        if place(&base) != place(&web) && !is_public_github {
            return Err(ForgeUrlError::ForeignApi);
        }
        Self::new(repository.provider, web, &base)
    }

    /// Does not check hosts: tests speak HTTP with servers of their own.
    pub(super) fn new(kind: ForgeKind, mut web: Url, base: &Url) -> Result<Self, ForgeUrlError> {
        let (host, port) = place(base).ok_or(ForgeUrlError::Url)?;
        let (host, port) = (host.to_owned(), port);
        let suffix = match kind {
            ForgeKind::Github => "/api/v3",
            ForgeKind::Gitlab => "/api/v4",
            ForgeKind::Gitea => "/api/v1",
            ForgeKind::Git => return Err(ForgeUrlError::Unsupported),
        };
        let path = web.path().trim_end_matches('/').to_owned();
        let path = path.strip_suffix(".git").unwrap_or(&path);
        // A forge may be below a path of its host.
        let base_path = base.path().trim_end_matches('/');
        let root = base_path.strip_suffix(suffix).unwrap_or_default();
        let project = path
            .strip_prefix(root)
            .and_then(|path| path.strip_prefix('/'))
            .ok_or(ForgeUrlError::Path)?
            .to_owned();
        let parts: Vec<&str> = project.split('/').collect();
        let is_plain = |part: &&str| {
            !part.is_empty()
                && !matches!(*part, "." | "..")
                && part
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"-_.~+".contains(&byte))
        };
        let is_nested = kind == ForgeKind::Gitlab && parts.len() > 2;
        if !(parts.len() == 2 || is_nested) || !parts.iter().all(is_plain) {
            return Err(ForgeUrlError::Path);
        }
        web.set_path(path);
        Ok(Self {
            kind,
            base: base.as_str().trim_end_matches('/').to_owned(),
            host,
            port,
            web,
            project,
        })
    }

    /// The host to resolve and check.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Whether the credential may be presented to the API: it is for the repository, and the API is
    /// on its host or is GitHub's own.
    pub(super) fn accepts(&self, credential: &CredentialPlaintext) -> bool {
        let Some((host, port)) = place(&self.web) else {
            return false;
        };
        let is_of_repository = credential.scheme == self.web.scheme()
            && credential.host.eq_ignore_ascii_case(host)
            && credential.port == port
            && has_prefix(self.web.path(), &credential.path_prefix);
        let is_same_host = (self.host.as_str(), self.port) == (host, port);
        let is_public_github =
            host == "github.com" && self.host == "api.github.com" && self.port == 443;
        is_of_repository && (is_same_host || is_public_github)
    }

    /// The project as one component of a path, as GitLab wants it.
    pub(super) fn encoded_project(&self) -> String {
        // No other character of a project needs it.
        self.project.replace('/', "%2F").replace('+', "%2B")
    }

    /// The account or organization that the project belongs to.
    pub(super) fn owner(&self) -> &str {
        self.project.split('/').next().unwrap_or_default()
    }

    /// A pull request with the URL that the forge gave, if it is one of this forge, else with the
    /// usual one: people are led nowhere else.
    pub(super) fn pull(&self, number: u64, url: Option<&str>) -> PullRequest {
        let is_ours = |url: &Url| {
            place(url) == place(&self.web)
                && url.scheme() == self.web.scheme()
                && url.username().is_empty()
                && url.password().is_none()
        };
        let given = url
            .filter(|url| url.len() <= MAX_SHOWN_URL_BYTES)
            .and_then(|url| Url::parse(url).ok())
            .filter(is_ours);
        let url = given.map_or_else(
            || {
                let part = match self.kind {
                    ForgeKind::Github | ForgeKind::Git => "pull",
                    ForgeKind::Gitlab => "-/merge_requests",
                    ForgeKind::Gitea => "pulls",
                };
                format!("{}/{part}/{number}", self.web)
            },
            String::from,
        );
        PullRequest { number, url }
    }
}

fn parse(text: &str) -> Result<Url, ForgeUrlError> {
    let url = Url::parse(text).map_err(|_| ForgeUrlError::Url)?;
    let is_plain = url.scheme() == "https"
        && url.host_str().is_some()
        && url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none();
    if is_plain {
        Ok(url)
    } else {
        Err(ForgeUrlError::Url)
    }
}

fn place(url: &Url) -> Option<(&str, u16)> {
    Some((url.host_str()?, url.port_or_known_default()?))
}

fn default_api(kind: ForgeKind, web: &Url) -> Result<Url, ForgeUrlError> {
    let path = match kind {
        ForgeKind::Github if place(web) == Some(("github.com", 443)) => {
            return Url::parse("https://api.github.com").map_err(|_| ForgeUrlError::Url);
        }
        ForgeKind::Github => "/api/v3",
        ForgeKind::Gitlab => "/api/v4",
        ForgeKind::Gitea => "/api/v1",
        ForgeKind::Git => return Err(ForgeUrlError::Unsupported),
    };
    web.join(path).map_err(|_| ForgeUrlError::Url)
}

/// Whether a path begins with whole components of another.
fn has_prefix(path: &str, prefix: &str) -> bool {
    let prefix = prefix.trim_end_matches('/');
    path.strip_prefix(prefix)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/') || rest == ".git")
        // The credential may name the repository with its ending.
        || prefix.strip_suffix(".git") == Some(path)
}
