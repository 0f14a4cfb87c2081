//! The preamble of a connection to a sandbox's proxies.
//!
//! A process in the sandbox connects to a port on loopback. The agent's listeners forward the bytes
//! of that connection, unchanged, to the socket [`PROXY_SOCKET`] of the worker, after a preamble
//! that names the port. Any process of the sandbox may use the socket directly, too.
//!
//! Invariant: a preamble has one length and one encoding, so a reader knows after
//! [`PREAMBLE_BYTES`] whether to continue. There are no optional parts: a new meaning needs a new
//! version.

/// The version of the preamble.
pub const VERSION: u8 = 1;
/// The worker's socket, inside a sandbox.
pub const PROXY_SOCKET: &str = "/run/cynode/proxy.sock";
/// The name of the process that listens, as the kernel shows it.
pub const LISTENERS_NAME: &str = "cynode-listen";
/// The length of a preamble.
pub const PREAMBLE_BYTES: usize = MAGIC.len() + 2;

const MAGIC: [u8; 6] = *b"cynode";

/// A port on loopback.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Listener {
    /// Requests to models.
    Inference,
    /// An HTTP proxy.
    Proxy,
    /// Reports of a job's own runner.
    Callback,
}

impl Listener {
    pub const ALL: [Self; 3] = [Self::Inference, Self::Proxy, Self::Callback];

    /// The port on 127.0.0.1 and ::1.
    #[must_use]
    pub const fn port(self) -> u16 {
        match self {
            Self::Inference => 11_434,
            Self::Proxy => 3_128,
            Self::Callback => 11_480,
        }
    }

    const fn code(self) -> u8 {
        match self {
            Self::Inference => 1,
            Self::Proxy => 2,
            Self::Callback => 3,
        }
    }

    /// What a connection to the worker begins with.
    #[must_use]
    pub fn preamble(self) -> [u8; PREAMBLE_BYTES] {
        let mut preamble = [0; PREAMBLE_BYTES];
        preamble[..MAGIC.len()].copy_from_slice(&MAGIC);
        preamble[MAGIC.len()] = VERSION;
        preamble[MAGIC.len() + 1] = self.code();
        preamble
    }

    pub fn parse(preamble: &[u8; PREAMBLE_BYTES]) -> Result<Self, PreambleError> {
        let (magic, [version, code]) = preamble
            .split_last_chunk::<2>()
            .ok_or(PreambleError::NoPreamble)?;
        if *magic != MAGIC {
            return Err(PreambleError::NoPreamble);
        }
        if *version != VERSION {
            return Err(PreambleError::UnknownVersion(*version));
        }
        Self::ALL
            .into_iter()
            .find(|listener| listener.code() == *code)
            .ok_or(PreambleError::UnknownListener(*code))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PreambleError {
    #[error("the connection does not begin with a preamble")]
    NoPreamble,
    #[error("version {0} of the preamble is not supported")]
    UnknownVersion(u8),
    #[error("there is no listener {0}")]
    UnknownListener(u8),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn preamble() -> impl Strategy<Value = [u8; PREAMBLE_BYTES]> {
        // Bytes at random, and preambles with one wrong byte.
        let flawed = (0..3_usize, 0..PREAMBLE_BYTES, any::<u8>()).prop_map(|(which, at, byte)| {
            let mut preamble = Listener::ALL[which].preamble();
            preamble[at] = byte;
            preamble
        });
        prop_oneof![any::<[u8; PREAMBLE_BYTES]>(), flawed]
    }

    proptest! {
        #[test]
        fn each_listener_has_exactly_one_preamble(preamble in preamble()) {
            match Listener::parse(&preamble) {
                Ok(listener) => prop_assert_eq!(listener.preamble(), preamble),
                Err(_) => {
                    for listener in Listener::ALL {
                        prop_assert_ne!(listener.preamble(), preamble);
                    }
                }
            }
        }
    }

    #[test]
    fn preambles_of_other_versions_and_of_unknown_listeners_are_refused_as_such() {
        for listener in Listener::ALL {
            let preamble = listener.preamble();
            assert_eq!(Listener::parse(&preamble), Ok(listener));
            let mut newer = preamble;
            newer[6] = VERSION + 1;
            let expected = Err(PreambleError::UnknownVersion(VERSION + 1));
            assert_eq!(Listener::parse(&newer), expected);
            let mut unknown = preamble;
            unknown[7] = 4;
            let expected = Err(PreambleError::UnknownListener(4));
            assert_eq!(Listener::parse(&unknown), expected);
        }
        assert_eq!(Listener::parse(b"GET / HT"), Err(PreambleError::NoPreamble));
    }
}
