//! The papers' figures: which experiment measures each, what the paper claims, and how a measurement here differs from its.
//!
//! NSDI'26 and APNET'25 are the two BIFROST papers, SIGCOMM'24 is that of Triton, SIGCOMM'25 that of Albatross, and RDMA is that of
//! Bifröst over RDMA.

/// A figure of a paper.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    /// The paper and its number.
    pub name: &'static str,
    /// What the paper says that it shows.
    pub claim: &'static str,
    /// How what is measured here differs.
    pub differs: &'static str,
}

/// What `experiment` measures of the papers.
pub fn of(experiment: &str) -> &'static [Figure] {
    MEASURED.iter().find(|(name, _)| *name == experiment).map_or(&[], |(_, figures)| figures)
}

const fn figure(name: &'static str, claim: &'static str, differs: &'static str) -> Figure {
    Figure { name, claim, differs }
}

/// By experiment.
const MEASURED: &[(&str, &[Figure])] = &[
    (
        "redis-loss",
        &[
            figure(
                "NSDI'26 figure 20",
                "At up to 1 % loss, latency of Redis is reduced by up to 3.4 times (mean), 242 times (P99) and 210 times (P99.9), throughput is \
                 3.4 times as high, and tail latency stays below 4 ms.",
                "Two hosts share the two processors of one machine, so Redis is slower and queues for a processor are a part of the tail; loss is \
                 injected on the wire as well, where the paper has it between switch and guest only.",
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
                "When the active port begins to lose 10 % of its packets, throughput stays stable.",
                "One of four links, not a port of a NIC; besides 10 %, a link that loses everything; bins of 100 ms \
             instead of 1 s. The paper's PS is mode `probe_switch`: ten probes a second over each path, and a switch of all that is plain VXLAN.",
            ),
            figure(
                "NSDI'26 figure F10, APNET'25 figure 10a",
                "While a port fails, every request of Redis succeeds, where half of them fail without BIFROST.",
                "A request fails when it has no answer after 1 s; one of four links fails, so most connections of the kernel's VXLAN never see it.",
            ),
        ],
    ),
    (
        "granularity",
        &[
            figure(
                "NSDI'26 figures 17 and 18",
                "Reordering in place raises throughput 1.01 to 1.31 times and lowers the guest's retransmissions 3.1 to 4.8 times, at every granularity \
                 of spraying.",
                "User-mode Linux guests whose processor is shared with the switch; four paths with delays 100 µs apart. Their TCP is of today: it \
                 waits for what is late (RACK) and sends again few of the disordered packets, as the columns beside show, so that its throughput \
                 hardly depends on the order.",
            ),
            figure(
                "NSDI'26 figure 23",
                "The guest's processor time falls, for the transport retransmits and reorders in its place.",
                "Processor time of the machine's process, for each gigabyte received; with so little to send again, the difference is smaller than \
                 its spread.",
            ),
        ],
    ),
    (
        "coverage",
        &[figure(
            "NSDI'26 figure 19",
            "With loss of 0 to 2 % between switch and guest, the guest retransmits 69 to 90 % less.",
            "Eight flows of one guest instead of eight guests on eight hosts; with and without are two runs with the same losses, not two halves of one.",
        )],
    ),
    (
        "nginx",
        &[
            figure(
                "NSDI'26 figure 21",
                "With short connections at up to 2 % loss, P99 is reduced by up to 66.7 times and stays below 10 ms; throughput is sustained.",
                "16 clients, one worker, and two hosts on two processors.",
            ),
            figure(
                "APNET'25 figures 7a and 9a",
                "At 1 % loss, mean latency is 1.2 ms instead of 12 ms, P99 below 10 ms instead of 200 ms.",
                "16 clients, one worker, and two hosts on two processors; loss on the wire in both directions, so that a request and its answer meet it twice.",
            ),
            figure(
                "SIGCOMM'24 figures 14 to 16",
                "Requests a second and completion times with long and short connections: comparable to a hardware path with long ones, 67 % more with short ones.",
                "Open vSwitch instead of a hardware path; nothing here is hardware.",
            ),
        ],
    ),
    (
        "elephants",
        &[figure(
            "NSDI'26 figure 15",
            "Two large flows together carry as much at every percentile, where they carry half of it when they are hashed onto one port.",
            "Four links of 200 Mbit/s, not two ports of 3 Gbit/s; 1.5 s after the first half second, not 5 s. The limit is at the sender's end of each link, which \
             is its only end. The paper's PS is mode `probe_switch`: ten probes a second over each path, and a switch of all that is plain VXLAN.",
        )],
    ),
    (
        "stable",
        &[figure(
            "NSDI'26 figures E8 and E9",
            "Without loss, BIFROST costs next to nothing on average, over short and over persistent connections, and lowers P99.9 and the maximum.",
            "At a fixed rate far below saturation, and beside the same switch without reliability, which is what the bars compare with. Nothing is lost \
             here, where the paper has what its network happens to lose: there is no tail to be lowered.",
        )],
    ),
    (
        "congestion-control",
        &[figure(
            "NSDI'26 figure F11",
            "With congestion control, latencies of Redis are somewhat lower from the mean to P99, and P99.9 is 30 % lower.",
            "Loss at both guests, not at the receiver alone. Between two hosts nothing congests but their processors, so all that is asked is that congestion \
             control costs nothing.",
        )],
    ),
    (
        "sockperf",
        &[figure(
            "APNET'25 figures 7b and 9b",
            "At 1 % loss, 97 of 100 Mbit/s instead of 30; at 5 %, 65.",
            "The paper does not say what is sent: its 100 Mbit/s is about what sockperf's own messages of 14 bytes come to. Sender and switch share \
             a processor; loss on the wire in both directions. A round trip here is so short that the kernel's TCP alone keeps two thirds at 1 %; the two are \
             compared at 5 %.",
        )],
    ),
    (
        "applications",
        &[figure(
            "beyond the papers",
            "The papers' applications are Redis and nginx over HTTP/1.1; what else runs on TCP gains alike, and what runs on UDP is not carried reliably, nor harmed.",
            "PostgreSQL, MariaDB, memcached and HTTP/2 on TCP, QUIC and a plain request and answer on UDP.",
        )],
    ),
    (
        "delayed-release",
        &[figure(
            "NSDI'26 figure 22",
            "A sender keeps 16 bytes for each packet in flight: about 500 KB at 10 Gbit/s, and no payload.",
            "Lower rates, over paths of 1 ms; memory is that of a process, not of a SmartNIC.",
        )],
    ),
    (
        "slicing",
        &[figure(
            "SIGCOMM'24 figure 11",
            "Jumbo frames (MTU 8500) and header-payload slicing together carry 192 Gbit/s of TCP, where 1500 bytes carry some 65 with slicing or without: three times \
             as much; one of the two alone brings little.",
            "What slicing saves here is a copy out of the guest's memory, not a way through PCIe. User-mode Linux guests share a processor with the switch and need \
             most of it, so the switch's processor time for each GB tells more than bandwidth does.",
        )],
    ),
    (
        "switch-overall",
        &[figure(
            "SIGCOMM'24 figure 8",
            "Bandwidth, packets a second and connections a second of one unified path, close to those of a hardware path.",
            "Open vSwitch's userspace datapath instead of a hardware path; containers with TAP devices.",
        )],
    ),
    (
        "switch-rate",
        &[figure(
            "SIGCOMM'24 figure 8, packets a second",
            "18 million packets a second.",
            "One core, which carries the far end of the underlay link, too; no NIC: the kernel's sockets and a veth pair.",
        )],
    ),
    (
        "switch-latency",
        &[figure(
            "SIGCOMM'24 figure 9",
            "The unified path adds about 2.5 µs.",
            "The whole way between two containers, with two switches and the kernel's TAP devices, beside a veth pair.",
        )],
    ),
    (
        "route-refresh",
        &[figure(
            "SIGCOMM'24 figure 10",
            "With 2 million connections, refreshing the route table costs a quarter of the packet rate for seconds, where a path in hardware loses three quarters for \
             a minute.",
            "A million connections on one core, Open vSwitch with DPDK beside it. How fast it learns of them is told as well.",
        )],
    ),
    (
        "vectors",
        &[figure(
            "SIGCOMM'24 figures 12 and 13",
            "Vectors of packets of one flow bring 27.6 to 36.3 % more packets and connections a second.",
            "One core, which does in software what hardware does there; conversations that take turns instead of a mix of flows. Open vSwitch with DPDK beside it.",
        )],
    ),
    (
        "gw-services",
        &[figure(
            "SIGCOMM'25 tables 2 and 3",
            "Four services forward 128.8, 81.6, 119.4 and 126.3 million packets a second on 88 data cores: 1.46 million of a core for VPC-VPC, and \
             0.63, 0.93 and 0.98 of that for the Internet, customers' networks and cloud services.",
            "One core of a virtual machine, and tables that fit into tens of megabytes instead of gigabytes. Packets come over memif from a program \
             that only copies them, where the paper has its NIC pipeline.",
        )],
    ),
    (
        "gw-order",
        &[
            figure(
                "SIGCOMM'25 figure 11",
                "With a timeout of 100 µs, one packet in 100,000 is out of order.",
                "Service times and timeouts are a thousand times longer, for threads here are away for milliseconds: what is shown is that order holds wherever \
                 nothing times out. The distribution of service times at the paper's scale is that of `bifrost-sim study gw-plb`.",
            ),
            figure(
                "SIGCOMM'25 figure 12",
                "The drop flag saves dozens to hundreds of head-of-line blockings a second.",
                "An ACL drops one packet in a hundred of 12,800 a second.",
            ),
        ],
    ),
    (
        "gw-overload",
        &[
            figure(
                "SIGCOMM'25 figure 13",
                "Without the limiter, a tenant that goes from 4 to 34 Mpps costs each of the others half of its packets.",
                "At a hundredth of the scale: 40 to 340 thousand packets a second, of which two workers take 200 thousand.",
            ),
            figure(
                "SIGCOMM'25 figure 14",
                "With it, the others lose nothing; a tenant that collides with the heavy one is free of it within seconds.",
                "At a hundredth of the scale.",
            ),
        ],
    ),
    (
        "rdm-loss",
        &[
            figure(
                "RDMA figure 7",
                "At a loss of up to 1/1024 throughput stays at 20 of 25 Gbit/s, where that of RC collapses.",
                "In software over UDP, between two namespaces with a processor each, and beside TCP: there is no RDMA NIC here. 1/256 as well, which \
                 the paper asserts and does not show. RC with go-back-N is compared in the simulator (`bifrost-sim study rdm-loss`).",
            ),
            figure(
                "RDMA table 2",
                "One processor core carries 84 Gbit/s, where TCP carries 22 and RC 88.",
                "The NIC is software, so its work is the processor's, too: the column of processor time for a gigabyte says how much.",
            ),
        ],
    ),
    (
        "rdm-upgrade",
        &[figure(
            "RDMA figure 12",
            "When an application's servers change from RC to Bifrost, throughput changes by less than 2 %; latency rises by 10 % for less than 30 s.",
            "From RC to UC and back in one connection, of two processes that a file tells, at a steady load; the paper's is a storage service in \
             production whose load is not told. Windows of a second in some tens of seconds, where the paper shows minutes. No PFC: packets are \
             lost, one in 256.",
        )],
    ),
    (
        "rdm-sort",
        &[figure(
            "RDMA figure 11",
            "A sort of a terabyte by 1000 mappers and 1000 reducers: beside RC with PFC the mappers' run time is 16 % shorter and their time blocked 10 %.",
            "8 or 16 mappers and as many reducers on two hosts, a megabyte for each pair as there; beside TCP, and with packets lost. In software.",
        )],
    ),
    (
        "rdm-block",
        &[figure(
            "RDMA figure 13",
            "Block storage: beside RC with PFC latency is 1 to 8 % lower, operations a second and throughput about the same, and fewer for writes.",
            "A front end and three back ends that keep blocks in memory, beside TCP, and with packets lost. In software; 4 KiB, and 4 to 128 KiB mixed.",
        )],
    ),
];

