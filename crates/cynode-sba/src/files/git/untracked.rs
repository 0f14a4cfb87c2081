//! Adds what git does not track to a private index.
//!
//! git neither lists nor adds the files of a repository within the work tree, unless its index has
//! a file there already. So the private index first gets a marker in each such repository: a file
//! that need not exist, and that no diff shows then.

use std::{
    ffi::OsStr,
    io::{BufRead as _, BufReader, BufWriter, Read as _, Write as _},
    os::unix::ffi::OsStrExt as _,
    process::Stdio,
};

use cynode_api::FileType;
use cynode_patch::spells_git;
use cynode_sba_proto::MAX_DATA;
use rustix::fs::{AtFlags, CWD, statat};

use super::Git;
use crate::files::{
    error::{FailureContext, Outcome},
    path,
};

/// A file in each repository within the work tree.
const MARKER: &[u8] = b".cynode-nested";
/// Repositories within repositories are entered this deep; deeper ones are left out.
const MAX_NESTED_REPOSITORIES: usize = 64;
/// In the scratch directory: what is to be added to the index.
const ADDITIONS: &str = "additions";

/// Names to add to the index, without contents: a diff reads them in place.
struct Additions {
    out: BufWriter<std::fs::File>,
    empty_blob: String,
    count: u64,
}

impl Additions {
    fn add(&mut self, parts: &[&[u8]]) -> Outcome<()> {
        let name = parts.concat();
        if name.split(|byte| *byte == b'/').any(spells_git) {
            // git refuses some of these names, and with one all others.
            return Ok(());
        }
        self.count += 1;
        write!(self.out, "100644 {} 0\t", self.empty_blob)
            .and_then(|()| self.out.write_all(&name))
            .and_then(|()| self.out.write_all(&[0]))
            .doing("writing", ADDITIONS.as_bytes())
    }
}

