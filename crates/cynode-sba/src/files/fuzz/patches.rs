//! Hostile diffs, applied to a workspace.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use cynode_api::PatchResult;
use cynode_patch::{
    File, Kind, Location, Patch,
    fuzz::{Memory, PatchForm},
};

use super::{
    super::{
        digest,
        error::{Failure, Outcome},
    },
    FuzzWorkspace, Tree,
};
use crate::fuzz::split;

/// A diff applies completely or not at all, reports its changes correctly, and stays inside the
/// workspace and outside of `.git`.
pub fn patches(input: &[u8]) {
    let (options, diff) = split(input);
    let strip = u32::from(options & 3);
    super::super::patch::fuzz::parsed(diff, strip);
    let patch = Patch::parse(diff, strip).ok();
    check(patch.as_ref(), |scratch, dry_run| {
        scratch.files.patch(diff, strip, dry_run)
    });
}

/// The same for the other forms of a patch, which the gate parses and encodes.
pub fn forms(input: &[u8]) {
    let (options, text) = split(input);
    let strip = u32::from(options & 3);
    cynode_patch::fuzz::forms(text, strip, &memory());
    let form = match options >> 2 & 3 {
        0 => PatchForm::BeginPatch,
        1 => PatchForm::Wire,
        2 => PatchForm::Any,
        _ => PatchForm::Lenient,
    };
    let Some(patch) = cynode_patch::fuzz::parse_form(form, text, strip) else {
        return;
    };
    let Ok(wire) = patch.to_wire() else {
        return;
    };
    check(Some(&patch), |scratch, dry_run| {
        scratch.files.encoded_patch(&wire, dry_run)
    });
}

/// Checks what applying a patch does to a workspace.
fn check(patch: Option<&Patch<'_>>, apply: impl Fn(&FuzzWorkspace, bool) -> Outcome<PatchResult>) {
    let scratch = workspace();
    let before = scratch.inside();
    let dry = apply(&scratch, true);
    assert_eq!(scratch.inside(), before, "a dry run changed files");
    let real = apply(&scratch, false);
    let after = scratch.inside();
    scratch.assert_outside_is_untouched();
    match (dry, real) {
        (Ok(dry), Ok(real)) => {
            assert_eq!(dry, real, "a dry run reported other changes");
            assert_reported(&scratch, &real, &before, &after);
            assert_named(patch.expect("it was applied"), &real);
        }
        (Err(Failure::Refused(dry)), Err(Failure::Refused(real))) => {
            assert_eq!((dry.code, dry.rejects), (real.code, real.rejects));
            assert_eq!(after, before, "a refused diff changed files");
        }
        // Write errors show only in a real run.
        (Ok(_), Err(Failure::Refused(error))) => {
            assert_eq!(after, before, "a failing diff changed files: {error:?}");
        }
        (dry, real) => panic!("a dry run gave {dry:?}, the real one {real:?}"),
    }
}

/// All changes are at paths that the gate would check against rules.
fn assert_named(patch: &Patch<'_>, result: &PatchResult) {
    let named: BTreeSet<_> = patch
        .paths()
        .into_iter()
        .map(String::from_utf8_lossy)
        .collect();
    for path in result
        .files
        .iter()
        .flat_map(|file| file.from.iter().chain([&file.path]))
    {
        assert!(
            named.contains(path.as_str()),
            "{path} was touched, but the diff does not name it"
        );
    }
    Memory::default().apply(patch);
}

/// Files of many kinds under short names, which a mutated diff has a chance to hit.
const FILES: [(&str, &str); 7] = [
    ("file", "1\n2\n3\n4\n5\n6\n7\n8\n"),
    ("a", "A\n"),
    ("b", "x"),
    ("dos", "1\r\n2\r\n"),
    ("empty", ""),
    ("dir/inner", "1\n"),
    (".git/config", "x\n"),
];

/// The files that a patch may touch, in memory.
fn memory() -> Memory {
    let files = FILES.iter().filter_map(|(path, content)| {
        let location = Location::parse(path.as_bytes()).ok()?;
        let file = File {
            kind: Kind::Regular(0o644),
            bytes: content.as_bytes().to_vec(),
        };
        Some((location, file))
    });
    Memory(files.collect())
}

fn workspace() -> FuzzWorkspace {
    let scratch = FuzzWorkspace::new();
    for (path, content) in FILES {
        scratch.put(path, content);
    }
    for (path, target) in [
        ("alias", "dir"),
        ("final", "file"),
        ("git", ".git"),
        ("up", ".."),
        ("out", "../outside"),
        ("abs", "/"),
    ] {
        scratch.link(path, target);
    }
    scratch
}

/// The real path of a reported name; `None` if the report could not carry the name.
///
/// A name below a changed path is taken literally: the directory may be a link by now.
fn real_path(scratch: &FuzzWorkspace, name: &str, result: &PatchResult) -> Option<PathBuf> {
    if name.contains(char::REPLACEMENT_CHARACTER) {
        return None;
    }
    if Path::new(name).ancestors().skip(1).any(|above| {
        result
            .files
            .iter()
            .any(|file| Path::new(&file.path) == above)
    }) {
        return Some(PathBuf::from(name));
    }
    let path = scratch.root().join(name);
    let parent =
        fs::canonicalize(path.parent()?).expect("the directory of a file that was changed");
    Some(
        parent
            .join(path.file_name()?)
            .strip_prefix(scratch.root())
            .expect("inside")
            .to_owned(),
    )
}

/// All changes were reported, and the reports match the files.
fn assert_reported(scratch: &FuzzWorkspace, result: &PatchResult, before: &Tree, after: &Tree) {
    let mut last: BTreeMap<PathBuf, Option<&Option<String>>> = BTreeMap::new();
    for file in &result.files {
        let from = file
            .from
            .as_ref()
            .map(|from| real_path(scratch, from, result));
        let (Some(path), Some(from)) = (
            real_path(scratch, &file.path, result),
            from.map_or(Some(None), |from| from.map(Some)),
        ) else {
            return;
        };
        if let Some(from) = from {
            last.insert(from, None);
        }
        last.insert(path, Some(&file.sha256_after));
    }
    for (path, reported) in &last {
        let Some(reported) = reported else { continue };
        // A directory may replace a deleted file.
        let file = after
            .get(path)
            .filter(|(mode, _)| mode & 0o170_000 != 0o040_000);
        let there = file.map(|(_, content)| digest::of_bytes(content));
        assert_eq!(
            there,
            **reported,
            "{} differs from the report",
            path.display()
        );
    }
    let changed: BTreeSet<&Path> = before
        .keys()
        .chain(after.keys())
        .filter(|path| before.get(*path) != after.get(*path))
        .map(PathBuf::as_path)
        .collect();
    for path in changed {
        let made_for_a_file = !before.contains_key(path)
            && last
                .keys()
                .any(|file| file != path && file.starts_with(path));
        assert!(
            last.contains_key(path) || made_for_a_file,
            "{} changed without a report",
            path.display()
        );
        assert!(!path.starts_with(".git"), "{} changed", path.display());
    }
}
