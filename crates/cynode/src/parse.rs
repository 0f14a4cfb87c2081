//! Parsers of argument values: sizes, durations, times, `KEY=VALUE`.

use std::time::Duration;

use cynode_api::{AllowedAddress, RepositoryCheck};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// Items that a list prints.
const MAX_LISTED: usize = 100_000;

/// `512m`, `2g`, `10GiB`, `1048576`: units of 1024.
pub fn size(text: &str) -> Result<u64, String> {
    let bad = || format!("'{text}' is not a size; write it like 512m, 2g or a number of bytes");
    let lower = text.to_ascii_lowercase();
    let digits = lower
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(lower.len());
    let (number, unit) = lower.split_at(digits);
    let shift = match unit
        .strip_suffix("ib")
        .or_else(|| unit.strip_suffix('b'))
        .unwrap_or(unit)
    {
        "" if unit != "ib" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(bad()),
    };
    let number: u64 = number.parse().map_err(|_| bad())?;
    number
        .checked_mul(1 << shift)
        .filter(|bytes| *bytes > 0)
        .ok_or_else(bad)
}

/// A number of items to list.
pub fn count(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|count| (1..=MAX_LISTED).contains(count))
        .ok_or_else(|| format!("'{text}' is not a number from 1 to {MAX_LISTED}"))
}

/// `24h`, `30m`, `1h30m`, `90s`, `500ms`, `2d`; a bare number is seconds.
pub fn duration(text: &str) -> Result<Duration, String> {
    let parsed = match text.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => humantime::parse_duration(text).ok(),
    };
    parsed
        .filter(|duration| !duration.is_zero())
        .ok_or_else(|| format!("'{text}' is not a duration; write it like 90s, 30m, 24h or 1h30m"))
}

/// A duration ago (`90m`), or a time (`2026-01-02T03:04:05Z`).
pub fn since(text: &str) -> Result<OffsetDateTime, String> {
    if let Ok(at) = OffsetDateTime::parse(text, &Rfc3339) {
        return Ok(at);
    }
    let ago = duration(text).map_err(|_| {
        format!(
            "'{text}' is neither a duration like 90m or 2d nor a time like 2026-01-02T03:04:05Z"
        )
    })?;
    OffsetDateTime::now_utc()
        .checked_sub(
            ago.try_into()
                .map_err(|_| format!("'{text}' is too long ago"))?,
        )
        .ok_or_else(|| format!("'{text}' is too long ago"))
}

pub fn cpus(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|cpus: &f64| cpus.is_finite() && *cpus > 0.0)
        .ok_or_else(|| format!("'{text}' is not a number of processors; write it like 2 or 0.5"))
}

pub fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("'{text}' is not KEY=VALUE")),
    }
}

/// `10.1.0.0/16:443`, `[fd00::/8]:443` or `fd00::/8:443`: the server reads the addresses.
pub fn address(text: &str) -> Result<AllowedAddress, String> {
    let bad = || format!("'{text}' is not CIDR:PORT; write it like 10.1.0.0/16:443");
    let (cidr, port) = text.rsplit_once(':').ok_or_else(bad)?;
    let cidr = cidr
        .strip_prefix('[')
        .and_then(|cidr| cidr.strip_suffix(']'))
        .unwrap_or(cidr);
    let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(bad)?;
    // An IPv6 address without a port ends in a group that looks like one.
    if cidr.is_empty() || cidr.ends_with(':') || (cidr.contains(':') && !text.contains(['/', '[']))
    {
        return Err(bad());
    }
    Ok(AllowedAddress {
        cidr: cidr.to_owned(),
        port,
    })
}

/// `test='pytest -q'`: a name, and a command whose words are split and quoted as in a shell.
pub fn check(text: &str) -> Result<RepositoryCheck, String> {
    let (name, command) = key_value(text)?;
    let argv = shlex::split(&command)
        .filter(|argv| !argv.is_empty())
        .ok_or_else(|| format!("'{command}' is not a command: a quote is open, or it is empty"))?;
    Ok(RepositoryCheck {
        name,
        argv,
        image_ref: None,
        timeout_seconds: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_range_with_a_port() {
        for (text, cidr) in [
            ("10.1.0.0/16:443", "10.1.0.0/16"),
            ("127.0.0.1:443", "127.0.0.1"),
            ("fd00::/8:443", "fd00::/8"),
            ("[fd00::1]:443", "fd00::1"),
        ] {
            let parsed = address(text).expect(text);
            assert_eq!((parsed.cidr.as_str(), parsed.port), (cidr, 443), "{text}");
        }
        for text in [
            "",
            ":443",
            "10.0.0.1",
            "10.0.0.1:0",
            "10.0.0.1:x",
            "fd00::443",
            "::1:1",
        ] {
            assert!(address(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_check_is_a_name_and_words() {
        let parsed = check("test=sh -c 'pytest -q'").expect("a check");
        assert_eq!(
            (parsed.name.as_str(), parsed.argv),
            (
                "test",
                ["sh", "-c", "pytest -q"].map(str::to_owned).to_vec()
            )
        );
        for text in ["test", "test=", "=x", "test='open"] {
            assert!(check(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_in_units_of_1024() {
        for (text, bytes) in [
            ("1", 1),
            ("512m", 512 << 20),
            ("2g", 2 << 30),
            ("2GiB", 2 << 30),
            ("10kb", 10 << 10),
            ("1T", 1 << 40),
            ("7b", 7),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "g",
            "-1",
            "1.5g",
            "2x",
            "0",
            "1ib",
            "99999999999999999999",
            "99999999999t",
            "1 g",
        ] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_add_up() {
        for (text, millis) in [
            ("24h", 86_400_000),
            ("1h30m", 5_400_000),
            ("90", 90_000),
            ("500ms", 500),
            ("2d", 172_800_000),
            ("1m1s1ms", 61_001),
            ("1.5h", 5_400_000),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in [
            "",
            "m",
            "-3s",
            "5x",
            "0",
            "0s",
            "10m5",
            "99999999999999999999s",
            "9999999999999999999d",
        ] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn since_takes_a_duration_or_a_time() {
        assert_eq!(
            since("2026-01-02T03:04:05Z"),
            Ok(time::macros::datetime!(2026-01-02 03:04:05 UTC))
        );
        let then = since("90m").expect("a duration");
        let ago = OffsetDateTime::now_utc() - then;
        assert!((5_400..5_460).contains(&ago.whole_seconds()), "{ago}");
        for text in [
            "",
            "yesterday",
            "2026-01-02",
            "-1h",
            "99999999999999d",
            "9999999d",
        ] {
            assert!(since(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_value_may_hold_equals_signs_and_a_key_must_not_be_empty() {
        assert_eq!(key_value("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert_eq!(key_value("A="), Ok(("A".into(), String::new())));
        assert!(key_value("=x").is_err());
        assert!(key_value("A").is_err());
    }
}
