//! Runs one target over files: `cargo run -p bifrost-fuzz --example replay TARGET FILE…`.

fn main() {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_default();
    let target = bifrost_fuzz::TARGETS.iter().find(|t| t.name == name);
    let Some(target) = target else { panic!("no target {name:?}") };
    for path in arguments {
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        (target.run)(&bytes);
        println!("{path}: fine");
    }
}
