//! C programs, compiled as users compile theirs, against the shared and the static library.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const CRATE: &str = env!("CARGO_MANIFEST_DIR");
const STRICT: [&str; 6] = ["-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", "-O1"];
/// What the static library needs of the system; `Libs.private` of the file for pkg-config has the
/// same.
const SYSTEM: [&str; 5] = ["-lgcc_s", "-lpthread", "-lm", "-ldl", "-lc"];

/// Where cargo has put the libraries: beside this test.
fn built(library: &str) -> PathBuf {
    let path = std::env::current_exe().unwrap().parent().unwrap().join(library);
    assert!(path.exists(), "{path:?}");
    path
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Compiles a program in `directory`, where the shared library is as it is installed.
fn compile(directory: &Path, source: impl AsRef<Path>) -> PathBuf {
    let source = Path::new(CRATE).join(source);
    let (link, load) = (directory.join("link"), directory.join("load"));
    for path in [&link, &load] {
        fs::create_dir_all(path).unwrap();
    }
    // The linker finds one name, the loader the other one, which the library itself tells.
    let _ = symlink(built("libbifrost_capi.so"), link.join("libbifrost_rdm.so"));
    let _ = symlink(built("libbifrost_capi.so"), load.join("libbifrost_rdm.so.0"));
    let program = directory.join(source.file_stem().unwrap());
    run(Command::new("cc")
        .args(STRICT)
        .arg(format!("-I{CRATE}/include"))
        .args([&source, Path::new("-o"), &program])
        .args([&format!("-L{}", link.display()), "-lbifrost_rdm", "-lpthread"])
        .arg(format!("-Wl,-rpath,{}", load.display())));
    program
}

/// A program that is ended with this.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The example's two ends; what the one that asks prints.
fn pingpong(mut server: Command, mut client: Command, [here, there]: [&str; 2], count: &str, len: &str) -> String {
    let mut server = Running(server.args(["serve", there]).stdout(Stdio::piped()).spawn().unwrap());
    let mut port = String::new();
    BufReader::new(server.0.stdout.as_mut().unwrap()).read_line(&mut port).unwrap();
    let told = run(client.args(["ask", here, there, port.trim(), count, len]));
    // It has seen the other one's end.
    assert!(server.0.wait().unwrap().success());
    told
}

#[test]
fn arguments_threads_and_ends_are_checked() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(run(&mut Command::new(compile(directory.path(), "tests/c/checks.c"))), "as expected\n");
}

#[test]
fn the_static_library_does_without_the_shared_one() {
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
fn the_guide_s_first_program_works() {
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
fn two_processes_talk() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "examples/pingpong.c");
    for (address, count, len) in [("::1", "200", "32768"), ("127.0.0.1", "100", "100"), ("::1", "5", "3000000")] {
        let told = pingpong(Command::new(&program), Command::new(&program), [address; 2], count, len);
        assert!(told.contains(&format!("{count} calls of {len} bytes")), "{told}");
    }
}

/// Two network namespaces and a link between them that drops packets (root). Removed at the end.
struct Lossy([String; 2]);

impl Lossy {
    fn new(one_in: u32) -> Self {
        let names = ["a", "b"].map(|end| format!("capi-{}-{end}", std::process::id()));
        for name in &names {
            // What is left of a process with the same id.
            let _ = Command::new("ip").args(["netns", "del", name]).stderr(Stdio::null()).status();
            run(Command::new("ip").args(["netns", "add", name]));
        }
        let lossy = Self(names);
        let [a, b] = &lossy.0;
        let link = ["link", "add", "e0", "netns", a, "type", "veth", "peer", "name", "e0", "netns", b];
        run(Command::new("ip").args(link));
        for (n, name) in lossy.0.iter().enumerate() {
            let address = format!("fd00:9::{}/64", n + 1);
            run(Command::new("ip").args(["-n", name, "addr", "add", &address, "dev", "e0", "nodad"]));
            run(Command::new("ip").args(["-n", name, "link", "set", "e0", "up"]));
            // One packet, one decision: without offloads.
            let off = ["gso", "off", "tso", "off", "gro", "off", "tx-udp-segmentation", "off"];
            run(lossy.command(n, "ethtool").args(["-K", "e0"]).args(off));
            let table = "table inet t { chain c { type filter hook input priority 0; }; }";
            run(lossy.command(n, "nft").arg(table));
            let rule = format!("add rule inet t c meta l4proto udp numgen random mod {one_in} 0 counter drop");
            run(lossy.command(n, "nft").arg(rule));
        }
        lossy
    }

    fn command(&self, end: usize, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0[end]]).arg(program.as_ref());
        command
    }
}

impl Drop for Lossy {
    fn drop(&mut self) {
        for name in &self.0 {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

#[test]
fn nothing_is_lost_where_packets_are() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path(), "examples/pingpong.c");
    let lossy = Lossy::new(64);
    let told =
        pingpong(lossy.command(1, &program), lossy.command(0, &program), ["fd00:9::1", "fd00:9::2"], "100", "200000");
    let lost = told.lines().find_map(|line| line.strip_prefix("lost and sent again: ")).unwrap();
    assert!(lost.parse::<u64>().unwrap() > 50, "{told}");
}
