//! Which addresses the role may dial.
//!
//! Only public addresses are dialled, unless an administrator admitted a range of one host and
//! port. Invariant: no rule admits metadata addresses, link-local, multicast or unspecified
//! addresses, or CyNode's own listeners; an IPv6 address that carries an IPv4 address is judged by
//! both.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use cynode_api::AllowedAddress;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Why an address is not dialled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("is an address of this machine")]
    Loopback,
    #[error("is a private address")]
    Private,
    #[error("is not a public address")]
    Special,
    #[error("is a metadata address")]
    Metadata,
    #[error("is a listener of CyNode")]
    OwnListener,
}

impl Refusal {
    /// Whether a range in `addresses` can admit it.
    const fn can_be_admitted(self) -> bool {
        matches!(self, Self::Loopback | Self::Private)
    }
}

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)
}

const fn v6(segments: [u16; 8], prefix: u8) -> Ipv6Net {
    let [a, b, c, d, e, f, g, h] = segments;
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, d, e, f, g, h), prefix)
}

/// The first match decides.
const V4: &[(Ipv4Net, Refusal)] = &[
    // Instance metadata of the large clouds, and of Alibaba and Oracle.
    (v4(169, 254, 169, 254, 32), Refusal::Metadata),
    (v4(169, 254, 170, 2, 32), Refusal::Metadata),
    (v4(169, 254, 170, 23, 32), Refusal::Metadata),
    (v4(100, 100, 100, 200, 32), Refusal::Metadata),
    (v4(192, 0, 0, 192, 32), Refusal::Metadata),
    // Azure's platform resource.
    (v4(168, 63, 129, 16, 32), Refusal::Metadata),
    (v4(127, 0, 0, 0, 8), Refusal::Loopback),
    (v4(10, 0, 0, 0, 8), Refusal::Private),
    (v4(172, 16, 0, 0, 12), Refusal::Private),
    (v4(192, 168, 0, 0, 16), Refusal::Private),
    (v4(100, 64, 0, 0, 10), Refusal::Private),
    (v4(0, 0, 0, 0, 8), Refusal::Special),
    (v4(169, 254, 0, 0, 16), Refusal::Special),
    (v4(192, 0, 0, 0, 24), Refusal::Special),
    (v4(192, 0, 2, 0, 24), Refusal::Special),
    (v4(192, 31, 196, 0, 24), Refusal::Special),
    (v4(192, 52, 193, 0, 24), Refusal::Special),
    (v4(192, 88, 99, 0, 24), Refusal::Special),
    (v4(192, 175, 48, 0, 24), Refusal::Special),
    (v4(198, 18, 0, 0, 15), Refusal::Special),
    (v4(198, 51, 100, 0, 24), Refusal::Special),
    (v4(203, 0, 113, 0, 24), Refusal::Special),
    (v4(224, 0, 0, 0, 4), Refusal::Special),
    (v4(240, 0, 0, 0, 4), Refusal::Special),
];

const V6: &[(Ipv6Net, Refusal)] = &[
    (
        v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 128),
        Refusal::Metadata,
    ),
    (
        v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128),
        Refusal::Metadata,
    ),
    (v6([0, 0, 0, 0, 0, 0, 0, 1], 128), Refusal::Loopback),
    (v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7), Refusal::Private),
    (v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10), Refusal::Special),
    (v6([0xfec0, 0, 0, 0, 0, 0, 0, 0], 10), Refusal::Special),
    (v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), Refusal::Special),
    (v6([0x100, 0, 0, 0, 0, 0, 0, 0], 64), Refusal::Special),
    // ORCHID, benchmarking, documentation and segment routing.
    (v6([0x2001, 2, 0, 0, 0, 0, 0, 0], 48), Refusal::Special),
    (v6([0x2001, 0x10, 0, 0, 0, 0, 0, 0], 28), Refusal::Special),
    (v6([0x2001, 0x20, 0, 0, 0, 0, 0, 0], 28), Refusal::Special),
    (v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32), Refusal::Special),
    (v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20), Refusal::Special),
    (v6([0x5f00, 0, 0, 0, 0, 0, 0, 0], 16), Refusal::Special),
];

