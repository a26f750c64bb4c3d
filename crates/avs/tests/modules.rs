//! Modules form layers: no module imports, directly or indirectly, a module that imports it.

#![allow(clippy::unwrap_used)]
#![cfg(not(miri))]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// For each module of the crate the modules that it imports, except in tests. A directory is one module.
fn imports() -> BTreeMap<String, BTreeSet<String>> {
    fn read(file: &Path, module: &str, all: &mut BTreeMap<String, BTreeSet<String>>) {
        let text = std::fs::read_to_string(file).unwrap();
        let code = text.split("#[cfg(test)]\n").next().unwrap();
        let names = code.split("crate::").skip(1).map(|rest| {
            let end = rest.find(|c: char| !(c.is_ascii_lowercase() || c == '_'));
            rest[..end.unwrap_or(rest.len())].to_owned()
        });
        all.entry(module.to_owned()).or_default().extend(names.filter(|name| name != module));
    }
    fn walk(directory: &Path, module: Option<&str>, all: &mut BTreeMap<String, BTreeSet<String>>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            if path.is_dir() {
                walk(&path, Some(module.unwrap_or(&name)), all);
            } else if name != "lib" && name != "tests" && name != "fairness" {
                read(&path, module.unwrap_or(&name), all);
            }
        }
    }
    let mut all = BTreeMap::new();
    walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), None, &mut all);
    let modules: BTreeSet<String> = all.keys().cloned().collect();
    all.values_mut().for_each(|names| names.retain(|name| modules.contains(name)));
    all
}

#[test]
fn no_module_imports_its_importer() {
    let mut left = imports();
    assert!(left.len() > 20 && left["switch"].contains("pipeline"), "these are not the modules: {left:?}");
    // Remove the lowest layer, then the one above it, until none is left.
    while !left.is_empty() {
        let lowest: Vec<String> = left.iter().filter(|(_, of)| of.is_empty()).map(|(name, _)| name.clone()).collect();
        assert!(!lowest.is_empty(), "these import each other: {left:?}");
        for name in lowest {
            left.remove(&name);
            left.values_mut().for_each(|of| of.retain(|other| *other != name));
        }
    }
}
