//! The program `bifrost-lab`; see the library of the same name.

use std::process::ExitCode;

fn main() -> ExitCode {
    match bifrost_lab::cli::parse_and_run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("bifrost-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}
