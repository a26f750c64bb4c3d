//! Tests of the bars and the report.

use super::super::full_links::LinkAtEnd;
use super::*;
use crate::results::to_values;

fn link(waiting_ms: f64) -> LinkAtEnd {
    LinkAtEnd {
        limit_mbit_per_s: 100,
        sent_mbit_per_s: 99.0,
        dropped_frames: 10,
        dropped_back_frames: 0,
        marked_frames: None,
        idle_rtt_ms: Some(0.1),
        rtt_ms_p50: Some(0.1 + waiting_ms),
        rtt_ms_p99: Some(6.0),
        probes: 100,
        probes_lost: 1,
    }
}

fn row(mode: Underneath, tenants: u8, each: &[f64], waiting_ms: [f64; 2]) -> Row {
    let total: f64 = each.iter().sum();
    Row {
        mode,
        point: Point { tenants, ..Point::new(&Shape::equal(2, 100, 50), 1) },
        repetition: 0,
        duration_s: 5.0,
        // The first second is excluded.
        goodput_by_second_mbit_per_s: vec![0.0, total, total],
        goodput_of_each_mbit_per_s: each.to_vec(),
        guest_retransmits: 5,
        received_ce_packets: 0,
        links: waiting_ms.map(link).to_vec(),
        paths: Vec::new(),
    }
}

const OURS: Underneath = Underneath::Overlay(Mode::Bifrost);

fn passed(rows: &[Row]) -> Vec<bool> {
    Capacity.bars(&to_values(rows).unwrap()).unwrap().iter().map(Bar::passes).collect()
}

#[test]
fn each_bar_can_fail() {
    let control = row(Underneath::BareLinks, 1, &[100.0, 100.0], [4.0, 2.0]);
    let ours = |goodput, waiting| [control.clone(), row(OURS, 1, &[goodput], waiting)];
    assert_eq!(passed(&ours(181.0, [1.9, 0.9])), [true, true]);
    assert_eq!(passed(&ours(179.0, [1.9, 0.9])), [false, true]);
    assert_eq!(passed(&ours(181.0, [0.0, 1.1])), [true, false], "the worst link counts");
    let mut silent = ours(181.0, [1.9, 0.9]);
    silent[1].links[0].rtt_ms_p50 = None;
    assert_eq!(passed(&silent), [true, false], "without probes nothing is proven");
    assert_eq!(passed(&ours(181.0, [1.9, 0.9])[1..]), [false, false], "without a control");
    assert_eq!(passed(&[]), [false]);
}

#[test]
fn tenants_are_judged_by_their_fairness() {
    let control = row(Underneath::BareLinks, 4, &[100.0, 100.0], [4.0, 2.0]);
    let rows = |each: &[f64]| [control.clone(), row(OURS, 4, each, [1.0, 1.0])];
    assert_eq!(passed(&rows(&[50.0, 50.0, 45.0, 45.0])), [true; 3]);
    assert_eq!(passed(&rows(&[100.0, 30.0, 30.0, 30.0])), [true, true, false]);
    assert_eq!(row(OURS, 4, &[1.0, 0.0, 0.0, 0.0], [0.0; 2]).fairness(), 0.25);
}

#[test]
fn the_report_names_the_control_and_every_network() {
    let rows = [
        row(Underneath::BareLinks, 1, &[100.0, 100.0], [4.0, 2.0]),
        row(Underneath::Overlay(Mode::Off), 1, &[100.0], [4.0, 1.0]),
        row(OURS, 1, &[180.0], [1.0, 1.0]),
    ];
    let values = to_values(&rows).unwrap();
    assert_eq!((values[0]["mode"].as_str(), values[0]["shape"].as_str()), (Some("bare_links"), Some("2x100@50")));
    let report = Capacity.report(&values).unwrap();
    for text in ["bare_links", " off |", "50.0 %", "90.0 %", "2x100@50, 1 flow"] {
        assert!(report.replace("  ", " ").contains(text), "{text}: {report}");
    }
}
