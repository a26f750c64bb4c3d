//! Whole worlds: the shipped scenarios, and determinism.

use std::cell::RefCell;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;

use bifrost_sim::{Report, Scenario, Trace, World};

fn scenarios() -> Vec<(String, Scenario)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
    let files = std::fs::read_dir(folder).expect("scenarios").map(|entry| entry.expect("entry").path());
    let mut all: Vec<_> =
        files.map(|p| (p.display().to_string(), Scenario::load(&p).unwrap_or_else(|e| panic!("{e}")))).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    assert!(all.len() >= 6);
    all
}

fn run(scenario: &Scenario, seed: u64) -> World {
    let mut world = World::new(scenario, seed).unwrap_or_else(|e| panic!("{e}"));
    world.run();
    world
}

#[test]
fn shipped_scenarios_are_deterministic_and_have_no_violations() {
    for (name, scenario) in scenarios() {
        for seed in [1, 2] {
            let world = run(&scenario, seed);
            let report = Report::of(&world);
            assert!(world.violations.is_empty() && report.done, "{name}, seed {seed}:\n{report}");
            let again = run(&scenario, seed);
            assert_eq!(world.event_hash(), again.event_hash(), "{name}, seed {seed}");
            assert_eq!(format!("{:?}", world.statistics()), format!("{:?}", again.statistics()));
        }
        assert_ne!(run(&scenario, 1).event_hash(), run(&scenario, 2).event_hash(), "{name}: the seed decides nothing");
    }
}

/// A host that gets no CPU for a moment responds on no path. This is evidence against the host, not against a path.
#[test]
fn a_paused_host_makes_no_path_suspect() {
    for length_ms in [8, 15, 25] {
        let mut text = "duration = \"6s\"\n[topology]\nkind = \"parallel\"\nhosts = 2\npaths = 4\n\
            link = { rate = \"10Gbit/s\", delay = \"20us\" }\n[[guests]]\nvni = 100\nper_host = 2\n\
            [[workloads]]\nkind = \"request\"\nfrom = [0]\nto = [2]\nconnections = 6\ncount = 40_000\n\
            [[workloads]]\nkind = \"packets\"\nfrom = [1]\nto = [3]\npackets = 8_000\ngap = \"200us\"\n"
            .to_owned();
        // Probes are sent at regular times, so pauses start at irregular ones.
        let mut at_us = 50_000;
        for number in 0..12u64 {
            at_us += 60_000 + number * 37_919 % 40_000;
            let host = number % 2;
            let until_us = at_us + length_ms * 1000;
            text += &format!("[[faults]]\nat = \"{at_us}us\"\nuntil = \"{until_us}us\"\npause = {host}\n");
        }
        let scenario = Scenario::parse("text", &text).expect("scenario");
        let world = run(&scenario, 1);
        let report = Report::of(&world);
        assert!(world.violations.is_empty() && report.done, "{length_ms} ms:\n{report}");
        let text = report.to_string();
        assert!(text.contains("rte.timeout_packets"), "{length_ms} ms: no timeout\n{text}");
        assert!(!text.contains("rte.suspect_paths"), "{length_ms} ms:\n{text}");
    }
}

/// All links are down for three seconds, and one comes back before the others. Packets that the hosts kept arrive
/// first, long before a guest's TCP tries again.
#[test]
fn requests_continue_at_once_after_an_outage() {
    let down_ms = 3_000;
    for first in 0..4 {
        let mut text = "duration = \"20s\"\n[topology]\nkind = \"parallel\"\nhosts = 2\npaths = 4\n\
            link = { rate = \"10Gbit/s\", delay = \"20us\" }\n[[guests]]\nvni = 100\nper_host = 1\n\
            [[workloads]]\nkind = \"request\"\nfrom = [0]\nto = [1]\nconnections = 6\ncount = 4_000\n"
            .to_owned();
        for path in 0..4 {
            // At a different phase of the probe interval each time.
            let at_us = 100_000 + first * 7_919;
            let until_us = at_us + 1000 * (down_ms + if path == first { 0 } else { 700 });
            text += &format!(
                "[[faults]]\nat = \"{at_us}us\"\nuntil = \"{until_us}us\"\nlinks = \"*/{path}\"\nset = {{ down = true }}\n"
            );
        }
        let scenario = Scenario::parse("text", &text).expect("scenario");
        let world = run(&scenario, 1 + first);
        let report = Report::of(&world);
        assert!(world.violations.is_empty() && report.done, "path {first}:\n{report}");
        // The latency of the requests that were in flight when the links went down.
        let longest_ms = report.workloads[0].latency.max_us / 1e3;
        assert!(longest_ms > down_ms as f64, "path {first}: {longest_ms} ms: the outage affected no request\n{report}");
        assert!(longest_ms < (down_ms + 50) as f64, "path {first}: {longest_ms} ms\n{report}");
    }
}