/// Global unicast: everything else in IPv6 is reserved.
const V6_GLOBAL: Ipv6Net = v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);

/// Why an address is not public. `None` for public ones.
pub(crate) fn refusal_of(address: IpAddr) -> Option<Refusal> {
    match address {
        IpAddr::V4(address) => V4
            .iter()
            .find(|(range, _)| range.contains(&address))
            .map(|(_, refusal)| *refusal),
        IpAddr::V6(address) => refusal_of_v6(address),
    }
}

fn refusal_of_v6(address: Ipv6Addr) -> Option<Refusal> {
    let listed = V6
        .iter()
        .find(|(range, _)| range.contains(&address))
        .map(|(_, refusal)| *refusal);
    if listed.is_some() {
        return listed;
    }
    match carried(address) {
        Carried::Native if V6_GLOBAL.contains(&address) => None,
        Carried::Native => Some(Refusal::Special),
        Carried::Mapped(inner) | Carried::Tunnelled(inner) => refusal_of(IpAddr::V4(inner)),
        Carried::Interface(inner) => refusal_of(IpAddr::V4(inner))
            .or_else(|| (!V6_GLOBAL.contains(&address)).then_some(Refusal::Special)),
    }
}

/// The IPv4 address that an IPv6 address carries.
enum Carried {
    Native,
    /// The kernel dials the IPv4 address.
    Mapped(Ipv4Addr),
    /// A relay on the way may dial the IPv4 address.
    Tunnelled(Ipv4Addr),
    /// The same, with the prefix of some network (ISATAP).
    Interface(Ipv4Addr),
}

fn carried(address: Ipv6Addr) -> Carried {
    let low = |high: u16, low: u16| Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    match address.segments() {
        [0, 0, 0, 0, 0, 0xffff, a, b] => Carried::Mapped(low(a, b)),
        // Compatible; translated (RFC 2765); NAT64 and its local prefix.
        [0, 0, 0, 0, 0, 0, a, b]
        | [0, 0, 0, 0, 0xffff, 0, a, b]
        | [0x64, 0xff9b, 0, 0, 0, 0, a, b]
        | [0x64, 0xff9b, 1, _, _, _, a, b]
        // 6to4.
        | [0x2002, a, b, _, _, _, _, _] => Carried::Tunnelled(low(a, b)),
        // Teredo: the client's address is inverted.
        [0x2001, 0, _, _, _, _, a, b] => Carried::Tunnelled(low(!a, !b)),
        [_, _, _, _, 0 | 0x200, 0x5efe, a, b] => Carried::Interface(low(a, b)),
        _ => Carried::Native,
    }
}

/// CyNode's own listeners, which are never dialled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OwnListeners(Vec<SocketAddr>);

impl OwnListeners {
    pub(crate) fn new(listeners: impl IntoIterator<Item = SocketAddr>) -> Self {
        Self(listeners.into_iter().collect())
    }

