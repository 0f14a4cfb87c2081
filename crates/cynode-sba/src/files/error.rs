//! Errors of file operations, and the mapping of system errors to the API's codes.
//!
//! Invariants: a message names the operation and the path, both safe to print (control characters
//! and bytes that are not UTF-8 are escaped); a lost connection is returned, never replied to.

use std::io;

use cynode_api::{ErrorCode, PatchReject};
pub(super) use cynode_patch::escaped;
use cynode_sba_proto::AgentError;
use rustix::io::Errno;

/// The reason why an operation failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// Reported with `Reply::Error`.
    Refused(AgentError),
    /// The connection broke, so no reply is possible.
    Connection(io::Error),
}

pub(super) type Outcome<T> = Result<T, Failure>;

impl Failure {
    pub(super) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self::Refused(AgentError::new(code, message))
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidRequest, message)
    }

    pub(super) fn rejected(message: impl Into<String>, rejects: Vec<PatchReject>) -> Self {
        let mut error = AgentError::new(ErrorCode::PatchRejected, message);
        error.rejects = rejects;
        Self::Refused(error)
    }

    /// A system error of the operation `doing` (such as "opening") on `path`.
    pub(super) fn system(errno: Errno, doing: &str, path: &[u8]) -> Self {
        let name = errno_name(errno);
        let mut error = AgentError::new(
            code_of(errno),
            format!("{doing} {}: {} ({name})", shown(path), meaning(errno)),
        );
        error.errno = Some(name);
        Self::Refused(error)
    }

    /// Like [`Failure::system`], for errors from `std::io`.
    pub(super) fn io(error: &io::Error, doing: &str, path: &[u8]) -> Self {
        match Errno::from_io_error(error) {
            Some(errno) => Self::system(errno, doing, path),
            None => Self::new(
                ErrorCode::Internal,
                format!("{doing} {}: {error}", shown(path)),
            ),
        }
    }
}

/// Adds operation and path to a system error.
pub(super) trait FailureContext<T> {
    fn doing(self, operation: &str, path: &[u8]) -> Outcome<T>;
}

impl<T> FailureContext<T> for Result<T, Errno> {
    fn doing(self, operation: &str, path: &[u8]) -> Outcome<T> {
        self.map_err(|errno| Failure::system(errno, operation, path))
    }
}

impl<T> FailureContext<T> for io::Result<T> {
    fn doing(self, operation: &str, path: &[u8]) -> Outcome<T> {
        self.map_err(|error| Failure::io(&error, operation, path))
    }
}

fn code_of(errno: Errno) -> ErrorCode {
    match errno {
        Errno::NOENT => ErrorCode::NotFound,
        Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::TXTBSY | Errno::BUSY => {
            ErrorCode::PermissionDenied
        }
        Errno::NOTDIR => ErrorCode::NotADirectory,
        // ENXIO: a socket, or a device without a driver.
        Errno::ISDIR | Errno::NXIO => ErrorCode::NotAFile,
        Errno::NOTEMPTY => ErrorCode::NotEmpty,
        Errno::EXIST => ErrorCode::AlreadyExists,
        Errno::NOSPC | Errno::DQUOT => ErrorCode::NoSpace,
        Errno::FBIG => ErrorCode::TooLarge,
        Errno::NAMETOOLONG | Errno::LOOP | Errno::INVAL | Errno::XDEV | Errno::ILSEQ => {
            ErrorCode::InvalidRequest
        }
        _ => ErrorCode::Internal,
    }
}

macro_rules! errnos {
    ($($constant:ident = $name:literal, $meaning:literal;)*) => {
        fn errno_name(errno: Errno) -> String {
            match errno {
                $(Errno::$constant => $name.to_owned(),)*
                other => format!("errno {}", other.raw_os_error()),
            }
        }

        fn meaning(errno: Errno) -> &'static str {
            match errno {
                $(Errno::$constant => $meaning,)*
                _ => "system error",
            }
        }
    };
}

