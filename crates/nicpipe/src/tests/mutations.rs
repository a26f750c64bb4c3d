//! A test detects each deliberate mistake.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{cases, hostile, jumbo, order, shared};
use crate::mutation::{Mutation, set};

/// Tests without random inputs.
const TESTS: [fn(); 14] = [
    cases::classes,
    cases::control_traffic_has_a_rate_and_passes_a_full_data_plane,
    cases::a_pod_that_goes_down_loses_waiting_packets,
    cases::header_only_packets_are_short,
    cases::headers_of_a_tunnel_stay_with_the_packet,
    cases::fragments_of_a_packet_go_to_one_core_whole,
    cases::a_trace_predicts_what_happens_to_a_frame,
    hostile::packets_too_short_to_be_frames_do_not_leave,
    jumbo::jumbo_frames_leave_unchanged_and_in_order,
    jumbo::a_pod_with_short_buffers_gets_the_headers_of_jumbo_frames_only,
    jumbo::frames_longer_than_the_device_takes_are_refused,
    order::a_burst_of_one_tenant_is_limited_before_the_cores,
    order::a_delayed_pipeline_limits_by_the_time_of_arrival,
    shared::a_pod_cannot_pretend_to_be_another,
];

fn is_noticed(mutation: Option<Mutation>) -> bool {
    set(mutation);
    let noticed = TESTS.iter().any(|test| catch_unwind(AssertUnwindSafe(test)).is_err());
    set(None);
    noticed
}

#[test]
fn every_mutation_is_detected() {
    assert!(!is_noticed(None), "a test fails without a mutation");
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let missed: Vec<Mutation> = Mutation::ALL.into_iter().filter(|mutation| !is_noticed(Some(*mutation))).collect();
    std::panic::set_hook(hook);
    assert!(missed.is_empty(), "not detected: {missed:?}");
}