impl Git<'_> {
    /// Adds the names of untracked files to the private index, except for those that git ignores.
    pub(super) fn add_untracked(&self) -> Outcome<()> {
        self.replace_by_directories()?;
        self.enter_repositories(true)?;
        let mut additions = self.additions()?;
        self.for_each_untracked(true, |name| match name {
            [.., b'/'] => Ok(()),
            file => additions.add(&[file]),
        })?;
        self.store(additions).map(drop)
    }

    /// Marks the repositories within the work tree, so that git treats them as plain directories.
    pub(super) fn enter_repositories(&self, with_ignore_rules: bool) -> Outcome<()> {
        for _ in 0..MAX_NESTED_REPOSITORIES {
            let mut additions = self.additions()?;
            self.for_each_untracked(with_ignore_rules, |name| match name {
                [.., b'/'] => additions.add(&[name, MARKER]),
                _ => Ok(()),
            })?;
            if !self.store(additions)? {
                break;
            }
        }
        Ok(())
    }

    /// Marks directories in the place of tracked files: git would take them for submodules if they
    /// are repositories.
    fn replace_by_directories(&self) -> Outcome<()> {
        let mut additions = self.additions()?;
        let list = ["diff-files", "--name-only", "-z", "--diff-filter=DT"];
        self.for_each_name(&list, |name| {
            let path = self.root.join(OsStr::from_bytes(name));
            match statat(CWD, &path, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) if path::kind(&stat) == FileType::Dir => {
                    additions.add(&[name, b"/", MARKER])
                }
                _ => Ok(()),
            }
        })?;
        self.store(additions).map(drop)
    }

    /// Calls `visit` with each untracked file, and with each repository, with a slash at the end.
    fn for_each_untracked(
        &self,
        with_ignore_rules: bool,
        visit: impl FnMut(&[u8]) -> Outcome<()>,
    ) -> Outcome<()> {
        let list = ["ls-files", "--others", "-z", "--exclude-standard"];
        let count = list.len() - usize::from(!with_ignore_rules);
        self.for_each_name(&list[..count], visit)
    }

    /// Calls `visit` with each name in the NUL-separated output of a command.
    fn for_each_name(
        &self,
        arguments: &[&str],
        mut visit: impl FnMut(&[u8]) -> Outcome<()>,
    ) -> Outcome<()> {
        let mut child = self.spawn(arguments)?;
        let mut read = || -> Outcome<()> {
            let Some(stdout) = child.stdout.take() else {
                return Ok(());
            };
            let mut stdout = BufReader::new(stdout);
            let mut name = Vec::new();
            loop {
                name.clear();
                let mut bounded = stdout.by_ref().take(MAX_DATA as u64);
                let count = bounded
                    .read_until(0, &mut name)
                    .doing("reading from", b"git")?;
                if count == 0 {
                    return Ok(());
                }
                if name.pop_if(|last| *last == 0).is_some() {
                    visit(&name)?;
                }
            }
        };
        let visited = read();
        if visited.is_err() {
            // It may have exited already.
            let _killed = child.kill();
        }
        let status = child.wait().doing("waiting for", b"git")?;
        visited?;
        if status.success() {
            Ok(())
        } else {
            Err(self.git_failure(&arguments.join(" "), status))
        }
    }

    fn additions(&self) -> Outcome<Additions> {
        let empty_blob = self.line(&["hash-object", "-t", "blob", "/dev/null"])?;
        Ok(Additions {
            out: BufWriter::new(self.scratch.create(ADDITIONS)?),
            empty_blob: empty_blob.unwrap_or_default(),
            count: 0,
        })
    }

    /// Changes the index. Returns whether there was anything to add.
    fn store(&self, mut additions: Additions) -> Outcome<bool> {
        if additions.count == 0 {
            return Ok(false);
        }
        additions
            .out
            .flush()
            .doing("writing", ADDITIONS.as_bytes())?;
        let stdin = Stdio::from(self.scratch.open(ADDITIONS)?);
        self.run_with(stdin, &["update-index", "-z", "--index-info"])?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::super::{super::tests::*, tests::*};

    const LIBRARY: &str = "vendor/lib";

    /// Makes a directory of the workspace a repository, with a commit if there are files.
    fn nest(workspace: &TestWorkspace, directory: &str, commit: bool) {
        git(workspace, &["init", "--quiet", directory]);
        if commit {
            git(workspace, &["-C", directory, "add", "."]);
            git(
                workspace,
                &["-C", directory, "commit", "--quiet", "-m", "nested"],
            );
        }
    }

    fn sections(diff: &str) -> Vec<&str> {
        diff.lines()
            .filter_map(|line| line.strip_prefix("diff --git a/")?.split(" b/").next())
            .collect()
    }

    #[test]
    fn a_repository_that_the_session_makes_comes_out_as_files() {
        for commit in [false, true] {
            let workspace = TestWorkspace::new();
            workspace.put("kept", "same\n");
            workspace.put(".gitignore", "*.o\n");
            snapshot(&workspace);
            workspace.put("app/main", "x\n");
            workspace.put("app/deep/inner/file", "y\n");
            workspace.put("app/main.o", "ignored\n");
            symlink("main", workspace.path("app/link")).expect("link");
            nest(&workspace, "app/deep/inner", commit);
            nest(&workspace, "app", false);
            nest(&workspace, "empty", false);
            workspace.put("kept", "changed\n");
            let diff = exported(&workspace, Some("brought"));
            assert_eq!(
                sections(&diff),
                ["app/deep/inner/file", "app/link", "app/main", "kept"],
                "{diff}"
            );
            assert!(!diff.contains("Subproject"), "{diff}");
            assert_eq!(exported(&workspace, Some("brought")), diff);
        }
    }

    #[test]
    fn repositories_that_were_brought_in_are_compared_file_by_file() {
        for commit in [false, true] {
            let workspace = repository();
            workspace.put(&format!("{LIBRARY}/a"), "one\n");
            workspace.put(&format!("{LIBRARY}/gone"), "one\n");
            nest(&workspace, LIBRARY, commit);
            // It is dirty from the beginning.
            workspace.put(&format!("{LIBRARY}/a"), "two\n");
            workspace.put(&format!("{LIBRARY}/b"), "untracked\n");
            snapshot(&workspace);
            assert_eq!(exported(&workspace, Some("brought")), "");
            workspace.put(&format!("{LIBRARY}/a"), "three\n");
            workspace.put(&format!("{LIBRARY}/new"), "new\n");
            workspace.put("modified", "two\n");
            std::fs::remove_file(workspace.path("vendor/lib/gone")).expect("removed");
            let diff = exported(&workspace, Some("brought"));
            assert_eq!(
                sections(&diff),
                [
                    "modified",
                    "vendor/lib/a",
                    "vendor/lib/gone",
                    "vendor/lib/new"
                ],
                "{diff}"
            );
            assert!(diff.contains("-two\n+three\n"), "{diff}");
        }
    }

    #[test]
    fn a_repository_in_the_place_of_a_file_comes_out_as_files() {
        for commit in [false, true] {
            let workspace = TestWorkspace::new();
            workspace.put("thing", "a file\n");
            snapshot(&workspace);
            std::fs::remove_file(workspace.path("thing")).expect("removed");
            workspace.put("thing/inner", "x\n");
            nest(&workspace, "thing", commit);
            let diff = exported(&workspace, Some("brought"));
            assert_eq!(sections(&diff), ["thing", "thing/inner"], "{diff}");
            assert!(!diff.contains("160000"), "{diff}");
        }
    }

    #[test]
    fn a_nested_repository_does_not_fail_the_diff_against_a_commit() {
        let workspace = repository();
        workspace.put("app/main", "x\n");
        nest(&workspace, "app", false);
        let index = workspace.get(".git/index");
        let diff = exported(&workspace, None);
        assert_eq!(sections(&diff), ["app/main"], "{diff}");
        assert_eq!(workspace.get(".git/index"), index);
    }

    #[test]
    fn directories_that_are_spelled_like_gits_own_are_left_out() {
        let workspace = TestWorkspace::new();
        workspace.put(".GIT/config", "x\n");
        workspace.put("sub/git~1/config", "x\n");
        workspace.put("file", "one\n");
        snapshot(&workspace);
        workspace.put(".GIT/config", "changed\n");
        workspace.put("sub/git~1/config", "changed\n");
        workspace.put("sub/.Git/hooks/x", "new\n");
        workspace.put("file", "two\n");
        let diff = exported(&workspace, Some("brought"));
        assert_eq!(sections(&diff), ["file"], "{diff}");
    }

    #[test]
    fn a_snapshot_that_fails_says_why_later() {
        let workspace = TestWorkspace::new();
        workspace.put("file", "one\n");
        // git adds no such link.
        symlink("file", workspace.path(".gitmodules")).expect("link");
        let answer = workspace.ask(cynode_sba_proto::FileOp::Snapshot, b"");
        let reason = answer.error().message.clone();
        let later = ask(&workspace, Some("brought")).error().message.clone();
        assert!(later.contains(&reason), "{later}: {reason}");
    }
}
