//! Instruction counts. `make cost` builds the programs, runs this, and divides by packets.

// The harness generates its own items.
#![allow(missing_docs)]

use std::hint::black_box;

use bifrost_bench::decisions::{self, Case, Decisions, Kind};
use bifrost_bench::forwarding::{self, Forwarding, Service};
use bifrost_bench::gateway::{self, Limiting, Routes, Spraying};
use bifrost_bench::messages::{self, Messages};
use bifrost_bench::round::{Load, Round};
use bifrost_bench::stages::{self, Prepared};
use bifrost_rte::{Ordering, US};
use gungraun::{Callgrind, EntryPoint, LibraryBenchmarkConfig, library_benchmark, library_benchmark_group, main};

/// Packets of a complete round.
const PACKETS: u32 = 8192;

#[library_benchmark]
#[bench::packets_256(Prepared::to_send())]
fn send(mut prepared: Prepared) -> Prepared {
    black_box(&mut prepared).send();
    prepared
}

#[library_benchmark]
#[bench::in_order_256(Prepared::to_receive(false))]
#[bench::reordered_256(Prepared::to_receive(true))]
fn receive(mut prepared: Prepared) -> Prepared {
    black_box(&mut prepared).receive();
    prepared
}

#[library_benchmark]
#[bench::in_order_256(Prepared::to_acknowledge(false))]
#[bench::bitmap_of_256(Prepared::to_acknowledge(true))]
fn build_ack(mut prepared: Prepared) -> Prepared {
    black_box(&mut prepared).acknowledge();
    prepared
}

#[library_benchmark]
#[bench::in_order_256(Prepared::to_release(false))]
#[bench::bitmap_of_256(Prepared::to_release(true))]
fn process_ack(mut prepared: Prepared) -> Prepared {
    black_box(&mut prepared).release();
    prepared
}

#[library_benchmark]
#[bench::idle_0(stages::resting(0))]
#[bench::idle_100k(stages::resting(100_000))]
fn timers(mut round: Round) -> Round {
    stages::advance(black_box(&mut round));
    round
}

/// Only instructions are counted: simulating caches as well would double the time.
fn callgrind() -> Callgrind {
    Callgrind::with_args(["--cache-sim=no"])
}

fn only_turns() -> LibraryBenchmarkConfig {
    let mut config = LibraryBenchmarkConfig::default();
    config.tool(callgrind().entry_point(EntryPoint::Custom("*::End::measured".to_owned())));
    config
}

#[library_benchmark(config = only_turns())]
#[bench::connections_256(stages::acquainted())]
fn set_up(mut round: Round) -> Round {
    stages::open(black_box(&mut round));
    round
}

fn steady(load: Load) -> Round {
    Round::steady(load)
}

fn strict(flows: u32) -> Round {
    steady(Load { flows, ordering: Ordering::Strict, ..Load::default() })
}

fn by_flow(flows: u32) -> Round {
    steady(Load { flows, ..Load::default() })
}

#[library_benchmark(config = only_turns())]
#[bench::strict_1_flow(strict(1))]
#[bench::strict_8_flows(strict(8))]
#[bench::by_flow_1_flow(by_flow(1))]
#[bench::by_flow_8_flows(by_flow(8))]
#[bench::beside_100k_idle(steady(Load { idle: 100_000, ..Load::default() }))]
#[bench::unequal_paths(steady(Load { skew_ns: 10 * US, ..Load::default() }))]
#[bench::unequal_paths_strict(steady(Load { skew_ns: 10 * US, ordering: Ordering::Strict, ..Load::default() }))]
#[bench::batch_of_1(steady(Load { batch: 1, every_ns: US, ..Load::default() }))]
#[bench::batch_of_8(steady(Load { batch: 8, every_ns: 8 * US, ..Load::default() }))]
#[bench::connections_64(steady(Load { conns: 64, ..Load::default() }))]
#[bench::buffers_of_32(steady(Load { segments: 32, ..Load::default() }))]
fn round(mut round: Round) -> Round {
    let released = black_box(&mut round).run(PACKETS);
    assert!(released.abs_diff(u64::from(PACKETS)) < 256 && round.sender.blocked_packets == 0, "not in steady state");
    round
}

fn slow(idle: u32) -> Round {
    steady(Load { batch: 1, every_ns: 500 * US, idle, ..Load::default() })
}

#[library_benchmark(config = only_turns())]
#[bench::idle_0(slow(0))]
#[bench::beside_100k_idle(slow(100_000))]
fn lone_packets(mut round: Round) -> Round {
    black_box(&mut round).run(1024);
    round
}

