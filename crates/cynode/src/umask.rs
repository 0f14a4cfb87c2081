//! The umask of this process.

use rustix::fs::Mode;

/// The permissions that new files must not have. Read from `/proc`: the system call can only
/// replace the umask, which other threads would notice. Without `/proc`, nobody but the owner gets
/// access.
pub fn umask() -> Mode {
    fs_err::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| parse(&status))
        .unwrap_or(Mode::RWXG | Mode::RWXO)
}

fn parse(status: &str) -> Option<Mode> {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("Umask:"))?
        .trim();
    u32::from_str_radix(mask, 8)
        .ok()
        .map(Mode::from_bits_truncate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_umask_is_read_as_the_kernel_prints_it() {
        let status = "Name:\tcynode\nUmask:\t0027\nState:\tR (running)\n";
        assert_eq!(parse(status), Some(Mode::from_bits_truncate(0o027)));
        assert_eq!(parse("Name:\tUmask:\nUmask:\tx\n"), None);
        assert!(parse(&fs_err::read_to_string("/proc/self/status").expect("a status")).is_some());
    }
}
