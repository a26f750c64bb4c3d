//! The target `messages` detects each mutation of the code that handles a vhost-user front-end. Some mutations end the
//! process, so each has its own.

#![cfg(feature = "mutations")]

use std::path::Path;
use std::process::{Command, Stdio};

use bifrost_fuzz::TARGETS;
use bifrost_port::vhost::Mutation;
use fastrand::Rng;

/// Number of generated inputs if no input of the corpus fails.
const MADE_UP: u64 = 400;

/// Runs inputs until one fails. Not a test by itself: the test below starts it.
#[test]
fn inputs() {
    let target = *TARGETS.iter().find(|t| t.name == "messages").expect("the target");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/messages");
    let mut corpus: Vec<_> = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|f| f.path()).collect();
    corpus.sort();
    for path in corpus {
        eprintln!("{}", path.display());
        (target.run)(&std::fs::read(&path).expect("an input"));
    }
    if std::env::var_os("MUTATION").is_none() {
        return;
    }
    for seed in 0..MADE_UP {
        let mut bytes = vec![0; target.max_len];
        Rng::with_seed(seed).fill(&mut bytes);
        if let Some(folder) = std::env::var_os("KEEP_INPUTS") {
            std::fs::write(Path::new(&folder).join("last"), &bytes).expect("room");
        }
        eprintln!("seed {seed}");
        (target.run)(&bytes);
    }
}

#[test]
fn every_mutation_is_detected() {
    let this = std::env::current_exe().expect("this program");
    // No message shows this one: `record_is_left_alone` in the port's own tests detects it.
    let shown = |mutation: &Mutation| *mutation != Mutation::RecordNotChecked;
    for mutation in Mutation::BACK_END.into_iter().filter(shown) {
        let mut command = Command::new(&this);
        command.args(["--exact", "inputs", "--nocapture"]).env("MUTATION", format!("{mutation:?}"));
        let ended = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().expect("it starts");
        let told = String::from_utf8_lossy(&ended.stderr);
        assert!(!ended.status.success(), "{mutation:?} is not detected");
        let reason =
            told.lines().rev().find(|l| l.contains("panicked") || l.starts_with("seed") || l.contains("corpus"));
        println!("{mutation:?}: {}, {}", ended.status, reason.unwrap_or_default());
    }
}