/// Packets of 64 flows that the switch has seen before.
fn decisions(case: Case, acl: u32, groups: bool) -> Decisions {
    Decisions::new(Kind { case, acl, groups, remembered: true }, 64)
}

/// Packets of one flow.
fn vectors(case: Case, groups: bool) -> Decisions {
    Decisions::new(Kind { case, acl: 0, groups, remembered: true }, 1)
}

#[library_benchmark]
#[bench::remote(decisions(Case::Remote, 0, false))]
#[bench::routed(decisions(Case::Routed, 0, false))]
#[bench::local(decisions(Case::Local, 0, false))]
#[bench::incoming(decisions(Case::In, 0, false))]
#[bench::remote_acl_10(decisions(Case::Remote, 10, false))]
#[bench::remote_acl_1000(decisions(Case::Remote, 1000, false))]
#[bench::remote_groups(decisions(Case::Remote, 0, true))]
#[bench::local_groups(decisions(Case::Local, 0, true))]
#[bench::local_groups_acl_1000(decisions(Case::Local, 1000, true))]
#[bench::routed_groups_acl_1000(decisions(Case::Routed, 1000, true))]
#[bench::incoming_groups(decisions(Case::In, 0, true))]
#[bench::incoming_groups_acl_1000(decisions(Case::In, 1000, true))]
#[bench::balanced(decisions(Case::Balanced, 0, false))]
#[bench::balanced_groups(decisions(Case::Balanced, 0, true))]
#[bench::balanced_incoming(decisions(Case::BalancedIn, 0, false))]
#[bench::balanced_incoming_groups(decisions(Case::BalancedIn, 0, true))]
#[bench::remote_vector(vectors(Case::Remote, false))]
#[bench::local_vector(vectors(Case::Local, false))]
#[bench::incoming_vector(vectors(Case::In, false))]
#[bench::remote_groups_vector(vectors(Case::Remote, true))]
#[bench::local_groups_vector(vectors(Case::Local, true))]
#[bench::incoming_groups_vector(vectors(Case::In, true))]
fn decide(mut decisions: Decisions) -> Decisions {
    black_box(&mut decisions).run(decisions::PACKETS);
    decisions
}

#[library_benchmark]
#[bench::in_order(Spraying::new(false))]
#[bench::reordered(Spraying::new(true))]
fn gateway_spray(mut spraying: Spraying) -> Spraying {
    black_box(&mut spraying).run(gateway::PACKETS);
    spraying
}

#[library_benchmark]
#[bench::two_stages(Limiting::new(false))]
#[bench::found(Limiting::new(true))]
fn gateway_limit(mut limiting: Limiting) -> Limiting {
    black_box(&mut limiting).run(gateway::PACKETS);
    limiting
}

#[library_benchmark]
#[bench::vpc(Forwarding::new(Service::Vpc))]
#[bench::eip(Forwarding::new(Service::Eip))]
#[bench::snat(Forwarding::new(Service::Snat))]
#[bench::idc(Forwarding::new(Service::Idc))]
#[bench::cloud_service(Forwarding::new(Service::Cloud))]
fn gateway_forward(mut forwarding: Forwarding) -> Forwarding {
    black_box(&mut forwarding).run(forwarding::PACKETS);
    forwarding
}

#[library_benchmark]
#[bench::batch_of_100k_routes(Routes::new(100_000))]
fn gateway_lookup(routes: Routes) -> (Routes, u32) {
    let sum = black_box(&routes).run(gateway::PACKETS);
    (routes, sum)
}

#[library_benchmark]
#[bench::of_64_bytes(Messages::short())]
fn message(mut messages: Messages) -> Messages {
    black_box(&mut messages).run_short(messages::SHORT);
    messages
}

#[library_benchmark]
#[bench::of_1_mib(Messages::long())]
fn message_chunk(mut messages: Messages) -> Messages {
    black_box(&mut messages).run_chunks(messages::CHUNKS);
    messages
}

library_benchmark_group!(
    name = cost,
    benchmarks = [
        send,
        receive,
        build_ack,
        process_ack,
        timers,
        set_up,
        round,
        lone_packets,
        decide,
        gateway_spray,
        gateway_limit,
        gateway_forward,
        gateway_lookup,
        message,
        message_chunk
    ]
);
main!(config = LibraryBenchmarkConfig::default().tool(callgrind()), library_benchmark_groups = cost);
