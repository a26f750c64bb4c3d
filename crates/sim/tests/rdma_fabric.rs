//! Priority flow control and costs of hosts, in small worlds of RDMA hosts.

use bifrost_sim::rdma::{Counts, DcqcnConfig, Fabric, Machine, Mark, Mesh, Pause, Stack, Topology};

const RATE: f64 = 25e9;
const PAUSE: Pause = Pause { off_bytes: 256 << 10, on_bytes: 128 << 10, between_switches: true };

fn mesh(stack: Stack, hosts: usize, pairs: &[(usize, usize)]) -> Mesh {
    let pairs = pairs.to_vec();
    Mesh { pairs, ..Mesh::full(vec![(stack, Machine::NEW); hosts], 64 * 1024, 16) }
}

/// Bytes that each host has sent after 2 ms and after 6 ms. If `dies`, the last host's memory fails in between.
fn run(mesh: &Mesh, fabric: Fabric, topology: &Topology, dies: bool) -> (Vec<[u64; 2]>, Counts) {
    let mut world = mesh.world(fabric, topology, 1).expect("a world");
    let last = mesh.hosts.len() - 1;
    let mut sent = [(); 2].map(|()| Vec::new());
    for (at, until) in [2_000_000, 6_000_000].into_iter().enumerate() {
        world.run_until(until);
        sent[at] = (0..=last).map(|host| world.node(host).sent_bytes()).collect();
        if dies {
            world.set_pcie_rate(last, 0.0);
        }
    }
    (sent[0].iter().zip(&sent[1]).map(|(a, b)| [*a, *b]).collect(), world.counts)
}

/// Two leaves of three hosts and a spine.
fn two_leaves() -> Topology {
    Topology::LeafSpine { leaves: vec![3, 3], spines: 1, rate: 75e9, delay_ns: 1_000 }
}

#[test]
fn pauses_prevent_drops() {
    let mesh = mesh(Stack::Rc(None), 6, &[(0, 5), (1, 5), (2, 5), (3, 5)]);
    let small = Fabric { buffer_bytes: 2 << 20, ..Fabric::new(RATE, 10_000) };
    let (_, lossy) = run(&mesh, small, &two_leaves(), false);
    assert!(lossy.dropped_packets > 100 && lossy.pauses == 0, "{lossy:?}");
    let (sent, lossless) = run(&mesh, Fabric { pause: Some(PAUSE), ..small }, &two_leaves(), false);
    assert!(lossless.dropped_packets == 0 && lossless.pauses > 10, "{lossless:?}");
    let gbps = sent.iter().map(|host| host[1] - host[0]).sum::<u64>() as f64 * 8.0 / 4e6;
    assert!(gbps > 0.9 * 22.7, "{gbps} Gbit/s into a link of 25");
}

#[test]
fn a_dead_host_stops_bystanders_only_by_its_pauses() {
    // Hosts 0 and 1 send to the host that dies. Host 2 sends to the host beside it, over the same links between
    // switches.
    let pairs = [(0, 5), (1, 5), (2, 4)];
    let bystander = |stack, fabric| {
        let [before, after] = run(&mesh(stack, 6, &pairs), fabric, &two_leaves(), true).0[2];
        (before as f64 * 8.0 / 2e6, (after - before) as f64 * 8.0 / 4e6)
    };
    let lossy = Fabric::new(RATE, 10_000);
    let paused = Fabric { pause: Some(PAUSE), ..lossy };
    let (before, after) = bystander(Stack::Rc(None), paused);
    assert!(before < 15.0 && after < 1.0, "RC, paused: {before} and {after} Gbit/s");
    for stack in [Stack::Rc(None), Stack::Engine] {
        let (before, after) = bystander(stack, lossy);
        assert!(before > 18.0 && after > 18.0, "{stack:?}, not paused: {before} and {after} Gbit/s");
    }
}

#[test]
fn marks_shorten_queues_and_runs_are_deterministic() {
    let queue = |dcqcn, mark| {
        let mesh = mesh(Stack::Rc(dcqcn), 6, &[(0, 5), (1, 5), (2, 5), (3, 5)]);
        let fabric = Fabric { mark, ..Fabric::new(RATE, 10_000) };
        let mut world = mesh.world(fabric, &Topology::Star, 1).expect("a world");
        world.run_until(10_000_000);
        world.take_queue_bytes_max(5);
        world.run_until(20_000_000);
        (world.take_queue_bytes_max(5), world.counts, world.events())
    };
    let line = queue(None, None);
    let marked = queue(Some(DcqcnConfig::new(RATE)), Some(Mark::DCQCN));
    assert!(marked.1.marked_packets > 0 && marked.0 * 2 < line.0, "{marked:?}, at line rate {line:?}");
    assert_eq!(marked, queue(Some(DcqcnConfig::new(RATE)), Some(Mark::DCQCN)));
}

#[test]
fn a_slow_processor_bounds_small_messages() {
    let rate = |operation_ns| {
        let machine = Machine { operation_ns, ..Machine::default() };
        let hosts = vec![(Stack::Engine, machine); 2];
        let mesh = Mesh { pairs: vec![(0, 1)], ..Mesh::full(hosts, 64, 32) };
        let mut world = mesh.world(Fabric::new(RATE, 1_000), &Topology::Star, 1).expect("a world");
        world.run_until(5_000_000);
        let busy = world.machine_counts(1).busy_ns as f64 / 5e6;
        (world.node(0).sent_bytes() / 64, busy)
    };
    let (fast, idle) = rate(0);
    let (slow, busy) = rate(1_000);
    assert!(slow * 2 < fast && idle == 0.0 && busy > 0.5, "{fast} and {slow} messages, busy for {busy}");
}
