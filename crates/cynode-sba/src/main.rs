//! The `cynode-sba` binary; the implementation is in the library.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    cynode_sba::main()
}
