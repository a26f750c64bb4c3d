//! `bifrostctl`: looks into a running `bifrostd` over its Unix socket.

fn main() -> std::process::ExitCode {
    bifrostctl::main()
}
