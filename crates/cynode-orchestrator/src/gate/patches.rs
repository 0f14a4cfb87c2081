//! The patch of a call: read once in any form that callers write, checked, and sent on encoded.
//!
//! Invariant: nothing of the caller's text but the parsed patch leaves the gate, so the agent
//! touches no path and brings in no content that was not checked here.

use bytes::Bytes;
use cynode_api::{Flags, PatchRepair, file_limits};
use cynode_patch::{Patch, Repair, Section};
use cynode_policy::{Action, Scanner, ShapeAction};
use cynode_service::ApiError;
use serde_json::Value;

use super::leaks::{self, Leak};

/// Larger binary contents are inflated on a blocking thread.
const INLINE_INFLATED_BYTES: usize = 64 * 1024;

/// A patch as the caller wrote it.
#[derive(Debug)]
pub(crate) struct CallerPatch<'a> {
    patch: Patch<'a>,
    repairs: Vec<Repair>,
}

/// A patch that the gate has admitted. A request extension.
#[derive(Clone, Debug)]
pub(crate) struct AdmittedPatch {
    /// For nodes and agents, which decode it.
    pub(crate) encoded: Bytes,
    /// Whether it has parts that nodes and agents of earlier versions refuse.
    pub(crate) needs_extensions: bool,
}

impl<'a> CallerPatch<'a> {
    /// Reads the patch of a body. Other calls have none, nor do malformed bodies, which the handler
    /// refuses.
    pub(crate) fn read(action: Action, body: &'a Value) -> Result<Option<Self>, ApiError> {
        let Some((text, strip)) = (action == Action::FilePatch).then(|| text(body)).flatten()
        else {
            return Ok(None);
        };
        let (patch, repairs) = Patch::parse_any(text.as_bytes(), strip)
            .map_err(|error| ApiError::invalid(format!("the diff can't be parsed: {error}")))?;
        Ok(Some(Self { patch, repairs }))
    }

    /// Every path that the patch touches.
    pub(crate) fn paths(&self) -> Vec<String> {
        let paths = self.patch.paths().into_iter();
        paths
            .map(|path| String::from_utf8_lossy(path).into_owned())
            .collect()
    }

    /// The hunks that were read in another way than the caller wrote them.
    pub(crate) fn repaired(&self) -> Vec<PatchRepair> {
        let repairs = self.repairs.iter().cloned();
        repairs
            .map(|Repair { path, hunk, what }| PatchRepair { path, hunk, what })
            .collect()
    }

    pub(crate) fn admit(&self) -> Result<AdmittedPatch, ApiError> {
        let encoded = self
            .patch
            .to_wire()
            .map_err(|error| ApiError::invalid(format!("diff: {error}")))?;
        Ok(AdmittedPatch {
            encoded: encoded.into(),
            needs_extensions: self.patch.needs_extensions(),
        })
    }

    /// Scans the content that the patch adds, by the files it is for.
    pub(crate) fn scan(
        &self,
        scanner: &Scanner,
        action: ShapeAction,
        flags: &mut Flags,
    ) -> Result<(), Leak> {
        scan_patch("diff", &self.patch, scanner, action, flags)
    }
}

/// Scans the content that a patch in a field adds, by the files it is for.
pub(super) fn scan_patch(
    field: &str,
    patch: &Patch<'_>,
    scanner: &Scanner,
    action: ShapeAction,
    flags: &mut Flags,
) -> Result<(), Leak> {
    let mut scan = || {
        let mut sections = patch.sections().iter();
        sections.try_for_each(|section| scan_section(field, scanner, action, section, flags))
    };
    if patch.inflated_bytes() > INLINE_INFLATED_BYTES {
        tokio::task::block_in_place(scan)
    } else {
        scan()
    }
}

fn scan_section(
    field: &str,
    scanner: &Scanner,
    action: ShapeAction,
    section: &Section<'_>,
    flags: &mut Flags,
) -> Result<(), Leak> {
    // The scan of the whole body sees compressed bytes only.
    if section.binary.is_some() {
        let system_scanner = scanner.system_only();
        let (mut watch, mut joined) = (system_scanner.watch(), system_scanner.watch());
        let mut hit = None;
        section.each_added(|bytes| hit = hit.or_else(|| watch.feed(bytes)));
        section.each_added_joined(|bytes| hit = hit.or_else(|| joined.feed(bytes)));
        hit.map_or(Ok(()), |hit| Err(Leak::system(field, hit.what)))?;
    }
    let Some(path) = section.new.as_ref().filter(|_| action != ShapeAction::Off) else {
        return Ok(());
    };
    if let Some(hit) = scanner.find(path) {
        return Err(Leak::shape(field, None, hit.what));
    }
    let path = String::from_utf8_lossy(path);
    let mut scan = scanner.content(&path, action);
    section.each_added(|bytes| scan.feed(bytes));
    if section.is_partial() {
        scan.feed(b"\n");
        section.each_added_joined(|bytes| scan.feed(bytes));
        scan.mark_unscanned();
    }
    leaks::refuse_or_flag(field, &path, scan, flags)
}

