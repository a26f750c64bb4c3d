//! The program that runs each benchmark under Valgrind: gungraun's own, built from the version that Cargo.lock names, so
//! that it always fits the harness and nothing has to be installed.

use gungraun_runner::error::Error;

fn main() {
    if let Err(error) = gungraun_runner::runner::run::run() {
        let regression = matches!(error.downcast_ref::<Error>(), Some(Error::RegressionError(_)));
        eprintln!("gungraun: {error:#}");
        std::process::exit(if regression { 3 } else { 1 });
    }
}
