//! The commit that the role writes.
//!
//! Invariant: its text is a function of the request, so a repeated build gives the same id, and
//! only commits of exactly this form are pushed.

use cynode_api::{PromotionId, TaskId};

use super::{ChangeError, defuse, objects::ObjectStore, output::ObjectId};

const COMMITTER: &str = "CyNode <cynode@cynode.invalid>";
/// The local part of an author's address.
const MAX_ADDRESS_BYTES: usize = 64;
/// A commit that is read back: the message, and headers of a few hundred bytes.
const MAX_COMMIT_BYTES: u64 = 64 * 1024;

/// What a commit says besides its tree.
#[derive(Clone, Debug)]
pub(crate) struct CommitText<'a> {
    pub(crate) task: TaskId,
    pub(crate) promotion: PromotionId,
    pub(crate) author: &'a str,
    pub(crate) message: &'a str,
    /// Seconds since 1970.
    pub(crate) at: i64,
}

impl CommitText<'_> {
    pub(super) fn render(&self, tree: ObjectId, base: ObjectId) -> String {
        let author = defuse::author(self.author);
        let address = address(&author);
        let message = defuse::message(self.message);
        let at = self.at.max(0);
        let trailers = trailers(self.task, self.promotion);
        format!(
            "tree {tree}\nparent {base}\nauthor {author} <{address}> {at} +0000\ncommitter \
             {COMMITTER} {at} +0000\n\n{message}{trailers}"
        )
    }
}

fn trailers(task: TaskId, promotion: PromotionId) -> String {
    format!("\n\nCyNode-Task: {task}\nCyNode-Promotion: {promotion}\n")
}

/// An address of a domain that can't exist, so that no forge attributes the commit to an account.
fn address(author: &str) -> String {
    let mut local = String::new();
    for letter in author.chars() {
        if letter.is_ascii_alphanumeric() {
            local.push(letter.to_ascii_lowercase());
        } else if !local.is_empty() && !local.ends_with('-') {
            local.push('-');
        }
    }
    local.truncate(MAX_ADDRESS_BYTES);
    let local = local.trim_matches('-');
    let local = if local.is_empty() { "agent" } else { local };
    format!("{local}@cynode.invalid")
}

/// Checks that a commit is one that [`CommitText::render`] made for this promotion and base, and
/// returns its tree. The mirror has the commits of all branches, too.
pub(crate) async fn check_commit(
    store: &ObjectStore<'_>,
    commit: ObjectId,
    base: ObjectId,
    task: TaskId,
    promotion: PromotionId,
) -> Result<ObjectId, ChangeError> {
    let name = commit.to_string();
    let args = ["cat-file", "commit", &name];
    let text = store
        .run(&args, bytes::Bytes::new(), None, MAX_COMMIT_BYTES)
        .await?;
    std::str::from_utf8(&text)
        .ok()
        .and_then(|text| tree_of(text, base, task, promotion))
        .ok_or(ChangeError::ForeignCommit(commit))
}

fn tree_of(text: &str, base: ObjectId, task: TaskId, promotion: PromotionId) -> Option<ObjectId> {
    let (head, message) = text.split_once("\n\n")?;
    let lines: Vec<&str> = head.split('\n').collect();
    let [tree, parent, author, committer] = lines.as_slice() else {
        return None;
    };
    let tree = ObjectId::parse(tree.strip_prefix("tree ")?)?;
    let is_ours = *parent == format!("parent {base}")
        && author.starts_with("author ")
        && author.contains("@cynode.invalid> ")
        && committer.starts_with(&format!("committer {COMMITTER} "))
        && format!("\n\n{message}").ends_with(&trailers(task, promotion));
    is_ours.then_some(tree)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids() -> (ObjectId, ObjectId) {
        let id = |digit: &str| ObjectId::parse(&digit.repeat(40)).expect("an id");
        (id("1"), id("2"))
    }

    fn text(task: TaskId, promotion: PromotionId) -> CommitText<'static> {
        CommitText {
            task,
            promotion,
            author: "Mallory\nparent 33 <m@evil> \u{202e}",
            message: "Fix it\n\nSigned-off-by: Somebody <s@example.org>",
            at: 1_700_000_000,
        }
    }

    #[test]
    fn a_commit_is_recognized_by_its_whole_form() {
        let (tree, base) = ids();
        let (task, promotion) = (TaskId::generate(), PromotionId::generate());
        let written = text(task, promotion).render(tree, base);
        assert_eq!(written, text(task, promotion).render(tree, base));
        assert_eq!(tree_of(&written, base, task, promotion), Some(tree));
        assert_eq!(tree_of(&written, tree, task, promotion), None);
        assert_eq!(tree_of(&written, base, TaskId::generate(), promotion), None);
        assert_eq!(tree_of(&written, base, task, PromotionId::generate()), None);
        let merge = written.replacen("author ", &format!("parent {tree}\nauthor "), 1);
        assert_eq!(tree_of(&merge, base, task, promotion), None);
        assert_eq!(
            written
                .lines()
                .filter(|line| line.starts_with("parent"))
                .count(),
            1
        );
        assert!(written.contains("<mallory-parent-33-m-evil@cynode.invalid>"));
        assert!(!written.contains("Signed-off-by:"));
    }

    #[test]
    fn every_author_has_an_address() {
        assert_eq!(address("Ada L."), "ada-l@cynode.invalid");
        assert_eq!(address("Ω"), "agent@cynode.invalid");
        assert!(address(&"a b".repeat(100)).len() < 90);
    }
}