/// A bulk flow fills the queues of four paths, and requests follow it. Then three of the paths fail together. Neither
/// the round-trip times of the bulk flow nor the order in which the transport tries the dead paths delays a request.
#[test]
fn paths_that_die_after_a_bulk_flow_delay_nothing() {
    let mut longest_ms = 0.0f64;
    for survivor in 0..4 {
        for after_us in [300, 1_100, 5_300, 20_700] {
            let mut text = "duration = \"20s\"\n[topology]\nkind = \"parallel\"\nhosts = 2\npaths = 4\n\
                link = { rate = \"1Gbit/s\", delay = \"20us\" }\n[[guests]]\nvni = 100\nper_host = 1\n\
                [[workloads]]\nkind = \"bulk\"\nfrom = [0]\nto = [1]\nconnections = 4\nbytes = \"8MB\"\n\
                [[workloads]]\nkind = \"request\"\nfrom = [0]\nto = [1]\nstart = \"150ms\"\ncount = 2_000\n"
                .to_owned();
            for path in (0..4).filter(|path| *path != survivor) {
                let at_us = 150_000 + after_us;
                text += &format!("[[faults]]\nat = \"{at_us}us\"\nlinks = \"*/{path}\"\nset = {{ down = true }}\n");
            }
            let scenario = Scenario::parse("text", &text).expect("scenario");
            let world = run(&scenario, 1);
            let report = Report::of(&world);
            let what = format!("path {survivor} lives, the others for {after_us} us");
            assert!(world.violations.is_empty() && report.done, "{what}:\n{report}");
            longest_ms = longest_ms.max(report.workloads[1].latency.max_us / 1e3);
        }
    }
    assert!((1.0..10.0).contains(&longest_ms), "{longest_ms} ms");
}

/// Plain VXLAN leaves a dead path as soon as a probe has detected the failure, although the transport has carried
/// nothing for a long time.
#[test]
fn plain_vxlan_leaves_a_path_that_dies() {
    let text = "duration = \"12s\"\n[topology]\nkind = \"parallel\"\nhosts = 2\npaths = 4\n\
                link = { rate = \"1Gbit/s\", delay = \"20us\" }\n\
                [[vnis]]\nid = 100\nreliability = \"tcp\"\n[[vnis]]\nid = 200\nreliability = \"off\"\n\
                [[guests]]\nvni = 100\nper_host = 1\n[[guests]]\nvni = 200\nper_host = 1\n\
                [[workloads]]\nkind = \"request\"\nfrom = [0]\nto = [1]\ncount = 10\n\
                [[workloads]]\nkind = \"packets\"\nfrom = [2]\nto = [3]\npackets = 20_000\nflows = 64\ngap = \"500us\"\n\
                [[faults]]\nat = \"3s\"\nlinks = \"*/2\"\nset = { down = true }\n";
    let world = run(&Scenario::parse("text", text).expect("scenario"), 1);
    let report = Report::of(&world);
    let lost = 20_000 - report.workloads[1].messages;
    // A quarter of 2,000 packets per second, for 100 ms until the next probe and its timeout.
    assert!(world.violations.is_empty() && (1..100).contains(&lost), "{lost} lost\n{report}");
}

