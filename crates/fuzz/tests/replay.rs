//! Every target over its corpus, over mutated inputs of it, and over random ones. Deterministic: no clock, no
//! randomness.

use std::path::{Path, PathBuf};

use bifrost_fuzz::{TARGETS, Target};
use fastrand::Rng;

/// A number below `n`; 0 if there is none.
fn below(rng: &mut Rng, n: usize) -> usize {
    rng.usize(..n.max(1))
}

/// The shortest first: Miri, a thousand times slower, runs a few of them.
fn corpus(target: &Target) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    let files = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    let mut all: Vec<_> = files.filter_map(|f| Some((f.path(), std::fs::read(f.path()).ok()?))).collect();
    all.sort_by_cached_key(|(path, bytes)| (bytes.len(), path.clone()));
    all
}

/// Bytes changed, removed, duplicated, or taken from another input.
fn changed(corpus: &[(PathBuf, Vec<u8>)], target: &Target, rng: &mut Rng) -> Vec<u8> {
    let mut bytes = match corpus.get(below(rng, corpus.len())) {
        Some((_, bytes)) if below(rng, 4) != 0 => bytes.clone(),
        _ => (0..below(rng, target.max_len.min(600))).map(|_| rng.u8(..)).collect(),
    };
    for _ in 0..below(rng, 6) {
        let at = below(rng, bytes.len());
        match below(rng, 5) {
            0 if !bytes.is_empty() => bytes[at] = rng.u8(..),
            1 if !bytes.is_empty() => bytes[at] ^= 1 << below(rng, 8),
            2 => bytes.truncate(at),
            3 => {
                let other = corpus.get(below(rng, corpus.len())).map_or(&[][..], |(_, b)| b);
                bytes.extend_from_slice(&other[below(rng, other.len())..]);
            }
            _ => {
                let again = bytes[at..].to_vec();
                bytes.extend(again);
            }
        }
    }
    bytes.truncate(target.max_len);
    bytes
}

fn replay(name: &str) {
    // They use a Unix socket.
    if cfg!(miri) && ["vhost", "messages", "rings", "memif"].contains(&name) {
        return;
    }
    let target = TARGETS.iter().find(|t| t.name == name).expect("a target of that name");
    let corpus = corpus(target);
    assert!(!corpus.is_empty(), "no corpus for {name}");
    // Under Miri, targets with whole engines or rings run only the shortest inputs.
    let (kept, made_up) = match target.quick_runs {
        quick if !cfg!(miri) => (corpus.len(), quick),
        ..2_000 => (2, 0),
        _ => (6, 1),
    };
    for (path, bytes) in &corpus[..kept] {
        if std::panic::catch_unwind(|| (target.run)(bytes)).is_err() {
            panic!("{name} fails with {}", path.display());
        }
    }
    let quick: u32 = std::env::var("FUZZ_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(made_up);
    let mut rng = Rng::with_seed(1);
    for n in 0..quick {
        let bytes = changed(&corpus, target, &mut rng);
        if std::panic::catch_unwind(|| (target.run)(&bytes)).is_err() {
            let path = std::env::temp_dir().join(format!("bifrost-fuzz-{name}-{n}"));
            let kept = std::fs::write(&path, &bytes).is_ok();
            panic!(
                "{name} fails with generated input {n}, {}",
                if kept { path.display().to_string() } else { String::new() }
            );
        }
    }
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                replay(stringify!($name));
            }
        )*

        #[test]
        fn every_target_is_tested() {
            let tested = [$(stringify!($name)),*];
            let all: Vec<&str> = TARGETS.iter().map(|t| t.name).collect();
            assert_eq!(all, tested);
        }
    };
}

targets! { headers bifrost segments merge switch config api relay intent engine pair forgery vhost messages rings pods memif gateway routes roce rdm peer }

/// Tests of the tests: each mutation of the switch is detected. The mutation is passed to another process, because all
/// tests of this one share its environment.
#[cfg(feature = "mutations")]
#[test]
fn every_mutation_of_the_switch_is_detected() {
    let this = std::env::current_exe().expect("this program");
    if std::env::var_os("MUTATION").is_some() {
        return;
    }
    for mutation in bifrost_avs::Mutation::ALL {
        let run = std::process::Command::new(&this)
            .args(["--exact", "switch"])
            .env("MUTATION", format!("{mutation:?}"))
            .output()
            .expect("this program runs");
        let said = String::from_utf8_lossy(&run.stdout);
        assert!(!run.status.success(), "{mutation:?} is not detected: {said}");
        assert!(said.contains("test switch ... FAILED"), "{mutation:?}: {said}");
    }
}
