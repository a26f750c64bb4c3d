//! Fuzz targets: everything that parses bytes from a guest, the wire or an operator, and the transport engine with an
//! adversary.
//!
//! A target is a function of bytes that panics when an invariant is violated. On the project's toolchain, `cargo test
//! -p bifrost-fuzz` runs each over its corpus (`corpus/TARGET/`), over mutated inputs of the corpus, and over random
//! ones; `scripts/fuzz.sh` runs them under libFuzzer, guided by coverage. An input that libFuzzer finds becomes a file
//! of the corpus. `docs/VERIFICATION.md` describes the coverage of the targets.

#![forbid(unsafe_code)]

mod input;
mod targets;

pub use input::Input;

/// A fuzz target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, and that of its corpus.
    pub name: &'static str,
    /// Maximum length of a useful input, bytes.
    pub max_len: usize,
    /// Number of inputs that the tests generate in addition to the corpus.
    pub quick_runs: u32,
    /// Panics when an invariant is violated.
    pub run: fn(&[u8]),
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "headers", max_len: 256, quick_runs: 60_000, run: targets::headers::run },
    Target { name: "bifrost", max_len: 128, quick_runs: 60_000, run: targets::bifrost::run },
    Target { name: "segments", max_len: 4096, quick_runs: 8_000, run: targets::segments::run },
    Target { name: "merge", max_len: 4096, quick_runs: 4_000, run: targets::merge::run },
    Target { name: "switch", max_len: 512, quick_runs: 20_000, run: targets::switch::run },
    Target { name: "config", max_len: 4096, quick_runs: 2_000, run: targets::config::run },
    Target { name: "api", max_len: 1024, quick_runs: 10_000, run: targets::api::run },
    Target { name: "relay", max_len: 2048, quick_runs: 20_000, run: targets::relay::run },
    Target { name: "intent", max_len: 512, quick_runs: 2_000, run: targets::intent::run },
    Target { name: "engine", max_len: 4096, quick_runs: 1_500, run: targets::engine::run },
    Target { name: "pair", max_len: 1024, quick_runs: 600, run: targets::pair::run },
    Target { name: "forgery", max_len: 1024, quick_runs: 600, run: targets::pair::run_with_forgeries },
    Target { name: "vhost", max_len: 1024, quick_runs: 1_500, run: targets::vhost::run },
    Target { name: "messages", max_len: 512, quick_runs: 500, run: targets::messages::run },
    Target { name: "rings", max_len: 512, quick_runs: 1_000, run: targets::rings::run },
    Target { name: "pods", max_len: 2048, quick_runs: 8_000, run: targets::pods::run },
    Target { name: "memif", max_len: 1024, quick_runs: 1_000, run: targets::memif::run },
    Target { name: "gateway", max_len: 1024, quick_runs: 8_000, run: targets::gateway::run },
    Target { name: "routes", max_len: 1024, quick_runs: 4_000, run: targets::routes::run },
    Target { name: "roce", max_len: 512, quick_runs: 20_000, run: targets::roce::run },
    Target { name: "rdm", max_len: 1024, quick_runs: 8_000, run: targets::rdm::run },
    Target { name: "peer", max_len: 1024, quick_runs: 2_000, run: targets::peer::run },
];
