//! C programs, compiled like a user's programs, with the shared and the static library.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

#[path = "../../endpoint/tests/common/lossy.rs"]
mod lossy;

use lossy::{Lossy, run};

const CRATE: &str = env!("CARGO_MANIFEST_DIR");
const STRICT: [&str; 6] = ["-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", "-O1"];
/// System libraries that the static library needs, as in `Libs.private` of the pkg-config file.
const SYSTEM: [&str; 5] = ["-lgcc_s", "-lpthread", "-lm", "-ldl", "-lc"];

/// The path of a library: cargo puts it beside this test.
fn built(library: &str) -> PathBuf {
    let path = std::env::current_exe().unwrap().parent().unwrap().join(library);
    assert!(path.exists(), "{path:?}");
    path
}

/// A program's path in `directory`, and a compiler command without libraries.
fn compiler(directory: &Path, source: &Path) -> (PathBuf, Command) {
    let program = directory.join(source.file_stem().unwrap());
    let mut command = Command::new("cc");
    command.args(STRICT).arg(format!("-I{CRATE}/include")).args([source, Path::new("-o"), &program]);
    (program, command)
}

/// Compiles a program in `directory`, with the shared library installed there.
fn compile(directory: &Path, source: impl AsRef<Path>) -> PathBuf {
    let source = Path::new(CRATE).join(source);
    let (link, load) = (directory.join("link"), directory.join("load"));
    for path in [&link, &load] {
        fs::create_dir_all(path).unwrap();
    }
    // The linker searches one name; the loader uses the library's soname.
    let _ = symlink(built("libbifrost_capi.so"), link.join("libbifrost_rdm.so"));
    let _ = symlink(built("libbifrost_capi.so"), load.join("libbifrost_rdm.so.0"));
    let (program, mut compiler) = compiler(directory, &source);
    run(compiler
        .args([&format!("-L{}", link.display()), "-lbifrost_rdm", "-lpthread"])
        .arg(format!("-Wl,-rpath,{}", load.display())));
    program
}

/// A program that is killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the example's two ends. Returns the client's output.
fn pingpong(mut server: Command, mut client: Command, [here, there]: [&str; 2], count: &str, len: &str) -> String {
    let mut server = Running(server.args(["serve", there]).stdout(Stdio::piped()).spawn().unwrap());
    let mut port = String::new();
    BufReader::new(server.0.stdout.as_mut().unwrap()).read_line(&mut port).unwrap();
    let output = run(client.args(["ask", here, there, port.trim(), count, len]));
    // The server detects the client's end.
    assert!(server.0.wait().unwrap().success());
    output
}

#[test]
fn arguments_threads_and_ends_are_checked() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(run(&mut Command::new(compile(directory.path(), "tests/c/checks.c"))), "as expected\n");
}

#[test]
fn the_static_library_needs_no_shared_one() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("checks");
    run(Command::new("cc")
        .args(STRICT)
        .args([&format!("-I{CRATE}/include"), &format!("{CRATE}/tests/c/checks.c"), "-o"])
        .arg(&program)
        .arg(built("libbifrost_capi.a"))
        .args(SYSTEM));
    assert_eq!(run(&mut Command::new(&program)), "as expected\n");
    assert!(!run(Command::new("ldd").arg(&program)).contains("bifrost"));
    let pc = fs::read_to_string(Path::new(CRATE).join("bifrost-rdm.pc.in")).unwrap();
    assert!(pc.contains(&format!("\nLibs.private: {}\n", SYSTEM.join(" "))), "{pc}");
}

