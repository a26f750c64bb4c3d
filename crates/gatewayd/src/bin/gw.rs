//! `bifrost-gw`: a gateway pod.

use std::process::ExitCode;

use bifrost_gatewayd::{pod::GatewayPod, program};
use bifrost_port::large_pages::LargePages;

#[global_allocator]
static ALLOCATOR: LargePages = LargePages;

const ABOUT: &str = "\
A gateway pod: forwards packets between VPCs, to the Internet, to customers' networks and to cloud services.

It connects to `bifrost-nicd` over memif and has a worker for each core, which takes a packet, decides and returns it. A control thread \
answers ARP, neighbour discovery and ping, and resolves next hops. SIGTERM ends it. The log goes to standard error; RUST_LOG=debug makes \
it say more. `--check` validates the configuration, with the line of each error.";

fn main() -> ExitCode {
    program::main::<GatewayPod>(ABOUT)
}
