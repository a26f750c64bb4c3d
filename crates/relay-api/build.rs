//! Makes Rust of `proto/relay.proto`. The proto compiler is a crate, so nothing has to be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/relay.proto");
    let descriptors = protox::compile(["proto/relay.proto"], ["proto"])?;
    // Specs are sent to many hosts and never changed: `Bytes` share them.
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
