//! The header in the repository equals the one that cbindgen generates from the sources.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

#[test]
fn the_header_is_up_to_date() {
    let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(crate_directory.join("cbindgen.toml")).unwrap();
    // cbindgen follows `mod` declarations; a file named here as well would be in the header twice.
    let builder = cbindgen::Builder::new().with_config(config).with_src(crate_directory.join("src/lib.rs"));
    let mut made = Vec::new();
    builder.generate().unwrap().write(&mut made);
    let made = for_c(&String::from_utf8(made).unwrap());
    let path = crate_directory.join("include/bifrost_rdm.h");
    if std::env::var_os("BIFROST_WRITE_DOCS").is_some() {
        fs::write(&path, &made).unwrap();
    }
    let declared: Vec<_> =
        made.split(['(', ' ', '\n']).filter(|word| word.starts_with("bifrost_rdm_begin_read")).collect();
    assert_eq!(declared.len(), 1, "declared once");
    let there = fs::read_to_string(&path).unwrap_or_default();
    assert!(there == made, "{path:?} is outdated; run BIFROST_WRITE_DOCS=1 cargo test -p bifrost-capi --test header");
}

/// Removes what is specific to Rust: safety sections, and markup.
fn for_c(header: &str) -> String {
    let mut lines: Vec<&str> = vec![];
    let mut safety = false;
    for line in header.lines() {
        let text = line.trim_start();
        if text == "* # Safety" {
            safety = true;
            // Remove the empty line before it.
            lines.pop();
        }
        safety &= !text.starts_with("*/");
        if !safety {
            lines.push(line);
        }
    }
    lines.iter().map(|line| line.replace('`', "") + "\n").collect()
}
