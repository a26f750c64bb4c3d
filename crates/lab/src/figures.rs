//! The papers' figures: the experiment that measures each, the paper's claim, and how the measurement here differs.
//!
//! NSDI'26 and APNET'25 are the two BIFROST papers, SIGCOMM'24 is the Triton paper, SIGCOMM'25 the Albatross paper,
//! and RDMA the paper on Bifröst over RDMA.

/// A figure of a paper.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    /// The paper and its number.
    pub name: &'static str,
    /// What the paper claims.
    pub claim: &'static str,
    /// How the measurement here differs.
    pub differs: &'static str,
}

/// The figures that `experiment` measures.
pub fn of(experiment: &str) -> &'static [Figure] {
    MEASURED.iter().find(|(name, _)| *name == experiment).map_or(&[], |(_, figures)| figures)
}

const fn figure(name: &'static str, claim: &'static str, differs: &'static str) -> Figure {
    Figure { name, claim, differs }
}

/// The figures of each experiment.
const MEASURED: &[(&str, &[Figure])] = &[
    (
        "redis-loss",
        &[
            figure(
                "NSDI'26 figure 20",
                "At up to 1 % loss, Redis latency falls by up to 3.4 times (mean), 242 times (P99) and 210 times \
                 (P99.9), throughput rises 3.4 times, and tail latency stays below 4 ms.",
                "Two hosts share the two processors of one machine, so Redis is slower, and queueing for a processor \
                 is part of the tail. Loss is also injected on the wire; the paper injects it only between switch and \
                 guest.",
            ),
            figure(
                "APNET'25 figure 10b",
                "P99.9 of Redis stays at about 3 ms under congestion.",
                "Random loss stands for congestion.",
            ),
        ],
    ),
    (
        "path-failure",
        &[
            figure(
                "NSDI'26 figure 16",
                "When the active port begins to lose 10 % of its packets, throughput is stable.",
                "One of four links, not a port of a NIC; also a link that loses everything; bins of 100 ms instead of \
                 1 s. The paper's PS is mode `probe_switch`: ten probes a second over each path, and all plain \
                 VXLAN traffic changes path.",
            ),
            figure(
                "NSDI'26 figure F10, APNET'25 figure 10a",
                "While a port fails, every Redis request succeeds; without BIFROST half of them fail.",
                "A request fails if it has no answer after 1 s. One of four links fails, so most connections over the \
                 kernel's VXLAN are not affected.",
            ),
        ],
    ),
    (
        "granularity",
        &[
            figure(
                "NSDI'26 figures 17 and 18",
                "In-network reordering raises throughput 1.01 to 1.31 times and lowers the guest's retransmissions 3.1 \
                 to 4.8 times, at every granularity of spraying.",
                "User-mode Linux guests that share a processor with the switch; four paths with delays 100 µs apart. \
                 Their TCP is a modern one: it waits for late packets (RACK) and retransmits few of the reordered \
                 ones, as the other columns show, so its throughput hardly depends on the order.",
            ),
            figure(
                "NSDI'26 figure 23",
                "The guest's processor time falls, because the transport retransmits and reorders in its place.",
                "Processor time of the machine's process, per gigabyte received. With so few retransmissions, the \
                 difference is smaller than its spread.",
            ),
        ],
    ),
    (
        "coverage",
        &[figure(
            "NSDI'26 figure 19",
            "With loss of 0 to 2 % between switch and guest, the guest retransmits 69 to 90 % less.",
            "Eight flows of one guest instead of eight guests on eight hosts; runs with and without BIFROST have the \
             same losses, and are not two halves of one run.",
        )],
    ),
    (
        "nginx",
        &[
            figure(
                "NSDI'26 figure 21",
                "With short connections at up to 2 % loss, P99 is reduced by up to 66.7 times and stays below 10 ms; \
                 throughput is sustained.",
                "16 clients, one worker, and two hosts on two processors.",
            ),
            figure(
                "APNET'25 figures 7a and 9a",
                "At 1 % loss, mean latency is 1.2 ms instead of 12 ms, P99 below 10 ms instead of 200 ms.",
                "16 clients, one worker, and two hosts on two processors; loss on the wire in both directions, so a \
                 request and its answer are exposed to it twice.",
            ),
            figure(
                "SIGCOMM'24 figures 14 to 16",
                "Requests per second and completion times: comparable to a hardware path with long connections, 67 % \
                 more with short ones.",
                "Open vSwitch instead of a hardware path; nothing here is hardware.",
            ),
        ],
    ),
    (
        "elephants",
        &[figure(
            "NSDI'26 figure 15",
            "Two large flows together carry the same throughput at every percentile; when they are hashed onto one \
             port they carry half of it.",
            "Four links of 200 Mbit/s, not two ports of 3 Gbit/s; 1.5 s after the first half second, not 5 s. The \
             limit is at the sender's end of each link, the only end. The paper's PS is mode `probe_switch`: ten \
             probes a second over each path, and all plain VXLAN traffic changes path.",
        )],
    ),
    (
        "stable",
        &[figure(
            "NSDI'26 figures E8 and E9",
            "Without loss, BIFROST costs almost nothing on average, with short and persistent connections, and lowers \
             P99.9 and the maximum.",
            "At a fixed rate far below saturation, compared with the same switch without reliability (as the bars \
             are). Nothing is lost here; the paper's network has occasional losses. So there is no tail to reduce.",
        )],
    ),
    (
        "congestion-control",
        &[figure(
            "NSDI'26 figure F11",
            "With congestion control, latencies of Redis are somewhat lower from the mean to P99, and P99.9 is 30 % \
             lower.",
            "Loss at both guests, not only at the receiver. Between two hosts nothing is congested except their \
             processors, so the bar only requires that congestion control costs nothing.",
        )],
    ),
    (
        "sockperf",
        &[figure(
            "APNET'25 figures 7b and 9b",
            "At 1 % loss, 97 of 100 Mbit/s instead of 30; at 5 %, 65.",
            "The paper does not say what it sends: its 100 Mbit/s is about the rate of sockperf's default messages of \
             14 bytes. Sender and switch share a processor; loss on the wire in both directions. The round trip here \
             is so short that the kernel's TCP alone keeps two thirds at 1 %; the two are compared at 5 %.",
        )],
    ),
    (
        "applications",
        &[figure(
            "beyond the papers",
            "The papers' applications are Redis and nginx over HTTP/1.1. Other applications over TCP gain equally; UDP \
             is not carried reliably and is not harmed.",
            "PostgreSQL, MariaDB, memcached and HTTP/2 on TCP, QUIC and plain requests and answers over UDP.",
        )],
    ),
    (
        "delayed-release",
        &[figure(
            "NSDI'26 figure 22",
            "A sender keeps 16 bytes for each packet in flight: about 500 KB at 10 Gbit/s, and no payload.",
            "Lower rates, over paths of 1 ms; memory of a process, not of a SmartNIC.",
        )],
    ),
    (
        "slicing",
        &[figure(
            "SIGCOMM'24 figure 11",
            "Jumbo frames (MTU 8500) with header-payload slicing carry 192 Gbit/s of TCP, three times as much as 1500 \
             bytes (some 65 Gbit/s, with or without slicing); each of the two alone brings little.",
            "Slicing saves a copy out of the guest's memory here, not a transfer over PCIe. User-mode Linux guests \
             share a processor with the switch and need most of it, so the switch's processor time per GB is more \
             meaningful than bandwidth.",
        )],
    ),
    (
        "switch-overall",
        &[figure(
            "SIGCOMM'24 figure 8",
            "Bandwidth, packets per second and connections per second of a unified path, close to those of a hardware \
             path.",
            "Open vSwitch's userspace datapath instead of a hardware path; containers with TAP devices.",
        )],
    ),
    (
        "switch-rate",
        &[figure(
            "SIGCOMM'24 figure 8, packets a second",
            "18 million packets a second.",
            "One core, which also runs the far end of the underlay link; no NIC: the kernel's sockets and a veth pair.",
        )],
    ),
    (
        "switch-latency",
        &[figure(
            "SIGCOMM'24 figure 9",
            "The unified path adds about 2.5 µs.",
            "The complete path between two containers, with two switches and the kernel's TAP devices, compared with a \
             veth pair.",
        )],
    ),
    (
        "route-refresh",
        &[figure(
            "SIGCOMM'24 figure 10",
            "With 2 million connections, a refresh of the route table costs a quarter of the packet rate for seconds; \
             a hardware path loses three quarters for a minute.",
            "A million connections on one core, compared with Open vSwitch with DPDK. The rate at which it learns \
             connections is reported as well.",
        )],
    ),
    (
        "vectors",
        &[figure(
            "SIGCOMM'24 figures 12 and 13",
            "Vectors of packets of one flow bring 27.6 to 36.3 % more packets and connections per second.",
            "One core, which does the hardware's work in software; conversations in turn instead of a mix of flows. \
             Compared with Open vSwitch with DPDK.",
        )],
    ),
    (
        "gw-services",
        &[figure(
            "SIGCOMM'25 tables 2 and 3",
            "Four services forward 128.8, 81.6, 119.4 and 126.3 million packets per second on 88 data cores: 1.46 \
             million per core for VPC-VPC, and 0.63, 0.93 and 0.98 of that for the Internet, customers' networks and \
             cloud services.",
            "One core of a virtual machine; tables of tens of megabytes instead of gigabytes. Packets come over memif \
             from a program that only copies them; in the paper they come from its NIC pipeline.",
        )],
    ),
    (
        "gw-order",
        &[
            figure(
                "SIGCOMM'25 figure 11",
                "With a timeout of 100 µs, one packet in 100,000 is out of order.",
                "Service times and timeouts are a thousand times longer, because threads here are descheduled for \
                 milliseconds: the experiment shows that order holds as long as nothing times out. `bifrost-sim study \
                 gw-plb` uses the paper's scale of service times.",
            ),
            figure(
                "SIGCOMM'25 figure 12",
                "The drop flag saves dozens to hundreds of head-of-line blockings per second.",
                "An ACL drops one in a hundred of 12,800 packets per second.",
            ),
        ],
    ),
    (
        "gw-overload",
        &[
            figure(
                "SIGCOMM'25 figure 13",
                "Without the limiter, a tenant that rises from 4 to 34 Mpps costs each of the others half of its \
                 packets.",
                "At a hundredth of the scale: 40 to 340 thousand packets a second, while two workers process 200 \
                 thousand.",
            ),
            figure(
                "SIGCOMM'25 figure 14",
                "With it, the others lose nothing; a tenant that collides with the heavy hitter recovers within \
                 seconds.",
                "At a hundredth of the scale.",
            ),
        ],
    ),
    (
        "gw-bgp",
        &[figure(
            "SIGCOMM'25 figure 7, BGP proxies",
            "A switch with more than 64 BGP peers may need tens of minutes until its routes converge after a restart. \
             With proxies a server has a fraction of the peers.",
            "FRR and BIRD on the processors of this machine instead of a switch's, where 256 peers converge, too; 64 \
             servers, each with two proxies or four pods, which are processes of GoBGP.",
        )],
    ),
    (
        "gw-links",
        &[figure(
            "SIGCOMM'25 figure B.2, four links of a pod",
            "For robustness a pod has four virtual functions of two NICs, to four switches; the paper has no figures.",
            "A VLAN in place of a virtual function, a pipeline in software in place of a NIC, a bridge in place of a \
             switch.",
        )],
    ),
    (
        "rdm-loss",
        &[
            figure(
                "RDMA figure 7",
                "At a loss of up to 1/1024 throughput stays at 20 of 25 Gbit/s; that of RC collapses.",
                "In software over UDP, between two namespaces with a processor each, compared with TCP: there is no \
                 RDMA NIC here. Also 1/256, which the paper claims without a figure. RC with go-back-N is compared in \
                 the simulator (`bifrost-sim study rdm-loss`).",
            ),
            figure(
                "RDMA table 2",
                "One processor core carries 84 Gbit/s, compared with 22 for TCP and 88 for RC.",
                "The NIC is software and uses the processor, too: see the column of processor time per gigabyte.",
            ),
        ],
    ),
    (
        "rdm-upgrade",
        &[figure(
            "RDMA figure 12",
            "When an application's servers change from RC to Bifrost, throughput changes by less than 2 %; latency \
             rises by 10 % for less than 30 s.",
            "From RC to UC and back in one connection, between two processes that are switched by a file, at a steady \
             load; the paper's is a storage service in production with unknown load. Windows of a second over some \
             tens of seconds instead of minutes. No PFC: one packet in 256 is lost.",
        )],
    ),
    (
        "rdm-sort",
        &[figure(
            "RDMA figure 11",
            "A sort of a terabyte by 1000 mappers and 1000 reducers: compared with RC with PFC, mappers run 16 % and \
             block 10 % shorter.",
            "8 or 16 mappers and as many reducers on two hosts, a megabyte per pair as in the paper; compared with \
             TCP, and with packet loss. In software.",
        )],
    ),
    (
        "rdm-block",
        &[figure(
            "RDMA figure 13",
            "Block storage: compared with RC with PFC, latency is 1 to 8 % lower; operations per second and throughput \
             are about the same, for writes lower.",
            "A front end and three back ends that keep blocks in memory, compared with TCP, and with packet loss. In \
             software; 4 KiB, and 4 to 128 KiB mixed.",
        )],
    ),
];

