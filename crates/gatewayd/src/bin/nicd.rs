//! `bifrost-nicd`: the NIC pipeline in front of gateway pods.

use std::process::ExitCode;

use bifrost_gatewayd::{nicd::Nicd, program};
use bifrost_port::large_pages::LargePages;

#[global_allocator]
static ALLOCATOR: LargePages = LargePages;

const ABOUT: &str = "\
The NIC pipeline in front of gateway pods: sprays packets over cores, restores their order, limits tenants.

A tenant that sends too much is stopped before it costs a core of a pod anything. The pipeline takes all frames of one network device \
(AF_XDP or AF_PACKET). A VLAN tag names a pod's interface; pods connect over memif sockets (`bifrost-gw`, or any memif client that returns \
trailers). SIGTERM ends it. The log goes to standard error; RUST_LOG=debug makes it say more. `--check` validates the configuration, with \
the line of each error.";

fn main() -> ExitCode {
    program::main::<Nicd>(ABOUT)
}
