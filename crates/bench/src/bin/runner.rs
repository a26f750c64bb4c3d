//! The runner that executes each benchmark under Valgrind: gungraun's own, in the version in Cargo.lock, so that it
//! always matches the harness and needs no installation.

use gungraun_runner::error::Error;

fn main() {
    if let Err(error) = gungraun_runner::runner::run::run() {
        let regression = matches!(error.downcast_ref::<Error>(), Some(Error::RegressionError(_)));
        eprintln!("gungraun: {error:#}");
        std::process::exit(if regression { 3 } else { 1 });
    }
}