/// The text of a patch in a body, and the number of leading path components to strip.
fn text(body: &Value) -> Option<(&str, u32)> {
    let strip = match body.get("strip") {
        None | Some(Value::Null) => file_limits::DEFAULT_STRIP,
        Some(strip) => u32::try_from(strip.as_u64()?).ok()?,
    };
    Some((body.get("diff")?.as_str()?, strip))
}

#[cfg(test)]
mod tests {
    use cynode_policy::{HeldSecrets, ShapePolicy, ShapeSetting, UNSCANNED};
    use serde_json::json;

    use super::*;

    fn token() -> String {
        ["gh", "p_", &"A7q3Zx9LmK2vRt5YwB8n".repeat(2)[..36]].concat()
    }

    fn scanned(text: &str, policy: ShapePolicy) -> Result<Flags, Leak> {
        let body = json!({ "diff": text });
        let patch = CallerPatch::read(Action::FilePatch, &body).expect("read");
        let scanner = Scanner::new(HeldSecrets::new([7; 32]), true);
        leaks::scan_json(&scanner, policy, Action::FilePatch, &body, patch.as_ref())
    }

    fn named(flags: &Flags) -> Vec<&str> {
        let files = flags.flagged.iter();
        files.map(|file| file.path.as_str()).collect()
    }

    fn shapes(flags: &Flags) -> Vec<&str> {
        let files = flags.flagged.iter();
        files.map(|file| file.shape.as_str()).collect()
    }

    enum Step<'a> {
        Insert(&'a str),
        /// Copies this many bytes of the old content.
        Copy(u8),
    }