/// Figures that no experiment measures, and why.
pub const NOT_MEASURED: &[(&str, &str)] = &[
    (
        "NSDI'26 section 6.1.4, aggregation and pooling",
        "Production servers: `bifrost-sim study aggregation` (docs/STUDIES.md) shows how many connections generated \
         flows need; `make cost` (docs/COST.md) measures the memory of a connection.",
    ),
    (
        "SIGCOMM'25 figures 4 and 5, cost of packet-level load balancing and hits of the L3 cache",
        "Simulated, because there are two cores here: `bifrost-sim study gw-plb` (docs/STUDIES.md) replays the memory \
         accesses of both designs through a model of the caches. This virtual machine has no registers that count real \
         cache hits.",
    ),
    (
        "SIGCOMM'25 figures 8 to 10, heavy hitters, tail latency, and use of cores",
        "Simulated at the paper's numbers of cores, in virtual time around the real load balancer: `bifrost-sim study \
         gw-plb` (docs/STUDIES.md).",
    ),
    (
        "SIGCOMM'25 figures 11 to 14 and table 3, at the paper's scale",
        "Simulated: latency and reordering, the drop flag, and the rate by cores, in `bifrost-sim study gw-plb`; a \
         tenant's burst in `bifrost-sim study gw-overload` (docs/STUDIES.md). `gw-order`, `gw-overload` and \
         `gw-services` measure real packets, on fewer cores and at lower rates.",
    ),
    (
        "SIGCOMM'25 figure 15, cost of an availability zone",
        "Computed from the paper's own numbers by `bifrostctl gw cost`, whose tables are below: 32 gateways are 32 \
         devices, or 8 servers with 4 pods each; half the price, and 40 % less power. None of this can be measured here.",
    ),
    ("SIGCOMM'25 figures 16 and 17, NUMA", "Not here, because no machine at hand has a second NUMA node."),
    ("SIGCOMM'25 table 1, resources of Tofino", "Not here, because it is about the hardware that Albatross replaces."),
    (
        "SIGCOMM'25 tables 4 and 5, latency and resources of the FPGA",
        "Not here, because the pipeline is a program: `make cost` (docs/COST.md) and `bifrost-nicd` report the cost of \
         its stages.",
    ),
    (
        "SIGCOMM'25 table 6, Albatross beside Sailfish",
        "Computed from the paper's own numbers by `bifrostctl gw cost`, whose tables are below. The row about routes is \
         also measured: `make cost` (docs/COST.md) builds and looks up 10 million LPM rules. Prices, throughput of \
         devices and other gateways: not here, because they are properties of hardware.",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment;

    #[test]
    fn figures_name_existing_experiments() {
        let names: Vec<_> = experiment::all().iter().map(|experiment| experiment.name()).collect();
        for (name, figures) in MEASURED {
            assert!(names.contains(name) && !figures.is_empty(), "{name}");
        }
        assert!(of("soak").is_empty());
    }

    /// The names in "SIGCOMM'25 figures 8 to 10, heavy hitters": `figure 8`, `figure 9`, `figure 10`.
    fn named(row: &str) -> Vec<String> {
        let Some(rest) = row.strip_prefix("SIGCOMM'25 ") else { return Vec::new() };
        let (mut names, mut kind, mut to) = (Vec::new(), "", false);
        let mut last = 0;
        for word in rest.split(',').next().unwrap_or_default().split(' ') {
            match word {
                "figure" | "figures" => kind = "figure",
                "table" | "tables" => kind = "table",
                "and" => {}
                "to" => to = true,
                word => {
                    let number: u32 = word.parse().unwrap_or(0);
                    let first = if to { last + 1 } else { number };
                    names.extend((first..=number).filter(|n| *n > 0).map(|n| format!("{kind} {n}")));
                    if number == 0 {
                        names.push(format!("{kind} {word}"));
                    }
                    (last, to) = (number, false);
                }
            }
        }
        names
    }

    #[test]
    fn each_figure_and_table_of_the_gateways_paper_has_a_row() {
        let measured = MEASURED.iter().flat_map(|(_, figures)| figures.iter().map(|figure| figure.name));
        let rows: Vec<String> = measured.chain(NOT_MEASURED.iter().map(|(name, _)| *name)).flat_map(named).collect();
        let numbers =
            |kind: &'static str, range: std::ops::RangeInclusive<u32>| range.map(move |n| format!("{kind} {n}"));
        let all = numbers("figure", 4..=5).chain(numbers("figure", 8..=17)).chain(numbers("table", 1..=6));
        let missing: Vec<_> = all.chain(["figure B.2".to_owned()]).filter(|name| !rows.contains(name)).collect();
        assert!(missing.is_empty(), "{missing:?} of {rows:?}");
        for (name, why) in NOT_MEASURED.iter().filter(|(name, _)| name.starts_with("SIGCOMM'25")) {
            let known = ["Simulated", "Computed ", "Not here, because "];
            assert!(known.iter().any(|known| why.starts_with(known)), "{name}: {why}");
        }
    }
}
