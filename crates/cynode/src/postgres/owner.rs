//! Whose the private server is. PostgreSQL refuses to run as root: root's runs as the user that the server's package made.

use std::{io, os::unix::fs::MetadataExt as _, path::PathBuf, process::Command};

use rustix::{
    process::{Gid, Uid, geteuid},
    thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid},
};

use crate::failure::{Failure, USAGE};

/// Another user than ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
}

impl Owner {
    /// `None` when the server runs as ourselves.
    pub fn find() -> Result<Option<Self>, Failure> {
        if !geteuid().is_root() {
            return Ok(None);
        }
        let users = fs_err::read_to_string("/etc/passwd")?;
        // The second is everybody's, and better than root.
        let found = ["postgres", "nobody"].into_iter().find_map(|name| in_passwd(&users, name));
        found.map(Some).ok_or_else(|| {
            Failure::new(USAGE, "postgres_user", "PostgreSQL does not run as root, and there is neither a user 'postgres' nor 'nobody'")
                .remedy("Make one (useradd --system postgres), run CyNode as an ordinary user, or use another server by DATABASE_URL.")
        })
    }

    /// Goes on as this user, for good. Only the calling thread does: it must be the one that goes on to run another program.
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
        Some(Owner { name: name.to_owned(), uid: fields.nth(1)?.parse().ok()?, gid: fields.next()?.parse().ok()? })
    })
}

/// Our own user's name, wherever users come from.
#[expect(clippy::disallowed_methods, reason = "asks the system's own program, which knows every source of users")]
pub fn own_name() -> Result<String, Failure> {
    let said = Command::new("id").arg("-un").output()?;
    let name = String::from_utf8_lossy(&said.stdout).trim().to_owned();
    if name.is_empty() { Err(Failure::internal("this user has no name; PostgreSQL needs one")) } else { Ok(name) }
}

/// What lives until the next boot.
pub fn runtime_directory() -> PathBuf {
    let uid = geteuid().as_raw();
    if uid == 0 {
        return PathBuf::from("/run/cynode-postgres");
    }
    let login = PathBuf::from(format!("/run/user/{uid}"));
    if fs_err::metadata(&login).is_ok_and(|metadata| metadata.uid() == uid) {
        login.join("cynode-postgres")
    } else {
        format!("/tmp/cynode-{uid}/postgres").into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_by_the_whole_name() {
        let users = "root:x:0:0:root:/root:/bin/bash\npostgres2:x:7:8::/:/bin/sh\npostgres:x:101:104:PostgreSQL,,,:/var/lib/postgresql:/bin/bash\n";
        assert_eq!(in_passwd(users, "postgres"), Some(Owner { name: "postgres".into(), uid: 101, gid: 104 }));
        assert_eq!(in_passwd(users, "nobody"), None);
    }
}
