use super::*;

/// Bins of 0.1 s: 1 s to settle, then phases of 1 s each.
fn bins(failed: f64) -> Vec<f64> {
    let mut bins = vec![3.0; 10];
    for (name, _) in PHASES {
        bins.extend([if name == "failed" { failed } else { 4.0 }; 10]);
    }
    bins
}

fn rows(failed_bin: f64, failures: u64, stall_us: u64, wrong: u64) -> Vec<Value> {
    let base = Row {
        mode: Mode::Bifrost,
        injector: Injector::Wire,
        workload: Workload::Flow,
        repetition: 0,
        failed_path: 2,
        bin_ms: 100,
        bins_gbit_per_s: bins(failed_bin),
        bins_rps: Vec::new(),
        bins_standstill_ms: vec![0.0; 60],
        phases: summarize(&bins(failed_bin), &[], &[], 1.0),
        request_success_percent: None,
        longest_stall_ms: None,
        wrong_answers: None,
        attempt: 1,
    };
    let mut outcomes = vec![key_value_client::Bin { answered: 400, failed: 0, longest_stall_us: 3000 }; 60];
    outcomes[45] = key_value_client::Bin { answered: 400, failed: failures, longest_stall_us: stall_us };
    let (success, stall) = outcome(&outcomes[10..]);
    let requests = Row {
        workload: Workload::Requests,
        bins_gbit_per_s: Vec::new(),
        bins_rps: bins(failed_bin),
        phases: summarize(&bins(failed_bin), &outcomes, &[], 1.0),
        request_success_percent: success,
        longest_stall_ms: stall,
        wrong_answers: Some(wrong),
        ..base.clone()
    };
    to_values(&[base, requests]).unwrap()
}

#[test]
fn each_bar_can_fail() {
    let failing = |rows: Vec<Value>| -> Vec<usize> {
        let bars = PathFailure.bars(&rows).unwrap();
        bars.iter().enumerate().filter(|(_, bar)| !bar.passes()).map(|(index, _)| index).collect()
    };
    assert_eq!(failing(rows(3.3, 0, 19_000, 0)), [] as [usize; 0]);
    assert_eq!(failing(rows(3.1, 0, 19_000, 0)), [0, 1]);
    assert_eq!(failing(rows(3.3, 1, 19_000, 0)), [2]);
    assert_eq!(failing(rows(3.3, 0, 20_000, 0)), [3]);
    assert_eq!(failing(rows(3.3, 0, 19_000, 1)), [4]);
    assert_eq!(failing(Vec::new()), [0, 1, 2, 3, 4]);
}

#[test]
fn disturbed_bins_are_ignored_unless_there_are_too_many() {
    let mut throughput = bins(4.0);
    throughput[44] = 1.0;
    let lowest = |disturbed: std::ops::Range<usize>| {
        let mut standstills = vec![0.0; 60];
        standstills[disturbed].fill(10.0);
        let row = Row {
            bins_gbit_per_s: throughput.clone(),
            phases: summarize(&throughput, &[], &standstills, 1.0),
            bins_standstill_ms: standstills,
            ..from_values::<Row>(&rows(4.0, 0, 0, 0)).unwrap().remove(0)
        };
        assert_eq!(row.phases[3].lowest_bin_percent_of_before, 25.0);
        PathFailure.bars(&to_values(&[row]).unwrap()).unwrap()[0].measured
    };
    assert_eq!(lowest(0..0), Some(25.0));
    assert_eq!(lowest(43..45), Some(100.0));
    assert_eq!(lowest(43..50), None);
    assert_eq!(lowest(40..41), None, "the start of the failure");
}

#[test]
fn attempts_complement_each_other_and_all_count() {
    let attempt = |attempt, low: f64, disturbed: std::ops::Range<usize>| {
        let mut throughput = bins(4.0);
        throughput[49] = low;
        let mut standstills = vec![0.0; 60];
        standstills[disturbed].fill(10.0);
        Row {
            attempt,
            phases: summarize(&throughput, &[], &standstills, 1.0),
            ..from_values::<Row>(&rows(4.0, 0, 0, 0)).unwrap().remove(0)
        }
    };
    let measured = |rows: &[Row]| PathFailure.bars(&to_values(rows).unwrap()).unwrap()[0].measured;
    let (late, early) = (attempt(1, 3.9, 42..48), attempt(2, 2.0, 40..44));
    assert_eq!(measured(std::slice::from_ref(&late)), None);
    assert_eq!(measured(&[late.clone(), early.clone()]), Some(50.0));
    // Two repetitions need twice as many.
    assert_eq!(measured(&[late.clone(), early.clone(), late.clone()]), Some(50.0));
    assert_eq!(measured(&[late.clone(), late.clone()]), None);
    assert_eq!(measured(&[early.clone(), early]), None);
}

#[test]
fn phases_are_split_where_the_loss_changes() {
    let phases = summarize(&bins(1.0), &[], &[], 1.0);
    let failed = &phases[3];
    assert_eq!((failed.start_s, failed.end_s, failed.mean, failed.lowest_bin_percent_of_before), (4.0, 5.0, 1.0, 25.0));
    assert_eq!(phases[4].lowest_bin_percent_of_before, 100.0);
    // A flow that ended early carried nothing after its end.
    assert_eq!(summarize(&[4.0; 25], &[], &[], 1.0)[4].mean, 0.0);
}
