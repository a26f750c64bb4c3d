//! The target `rings` detects each mutation of vhost-user rings, with an input of its corpus or a generated one; the
//! target `vhost` detects those of the log of written pages.

#![cfg(feature = "mutations")]

use std::path::Path;

use bifrost_fuzz::{TARGETS, Target};
use bifrost_port::vhost::Mutation;
use fastrand::Rng;

/// Number of generated inputs if no input of the corpus fails.
const MADE_UP: u32 = 3_000;

fn corpus() -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/rings");
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut all: Vec<_> = files
        .filter_map(|f| Some((f.file_name().to_string_lossy().into_owned(), std::fs::read(f.path()).ok()?)))
        .collect();
    all.sort();
    all
}

fn target(name: &str) -> Target {
    *TARGETS.iter().find(|t| t.name == name).expect("the target")
}

/// The first input with which the target fails. It runs in a separate thread, whose port ends with it.
fn first_failure(target: Target, inputs: impl Iterator<Item = (String, Vec<u8>)> + Send + 'static) -> Option<String> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let run = move || {
        for (name, bytes) in inputs {
            let _ = sender.send((name, bytes.clone()));
            (target.run)(&bytes);
        }
    };
    let failed = std::thread::spawn(run).join().is_err();
    let (name, bytes) = receiver.iter().last()?;
    if failed && let Ok(folder) = std::env::var("KEEP_INPUTS") {
        let _ = std::fs::write(Path::new(&folder).join(&name), &bytes);
    }
    failed.then_some(name)
}

#[test]
fn every_mutation_is_detected() {
    Mutation::switch(None);
    assert_eq!(first_failure(target("rings"), corpus().into_iter()), None, "it fails without a mutation");
    let mut missed = Vec::new();
    let all = Mutation::RINGS.map(|m| (m, "rings")).into_iter().chain(Mutation::LOG.map(|m| (m, "vhost")));
    for (mutation, name) in all {
        let target = target(name);
        Mutation::switch(Some(mutation));
        let made_up = (0..MADE_UP).map(move |n| {
            let mut rng = Rng::with_seed(u64::from(n));
            let mut bytes = vec![0; rng.usize(..target.max_len)];
            rng.fill(&mut bytes);
            (format!("{mutation:?}-{n}"), bytes)
        });
        let began = std::time::Instant::now();
        let corpus = if name == "rings" { corpus() } else { Vec::new() };
        match first_failure(target, corpus.into_iter().chain(made_up)) {
            Some(name) => println!("{mutation:?}: detected with {name}, {:?}", began.elapsed()),
            None => missed.push(mutation),
        }
    }
    Mutation::switch(None);
    assert!(missed.is_empty(), "not detected: {missed:?}");
}
