//! Fuzz targets of diffs; see [`crate::fuzz`].

pub(in super::super) use cynode_patch::fuzz::parsed;
use cynode_patch::fuzz::{anywhere, there_and_back};

use crate::fuzz::{fields, split};

/// The diff of two contents turns the first into the second, and its reverse undoes that.
pub fn diffs(input: &[u8]) {
    let (options, rest) = split(input);
    let mut contents = fields(rest);
    let (old, new) = (
        contents.next().unwrap_or_default(),
        contents.next().unwrap_or_default(),
    );
    there_and_back(old, new, usize::from(options & 7));
    if let Some(third) = contents.next() {
        // The same lines before both move the hunks down.
        there_and_back(
            &[third, old].concat(),
            &[third, new].concat(),
            usize::from(options & 7),
        );
        anywhere(old, new, third);
    }
}
