//! `bifrost-gw-console`: a web page about gateway servers.

use std::process::ExitCode;

fn main() -> ExitCode {
    bifrost_gatewayd::console::main()
}
