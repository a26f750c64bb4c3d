use super::*;

fn row(mode: Mode, loss_percent: f64, op: Op, repetition: u32, rps: f64, tail: f64) -> Row {
    Row {
        guests: Guests::Container,
        mode,
        injector: Injector::Wire,
        loss_percent,
        op,
        repetition,
        requests: 1000,
        rps,
        paced_rps: None,
        latency_ms_avg: 0.5,
        latency_ms_p50: 0.5,
        latency_ms_p99: tail / 2.0,
        latency_ms_p99_9: tail,
        latency_ms_max: tail * 2.0,
        wire_drops_packets: Some(0),
        attempts: 1,
        standstills: 0,
        standstill_ms_max: 0.0,
        processor_percent: Shares::new(),
    }
}

fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for op in [Op::Get, Op::Set] {
        for repetition in 0..3 {
            // The middle repetition is the median; the others are outliers.
            let noise = [0.5, 1.0, 3.0][repetition as usize];
            rows.push(row(Mode::KernelVxlan, 0.0, op, repetition, 60_000.0 * noise, 1.0));
            rows.push(row(Mode::KernelVxlan, 1.0, op, repetition, 10_000.0 * noise, 210.0 * noise));
            rows.push(row(Mode::Off, 0.0, op, repetition, 45_000.0 * noise, 1.0));
            rows.push(row(Mode::Off, 1.0, op, repetition, 9_000.0 * noise, 210.0 * noise));
            rows.push(row(Mode::Bifrost, 0.0, op, repetition, 40_000.0 * noise, 2.0));
            rows.push(row(Mode::Bifrost, 1.0, op, repetition, 38_000.0 * noise, 3.0 * noise));
        }
    }
    rows
}

#[test]
fn bars_use_medians_and_each_can_fail() {
    let values = to_values(&rows()).unwrap();
    let bars = RedisLoss.bars(&values).unwrap();
    assert_eq!(bars.len(), 12);
    for bar in &bars {
        assert!(bar.passes(), "{bar}");
    }
    let worse = |change: fn(&mut Row)| {
        let mut rows = rows();
        rows.iter_mut().filter(|row| row.mode == Mode::Bifrost).for_each(change);
        RedisLoss.bars(&to_values(&rows).unwrap()).unwrap().iter().filter(|bar| !bar.passes()).count()
    };
    assert_eq!(worse(|row| row.latency_ms_p99_9 *= 10.0), 2);
    assert_eq!(worse(|row| row.latency_ms_p99 *= 1.0 + 2.0 * row.loss_percent), 2);
    assert_eq!(worse(|row| row.latency_ms_max *= 10.0), 2);
    assert_eq!(worse(|row| row.rps *= 1.0 - 0.2 * row.loss_percent), 2);
    assert_eq!(worse(|row| row.rps *= 0.9), 2);
    assert_eq!(worse(|row| row.rps *= 0.6), 4);
}

#[test]
fn virtual_machines_are_compared_with_the_same_switch() {
    let mut rows = rows();
    rows.retain(|row| row.mode != Mode::KernelVxlan);
    rows.iter_mut().for_each(|row| (row.guests, row.injector) = (Guests::Vm, Injector::Vnic));
    let bars = RedisLoss.bars(&to_values(&rows).unwrap()).unwrap();
    assert_eq!(bars.iter().filter(|bar| bar.passes()).count(), 10);
    rows.iter_mut().filter(|row| row.mode == Mode::Off).for_each(|row| row.latency_ms_p99_9 /= 3.0);
    let bars = RedisLoss.bars(&to_values(&rows).unwrap()).unwrap();
    assert_eq!(bars.iter().filter(|bar| !bar.passes()).count(), 2);
}

#[test]
fn missing_points_fail() {
    let only_kernel: Vec<Row> = rows().into_iter().filter(|row| row.mode == Mode::KernelVxlan).collect();
    let bars = RedisLoss.bars(&to_values(&only_kernel).unwrap()).unwrap();
    assert!(bars.iter().all(|bar| !bar.passes() && bar.measured.is_none()));
}

#[test]
fn the_report_compares_with_the_kernel() {
    let report = RedisLoss.report(&to_values(&rows()).unwrap()).unwrap();
    let line = report.lines().find(|line| line.contains("bifrost") && line.starts_with("| 1 %")).unwrap();
    assert!(line.contains("70x") && line.contains("3.80x"), "{line}");
}

#[test]
fn strict_order_is_judged_where_it_was_measured() {
    let judged = |tail: f64, rps: f64| {
        let mut rows = rows();
        let strict: Vec<Row> = rows.iter().filter(|row| row.mode == Mode::Bifrost).cloned().collect();
        rows.extend(strict.into_iter().map(|row| Row {
            mode: Mode::Strict,
            // A single outlier does not matter.
            latency_ms_p99_9: row.latency_ms_p99_9 * (1.0 + tail) / if row.repetition == 0 { 9.0 } else { 1.0 },
            rps: row.rps * (1.0 + rps),
            ..row
        }));
        let bars = RedisLoss.bars(&to_values(&rows).unwrap()).unwrap();
        assert_eq!(bars.len(), 12 + 2);
        let missed = bars.iter().filter(|bar| !bar.passes());
        missed.map(|bar| bar.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(judged(0.0, 0.0), [] as [String; 0]);
    let name = |what: &str| format!("at every loss: BIFROST's {what} over that in strict order, median of all points");
    assert_eq!(judged(-0.2, 0.0), [name("P99.9")]);
    assert_eq!(judged(0.0, 0.1), [name("rps")]);
}
