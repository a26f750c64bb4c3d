//! libFuzzer's main function for one target, named by the environment variable `FUZZ_TARGET`.

#![no_main]
#![allow(clippy::expect_used)]

use std::sync::OnceLock;

use bifrost_fuzz::{TARGETS, Target};

static TARGET: OnceLock<Target> = OnceLock::new();

libfuzzer_sys::fuzz_target!(
    init: {
        let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
        let names: Vec<&str> = TARGETS.iter().map(|t| t.name).collect();
        let target = TARGETS.iter().find(|t| t.name == name);
        let target = target.unwrap_or_else(|| panic!("FUZZ_TARGET must be one of {}", names.join(", ")));
        TARGET.get_or_init(|| *target);
    },
    |bytes: &[u8]| {
        if let Some(target) = TARGET.get() {
            (target.run)(bytes);
        }
    }
);
