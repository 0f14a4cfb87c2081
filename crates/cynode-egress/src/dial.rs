//! Finds the addresses of a repository's host, after its use was permitted.
//!
//! Invariant: what is dialled was checked, and every address of the name was: a name with one
//! refused address is not dialled at all. Nobody resolves the name again.

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use async_trait::async_trait;
use cynode_api::AllowedAddress;
use tokio::time::timeout;

use crate::addresses::{OwnListeners, Refusal, check};

/// Timeout of a resolution.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Addresses of one name.
const MAX_ADDRESSES: usize = 64;

#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error("{host}: the name can't be resolved")]
    Resolve { host: String, source: io::Error },
    #[error("{host}: the name was not resolved in time")]
    Timeout { host: String },
    #[error("{host} has no addresses, or more than {MAX_ADDRESSES}")]
    Count { host: String },
    #[error("{host}:{port}: {address} {refusal}")]
    Refused {
        host: String,
        port: u16,
        address: IpAddr,
        refusal: Refusal,
    },
}

/// Resolves names.
#[async_trait]
pub(crate) trait Resolver: Send + Sync {
    async fn resolve(&self, host: &str, port: u16) -> io::Result<Vec<IpAddr>>;
}

/// The resolver of the system.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SystemResolver;

#[async_trait]
impl Resolver for SystemResolver {
    async fn resolve(&self, host: &str, port: u16) -> io::Result<Vec<IpAddr>> {
        Ok(tokio::net::lookup_host((host, port))
            .await?
            .map(|address| address.ip())
            .collect())
    }
}

/// Resolves and checks.
#[derive(Clone)]
pub(crate) struct Dialer {
    resolver: Arc<dyn Resolver>,
}

impl std::fmt::Debug for Dialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dialer").finish_non_exhaustive()
    }
}

impl Dialer {
    pub(crate) fn new(resolver: Arc<dyn Resolver>) -> Self {
        Self { resolver }
    }

    async fn resolve(&self, host: &str, port: u16) -> Result<Vec<IpAddr>, DialError> {
        let host_name = || host.to_owned();
        match timeout(RESOLVE_TIMEOUT, self.resolver.resolve(host, port)).await {
            Ok(Ok(addresses)) => Ok(addresses),
            Ok(Err(source)) => Err(DialError::Resolve {
                host: host_name(),
                source,
            }),
            Err(_) => Err(DialError::Timeout { host: host_name() }),
        }
    }

    /// The addresses of a host, all of them checked.
    pub(crate) async fn addresses(
        &self,
        host: &str,
        port: u16,
        allowed: &[AllowedAddress],
        own: &OwnListeners,
    ) -> Result<Vec<IpAddr>, DialError> {
        let literal = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'))
            .unwrap_or(host);
        let mut addresses = match literal.parse::<IpAddr>() {
            Ok(address) => vec![address],
            Err(_) => self.resolve(host, port).await?,
        };
        addresses.sort_unstable();
        addresses.dedup();
        if !(1..=MAX_ADDRESSES).contains(&addresses.len()) {
            return Err(DialError::Count {
                host: host.to_owned(),
            });
        }
        for address in &addresses {
            check(*address, port, allowed, own).map_err(|refusal| DialError::Refused {
                host: host.to_owned(),
                port,
                address: *address,
                refusal,
            })?;
        }
        Ok(addresses)
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// Answers every name with the same addresses.
    pub(crate) struct FixedResolver(pub(crate) Vec<IpAddr>);

    #[async_trait]
    impl Resolver for FixedResolver {
        async fn resolve(&self, _: &str, _: u16) -> io::Result<Vec<IpAddr>> {
            Ok(self.0.clone())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{testing::FixedResolver, *};

    fn dialer(addresses: &[&str]) -> Dialer {
        let addresses = addresses
            .iter()
            .map(|address| address.parse().expect("an address"));
        Dialer::new(Arc::new(FixedResolver(addresses.collect())))
    }

    async fn dial(addresses: &[&str], host: &str) -> Result<Vec<IpAddr>, DialError> {
        dialer(addresses)
            .addresses(host, 443, &[], &OwnListeners::default())
            .await
    }

    #[tokio::test]
    async fn one_refused_address_refuses_the_name() {
        assert_eq!(
            dial(&["1.1.1.1", "1.0.0.1", "1.1.1.1"], "git.example")
                .await
                .expect("public")
                .len(),
            2
        );
        for refused in [
            "127.0.0.1",
            "10.0.0.1",
            "169.254.169.254",
            "::ffff:10.0.0.1",
        ] {
            match dial(&["1.1.1.1", refused], "git.example").await {
                Err(DialError::Refused { address, .. }) => {
                    assert_eq!(address.to_string(), refused);
                }
                other => panic!("{refused}: {other:?}"),
            }
        }
        assert!(matches!(
            dial(&[], "git.example").await,
            Err(DialError::Count { .. })
        ));
        let many: Vec<String> = (0..=MAX_ADDRESSES).map(|n| format!("1.1.1.{n}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(matches!(
            dial(&many, "git.example").await,
            Err(DialError::Count { .. })
        ));
    }

    #[tokio::test]
    async fn an_address_as_a_host_is_checked_and_not_resolved() {
        for host in ["127.0.0.1", "[::1]", "10.0.0.1", "[::ffff:10.0.0.1]"] {
            assert!(
                matches!(
                    dial(&["1.1.1.1"], host).await,
                    Err(DialError::Refused { .. })
                ),
                "{host}"
            );
        }
        assert_eq!(
            dial(&["9.9.9.9"], "1.1.1.1").await.expect("public"),
            ["1.1.1.1".parse::<IpAddr>().expect("an address")]
        );
    }
}
