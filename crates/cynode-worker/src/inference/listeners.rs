//! Who can reach a server on this machine: the kernel's tables of listening sockets.
//!
//! A model server on loopback often listens on all addresses too. Then everybody in the network can
//! use it, past every rule of this node.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const TABLES: [&str; 2] = ["/proc/self/net/tcp", "/proc/self/net/tcp6"];
/// The state of a listening socket.
const LISTENING: &str = "0A";

/// The first address beyond loopback on which something listens at a port.
pub(super) fn beyond_loopback(port: u16) -> Option<IpAddr> {
    TABLES.iter().find_map(|table| {
        let text = fs_err::read_to_string(table).ok()?;
        text.lines().find_map(|line| exposed(line, port))
    })
}

/// The address of a line of a table, if it is a socket that listens beyond loopback at the port.
fn exposed(line: &str, port: u16) -> Option<IpAddr> {
    let mut fields = line.split_ascii_whitespace();
    let (address, local_port) = fields.nth(1)?.split_once(':')?;
    if fields.nth(1)? != LISTENING || u16::from_str_radix(local_port, 16).ok()? != port {
        return None;
    }
    let address = parse(address)?;
    (!address.to_canonical().is_loopback()).then_some(address)
}

/// An address as the kernel prints it: words of 32 bits in the order of the machine.
fn parse(hex: &str) -> Option<IpAddr> {
    let word = |at: usize| {
        let word = u32::from_str_radix(hex.get(at * 8..at * 8 + 8)?, 16).ok()?;
        Some(word.to_ne_bytes())
    };
    match hex.len() {
        8 => Some(IpAddr::V4(Ipv4Addr::from(word(0)?))),
        32 => {
            let mut bytes = [0; 16];
            for (at, four) in bytes.chunks_mut(4).enumerate() {
                four.copy_from_slice(&word(at)?);
            }
            Some(IpAddr::V6(Ipv6Addr::from(bytes)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_listener_on_all_addresses_is_found_and_one_on_loopback_is_not() {
        for (address, is_exposed) in [
            ("127.0.0.1:0", false),
            ("127.0.0.2:0", false),
            ("[::1]:0", false),
            ("0.0.0.0:0", true),
            ("[::]:0", true),
        ] {
            // Machines without IPv6 have no such address.
            let Ok(listener) = TcpListener::bind(address) else {
                continue;
            };
            let port = listener.local_addr().expect("bound").port();
            assert_eq!(beyond_loopback(port).is_some(), is_exposed, "{address}");
        }
    }

    #[test]
    fn only_listening_sockets_at_the_port_count() {
        let line = |local: &str, state: &str| {
            format!("   0: {local} 00000000:0000 {state} 00000000:00000000 00:00000000 0 0 0 1")
        };
        let any = "00000000:2CAA";
        assert_eq!(
            exposed(&line(any, "0A"), 11_434),
            Some(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
        );
        assert_eq!(exposed(&line(any, "01"), 11_434), None);
        assert_eq!(exposed(&line(any, "0A"), 11_435), None);
        assert_eq!(
            exposed("  sl  local_address rem_address   st", 11_434),
            None
        );
        assert_eq!(exposed("", 1), None);
    }
}
