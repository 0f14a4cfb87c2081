#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| cynode_egress::fuzz::directives(input));
