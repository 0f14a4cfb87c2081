//! Where a repository is: its URL, taken apart once.
//!
//! Invariant: a location is `https`, without credentials, query, fragment or escapes, so that git,
//! the vault and the forge's client can't read it differently.

use cynode_api::repository_limits;
use reqwest::Url;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LocationError {
    #[error("the URL is longer than {} bytes", repository_limits::MAX_URL_BYTES)]
    Length,
    #[error("the URL is not valid")]
    Syntax,
    #[error("the URL must begin with https://")]
    Scheme,
    #[error("the URL must not contain credentials, a query or a fragment")]
    Extras,
    #[error("the URL's path must consist of plain names, without escapes")]
    Path,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RepositoryLocation {
    url: String,
    scheme: String,
    host: String,
    port: u16,
    path: String,
}

impl RepositoryLocation {
    pub(crate) fn parse(text: &str) -> Result<Self, LocationError> {
        if text.len() > repository_limits::MAX_URL_BYTES {
            return Err(LocationError::Length);
        }
        // Parsers of URLs drop these silently.
        if text.contains(|character: char| character.is_control() || character.is_whitespace()) {
            return Err(LocationError::Syntax);
        }
        // Tests have repositories of their own.
        if cfg!(test) && text.starts_with("file:///") {
            return Ok(Self {
                url: text.to_owned(),
                scheme: "file".to_owned(),
                host: "localhost".to_owned(),
                port: 443,
                path: text["file://".len()..].to_owned(),
            });
        }
        let url = Url::parse(text).map_err(|_| LocationError::Syntax)?;
        let begins_as_written = text
            .get(.."https://".len())
            .is_some_and(|begin| begin.eq_ignore_ascii_case("https://"));
        if url.scheme() != "https" || !begins_as_written {
            return Err(LocationError::Scheme);
        }
        if !url.username().is_empty()
            || url.password().is_some()
            || url.query().is_some()
            || url.fragment().is_some()
            || text.contains('@')
        {
            return Err(LocationError::Extras);
        }
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~+".contains(&byte);
        let path = url.path();
        // The parser resolves `..` and turns backslashes; it must not have had to.
        let written = text
            .get("https://".len()..)
            .and_then(|rest| rest.find('/').map(|at| &rest[at..]))
            .unwrap_or("/");
        if !path.bytes().all(is_plain) || path.contains("//") || written != path {
            return Err(LocationError::Path);
        }
        let host = url.host_str().ok_or(LocationError::Syntax)?;
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        let port = url.port_or_known_default().ok_or(LocationError::Syntax)?;
        let shown_port = if port == 443 {
            String::new()
        } else {
            format!(":{port}")
        };
        Ok(Self {
            url: format!("https://{host}{shown_port}{path}"),
            scheme: "https".to_owned(),
            port,
            path: path.to_owned(),
            host,
        })
    }

    /// The normalized URL.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn scheme(&self) -> &str {
        &self.scheme
    }

    /// In lowercase, without a final dot; an IPv6 address is in brackets.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Begins with a slash.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_is_normalized() {
        for (text, url, host, port, path) in [
            (
                "https://Git.Example/Team/app.git",
                "https://git.example/Team/app.git",
                "git.example",
                443,
                "/Team/app.git",
            ),
            (
                "https://git.example.:8443/a/",
                "https://git.example:8443/a/",
                "git.example",
                8443,
                "/a/",
            ),
            (
                "https://git.example:443/a",
                "https://git.example/a",
                "git.example",
                443,
                "/a",
            ),
            (
                "https://0x7f.1/a",
                "https://127.0.0.1/a",
                "127.0.0.1",
                443,
                "/a",
            ),
            ("https://[::1]/a", "https://[::1]/a", "[::1]", 443, "/a"),
        ] {
            let location = RepositoryLocation::parse(text).expect(text);
            assert_eq!(location.url(), url);
            assert_eq!(location.host(), host);
            assert_eq!(location.port(), port);
            assert_eq!(location.path(), path);
        }
    }

    #[test]
    fn what_two_programs_could_read_differently_is_refused() {
        for (text, error) in [
            ("http://git.example/a", LocationError::Scheme),
            ("ssh://git.example/a", LocationError::Scheme),
            ("git.example:a", LocationError::Scheme),
            ("https:git.example/a", LocationError::Scheme),
            ("ext::sh -c id", LocationError::Syntax),
            ("https://user@git.example/a", LocationError::Extras),
            ("https://user:secret@git.example/a", LocationError::Extras),
            ("https://git.example/a?x=1", LocationError::Extras),
            ("https://git.example/a#b", LocationError::Extras),
            ("https://git.example/a/../b", LocationError::Path),
            ("https://git.example/a%2fb", LocationError::Path),
            ("https://git.example/a//b", LocationError::Path),
            ("https://git.example/a\\b", LocationError::Path),
            ("https://git.exa\nmple/a", LocationError::Syntax),
            ("https:///a b", LocationError::Syntax),
        ] {
            assert_eq!(RepositoryLocation::parse(text), Err(error), "{text}");
        }
    }
}
