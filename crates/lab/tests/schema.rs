//! `docs/results.schema.json` describes what the experiments write.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;

use bifrost_lab::experiment;
use bifrost_lab::experiments::{
    applications, apply, cni, congestion_control, coverage, delayed_release, elephants, flow_log, flow_records,
    full_links, granularity, gw_bgp, gw_elastic, gw_hosts, gw_kill, gw_links, gw_order, gw_overload, gw_services,
    iperf, isolation, learn, load_balancer, lossless, migrate, mirror, nat, nginx, outage, path_failure, rdm_block,
    rdm_loss, rdm_sort, rdm_upgrade, redis_loss, requests, route_refresh, slicing, soak, sockperf, stable,
    switch_latency, switch_overall, switch_rate, tunnel::Switch, upgrade, vectors, vhost_rate,
};
use bifrost_lab::gateway::switch::Daemon;
use bifrost_lab::options::{App, Guests, Injector, Mode, Op, Options};
use bifrost_lab::results::{HostInfo, Results, SCHEMA_VERSION, to_values};
use bifrost_lab::stats::LatencyMs;
use serde::Serialize;
use serde_json::{Value, json};

fn validator() -> jsonschema::Validator {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results.schema.json");
    let schema: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    jsonschema::validator_for(&schema).unwrap()
}

fn results<R: Serialize>(experiment: &str, row: R) -> Value {
    let options = Options {
        quick: true,
        modes: Mode::ALL.to_vec(),
        losses: Some(vec![0.0, 1.0]),
        ops: vec![Op::Get],
        apps: vec![App::Udp],
        ..Options::default()
    };
    let results = Results {
        schema_version: SCHEMA_VERSION,
        experiment: experiment.to_owned(),
        host: HostInfo::collect(&options),
        rows: to_values(&[row]).unwrap(),
    };
    serde_json::to_value(results).unwrap()
}