#[derive(Clone, Default)]
struct Shared(Rc<RefCell<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.borrow_mut().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_trace_has_every_datagram_in_well_formed_blocks() {
    let text = "duration = \"1s\"\n[topology]\nkind = \"parallel\"\nhosts = 2\npaths = 2\nlink = { loss = 0.1 }\n\
                [[workloads]]\nkind = \"packets\"\nfrom = [0]\nto = [1]\npackets = 200\n";
    let scenario = Scenario::parse("text", text).expect("scenario");
    let bytes = Shared::default();
    let mut world = World::new(&scenario, 3).expect("world");
    world.set_trace(Trace::new(Box::new(bytes.clone())).expect("trace"));
    world.run();
    world.finish_trace().expect("trace");
    let plain = run(&scenario, 3);
    assert_eq!(world.event_hash(), plain.event_hash(), "a trace changes nothing");

    let bytes = bytes.0.borrow();
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let (mut at, mut packets, mut interfaces, mut last) = (0, 0, 0, 0);
    while at < bytes.len() {
        let (kind, len) = (u32_at(at), u32_at(at + 4) as usize);
        assert!(len % 4 == 0 && u32_at(at + len - 4) as usize == len);
        match kind {
            0x0a0d_0d0a => assert_eq!(at, 0),
            1 => interfaces += 1,
            6 => {
                assert!(u32_at(at + 8) < interfaces, "an interface that was described before");
                let time = u64::from(u32_at(at + 12)) << 32 | u64::from(u32_at(at + 16));
                let frame = &bytes[at + 28..at + 28 + u32_at(at + 20) as usize];
                assert!(time + 1_000_000 > last, "roughly in order");
                last = time;
                let ip = bifrost_wire::ipv4::Header::parse(&frame[14..]).expect("IPv4");
                assert!(bifrost_wire::ipv4::checksum_is_valid(&frame[14..34]) && ip.protocol == 17);
                packets += 1;
            }
            other => panic!("block {other:#x}"),
        }
        at += len;
    }
    assert_eq!((packets, interfaces), (plain.statistics().sent_packets, 4));
}

/// Wireshark parses a trace, if it is installed.
#[test]
fn wireshark_opens_a_trace() {
    let missing = |e: &std::io::Error| e.kind() == std::io::ErrorKind::NotFound;
    if Command::new("tshark").arg("--version").output().is_err_and(|e| missing(&e)) {
        eprintln!("tshark is not installed: nothing is tested here");
        return;
    }
    let text = "duration = \"1s\"\n[topology]\nkind = \"star\"\nhosts = 2\nlink = { loss = 0.1 }\n\
                [[workloads]]\nkind = \"packets\"\nfrom = [0]\nto = [1]\npackets = 100\n";
    let file = tempfile::NamedTempFile::new().expect("a file");
    let mut world = World::new(&Scenario::parse("text", text).expect("scenario"), 1).expect("world");
    world.set_trace(Trace::new(Box::new(file.reopen().expect("a file"))).expect("trace"));
    world.run();
    world.finish_trace().expect("trace");
    let fields = |filter: &str, field: &str| {
        let arguments = ["-o", "udp.check_checksum:TRUE", "-o", "ip.check_checksum:TRUE", "-T", "fields", "-e", field];
        let output = Command::new("tshark").arg("-r").arg(file.path()).args(["-Y", filter]).args(arguments).output();
        let output = output.expect("tshark");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).lines().map(str::to_string).collect::<Vec<_>>()
    };
    let links = &world.network().links;
    let entered: u64 = links.iter().map(|l| l.packets + l.dropped_packets).sum();
    assert_eq!(fields("udp.checksum.status == 1 && ip.checksum.status == 1", "frame.number").len() as u64, entered);
    let lost = fields("frame.comment == \"dropped: loss\"", "frame.interface_name");
    let want = |name: &str| links[world.network().matching(name).next().expect("a link") as usize].dropped_packets;
    for name in ["h0>s0", "s0>h0", "h1>s0", "s0>h1"] {
        assert_eq!(lost.iter().filter(|l| *l == name).count() as u64, want(name), "{name}");
    }
    assert!(!lost.is_empty());
}

/// A guest whose buffers are all held, and which receives nothing, continues when its buffers are released.
#[test]
fn a_guest_with_few_buffers_is_not_forgotten() {
    let text = "duration = \"5s\"\nhost = { tx_ring = 4, rx_ring = 4 }\n[topology]\nkind = \"parallel\"\nhosts = 2\n\
                paths = 2\n[[workloads]]\nkind = \"packets\"\nfrom = [0]\nto = [1]\npackets = 500\n";
    let world = run(&Scenario::parse("text", text).expect("scenario"), 1);
    assert!(world.violations.is_empty(), "{}", Report::of(&world));
}

/// Hosts 0 and 1 around two spines. All links to and from spine 1 go down permanently at 1 ms.
fn with_a_dead_spine(reroute_after: &str) -> World {
    let text = format!(
        "duration = \"100ms\"\nrun_to_end = true\npaths = 8\n[topology]\nkind = \"clos2\"\nleaves = 2\nspines = 2\n\
         hosts_per_leaf = 1\nfabric_link = {{ reroute_after = \"{reroute_after}\" }}\n[[workloads]]\nkind = \"packets\"\n\
         from = [0]\nto = [1]\npackets = 9000\ngap = \"10us\"\n[[faults]]\nat = \"1ms\"\nlinks = \"leaf*>spine1\"\n\
         both_ways = true\nset = {{ down = true }}\n"
    );
    run(&Scenario::parse("text", &text).expect("scenario"), 1)
}

/// Number of packets that a link dropped.
fn lost(world: &World, name: &str) -> u64 {
    let link = world.network().matching(name).next().expect("a link");
    world.network().links[link as usize].dropped_packets
}

