//! The seccomp profile of every sandbox: `seccomp.json` next to this file, with a reason for each
//! group of syscalls.
//!
//! Invariant: no sandbox runs without the profile. Podman reads it from a file, which the Podman
//! driver writes before it first calls Podman; Docker's API takes the text of the profile.

use std::{
    io,
    path::{Path, PathBuf},
};

/// The profile in the format that Podman and Docker share.
pub(crate) const PROFILE: &str = include_str!("seccomp.json");

/// Writes the profile atomically to a directory and returns its path.
pub(crate) fn write(directory: &Path) -> io::Result<PathBuf> {
    fs_err::create_dir_all(directory)?;
    let path = directory.join("seccomp.json");
    cynode_service::files::replace(&path, PROFILE.as_bytes())?;
    // It is not secret, and the service that reads it may run as another user.
    fs_err::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn groups() -> Vec<Value> {
        let profile: Value = serde_json::from_str(PROFILE).expect("the profile is JSON");
        assert_eq!(profile["defaultAction"], "SCMP_ACT_ERRNO");
        profile["syscalls"].as_array().expect("groups").clone()
    }

    /// Returns whether a call is allowed; asserts that no other group denies it.
    fn allowed(groups: &[Value], name: &str, arguments: [u64; 3]) -> bool {
        let holds = |condition: &Value| {
            let number = |key: &str| condition[key].as_u64().unwrap_or_default();
            let argument = arguments[usize::try_from(number("index")).expect("an index")];
            match condition["op"].as_str().expect("an operator") {
                "SCMP_CMP_EQ" => argument == number("value"),
                "SCMP_CMP_GT" => argument > number("value"),
                "SCMP_CMP_MASKED_EQ" => argument & number("value") == number("valueTwo"),
                other => panic!("{other}"),
            }
        };
        let actions: Vec<bool> = groups
            .iter()
            .filter(|group| group["names"][0] == name)
            .filter(|group| {
                group["args"]
                    .as_array()
                    .is_none_or(|conditions| conditions.iter().all(holds))
            })
            .map(|group| group["action"] == "SCMP_ACT_ALLOW")
            .collect();
        assert!(
            actions.windows(2).all(|pair| pair[0] == pair[1]),
            "{name} {arguments:?} is both allowed and denied"
        );
        actions.first().copied().unwrap_or(false)
    }

    #[test]
    fn every_group_has_a_reason_and_unconditional_calls_are_unique() {
        let mut conditional = std::collections::BTreeSet::new();
        let mut unconditional = std::collections::BTreeSet::new();
        for group in groups() {
            assert!(
                group["comment"]
                    .as_str()
                    .is_some_and(|comment| !comment.is_empty()),
                "{group}"
            );
            // OCI runtimes treat two conditions on one argument as alternatives.
            let conditions = group["args"].as_array().cloned().unwrap_or_default();
            let indices: std::collections::BTreeSet<_> = conditions
                .iter()
                .map(|condition| condition["index"].as_u64())
                .collect();
            assert_eq!(indices.len(), conditions.len(), "{group}");
            for name in group["names"].as_array().expect("names") {
                let name = name.as_str().expect("a name").to_owned();
                if conditions.is_empty() {
                    assert!(unconditional.insert(name.clone()), "{name} is listed twice");
                } else {
                    conditional.insert(name);
                }
            }
        }
        assert_eq!(
            conditional.intersection(&unconditional).collect::<Vec<_>>(),
            Vec::<&String>::new()
        );
    }

    #[test]
    fn conditions_have_no_gaps_and_ignore_high_bits() {
        let groups = groups();
        for high in [0, 1 << 32, u64::from(u32::MAX) << 32] {
            for command in (0_u64..32)
                .map(|bit| 1 << bit)
                .chain(0x5400..0x5480)
                .chain([0x8004_5430, 0xc020_660b, 0x8000_5412, 0xffff_ffff])
            {
                let refused = matches!(command, 0x5412 | 0x541c);
                assert_eq!(
                    allowed(&groups, "ioctl", [0, high | command, 0]),
                    !refused,
                    "{command:#x}"
                );
            }
            for bit in 0..32 {
                let namespace = matches!(bit, 17 | 25..=30);
                assert_eq!(
                    allowed(&groups, "clone", [high | 1 << bit, 0, 0]),
                    !namespace,
                    "{bit}"
                );
                assert_eq!(
                    allowed(&groups, "unshare", [high | 1 << bit, 0, 0]),
                    !namespace && bit != 7,
                    "{bit}"
                );
            }
            for kind in 0..16 {
                assert_eq!(
                    allowed(&groups, "mknod", [0, high | kind << 12 | 0o644, 0]),
                    matches!(kind, 0 | 1 | 8 | 12),
                    "{kind}"
                );
            }
        }
    }

    #[test]
    fn only_a_few_socket_families_types_and_protocols_are_allowed() {
        let groups = groups();
        for family in (0_u64..64).chain([0x1_0000_0002, 0x1_0000_0028, u64::MAX]) {
            for kind in [1_u64, 2, 3, 5, 6] {
                for protocol in [0_u64, 1, 4, 6, 9, 17, 33, 58, 132, 262] {
                    let expected = matches!(
                        (family, kind, protocol),
                        (1, _, _) | (2 | 10, 1, 0 | 6) | (2 | 10, 2, 0 | 17) | (16, _, 0)
                    );
                    let with_flags = kind | 0o2_004_000;
                    assert_eq!(
                        allowed(&groups, "socket", [family, with_flags, protocol]),
                        expected,
                        "{family} {kind} {protocol}"
                    );
                }
            }
            assert_eq!(
                allowed(&groups, "socketpair", [family, 1, 0]),
                family == 1,
                "{family}"
            );
        }
    }
}