    /// A diff with a binary delta, stored without compression.
    fn delta(path: &str, steps: &[Step<'_>]) -> String {
        // The sizes of both contents, which only matter to an agent.
        let mut delta = vec![1, 1];
        for step in steps {
            match step {
                Step::Insert(text) => {
                    delta.push(u8::try_from(text.len()).expect("short"));
                    delta.extend(text.bytes());
                }
                Step::Copy(length) => delta.extend([0x90, *length]),
            }
        }
        let length = u16::try_from(delta.len()).expect("short");
        let (mut low, mut high) = (1_u32, 0_u32);
        for byte in &delta {
            low = (low + u32::from(*byte)) % 65_521;
            high = (high + low) % 65_521;
        }
        let zlib = [
            &[0x78, 0x01, 0x01][..],
            &length.to_le_bytes(),
            &(!length).to_le_bytes(),
            &delta,
            &(high << 16 | low).to_be_bytes(),
        ]
        .concat();
        let lines: String = zlib.chunks(52).map(base85).collect();
        format!(
            "diff --git a/{path} b/{path}\nindex 1..2 100644\nGIT binary patch\ndelta {}\n{lines}\n",
            delta.len()
        )
    }

    /// A line of at most 52 bytes, as git writes it.
    fn base85(bytes: &[u8]) -> String {
        const DIGITS: &[u8; 85] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz\
            !#$%&()*+-;<=>?@^_`{|}~";
        let letter = match bytes.len() {
            length @ 1..=26 => b'A' + u8::try_from(length - 1).expect("short"),
            length => b'a' + u8::try_from(length - 27).expect("short"),
        };
        let mut line = String::from(char::from(letter));
        for group in bytes.chunks(4) {
            let mut four = [0; 4];
            four[..group.len()].copy_from_slice(group);
            let mut value = u32::from_be_bytes(four) as usize;
            let mut digits = [0; 5];
            for digit in digits.iter_mut().rev() {
                *digit = DIGITS[value % 85];
                value /= 85;
            }
            line.extend(digits.map(char::from));
        }
        line + "\n"
    }

    #[test]
    fn a_patch_is_scanned_by_the_files_it_changes_and_the_lines_it_adds_in_any_form() {
        let diff = format!(
            "--- a/old.rs\n+++ b/src/a.rs\n@@ -1,2 +1,2 @@\n context {0}\n-{0}\n+{0}\n\
             --- a/.env\n+++ b/.env\n@@ -1 +1 @@\n-{0}\n+A=b\n",
            token()
        );
        let look = |diff: &str| scanned(diff, ShapePolicy::default());
        assert_eq!(
            named(&look(&diff).expect("flagged")),
            ["src/a.rs"],
            "removing a token from .env was flagged"
        );
        let leak = look(&diff.replace("+A=b", &format!("+A={}", token()))).expect_err("refused");
        assert_eq!(
            (leak.field.as_str(), leak.path.as_deref()),
            ("diff", Some(".env"))
        );
        assert!(
            leak.error().detail.contains(".env")
                && leak.error().detail.contains("looks like a GitHub token")
        );
        let with_token = diff.replace("src/a.rs", &token());
        assert_eq!(
            look(&with_token).expect_err("a name").path,
            None,
            "a name that contains a token was repeated"
        );
        // The same without counts, without line numbers, and in the other form.
        let begin = format!(
            "*** Begin Patch\n*** Update File: old.rs\n*** Move to: src/a.rs\n@@ context\n-{0}\n\
             +{0}\n*** Update File: .env\n@@\n-{0}\n+A=b\n*** End Patch\n",
            token()
        );
        for text in [
            diff.replace("@@ -1,2 +1,2 @@", "@@ -1,9 +1 @@"),
            diff.replace("@@ -1,2 +1,2 @@", "@@ @@"),
            begin,
        ] {
            assert_eq!(
                named(&look(&text).expect("flagged")),
                ["src/a.rs"],
                "{text}"
            );
            let secret = text.replace("+A=b", &format!("+A={}", token()));
            assert_eq!(
                look(&secret).expect_err("refused").path.as_deref(),
                Some(".env"),
                "{text}"
            );
        }
        let added = format!(
            "*** Begin Patch\n*** Add File: .npmrc\n+{}\n*** End Patch",
            token()
        );
        assert!(look(&added).is_err());
        // `A=` and a GitHub token, deflated.
        let binary = "diff --git a/.env b/.env\nindex 1..2 100644\nGIT binary patch\nliteral 44\nlcmZQ@v`x<_h<7wEG>)pU^vU%$DhnzxjVyPv$U_(70suCc4b%Vt\n\n";
        assert_eq!(
            look(binary).expect_err("a binary content").path.as_deref(),
            Some(".env")
        );
    }

    #[test]
    fn a_copy_in_a_delta_hides_no_credential() {
        use Step::{Copy, Insert};
        let policy = |setting: Value| -> ShapePolicy {
            (&serde_json::from_value::<ShapeSetting>(setting).expect("a setting")).into()
        };
        let token = token();
        let (head, tail) = token.split_at(15);
        let default = ShapePolicy::default();
        // Whatever is copied between the two parts.
        let split = [Insert(head), Copy(1), Insert(tail)];
        let flags = scanned(&delta("a.png", &split), default).expect("flagged");
        assert_eq!(shapes(&flags), ["a GitHub token", UNSCANNED]);
        // The old content has a letter of it.
        let completed = [Insert(head), Copy(1), Insert(&tail[1..])];
        let flags = scanned(&delta("a.png", &completed), default).expect("flagged");
        assert_eq!(shapes(&flags), [UNSCANNED]);
        let leak = scanned(&delta(".env", &completed), default).expect_err("refused");
        assert_eq!(
            (leak.kind, leak.path.as_deref(), leak.is_system),
            (UNSCANNED, Some(".env"), false)
        );
        let error = leak.error();
        assert!(
            error
                .detail
                .contains("a binary delta completes the content of .env")
        );
        assert!(error.remedy.contains("Write the whole file"));
        let refused = policy(json!({"patches": "refuse"}));
        assert!(scanned(&delta("a.png", &completed), refused).is_err());
        let off = policy(json!({"patches": "off"}));
        assert!(scanned(&delta("a.png", &split), off).is_ok_and(|flags| flags.is_empty()));
        // A token of this system, with any policy.
        let ours = format!("cyn_{}", "A7q3Zx9LmK2vRt5YwB8n".repeat(3));
        let split = [Insert(&ours[..20]), Copy(9), Insert(&ours[20..])];
        let leak = scanned(&delta("a.png", &split), off).expect_err("refused");
        assert!(leak.is_system, "{leak:?}");
        // What the patch tells completely is not flagged.
        for steps in [&[Insert("a"), Insert("b")][..], &[Copy(1), Copy(2)]] {
            assert!(scanned(&delta("a", steps), default).is_ok_and(|flags| flags.is_empty()));
        }
    }

    #[test]
    fn the_admitted_patch_is_encoded_and_tells_what_it_needs() {
        let admitted = |text: &str| {
            let body = json!({ "diff": text });
            let patch = CallerPatch::read(Action::FilePatch, &body).expect("read");
            let patch = patch.expect("a patch");
            let AdmittedPatch {
                encoded,
                needs_extensions,
            } = patch.admit().expect("encoded");
            let encoded = String::from_utf8(encoded.to_vec()).expect("UTF-8");
            (encoded, needs_extensions, patch.repaired())
        };
        let diff = "talk\n--- a/x\n+++ b/x\n@@ -1,9 +1 @@ fn\n-a\n+b\nmore talk\n";
        let (encoded, needs_extensions, repaired) = admitted(diff);
        assert_eq!(
            encoded,
            "cynode-patch 1\n--- \"x\"\n+++ \"x\"\n@@ -1,1 +1,1 @@\n-a\n+b\n"
        );
        assert!(!needs_extensions);
        assert_eq!((repaired.len(), repaired[0].hunk), (1, 1));
        assert!(repaired[0].what.contains("has -1 +1"), "{repaired:?}");
        let begin = "*** Begin Patch\n*** Delete File: x\n*** End Patch";
        let (_, needs_extensions, repaired) = admitted(begin);
        assert!(needs_extensions && repaired.is_empty());
        // Other calls, and bodies that the handler refuses.
        for (action, body) in [
            (Action::FileWrite, json!({ "diff": diff })),
            (Action::FilePatch, json!({ "diff": 1 })),
            (Action::FilePatch, json!({ "diff": diff, "strip": "1" })),
        ] {
            assert!(CallerPatch::read(action, &body).is_ok_and(|patch| patch.is_none()));
        }
    }
}