    /// With those of another copy.
    pub(crate) fn and(mut self, other: &Self) -> Self {
        self.0.extend(&other.0);
        self.0.sort_unstable();
        self.0.dedup();
        self
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// A listener on every address makes its port untouchable, because the addresses of this
    /// machine are not known here.
    pub(crate) fn contains(&self, address: IpAddr, port: u16) -> bool {
        let address = unmapped(address);
        self.0.iter().any(|own| {
            let ip = unmapped(own.ip());
            own.port() == port
                && (ip.is_unspecified()
                    || ip == address
                    || (ip.is_loopback() && address.is_loopback()))
        })
    }
}

fn unmapped(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// Checks one address of a host. `allowed` are the ranges that an administrator admitted for this
/// host.
pub(crate) fn check(
    address: IpAddr,
    port: u16,
    allowed: &[AllowedAddress],
    own: &OwnListeners,
) -> Result<(), Refusal> {
    if own.contains(address, port) {
        return Err(Refusal::OwnListener);
    }
    match refusal_of(address) {
        None => Ok(()),
        Some(refusal) if refusal.can_be_admitted() && is_admitted(address, port, allowed) => Ok(()),
        Some(refusal) => Err(refusal),
    }
}

fn is_admitted(address: IpAddr, port: u16, allowed: &[AllowedAddress]) -> bool {
    let address = match address {
        IpAddr::V6(inner) => match carried(inner) {
            Carried::Mapped(inner) => IpAddr::V4(inner),
            Carried::Native => address,
            // Where a relay would send it is not for a rule to say.
            Carried::Tunnelled(_) if inner.is_loopback() => address,
            Carried::Tunnelled(_) | Carried::Interface(_) => return false,
        },
        IpAddr::V4(_) => address,
    };
    allowed.iter().any(|range| {
        range.port == port && parse_range(&range.cidr).is_some_and(|net| net.contains(&address))
    })
}

/// `10.1.0.0/16`, or a single address.
pub(crate) fn parse_range(text: &str) -> Option<IpNet> {
    text.parse::<IpNet>()
        .ok()
        .or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn allow(cidr: &str, port: u16) -> AllowedAddress {
        AllowedAddress {
            cidr: cidr.to_owned(),
            port,
        }
    }

    #[test]
    fn only_public_addresses_pass_the_table() {
        for public in [
            "1.1.1.1",
            "140.82.121.4",
            "172.15.255.255",
            "172.32.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "2606:4700::1111",
            "2a00:1450:4001:81c::200e",
            "64:ff9b::8c52:7904",
            "2002:8c52:7904::1",
        ] {
            assert_eq!(refusal_of(ip(public)), None, "{public}");
        }
        for (address, refusal) in [
            ("127.0.0.1", Refusal::Loopback),
            ("127.255.255.255", Refusal::Loopback),
            ("::1", Refusal::Loopback),
            ("::ffff:127.0.0.1", Refusal::Loopback),
            ("10.0.0.1", Refusal::Private),
            ("172.31.255.255", Refusal::Private),
            ("192.168.1.1", Refusal::Private),
            ("100.64.0.1", Refusal::Private),
            ("fc00::1", Refusal::Private),
            ("fdff::1", Refusal::Private),
            ("::ffff:10.0.0.1", Refusal::Private),
            ("0.0.0.0", Refusal::Special),
            ("::", Refusal::Special),
            ("0.1.2.3", Refusal::Special),
            ("169.254.1.1", Refusal::Special),
            ("192.0.2.1", Refusal::Special),
            ("198.18.0.1", Refusal::Special),
            ("198.19.255.255", Refusal::Special),
            ("203.0.113.9", Refusal::Special),
            ("224.0.0.1", Refusal::Special),
            ("255.255.255.255", Refusal::Special),
            ("fe80::1", Refusal::Special),
            ("ff02::1", Refusal::Special),
            ("2001:db8::1", Refusal::Special),
            ("2001:2::1", Refusal::Special),
            ("4000::1", Refusal::Special),
            ("169.254.169.254", Refusal::Metadata),
            ("100.100.100.200", Refusal::Metadata),
            ("168.63.129.16", Refusal::Metadata),
            ("fd00:ec2::254", Refusal::Metadata),
            ("::ffff:169.254.169.254", Refusal::Metadata),
            // IPv4 inside IPv6, by every way to write it.
            ("64:ff9b::a00:1", Refusal::Private),
            ("64:ff9b::7f00:1", Refusal::Loopback),
            ("64:ff9b:1::a9fe:a9fe", Refusal::Metadata),
            ("::a00:1", Refusal::Private),
            ("2002:a00:1::", Refusal::Private),
            ("2002:a9fe:a9fe::", Refusal::Metadata),
            ("2001:0:1:2:3:4:f5ff:fffe", Refusal::Private),
            ("2606:4700::5efe:a00:1", Refusal::Private),
        ] {
            assert_eq!(refusal_of(ip(address)), Some(refusal), "{address}");
        }
    }

    #[test]
    fn a_rule_admits_its_range_and_port_and_nothing_that_is_never_dialled() {
        let own = OwnListeners::new(["127.0.0.1:12080".parse().expect("an address")]);
        let allowed = [
            allow("10.1.0.0/16", 443),
            allow("127.0.0.1", 8443),
            allow("127.0.0.0/8", 12_080),
            allow("0.0.0.0/0", 443),
            allow("::/0", 443),
        ];
        let check = |address: &str, port| check(ip(address), port, &allowed, &own);
        assert_eq!(check("10.1.2.3", 443), Ok(()));
        assert_eq!(check("::ffff:10.1.2.3", 443), Ok(()));
        assert_eq!(check("10.1.2.3", 8443), Err(Refusal::Private));
        assert_eq!(check("127.0.0.1", 8443), Ok(()));
        assert_eq!(check("127.0.0.2", 8443), Err(Refusal::Loopback));
        assert_eq!(check("::1", 443), Ok(()));
        assert_eq!(check("127.0.0.1", 12_080), Err(Refusal::OwnListener));
        assert_eq!(check("127.0.0.9", 12_080), Err(Refusal::OwnListener));
        for never in [
            "169.254.169.254",
            "169.254.0.1",
            "fe80::1",
            "224.0.0.1",
            "0.0.0.0",
            "::",
            "fd00:ec2::254",
            "::ffff:169.254.169.254",
        ] {
            assert!(check(never, 443).is_err(), "{never}");
        }
        // A relay would choose the way.
        assert_eq!(check("64:ff9b::a01:203", 443), Err(Refusal::Private));
        assert_eq!(check("1.1.1.1", 80), Ok(()));
        let everywhere = OwnListeners::new(["0.0.0.0:443".parse().expect("an address")]);
        assert_eq!(
            super::check(ip("1.1.1.1"), 443, &[], &everywhere),
            Err(Refusal::OwnListener)
        );
        assert!(parse_range("10.1.0.0/33").is_none() && parse_range("host").is_none());
    }

    proptest! {
        /// However an IPv4 address is carried, it is judged like itself.
        #[test]
        fn an_address_inside_another_is_judged_like_itself(bits: u32, rest: u64) {
            let inner = Ipv4Addr::from(bits);
            let expected = refusal_of(IpAddr::V4(inner));
            let [a, b, c, d] = bits.to_be_bytes();
            let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
            prop_assert_eq!(refusal_of(IpAddr::V6(inner.to_ipv6_mapped())), expected);
            let nat64 = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low);
            prop_assert_eq!(refusal_of(IpAddr::V6(nat64)), expected);
            let [a, b, c, d, ..] = rest.to_be_bytes();
            let (subnet, host) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
            let six = Ipv6Addr::new(0x2002, high, low, subnet, 1, 1, host, 1);
            prop_assert_eq!(refusal_of(IpAddr::V6(six)).is_some(), expected.is_some());
        }

        /// The standard library's own predicates never contradict the table.
        #[test]
        fn what_the_standard_library_calls_special_is_refused(bits: u32, wide: u128) {
            let four = Ipv4Addr::from(bits);
            if four.is_loopback() || four.is_private() || four.is_link_local()
                || four.is_multicast() || four.is_broadcast() || four.is_unspecified()
                || four.is_documentation()
            {
                prop_assert!(refusal_of(IpAddr::V4(four)).is_some());
            }
            let six = Ipv6Addr::from(wide);
            if six.is_loopback() || six.is_multicast() || six.is_unspecified()
                || six.is_unique_local() || six.is_unicast_link_local()
            {
                prop_assert!(refusal_of(IpAddr::V6(six)).is_some());
            }
        }

        /// Whatever a rule says.
        #[test]
        fn no_rule_admits_what_is_never_dialled(bits: u32, port: u16) {
            let allowed = [allow("0.0.0.0/0", port), allow("::/0", port)];
            let address = IpAddr::V4(Ipv4Addr::from(bits));
            let verdict = check(address, port, &allowed, &OwnListeners::default());
            let never = matches!(
                refusal_of(address),
                Some(Refusal::Metadata | Refusal::Special | Refusal::OwnListener)
            );
            prop_assert_eq!(verdict.is_err(), never);
        }
    }
}
