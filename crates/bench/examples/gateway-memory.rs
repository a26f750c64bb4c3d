//! What a gateway's packets wait for among very many tenants: `time` measures packets decided one by one and in
//! vectors; `lines` lists the cache lines that a packet touches, by their owners, with valgrind's `lackey`.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;

use anyhow::{Context as _, Result, bail};
use bifrost_bench::account::Counting;
use bifrost_bench::forwarding::Service;
use bifrost_bench::tenants::{self, LINES_OF_SNAT, MARK, MEMORY_LINES, SHARED_LINES, Scale, TRACED};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["time"] => time(),
        ["lines"] => ["vpc", "snat"].into_iter().try_for_each(lines)?,
        // What `lines` runs under valgrind.
        ["trace", service] => {
            println!("{}", (&raw const MARK).addr());
            tenants::trace_lines(service_of(service)?, |buffer| println!("{}\n{}", buffer.start, buffer.end));
        }
        _ => bail!("usage: gateway-memory time | lines"),
    }
    Ok(())
}

fn service_of(name: &str) -> Result<Service> {
    Ok(match name {
        "vpc" => Service::Vpc,
        "snat" => Service::Snat,
        _ => bail!("no service {name}"),
    })
}

fn time() {
    println!("an access to memory takes {:.0} ns", tenants::memory_latency_ns());
    for times in tenants::times() {
        let tenants::Times { name, small_ns: [small, small_vectors], large_ns: [large, vectors], percent, bytes } =
            times;
        println!(
            "{name}: few flows {small:.0} ns a packet, in vectors {small_vectors:.0}; {} MB of tables {large:.0} ns, in \
             vectors {vectors:.0} ({percent:.0} %)",
            bytes >> 20
        );
    }
    println!("an access to memory takes {:.0} ns", tenants::memory_latency_ns());
    for (name, scale, lines) in
        [("the shared cache", Scale::MIDDLE, SHARED_LINES), ("memory", Scale::LARGE, MEMORY_LINES)]
    {
        let wait = tenants::wait(scale, lines);
        println!(
            "tables in {name}: snat in vectors {:.0} ns a packet, of which it waits {:.0}: {LINES_OF_SNAT} lines of {:.0} \
             ns, {:.1} of which overlap",
            wait.packet_ns,
            wait.wait_ns,
            wait.latency_ns,
            wait.overlap()
        );
    }
}

/// Reads the trace of `trace`.
fn lines(service: &str) -> Result<()> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut traced = Command::new("valgrind")
        .args(["--tool=lackey", "--trace-mem=yes"])
        .arg(program)
        .args(["trace", service])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("starting valgrind")?;
    let (Some(stdout), Some(stderr)) = (traced.stdout.take(), traced.stderr.take()) else { bail!("no pipes") };
    // Addresses come on another pipe than the trace, whose begin is not needed.
    let (sender, addresses) = channel();
    let reader = std::thread::spawn(move || {
        let lines = BufReader::new(stdout).lines().map_while(Result::ok);
        lines.filter_map(|line| line.parse().ok()).try_for_each(|address: usize| sender.send(address))
    });
    // Everything between a mark and the next one.
    let mut packets: Vec<BTreeMap<usize, bool>> = Vec::new();
    let (mut mark, mut inside) = (None, false);
    for line in BufReader::with_capacity(1 << 20, stderr).split(b'\n') {
        let Some((address, size, written)) = access(&line?) else { continue };
        if mark.is_none() {
            mark = addresses.try_recv().ok();
        } else if mark == Some(address) && written {
            inside = !inside;
            if inside {
                packets.push(BTreeMap::new());
            }
        } else if inside && let Some(packet) = packets.last_mut() {
            for line in address / 64..=(address + size.max(1) - 1) / 64 {
                *packet.entry(line).or_default() |= written;
            }
        }
    }
    if !traced.wait()?.success() {
        bail!("valgrind failed");
    }
    let (Ok(start), Ok(end), Ok(_)) = (addresses.recv(), addresses.recv(), reader.join()) else {
        bail!("no addresses")
    };
    if packets.len() != TRACED.all_flows() as usize {
        bail!("{} packets are marked", packets.len());
    }
    println!("{service}: cache lines that a packet touches");
    for tenants::Lines { owner, each, different } in tenants::owners(TRACED, start..end, &packets) {
        println!("  {owner:?}: {each:.1} of {different:.1}");
    }
    Ok(())
}

/// A line of the trace: address, bytes, whether it is a store. `None` for others, such as instructions.
fn access(line: &[u8]) -> Option<(usize, usize, bool)> {
    let [b' ', kind @ (b'L' | b'S' | b'M'), b' ', rest @ ..] = line else { return None };
    let (address, size) = std::str::from_utf8(rest).ok()?.split_once(',')?;
    Some((usize::from_str_radix(address, 16).ok()?, size.trim().parse().ok()?, *kind != b'L'))
}
