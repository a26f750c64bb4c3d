use super::*;

fn row(app: App, mode: Mode, loss_percent: f64, requests_per_s: f64, tail: f64, lost_requests: u64) -> Row {
    Row {
        app,
        mode,
        injector: Injector::Wire,
        loss_percent,
        repetition: 0,
        requests_per_s,
        requests: 10_000 - lost_requests,
        paced_requests_per_s: None,
        latency_ms_avg: 0.5,
        latency_ms_p50: 0.5,
        latency_ms_p99: tail / 2.0,
        latency_ms_p99_9: tail,
        latency_ms_max: tail * 2.0,
        lost_requests,
        wire_drops_packets: 0,
        attempts: 1,
        standstills: 0,
        standstill_ms_max: 0.0,
    }
}

const APPS: [App; 6] = [App::Postgresql, App::Mariadb, App::Memcached, App::Http2, App::Quic, App::Udp];

/// Three repetitions on a machine whose speed drifts.
fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for (repetition, speed) in [1.0, 0.5, 2.0].into_iter().enumerate() {
        for app in APPS {
            let (stall, lost) = match app {
                App::Quic => ([60.0, 60.0, 70.0], [0, 0, 0]),
                App::Udp => ([0.4, 0.6, 0.6], [200, 205, 210]),
                _ => ([210.0, 215.0, 4.0], [0, 0, 0]),
            };
            for (index, mode) in [Mode::KernelVxlan, Mode::Off, Mode::Bifrost].into_iter().enumerate() {
                let rate = speed * [20_000.0, 15_000.0, 14_000.0][index];
                let kept = if mode == Mode::Bifrost { 0.95 } else { 0.6 };
                for mut row in [
                    row(app, mode, 0.0, rate, 1.0 / speed, 0),
                    row(
                        app,
                        mode,
                        1.0,
                        rate * if app.is_tcp() { kept } else { 0.9 },
                        stall[index] / speed,
                        lost[index],
                    ),
                ] {
                    row.repetition = repetition as u32;
                    rows.push(row);
                }
            }
        }
    }
    rows
}

fn failed(rows: &[Row]) -> Vec<String> {
    let bars = Applications.bars(&to_values(rows).unwrap()).unwrap();
    bars.into_iter().filter(|bar| !bar.passes()).map(|bar| bar.name).collect()
}

#[test]
fn bars_compare_within_a_repetition_and_each_can_fail() {
    let bars = Applications.bars(&to_values(&rows()).unwrap()).unwrap();
    assert_eq!(bars.len(), 4 * 3 + 6 + 3);
    assert_eq!(failed(&rows()), [] as [String; 0]);
    // The changed rows, the change, and the bars that it fails.
    type Change = fn(&mut Row);
    let table: [(App, Mode, f64, Change, &[&str]); 11] = [
        (App::Http2, Mode::Bifrost, 1.0, |r| r.latency_ms_p99_9 *= 3.0, &["http2, 1 % loss: the kernel's P99.9"]),
        (
            App::Mariadb,
            Mode::KernelVxlan,
            1.0,
            |r| r.latency_ms_p99_9 /= 3.0,
            &["mariadb, 1 % loss: the kernel's P99.9"],
        ),
        (
            App::Memcached,
            Mode::Bifrost,
            1.0,
            |r| r.requests_per_s *= 0.8,
            &["memcached, 1 % loss: BIFROST's requests/s"],
        ),
        (App::Postgresql, Mode::Off, 0.0, |r| r.requests_per_s *= 1.5, &["postgresql, no loss: requests/s"]),
        (
            App::Quic,
            Mode::KernelVxlan,
            0.0,
            |r| r.requests_per_s *= 2.0,
            &["quic, 0 % loss: requests/s of BIFROST over kernel"],
        ),
        (
            App::Quic,
            Mode::KernelVxlan,
            1.0,
            |r| r.requests_per_s *= 2.0,
            &["quic, 1 % loss: requests/s of BIFROST over kernel"],
        ),
        (App::Quic, Mode::Off, 1.0, |r| r.requests_per_s *= 2.0, &["quic, 1 % loss: requests/s with reliability"]),
        (App::Quic, Mode::Bifrost, 1.0, |r| r.latency_ms_p99 *= 2.0, &["quic, 1 % loss: BIFROST's P99"]),
        (App::Quic, Mode::Bifrost, 0.0, |r| r.latency_ms_p99 *= 2.0, &["quic, no loss: P99"]),
        (App::Udp, Mode::Bifrost, 0.0, |r| r.lost_requests += 20, &["udp, no loss: requests answered"]),
        (App::Udp, Mode::Bifrost, 1.0, |r| r.lost_requests += 200, &["udp, 1 % loss: requests answered"]),
    ];
    for (app, mode, loss, change, expected) in table {
        let mut rows = rows();
        rows.iter_mut().filter(|row| at(app, mode, loss)(row)).for_each(change);
        let failed = failed(&rows);
        assert_eq!(failed.len(), expected.len(), "{failed:?}");
        assert!(failed.iter().zip(expected).all(|(name, start)| name.starts_with(start)), "{failed:?}");
    }
}

#[test]
fn a_quick_run_is_judged_without_off_but_not_without_the_others() {
    let mut rows = rows();
    rows.retain(|row| row.mode != Mode::Off);
    assert_eq!(Applications.bars(&to_values(&rows).unwrap()).unwrap().len(), 4 * 2 + 3 + 2);
    assert_eq!(failed(&rows), [] as [String; 0]);
    rows.retain(|row| row.mode != Mode::KernelVxlan);
    assert_eq!(failed(&rows).len(), 4 + 3 + 1);
}

#[test]
fn the_report_shows_the_spread_and_lost_requests() {
    let report = Applications.report(&to_values(&rows()).unwrap()).unwrap();
    let line = |from: &str| {
        let (_, rest) = report.split_once(from).unwrap();
        rest.lines().find(|line| line.starts_with("| 1 %") && line.contains("bifrost")).unwrap().to_owned()
    };
    let http2 = line("### HTTP/2");
    assert!(http2.contains("6650..26600") && http2.contains("2.000..8.000") && http2.contains("52x"), "{http2}");
    assert!(line("### Plain UDP").contains("97.90 %"), "{report}");
    assert!(Applications.report(&[]).unwrap().starts_with("Loss on the wire"));
}

#[test]
fn each_application_has_a_panel() {
    let directory = tempfile::tempdir().unwrap();
    let plots = Applications.plots(&to_values(&rows()).unwrap(), directory.path()).unwrap();
    let text = fs::read_to_string(&plots[0]).unwrap();
    assert!(APPS.iter().all(|app| text.contains(title(*app))), "{text}");
}