/// Figures that no experiment measures, and why.
pub const NOT_MEASURED: &[(&str, &str)] = &[
    (
        "NSDI'26 section 6.1.4, aggregation and pooling",
        "Production servers: how many connections generated flows need is in `bifrost-sim study aggregation` (docs/STUDIES.md); what a connection takes is \
         counted by `make cost` (docs/COST.md).",
    ),
    (
        "SIGCOMM'25 figures 4 and 5, cost of packet-level load balancing and hits of the L3 cache",
        "Simulated, because there are two cores here: `bifrost-sim study gw-plb` (docs/STUDIES.md) replays the accesses of both ways through a model of the \
         caches. The real ones' hits are counted by registers that this virtual machine does not have.",
    ),
    (
        "SIGCOMM'25 figures 8 to 10, heavy hitters, tail latency, and use of cores",
        "Simulated at the paper's numbers of cores, in virtual time around the real load balancer: `bifrost-sim study gw-plb` (docs/STUDIES.md).",
    ),
    (
        "SIGCOMM'25 figures 11 to 14 and table 3, at the paper's scale",
        "Simulated: latencies and disorder, the drop flag, and the rate by cores, in `bifrost-sim study gw-plb`; a tenant's burst in `bifrost-sim study gw-overload` \
         (docs/STUDIES.md). Real packets, of fewer cores and at lower rates, are measured by `gw-order`, `gw-overload` and `gw-services`.",
    ),
    (
        "SIGCOMM'25 figure 15, cost of an availability zone",
        "Computed from the paper's own numbers: 32 gateways are 32 servers, or 8 servers with 4 pods each; at twice the price of a server 16 of 32 (half), \
         and 7.2 of 12 kW (40 % less). Nothing of it can be measured.",
    ),
    ("SIGCOMM'25 figures 16 and 17, NUMA", "Not here, because no machine at hand has a second NUMA node."),
    ("SIGCOMM'25 table 1, resources of Tofino", "Not here, because it is about the hardware that Albatross replaces."),
    (
        "SIGCOMM'25 tables 4 and 5, latency and resources of the FPGA",
        "Not here, because the pipeline is a program: what its stages cost is counted by `make cost` (docs/COST.md) and told by `bifrost-nicd`.",
    ),
    (
        "SIGCOMM'25 table 6, Albatross beside Sailfish",
        "Measured in part: 10 million LPM rules are built and looked up by `make cost` (docs/COST.md). Prices, throughput of devices and other gateways: not here, because \
         they are properties of hardware.",
    ),
    (
        "SIGCOMM'25 figure B.2, four links of a pod to four switches",
        "Not here, because which of the links has failed is told by BGP, which the gateway does not speak yet. A pod has up to four interfaces (docs/GATEWAY.md).",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment;

    #[test]
    fn figures_are_of_experiments_that_there_are() {
        let names: Vec<_> = experiment::all().iter().map(|experiment| experiment.name()).collect();
        for (name, figures) in MEASURED {
            assert!(names.contains(name) && !figures.is_empty(), "{name}");
        }
        assert!(of("soak").is_empty());
    }

    /// What "SIGCOMM'25 figures 8 to 10, heavy hitters" names: `figure 8`, `figure 9`, `figure 10`.
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
    fn each_figure_and_table_of_the_gateways_paper_has_a_row_that_says_how_it_is_known() {
        let measured = MEASURED.iter().flat_map(|(_, figures)| figures.iter().map(|figure| figure.name));
        let rows: Vec<String> = measured.chain(NOT_MEASURED.iter().map(|(name, _)| *name)).flat_map(named).collect();
        let numbers =
            |kind: &'static str, range: std::ops::RangeInclusive<u32>| range.map(move |n| format!("{kind} {n}"));
        let all = numbers("figure", 4..=5).chain(numbers("figure", 8..=17)).chain(numbers("table", 1..=6));
        let missing: Vec<_> = all.chain(["figure B.2".to_owned()]).filter(|name| !rows.contains(name)).collect();
        assert!(missing.is_empty(), "{missing:?} of {rows:?}");
        for (name, why) in NOT_MEASURED.iter().filter(|(name, _)| name.starts_with("SIGCOMM'25")) {
            let known = ["Measured in part: ", "Simulated", "Computed ", "Not here, because "];
            assert!(known.iter().any(|known| why.starts_with(known)), "{name}: {why}");
        }
    }
}
