//! `cynode-sba`, the program. All of it is in the library.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    cynode_sba::main()
}
