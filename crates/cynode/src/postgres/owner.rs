//! The user of the private server. PostgreSQL refuses to run as root, so root's server runs as the
//! user that its package created.

use std::{
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    process::Command,
};

use cynode_service::private;
use rustix::{
    process::{Gid, Uid, geteuid},
    thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid},
};

use crate::failure::{Failure, USAGE};

/// A user other than the current one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
}

impl Owner {
    /// `None` if the server runs as the current user.
    pub fn find() -> Result<Option<Self>, Failure> {
        if !geteuid().is_root() {
            return Ok(None);
        }
        let users = fs_err::read_to_string("/etc/passwd")?;
        // `nobody` is shared with other services, but better than root.
        let owner = ["postgres", "nobody"]
            .into_iter()
            .find_map(|name| in_passwd(&users, name));
        owner.map(Some).ok_or_else(|| {
            Failure::new(
                USAGE,
                "postgres_user",
                "PostgreSQL does not run as root, and neither user 'postgres' nor 'nobody' exists",
            )
            .remedy(
                "Create the user (useradd --system postgres), run CyNode as an ordinary user, or \
                 set DATABASE_URL to use another server.",
            )
        })
    }

    /// Switches to this user permanently. Only affects the calling thread, which must be the one
    /// that executes the next program.
    pub fn assume(&self) -> io::Result<()> {
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        set_thread_groups(&[])?;
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
        Ok(())
    }
}

fn in_passwd(users: &str, name: &str) -> Option<Owner> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next()? != name {
            return None;
        }
        Some(Owner {
            name: name.to_owned(),
            uid: fields.nth(1)?.parse().ok()?,
            gid: fields.next()?.parse().ok()?,
        })
    })
}

/// The name of the current user, from any user database.
#[expect(
    clippy::disallowed_methods,
    reason = "id knows every user database of the system"
)]
pub fn current_user() -> Result<String, Failure> {
    let output = Command::new("id").arg("-un").output()?;
    let name = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if name.is_empty() {
        Err(Failure::internal(
            "the current user has no name; PostgreSQL needs one",
        ))
    } else {
        Ok(name)
    }
}

/// The directory of sockets whose path in the state directory is too long. Independent of the
/// environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuntimeDirectory {
    /// Root's directory, which the server's user must be able to traverse.
    System(PathBuf),
    /// The user's runtime directory, which systemd creates (`XDG_RUNTIME_DIR`).
    Login(PathBuf),
    /// A directory below `/tmp`, where another user may have created it before.
    Shared(PathBuf),
}

impl RuntimeDirectory {
    pub fn find() -> Self {
        let uid = geteuid().as_raw();
        if uid == 0 {
            return Self::System(PathBuf::from("/run/cynode-postgres"));
        }
        let login = PathBuf::from(format!("/run/user/{uid}"));
        if fs_err::symlink_metadata(&login)
            .is_ok_and(|entry| entry.is_dir() && entry.uid() == uid && entry.mode() & 0o022 == 0)
        {
            Self::Login(login.join("cynode-postgres"))
        } else {
            Self::Shared(format!("/tmp/cynode-{uid}").into())
        }
    }

    pub fn path(&self) -> PathBuf {
        match self {
            Self::System(path) | Self::Login(path) => path.clone(),
            Self::Shared(parent) => parent.join("postgres"),
        }
    }

    /// Creates the directory and ensures that no other user can write to it: clients would connect
    /// to another user's socket.
    pub fn secure(&self) -> Result<(), Failure> {
        let secured = match self {
            Self::System(path) => root_directory(path),
            Self::Login(path) => private::closed_directory(path),
            Self::Shared(parent) => private::private_directory(parent)
                .and_then(|()| private::closed_directory(&parent.join("postgres"))),
        };
        secured.map_err(|error| {
            Failure::new(
                USAGE,
                "unsafe_directory",
                format!("the PostgreSQL socket can't be protected from other users: {error}"),
            )
            .remedy(
                "Correct the directory, or choose a state directory with a shorter path \
                 (--state-dir), which then contains the socket.",
            )
        })
    }
}

/// Creates a directory that only root can write to and everybody can traverse.
fn root_directory(path: &Path) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o755).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let entry = fs_err::symlink_metadata(path)?;
    if entry.is_dir() && entry.uid() == 0 && entry.mode() & 0o022 == 0 {
        Ok(())
    } else {
        Err(io::Error::other(format!(
            "{} is not a directory that only root can write to: remove it",
            path.display()
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    // invariant: supervisor
    fn a_directory_below_tmp_is_ours_alone_or_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let root = tempfile::tempdir().expect("a directory");
        let parent = root.path().join("cynode-1000");
        let directory = RuntimeDirectory::Shared(parent.clone());
        directory.secure().expect("made");
        directory.secure().expect("the same again");
        for path in [&parent, &directory.path()] {
            assert_eq!(
                fs_err::metadata(path).expect("there").mode() & 0o777,
                0o700,
                "{}",
                path.display()
            );
        }
        // Another user was first: a writable directory, a link, a link to a server.
        fs_err::set_permissions(&parent, std::fs::Permissions::from_mode(0o777)).expect("opened");
        let refused = directory.secure().expect_err("open to others");
        assert_eq!(refused.exit, USAGE);
        assert!(
            refused.message().contains("chmod 700")
                && refused
                    .remedy_text()
                    .is_some_and(|remedy| remedy.contains("--state-dir")),
            "{refused:?}"
        );
        fs_err::remove_dir_all(&parent).expect("removed");
        let elsewhere = root.path().join("elsewhere");
        fs_err::create_dir(&elsewhere).expect("made");
        std::os::unix::fs::symlink(&elsewhere, &parent).expect("linked");
        assert!(directory.secure().is_err());
        fs_err::remove_file(&parent).expect("removed");
        fs_err::create_dir(&parent).expect("made");
        fs_err::set_permissions(&parent, std::fs::Permissions::from_mode(0o700)).expect("closed");
        std::os::unix::fs::symlink(&elsewhere, directory.path()).expect("linked");
        assert!(directory.secure().is_err());
        assert_eq!(
            fs_err::read_dir(&elsewhere).expect("a directory").count(),
            0,
            "something was created at the target of a link"
        );
        if geteuid().is_root() {
            fs_err::remove_file(directory.path()).expect("removed");
            std::os::unix::fs::chown(&parent, Some(65_534), None).expect("given away");
            assert!(
                directory
                    .secure()
                    .expect_err("another's")
                    .message()
                    .contains("belongs to another user")
            );
        }
    }

    #[test]
    fn a_user_is_found_by_the_whole_name() {
        let users = "root:x:0:0:root:/root:/bin/bash\npostgres2:x:7:8::/:/bin/sh\n\
                     postgres:x:101:104:PostgreSQL,,,:/var/lib/postgresql:/bin/bash\n";
        assert_eq!(
            in_passwd(users, "postgres"),
            Some(Owner {
                name: "postgres".into(),
                uid: 101,
                gid: 104
            })
        );
        assert_eq!(in_passwd(users, "nobody"), None);
    }
}