fn all() -> Vec<Value> {
    let redis_loss = redis_loss::Row {
        guests: Guests::Container,
        mode: Mode::KernelVxlan,
        injector: Injector::Vnic,
        loss_percent: 0.01,
        op: Op::Set,
        repetition: 2,
        requests: 100,
        rps: 1.5,
        paced_rps: Some(1000.0),
        latency_ms_avg: 0.1,
        latency_ms_p50: 0.1,
        latency_ms_p99: 0.2,
        latency_ms_p99_9: 0.3,
        latency_ms_max: 0.4,
        wire_drops_packets: None,
        attempts: 2,
        standstills: 3,
        standstill_ms_max: 9.5,
        processor_percent: [("idle".to_owned(), 12.5)].into(),
    };
    let path_failure = path_failure::Row {
        mode: Mode::Bifrost,
        injector: Injector::Wire,
        workload: path_failure::Workload::Requests,
        repetition: 0,
        failed_path: 3,
        bin_ms: 100,
        bins_gbit_per_s: Vec::new(),
        bins_rps: vec![1.0],
        bins_standstill_ms: vec![0.0],
        phases: vec![path_failure::Phase {
            name: "failed".to_owned(),
            loss_percent: 100.0,
            start_s: 1.0,
            end_s: 2.0,
            mean: 1.0,
            undisturbed_bins: 1,
            begins_undisturbed: true,
            lowest_undisturbed_bin_percent_of_before: Some(90.0),
            longest_undisturbed_stall_ms: None,
            lowest_bin_percent_of_before: 99.0,
            request_success_percent: Some(100.0),
            longest_stall_ms: Some(1.0),
        }],
        request_success_percent: Some(100.0),
        longest_stall_ms: Some(1.0),
        wrong_answers: Some(0),
        attempt: 2,
    };
    let iperf = iperf::Row {
        mode: Mode::Off,
        injector: Injector::Wire,
        loss_percent: 0.1,
        repetition: 0,
        duration_s: 5.0,
        throughput_gbit_per_s: 3.0,
        guest_retransmits: 0,
        wire_drops_packets: 1,
        bins_gbit_per_s: vec![3.0],
    };
    let coverage = coverage::Row {
        mode: Mode::Off,
        repetition: 0,
        duration_s: 5.0,
        losses_percent: vec![1.5],
        dropped_packets: 1,
        throughput_gbit_per_s: 1.0,
        cumulative_retransmitted_segments: vec![1],
        retransmitted_segments: 1,
    };
    let delayed_release = delayed_release::Row {
        mode: Mode::Bifrost,
        repetition: 0,
        offered_gbit_per_s: 0.5,
        throughput_gbit_per_s: 0.5,
        duration_s: 5.0,
        in_flight_packets: 50.5,
        held_buffers: 2.0,
        window_bytes: 1030.0,
        kept_payload_bytes: 0.0,
        memory_growth_kib: -4.0,
    };
    let slicing = slicing::Row {
        mode: Mode::Bifrost,
        mtu_bytes: 8500,
        slicing: true,
        segmentation: slicing::Segmentation::Guest,
        repetition: 0,
        duration_s: 4.0,
        throughput_gbit_per_s: 1.0,
        switch_cpu_s_per_gb: 1.5,
        packet_bytes: Some(8514.0),
        kept_payload_bytes: None,
    };
    let granularity = granularity::Row {
        mode: Mode::Bifrost,
        reordering: granularity::Reordering::On,
        group_packets: 1,
        repetition: 0,
        duration_s: 5.0,
        throughput_gbit_per_s: 1.0,
        disordered_packets: 1,
        received_segments: 1,
        out_of_order_segments: 0,
        retransmitted_segments: 0,
        spurious_retransmissions: 0,
        receiver_cpu_s_per_gb: 1.0,
        sender_cpu_s_per_gb: 1.0,
    };
    let counters = BTreeMap::from([("rte_sent_packets".to_owned(), 1)]);
    let soak = soak::Row {
        mode: Mode::Bifrost,
        duration_s: 60.0,
        seed: 1,
        faults: vec![soak::FaultEntry { start_s: 0.0, description: "no fault".to_owned(), hits_packets: 0 }],
        streams: vec![soak::StreamResult {
            direction: "a to b".to_owned(),
            sent_bytes: 1,
            correct_bytes: 1,
            error: Some("none".to_owned()),
        }],
        redis_answered_requests: 1,
        redis_failed_requests: 0,
        redis_wrong_answers: 0,
        redis_latency_ms_p99_9: 1.0,
        daemons: vec![soak::DaemonResult {
            host: "host-a".to_owned(),
            rss_start_kib: 1.0,
            rss_end_kib: 1.0,
            rss_slope_kib_per_minute: -0.5,
            drops_packets: BTreeMap::new(),
            unexplained_packets: BTreeMap::new(),
            counters,
        }],
        missing_packets: Some(0),
        bins_rps: vec![1.0],
    };
    let rdm_loss = rdm_loss::Row {
        mode: rdm_loss::Transport::Messages,
        loss_percent: 100.0 / 256.0,
        workload: rdm_loss::Workload::Calls,
        repetition: 0,
        duration_s: 3.0,
        gbit_per_s: 2.0,
        dropped_packets: 1,
        sender_cpu_s_per_gb: None,
        receiver_cpu_s_per_gb: Some(1.0),
        calls: Some(20_000),
        latency_ms_p50: Some(0.1),
        latency_ms_p99: Some(0.3),
        latency_ms_p99_9: Some(0.6),
        latency_ms_max: None,
    };
    let rdm_upgrade = rdm_upgrade::Row {
        mode: rdm_loss::Transport::Messages,
        loss_percent: 100.0 / 256.0,
        repetition: 0,
        calls: 24_000,
        lost_calls: 0,
        out_of_order_calls: 0,
        dropped_packets: 1,
        changes_s: vec![4.1, 8.1],
        window_s: 1.0,
        windows_gbit_per_s: vec![1.05; 12],
        windows_p50_ms: vec![0.4; 12],
        windows_p99_ms: vec![1.0; 12],
        windows_max_ms: vec![3.0; 12],
        jitter_before_percent: 0.0,
        jitter_percent: 0.1,
    };
    let rdm_sort = rdm_sort::Row {
        mode: rdm_loss::Transport::Cubic,
        loss_percent: 0.0,
        repetition: 0,
        mappers: 8,
        records: 640_000,
        correct: true,
        run_s: 0.5,
        run_s_max: 0.6,
        block_s: 0.4,
        dropped_packets: 0,
    };
    let rdm_block = rdm_block::Row {
        mode: rdm_loss::Transport::Rc,
        loss_percent: 0.0,
        operation_bytes: 4096,
        repetition: 0,
        operations_per_s: 10_000.0,
        gbit_per_s: 0.3,
        read_ms_p50: 0.1,
        read_ms_p99: 0.3,
        read_ms_p99_9: 0.6,
        write_ms_p50: 0.2,
        write_ms_p99: 0.5,
        write_ms_p99_9: 0.9,
        dropped_packets: 0,
    };
    let migrate = migrate::Row {
        network: migrate::Network::Bifrost,
        repetition: 9,
        away_ms: 60.5,
        tcp_stall_ms: 61.0,
        tcp_answers: 4000,
        broken: false,
        qemu_downtime_ms: 30.0,
        qemu_total_ms: 700.0,
    };
    let vhost_rate = vhost_rate::Row {
        mode: vhost_rate::Switch::DpdkVhost,
        repetition: 0,
        frame_bytes: 64,
        duration_s: 4.0,
        packets_per_s: 5e6,
        cycles_per_packet: 350.0,
        lost_packets: 0,
    };
    let lossless = lossless::Row {
        mode: Mode::KernelVxlan,
        place: lossless::Place::OneHost,
        workers: 0,
        wire_offload: false,
        load: lossless::Load::OneFlow,
        repetition: 0,
        duration_s: 3.0,
        per_s: 6e9,
        latency_ms_p50: None,
        latency_ms_p99_9: None,
        processor_percent: [("idle".to_owned(), 12.5)].into(),
    };
    let switch_overall = switch_overall::Row {
        mode: Mode::OpenVswitch,
        security_groups: true,
        repetition: 0,
        duration_s: 4.0,
        throughput_gbit_per_s: 1.0,
        requests_per_s: 50_000.0,
        latency_ms_p99: 1.5,
        connections_per_s: 10_000.0,
        requests_processor_percent: [("idle".to_owned(), 12.5)].into(),
        connections_processor_percent: [("idle".to_owned(), 12.5)].into(),
    };
    let switch_rate = switch_rate::Row {
        mode: Switch::OvsDpdk,
        flows: 10_000,
        repetition: 0,
        duration_s: 4.0,
        packets_per_s: 1e6,
        missing_percent: 0.5,
    };
    let flow_records = flow_records::Row {
        mode: flow_records::Judged::Remembered,
        flows: 256,
        repetition: 0,
        duration_s: 4.0,
        packets_per_s: 3e6,
        cycles_per_packet: 650.0,
        lost_packets: 0,
    };
    let vectors = vectors::Row {
        mode: vectors::Switch::Batches,
        conversations: 256,
        repetition: 0,
        sessions: 256,
        duration_s: 4.0,
        packets_per_s: 3e6,
        new_sessions_per_s: None,
    };
    let route_refresh = route_refresh::Row {
        mode: Switch::Off,
        repetition: 0,
        sessions: 999_999,
        new_sessions_per_s: Some(2e5),
        refresh_s: [5.0, 6.5],
        bin_ends_s: vec![0.2, 0.4],
        packets_per_s: vec![5e5, 4e5],
    };
    let cni = cni::Row { plugin: cni::Plugin::Bridge, standing: 100, repetition: 3, add_ms: 10.5, del_ms: 30.0 };
    let nat = nat::Row {
        through: nat::Through::SharedAddress,
        connections: nat::Connections::Short,
        repetition: 0,
        clients: 16,
        requests: 10_000,
        rps: 5_000.0,
        latency_ms_p50: 1.0,
        latency_ms_p99: 3.5,
        processor_percent: [("idle".to_owned(), 12.5)].into(),
    };
    let load_balancer = load_balancer::Row {
        run: requests::Row {
            through: load_balancer::Through::LoadBalancer,
            connections: nat::Connections::Persistent,
            repetition: 0,
            clients: 16,
            requests: 10_000,
            rps: 5_000.0,
            latency_ms_p50: 1.0,
            latency_ms_p99: 3.5,
            processor_percent: [("idle".to_owned(), 12.5)].into(),
        },
        change: Some(load_balancer::Change {
            held_connections: 512,
            drained_connections: 256,
            moved_connections: 0,
            misplaced_connections: 0,
        }),
    };
    let apply = apply::Row {
        what: apply::What::Route,
        repetition: 0,
        routes: 1_000_000,
        change_ms: vec![0.9, 1.5],
        guest_latency_us_p99_9: 350.5,
        memory_mib: 700.5,
    };
    let learn = learn::Row {
        mode: learn::Routes::Learned,
        repetition: 0,
        routes: 999_999,
        used_destinations: 1000,
        sent_routes: 66,
        learned_routes: 1001,
        lost_packets: 0,
        first_ms_p50: 0.5,
        first_ms_p99: 2.5,
        first_ms_max: 9.5,
        second_ms_p50: 0.1,
        second_ms_p99: 0.2,
        second_ms_max: 0.4,
        daemon_growth_mib: -0.5,
        agent_growth_mib: 2.5,
        daemon_empty_mib: 20.5,
        daemon_mib: 50.5,
        relay_mib: 900.5,
        objects_s: 25.5,
    };
    let upgrade = upgrade::Row {
        what: upgrade::What::Upgrade,
        repetition: 0,
        upgrades: 102,
        disturbed: 2,
        failed: 0,
        restarted: 0,
        stall_ms: vec![2.5, 8.5],
        reference_ms: vec![1.5, 2.5],
        machine_stall_ms: vec![3.5, 9.5],
        machine_reference_ms: vec![2.5, 3.5],
        held_ms: vec![1.5, 3.5],
        sessions: 100_000,
        requests: 80_000,
        compared_bytes: 1 << 30,
        connections: 5_007,
        broken_connections: 0,
        wrong: 0,
        more_descriptors: 0,
    };
    let mirror = mirror::Row {
        run: requests::Row {
            through: mirror::Mirroring::Truncated,
            connections: nat::Connections::Persistent,
            repetition: 0,
            clients: 16,
            requests: 10_000,
            rps: 5_000.0,
            latency_ms_p50: 1.0,
            latency_ms_p99: 3.5,
            processor_percent: [("idle".to_owned(), 12.5)].into(),
        },
        mirrored: Some(mirror::Mirrored {
            paced_latency_us_p99_9: 350.5,
            sent_copies: 100_000,
            missed_copies: 1,
            unsent_copies: 2,
            arrived_copies: 100_000,
            expected_datagrams: 4000,
            correct_datagrams: 3999,
            wrong_datagrams: 1,
        }),
    };
    let flow_log = flow_log::Row {
        mode: flow_log::Logging::Crowded,
        repetition: 0,
        duration_s: 5.0,
        received_packets: 550_000,
        processor_s: 2.5,
        created_records: 80_000,
        lost_records: 0,
        unlogged_packets: 470_000,
        sent_records: 79_999,
        unsent_records: 1,
        collected_records: 79_999,
        collected_packets: 79_999,
        memory_mib: 20.5,
    };
    let nginx = nginx::Row {
        mode: Mode::OpenVswitch,
        injector: Injector::Wire,
        loss_percent: 2.0,
        connections: nginx::Connections::Short,
        repetition: 0,
        clients: 50,
        requests: 10_000,
        rps: 5_000.0,
        latency_ms_avg: 1.5,
        latency_ms_p50: 1.0,
        latency_ms_p99: 3.5,
        latency_ms_p99_9: 5.0,
        latency_ms_max: 9.0,
        wire_drops_packets: 1,
    };
    let applications = applications::Row {
        app: App::Memcached,
        mode: Mode::Off,
        injector: Injector::Wire,
        loss_percent: 0.1,
        repetition: 1,
        requests_per_s: 20_000.5,
        requests: 8000,
        paced_requests_per_s: Some(2000.0),
        latency_ms_avg: 0.2,
        latency_ms_p50: 0.1,
        latency_ms_p99: 0.5,
        latency_ms_p99_9: 210.0,
        latency_ms_max: 430.0,
        lost_requests: 0,
        wire_drops_packets: 12,
        attempts: 1,
        standstills: 1,
        standstill_ms_max: 4.5,
    };
    let isolation = isolation::Row {
        mode: Mode::Bifrost,
        neighbour: isolation::Neighbour::InnocentAgain,
        repetition: 0,
        requests: 1000,
        requests_per_s: 50_000.0,
        latency_ms_p50: 1.0,
        latency_ms_p99: 2.0,
        frames_per_s: 20_000.0,
        refused_frames: 1,
        delivered_packets: 1,
        neighbour_drops_packets: BTreeMap::from([("avs.dropped_vlan_packets".to_owned(), 1)]),
        tenant_drops_packets: BTreeMap::new(),
        unexplained_packets: 0,
        sessions: 1,
        sessions_bound: 1,
        evicted_sessions: 0,
        memory_growth_kib: -4.0,
        processor_percent: BTreeMap::from([("switch".to_owned(), 40.0)]),
    };
    let elephants = elephants::Row {
        mode: Mode::KernelVxlan,
        attempt: 99,
        link_mbit_per_s: 200,
        duration_s: 2.5,
        throughput_mbit_per_s: 370.5,
        guest_retransmits: 1,
        links_mbit_per_s: vec![200.0, 0.0],
    };
    let latency_ms = LatencyMs { avg: 0.1, p50: 0.1, p90: 0.2, p99: 0.3, p99_9: 0.4, max: 0.5 };
    let stable = stable::Row {
        mode: Mode::Off,
        connections: nginx::Connections::Short,
        op: Op::Set,
        repetition: 0,
        clients: 50,
        offered_rps: 1000.0,
        requests: 10_000,
        latency_ms,
    };
    let congestion_control = congestion_control::Row {
        mode: Mode::Bifrost,
        congestion_control: congestion_control::Control::Swift,
        injector: Injector::Vnic,
        loss_percent: 0.1,
        repetition: 0,
        clients: 200,
        requests: 100_000,
        rps: 30_000.0,
        latency_ms,
    };
    let sockperf = sockperf::Row {
        mode: Mode::KernelVxlan,
        loss_percent: 0.5,
        repetition: 1,
        duration_s: 5.0,
        messages: 1_000_000,
        throughput_mbit_per_s: 22.4,
        wire_drops_packets: 1,
    };
    let switch_latency = switch_latency::Row {
        mode: switch_latency::Between::Veth,
        pace: switch_latency::Pace::ThousandPerSecond,
        repetition: 0,
        requests: 1000,
        latency_us_avg: 50.0,
        latency_us_p50: 49.5,
        latency_us_p99: 70.0,
        latency_us_max: 900.0,
    };
    let capacity = full_links::Row {
        mode: full_links::Underneath::BareLinks,
        point: full_links::Point { receiver_paths: Some(2), ..full_links::Point::new(&"4x100@50".parse().unwrap(), 8) },
        repetition: 0,
        duration_s: 30.0,
        goodput_by_second_mbit_per_s: vec![300.0, 380.5],
        goodput_of_each_mbit_per_s: vec![380.5],
        guest_retransmits: 3,
        received_ce_packets: 4,
        links: vec![full_links::LinkAtEnd {
            limit_mbit_per_s: 100,
            sent_mbit_per_s: 99.9,
            dropped_frames: 1,
            dropped_back_frames: 0,
            marked_frames: Some(9),
            idle_rtt_ms: Some(0.05),
            rtt_ms_p50: Some(3.0),
            rtt_ms_p99: None,
            probes: 1400,
            probes_lost: 2,
        }],
        paths: vec![full_links::PathAtEnd {
            host: "host-a".to_owned(),
            path: 0,
            state: "active".to_owned(),
            cwnd_packets: 40.5,
            in_flight_packets: 39,
            srtt_us: Some(3000.0),
            min_rtt_us: None,
            loss_percent: 0.1,
            share_percent: 25.0,
            tx_packets: 100_000,
            lost_packets: 100,
            ce_marked_packets: 0,
        }],
    };
    let outage = outage::Row {
        mode: Mode::Bifrost,
        case: outage::Case::AllDown,
        repetition: 0,
        requests: 20_000,
        failed_requests: 1500,
        wrong_answers: 0,
        longest_ms: 100.0,
        first_answer_ms: Some(9.5),
        every_client_ms: None,
        attempts: 2,
        standstill_ms: 4.5,
    };
    let gw_services = gw_services::Row {
        forwarder: gw_services::Forwarder::Pod,
        service: gw_services::Service::CloudService,
        repetition: 0,
        turn: 3,
        flows: 500_000,
        frame_bytes: 256,
        duration_s: 4.0,
        packets_per_s: 1e6,
        busy_percent: 99.5,
        dropped_packets: 0,
        transfer_ns: 150.0,
    };
    let gw_hosts = gw_hosts::Row {
        over: gw_hosts::Over::Transport,
        loss_percent: 1.0,
        repetition: 0,
        duration_s: 5.0,
        throughput_gbit_per_s: 1.5,
        guest_retransmits: 3,
        requests: 5000,
        latency_ms_p50: 0.1,
        latency_ms_p99: 0.2,
        latency_ms_p99_9: 3.0,
        lost_packets: 700,
    };
    let gw_elastic = gw_elastic::Row {
        pods: gw_elastic::Pods::Podman,
        repetition: 0,
        connected_ms: 300.0,
        first_packet_ms: 500.0,
        migration_s: 7.5,
        sent_probes: 80_000,
        lost_probes: 0,
        streams: 8,
        broken_streams: 0,
        retransmitted_segments: 0,
        stalled_ms: 25.0,
        nat_streams: 8,
        broken_nat_streams: 0,
        nat_retransmitted_segments: 0,
        moved_sessions: 60,
        opened_connections: 200,
        failed_connections: 0,
        slowest_connection_ms: 1020.0,
        hung_ms: 180.0,
        killed_lost_probes: 500,
        upgraded_pods: 2,
        upgrade_s: 14.0,
        upgrade_lost_probes: 0,
        overload_lost_percent: 30.0,
        scale_out_s: 3.2,
        scaled_pods: 2,
        scaled_lost_percent: 0.0,
    };
    let gw_bgp = gw_bgp::Row {
        containers: gw_elastic::Pods::Podman,
        switch: Daemon::Bird,
        repetition: 0,
        pods: 4,
        switch_sessions: 2,
        paths: 8,
        next_hops: 4,
        hung_ms: 234.0,
        overload: 4.0,
        bfd_flaps: 0,
        bgp_flaps: 0,
        bfd_flaps_without: 7,
        bgp_flaps_without: 7,
        proxy_sessions: 128,
        proxy_convergence_ms: 1100.0,
        pod_sessions: 256,
        pod_convergence_ms: 1200.0,
    };
    let gw_kill = gw_kill::Row {
        victim: gw_kill::Victim::Bird,
        repetition: 0,
        sent_probes: 56_000,
        lost_probes: 12_000,
        longest_gap_ms: 1053.0,
        back_ms: 1637.0,
        neighbours_ran_s: 125.0,
    };
    let gw_links = gw_links::Row {
        failure: gw_links::Failure::Switch,
        repetition: 0,
        sent_probes: 80_000,
        share: 0.25,
        lost_probes: 500,
        other_lost_probes: 0,
        outage_ms: 190.0,
        back_ms: 1500.0,
    };
    let gw_order = gw_order::Row {
        case: gw_order::Case::StoppedWorker,
        repetition: 1,
        sent_packets: 20_000,
        refused_packets: 200,
        received_packets: 19_800,
        reordered_packets: 1,
        timed_out_packets: 1000,
        late_packets: 1000,
        by_flow_packets: 0,
    };
    let tenant = gw_overload::Tenant { vni: 100, sent_packets: vec![4000], received_packets: vec![2000] };
    let gw_overload = gw_overload::Row {
        limiter: gw_overload::Limiter::Collision,
        repetition: 0,
        bin_ms: 100,
        burst_bin: 30,
        tenants: vec![tenant],
        limited_packets: 1,
        no_room_packets: 2,
        device_lost_frames: 0,
    };
    vec![
        results("gw-services", gw_services),
        results("gw-hosts", gw_hosts),
        results("gw-elastic", gw_elastic),
        results("gw-bgp", gw_bgp),
        results("gw-kill", gw_kill),
        results("gw-links", gw_links),
        results("gw-order", gw_order),
        results("gw-overload", gw_overload),
        results("redis-loss", redis_loss),
        results("path-failure", path_failure),
        results("iperf", iperf),
        results("lossless", lossless),
        results("soak", soak),
        results("granularity", granularity),
        results("coverage", coverage),
        results("delayed-release", delayed_release),
        results("slicing", slicing),
        results("vhost-rate", vhost_rate),
        results("migrate", migrate),
        results("rdm-loss", rdm_loss),
        results("rdm-upgrade", rdm_upgrade),
        results("rdm-sort", rdm_sort),
        results("rdm-block", rdm_block),
        results("switch-overall", switch_overall),
        results("switch-rate", switch_rate),
        results("flow-records", flow_records),
        results("vectors", vectors),
        results("route-refresh", route_refresh),
        results("switch-latency", switch_latency),
        results("nat", nat),
        results("load-balancer", load_balancer),
        results("mirror", mirror),
        results("flow-log", flow_log),
        results("apply", apply),
        results("learn", learn),
        results("upgrade", upgrade),
        results("cni", cni),
        results("nginx", nginx),
        results("applications", applications),
        results("isolation", isolation),
        results("elephants", elephants),
        results("stable", stable),
        results("congestion-control", congestion_control),
        results("sockperf", sockperf),
        results("capacity", capacity.clone()),
        results("ecn", capacity),
        results("outage", outage),
    ]
}

