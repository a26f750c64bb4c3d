//! Every target over its corpus, over inputs made from it, and over random ones. Deterministic: no clock, no chance.

use std::path::{Path, PathBuf};

use bifrost_fuzz::{TARGETS, Target};

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

fn corpus(target: &Target) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    let files = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    let mut all: Vec<_> = files.filter_map(|f| Some((f.path(), std::fs::read(f.path()).ok()?))).collect();
    all.sort();
    all
}

/// Bytes changed, cut, doubled, or taken from another input.
fn changed(corpus: &[(PathBuf, Vec<u8>)], target: &Target, rng: &mut Rng) -> Vec<u8> {
    let mut bytes = match corpus.get(rng.below(corpus.len())) {
        Some((_, bytes)) if rng.below(4) != 0 => bytes.clone(),
        _ => (0..rng.below(target.max_len.min(600))).map(|_| rng.next() as u8).collect(),
    };
    for _ in 0..rng.below(6) {
        let at = rng.below(bytes.len());
        match rng.below(5) {
            0 if !bytes.is_empty() => bytes[at] = rng.next() as u8,
            1 if !bytes.is_empty() => bytes[at] ^= 1 << rng.below(8),
            2 => bytes.truncate(at),
            3 => {
                let other = corpus.get(rng.below(corpus.len())).map_or(&[][..], |(_, b)| b);
                bytes.extend_from_slice(&other[rng.below(other.len())..]);
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
    let target = TARGETS.iter().find(|t| t.name == name).expect("a target of that name");
    let corpus = corpus(target);
    assert!(!corpus.is_empty(), "no corpus for {name}");
    for (path, bytes) in &corpus {
        if std::panic::catch_unwind(|| (target.run)(bytes)).is_err() {
            panic!("{name} fails with {}", path.display());
        }
    }
    let quick: u32 = std::env::var("FUZZ_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(target.quick_runs);
    let mut rng = Rng(1);
    for n in 0..if cfg!(miri) { 5 } else { quick } {
        let bytes = changed(&corpus, target, &mut rng);
        if std::panic::catch_unwind(|| (target.run)(&bytes)).is_err() {
            let path = std::env::temp_dir().join(format!("bifrost-fuzz-{name}-{n}"));
            let kept = std::fs::write(&path, &bytes).is_ok();
            panic!(
                "{name} fails with made-up input {n}, {}",
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

targets! { headers bifrost segments merge switch config api engine pair forgery vhost }