#[test]
fn the_shared_library_exports_what_the_header_declares() {
    let header = fs::read_to_string(Path::new(CRATE).join("include/bifrost_rdm.h")).unwrap();
    let declared: BTreeSet<&str> = { header.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') }
        .filter(|word| header.contains(&format!("{word}(")) && word.starts_with("bifrost_rdm_"))
        .collect();
    let symbols = run(Command::new("nm").args(["-D", "--defined-only"]).arg(built("libbifrost_capi.so")));
    let exported: BTreeSet<&str> = symbols.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    assert_eq!(exported, declared);
    assert!(exported.len() > 30);
}

#[test]
fn the_first_program_of_the_guide_works() {
    let guide = fs::read_to_string(Path::new(CRATE).join("../../docs/RDM-LIBRARY.md")).unwrap();
    let (_, block) = guide.split_once("```c\n").unwrap();
    let (block, after) = block.split_once("```\n").unwrap();
    let (_, promised) = after.split_once("It prints `").unwrap();
    let (promised, _) = promised.split_once('`').unwrap();
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("first.c");
    fs::write(&source, block).unwrap();
    assert_eq!(run(&mut Command::new(compile(directory.path(), source))).trim_end(), promised);
}

#[test]
fn two_processes_exchange_messages() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "examples/pingpong.c");
    for (address, count, len) in [("::1", "200", "32768"), ("127.0.0.1", "100", "100"), ("::1", "5", "3000000")] {
        let output = pingpong(Command::new(&program), Command::new(&program), [address; 2], count, len);
        assert!(output.contains(&format!("{count} calls of {len} bytes")), "{output}");
    }
}

#[test]
fn no_message_is_lost_when_packets_are() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "examples/pingpong.c");
    let lossy = Lossy::new("capi", 1500, 64);
    let output =
        pingpong(lossy.command(1, &program), lossy.command(0, &program), ["fd00:9::1", "fd00:9::2"], "100", "200000");
    let lost = output.lines().find_map(|line| line.strip_prefix("lost and retransmitted: ")).unwrap();
    assert!(lost.parse::<u64>().unwrap() > 50, "{output}");
}

#[test]
fn calls_move_between_two_libraries_of_a_process() {
    let directory = tempfile::tempdir().unwrap();
    let (program, mut compiler) = compiler(directory.path(), &Path::new(CRATE).join("examples/upgrade.c"));
    run(compiler.arg("-ldl"));
    // To the loader, another file is another library, with its own memory.
    let libraries = ["old.so", "new.so"].map(|name| directory.path().join(name));
    for library in &libraries {
        fs::copy(built("libbifrost_capi.so"), library).unwrap();
    }
    let lossy = Lossy::new("capi2", 1500, 256);
    let mut server = lossy.command(1, &program);
    let mut server =
        Running(server.arg("serve").args(&libraries).arg("fd00:9::2").stdout(Stdio::piped()).spawn().unwrap());
    let mut served = BufReader::new(server.0.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let ports = served.next().unwrap();
    let mut client = lossy.command(0, &program);
    client.arg("ask").args(&libraries).args(["fd00:9::1", "fd00:9::2"]).args(ports.split_whitespace());
    let mut client = Running(client.args(["3", "8192"]).stdout(Stdio::piped()).spawn().unwrap());
    let mut asked = BufReader::new(client.0.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    assert_eq!(asked.next().unwrap(), "connected");
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(500));
        // `ip netns exec` executes the program, so the child is the program itself.
        run(Command::new("kill").args(["-USR1", &client.0.id().to_string()]));
    }
    let output = asked.next().unwrap();
    let number = |text: &str, before: &str| -> u64 {
        let (_, after) = text.split_once(before).unwrap();
        after.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
    };
    let (all, first, second) = (number(&output, ""), number(&output, "first library "), number(&output, "second "));
    assert!(first > 0 && second > 0 && first + second == all && output.contains("moved 2 times"), "{output}");
    assert!(client.0.wait().unwrap().success());
    assert_eq!(served.next().unwrap(), format!("{all} requests, 0 duplicates"));
    assert!(server.0.wait().unwrap().success());
    // Loading the same file twice yields the same library.
    let same = Command::new(&program).arg("serve").args([&libraries[0], &libraries[0]]).arg("::1").output().unwrap();
    assert!(String::from_utf8_lossy(&same.stderr).contains("both are the same library"), "{same:?}");
}