#[test]
fn routing_withdraws_a_dead_link_after_its_time() {
    let (never, late, soon) = (with_a_dead_spine("0ns"), with_a_dead_spine("50ms"), with_a_dead_spine("2ms"));
    for world in [&never, &late, &soon] {
        assert!(world.violations.is_empty(), "{}", Report::of(world));
        assert!(lost(world, "leaf0>spine1") > 0 && lost(world, "spine1>leaf0") + lost(world, "leaf1>spine1") > 0);
    }
    let [never, late, soon] = [&never, &late, &soon].map(|world| lost(world, "leaf0>spine1"));
    assert!(soon < late && late < never, "{soon} {late} {never}");
}

#[test]
fn a_slow_guest_gets_everything_at_its_own_pace() {
    for (kind, size) in [("packets", "packets = 500\ngap = \"5us\""), ("bulk", "bytes = \"500KB\"")] {
        let text = format!(
            "duration = \"5s\"\nhost = {{ rx_ring = 256 }}\n[topology]\nkind = \"parallel\"\nhosts = 2\npaths = 2\n\
             [[workloads]]\nkind = \"{kind}\"\nfrom = [0]\nto = [1]\n{size}\n"
        );
        let duration = |fault: &str| {
            let world = run(&Scenario::parse("text", &format!("{text}{fault}")).expect("scenario"), 1);
            assert!(world.violations.is_empty(), "{kind}: {}", Report::of(&world));
            Report::of(&world).workloads[0].duration_ns
        };
        let (fast, slow) = (duration(""), duration("[[faults]]\nstall = 1\nreceive_gap = \"50us\"\n"));
        // At least 500 frames at 50 us each. TCP sends 500 KB in 343 frames.
        assert!(fast < 10_000_000 && (15_000_000..1_000_000_000).contains(&slow), "{kind}: {fast} ns, {slow} ns");
    }
}

/// Bursts of 500 packets to a guest with 32 buffers. Most do not fit at first, whatever the ordering.
#[test]
fn a_ring_smaller_than_a_burst_costs_milliseconds_and_no_packet() {
    for ordering in ["flow", "strict"] {
        let text = format!(
            r#"
            duration = "20s"
            paths = 4
            topology = {{ kind = "parallel", hosts = 2, paths = 4, link = {{ rate = "25Gbit/s", delay = "25us" }} }}
            host = {{ rx_ring = 32 }}
            vnis = [{{ id = 100, reliability = "all", ordering = "{ordering}" }}]
            guests = [{{ vni = 100, hosts = [0, 1], per_host = 1 }}]
            [[workloads]]
            kind = "packets"
            from = [0]
            to = [1]
            packets = 5000
            flows = 8
            size = "1000B"
            gap = "50ms"
            burst = 500
            start = "1ms"
            "#
        );
        let scenario = Scenario::parse("small ring", &text).unwrap_or_else(|e| panic!("{e}"));
        let report = Report::of(&run(&scenario, 3));
        assert!(report.violations == 0 && report.done, "{ordering}:\n{report}");
        assert_eq!(report.exempt_packets, 0, "{ordering}: no packet is given up");
        assert!(report.workloads[0].latency.p99_us <= 20_000.0, "{ordering}:\n{report}");
        assert!(report.sent_packets < 15_000, "{ordering}:\n{report}");
    }
}

/// One guest sends to two others, one of which receives a packet every 200 us. Its window is closed, but the other one
/// is not delayed.
#[test]
fn a_closed_window_delays_only_its_own_destination() {
    let text = "duration = \"20s\"\nhost = { tx_ring = 1024, rx_ring = 256 }\n[topology]\nkind = \"star\"\nhosts = 3\n\
                [[workloads]]\nkind = \"packets\"\nfrom = [0]\nto = [1]\npackets = 4000\ngap = \"20us\"\n\
                [[workloads]]\nkind = \"packets\"\nfrom = [0]\nto = [2]\npackets = 4000\ngap = \"10us\"\n";
    let report = |fault: &str| {
        let world = run(&Scenario::parse("text", &format!("{text}{fault}")).expect("scenario"), 1);
        assert!(world.violations.is_empty(), "{}", Report::of(&world));
        Report::of(&world)
    };
    let (alone, beside) = (report(""), report("[[faults]]\nstall = 2\nreceive_gap = \"200us\"\n"));
    let [to_one, to_slow] = [0, 1].map(|n| beside.workloads[n].duration_ns);
    assert!(to_slow > 2 * alone.workloads[1].duration_ns, "the second one is slow: {to_slow} ns\n{beside}");
    let before = alone.workloads[0].duration_ns;
    assert!(to_one < before + before / 20, "{to_one} ns, {before} ns without\n{beside}");
    let [p99, p99_before] = [&beside, &alone].map(|report| report.workloads[0].latency.p99_us);
    assert!(p99 < p99_before + 100.0, "{p99} us, {p99_before} us without\n{beside}");
}
