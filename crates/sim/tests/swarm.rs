//! A small swarm: a few seeds, and every scenario that once failed.

use std::path::Path;

use bifrost_sim::{Scenario, rdma, swarm};

/// A few seeds; `scripts/test.sh` runs thousands.
const SEEDS: u64 = 40;

#[test]
fn a_few_seeds_are_deterministic_and_have_no_violations() {
    for seed in 0..SEEDS {
        let outcome = swarm::run(seed);
        assert!(outcome.violation.is_none(), "bifrost-sim swarm --seeds {seed}\n{:?}", outcome.violation);
        if seed % 8 == 0 {
            assert_eq!(swarm::run(seed).hash, outcome.hash, "seed {seed} is not the same each time");
        }
    }
}

#[test]
fn a_scenario_survives_a_round_trip_through_toml() {
    for seed in 0..200 {
        let scenario = swarm::scenario(seed);
        let again = Scenario::parse("again", &scenario.to_toml()).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert_eq!(again, scenario, "seed {seed}");
    }
}

/// Each file begins with `# seed N: what went wrong`.
#[test]
fn scenarios_that_once_failed_pass() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    let mut count = 0;
    for path in std::fs::read_dir(folder).expect("regressions").map(|entry| entry.expect("entry").path()) {
        let text = std::fs::read_to_string(&path).expect("a file");
        let name = path.display();
        let seed = text.strip_prefix("# seed ").and_then(|t| t.split_once(':')).and_then(|(seed, _)| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| panic!("{name} does not begin with its seed"));
        let scenario = Scenario::load(&path).unwrap_or_else(|e| panic!("{e}"));
        let outcome = swarm::run_scenario(&scenario, seed, |_| ());
        assert!(outcome.violation.is_none(), "{name}: {:?}", outcome.violation);
        count += 1;
    }
    assert!(count > 0, "no regressions were found");
}

#[test]
fn a_few_message_worlds_are_deterministic_and_have_no_violations() {
    for seed in 0..SEEDS {
        let outcome = rdma::swarm::run(seed);
        assert!(outcome.violation.is_none(), "bifrost-sim swarm --rdm --seeds {seed}\n{:?}", outcome.violation);
        if seed % 8 == 0 {
            assert_eq!(rdma::swarm::run(seed).hash, outcome.hash, "seed {seed} is not the same each time");
        }
    }
}

/// Each file begins with `# seed N: what went wrong`.
#[test]
fn message_worlds_that_once_failed_pass() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions-rdm");
    let mut count = 0;
    for path in std::fs::read_dir(folder).expect("regressions").map(|entry| entry.expect("entry").path()) {
        let text = std::fs::read_to_string(&path).expect("a file");
        let name = path.display();
        let seed = text.strip_prefix("# seed ").and_then(|t| t.split_once(':')).and_then(|(seed, _)| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| panic!("{name} does not begin with its seed"));
        let world = rdma::swarm::load(&path).unwrap_or_else(|e| panic!("{e:#}"));
        let again = toml::to_string(&world).expect("TOML");
        assert_eq!(toml::from_str::<rdma::swarm::Description>(&again).expect("a world"), world, "{name}");
        let outcome = rdma::swarm::run_world(&world, seed, &|_| ());
        assert!(outcome.violation.is_none(), "{name}: {:?}", outcome.violation);
        count += 1;
    }
    assert!(count > 0, "no regressions were found");
}