#[test]
fn every_experiments_results_match() {
    let validator = validator();
    for results in all() {
        let errors: Vec<_> = validator.iter_errors(&results).map(|e| format!("{}: {e}", e.instance_path)).collect();
        assert!(errors.is_empty(), "{}: {errors:?}", results["experiment"]);
    }
}

#[test]
fn every_network_of_an_experiment_matches() {
    let validator = validator();
    for experiment in experiment::all() {
        let name = experiment.name();
        if ![
            "redis-loss",
            "path-failure",
            "iperf",
            "lossless",
            "soak",
            "switch-overall",
            "switch-latency",
            "nginx",
            "elephants",
            "capacity",
        ]
        .contains(&name)
        {
            continue;
        }
        let mut results = all().into_iter().find(|results| results["experiment"] == name).unwrap();
        for mode in experiment.modes() {
            results["rows"][0]["mode"] = json!(mode.name());
            assert!(validator.is_valid(&results), "{name}: {}", mode.name());
        }
    }
}

/// An error, and how to make it.
type Change = (&'static str, fn(&mut Value));

#[test]
fn invalid_results_do_not_match() {
    let validator = validator();
    let changes: [Change; 6] = [
        ("a missing field", |v| drop(v["rows"][0].as_object_mut().unwrap().remove("mode"))),
        ("an unknown field", |v| v["rows"][0]["latency"] = json!(1)),
        ("an unknown mode", |v| v["rows"][0]["mode"] = json!("magic")),
        ("another version", |v| v["schema_version"] = json!(2)),
        ("an unknown experiment", |v| v["experiment"] = json!("magic")),
        ("a text for a number", |v| v["host"]["cpus"] = json!("two")),
    ];
    for results in all() {
        for (what, change) in changes {
            let mut changed = results.clone();
            change(&mut changed);
            assert!(!validator.is_valid(&changed), "{}: {what}", results["experiment"]);
        }
    }
}