errnos! {
    NOENT = "ENOENT", "no such file or directory";
    ACCESS = "EACCES", "permission denied";
    PERM = "EPERM", "operation not permitted";
    ROFS = "EROFS", "read-only file system";
    TXTBSY = "ETXTBSY", "the program is running";
    BUSY = "EBUSY", "in use by the system";
    NOTDIR = "ENOTDIR", "a part of the path is not a directory";
    ISDIR = "EISDIR", "is a directory";
    NXIO = "ENXIO", "not a regular file";
    NOTEMPTY = "ENOTEMPTY", "the directory is not empty";
    EXIST = "EEXIST", "already exists";
    NOSPC = "ENOSPC", "no space left";
    DQUOT = "EDQUOT", "the disk quota is exceeded";
    FBIG = "EFBIG", "the file would be too large";
    NAMETOOLONG = "ENAMETOOLONG", "the name is too long";
    LOOP = "ELOOP", "too many symbolic links";
    INVAL = "EINVAL", "invalid argument";
    XDEV = "EXDEV", "crosses file systems";
    ILSEQ = "EILSEQ", "the file system does not support the name";
    NOMEM = "ENOMEM", "out of memory";
    MFILE = "EMFILE", "too many open files";
    NFILE = "ENFILE", "too many open files in the system";
    MLINK = "EMLINK", "too many links";
    IO = "EIO", "input or output error";
    AGAIN = "EAGAIN", "try again";
    NOSYS = "ENOSYS", "not supported by the kernel";
    OPNOTSUPP = "EOPNOTSUPP", "not supported by the file system";
    STALE = "ESTALE", "the file is gone";
}

/// The longest path in a message.
const SHOWN_PATH_BYTES: usize = 512;

/// Quotes a path for messages: escapes control characters and undecodable bytes, and truncates the
/// middle of a very long path.
pub(super) fn shown(path: &[u8]) -> String {
    if path.len() > SHOWN_PATH_BYTES {
        let (head, tail) = (
            &path[..SHOWN_PATH_BYTES / 2],
            &path[path.len() - SHOWN_PATH_BYTES / 2..],
        );
        return format!("'{}…{}'", escaped(head), escaped(tail));
    }
    format!("'{}'", escaped(path))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refused(failure: Failure) -> AgentError {
        match failure {
            Failure::Refused(error) => error,
            Failure::Connection(error) => panic!("expected an answer, got {error}"),
        }
    }

    #[test]
    fn a_system_error_carries_code_name_operation_and_path() {
        let error = refused(Failure::system(Errno::NOENT, "opening", b"a\nb\xff"));
        assert_eq!(error.code, ErrorCode::NotFound);
        assert_eq!(error.errno.as_deref(), Some("ENOENT"));
        assert_eq!(
            error.message,
            "opening 'a\\nb\\xff': no such file or directory (ENOENT)"
        );
    }

    #[test]
    fn each_documented_errno_has_its_code() {
        for (errno, code) in [
            (Errno::ACCESS, ErrorCode::PermissionDenied),
            (Errno::PERM, ErrorCode::PermissionDenied),
            (Errno::ROFS, ErrorCode::PermissionDenied),
            (Errno::NOTDIR, ErrorCode::NotADirectory),
            (Errno::ISDIR, ErrorCode::NotAFile),
            (Errno::NOTEMPTY, ErrorCode::NotEmpty),
            (Errno::EXIST, ErrorCode::AlreadyExists),
            (Errno::NOSPC, ErrorCode::NoSpace),
            (Errno::DQUOT, ErrorCode::NoSpace),
            (Errno::NAMETOOLONG, ErrorCode::InvalidRequest),
            (Errno::LOOP, ErrorCode::InvalidRequest),
            (Errno::INVAL, ErrorCode::InvalidRequest),
            (Errno::NOMEM, ErrorCode::Internal),
            (Errno::MFILE, ErrorCode::Internal),
            (Errno::from_raw_os_error(4_000), ErrorCode::Internal),
        ] {
            assert_eq!(
                refused(Failure::system(errno, "x", b"y")).code,
                code,
                "{errno:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn shown_paths_are_short_and_have_no_control_characters(
            path in proptest::collection::vec(any::<u8>(), 0..6_000),
        ) {
            let text = shown(&path);
            prop_assert!(!text.chars().any(char::is_control));
            prop_assert!(text.len() <= SHOWN_PATH_BYTES * 8 + 8);
        }
    }
}
