//! Tasks of this repository: `cargo xtask sba | requirements | escape | check-deps | check-types |
//! docs`.
#![forbid(unsafe_code)]
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a command-line tool for this repository"
)]

mod deps;
mod docs;
mod escape;
mod requirements;
mod sba;
mod types;

use anyhow::{Result, bail};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .as_slice()
    {
        ["sba"] => sba::build(),
        ["requirements"] => requirements::report(),
        ["escape"] => escape::table(),
        ["check-deps"] => deps::check(),
        ["check-types"] => types::check(),
        ["docs"] => docs::write(),
        _ => bail!(
            "usage: cargo xtask sba | requirements | escape | check-deps | check-types | docs"
        ),
    }
}

/// The repository's root.
fn root() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies below the root")
        .to_path_buf()
}
