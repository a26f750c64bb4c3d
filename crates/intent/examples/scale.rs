//! What plans and spans of many hosts and ports cost: `cargo run --release -p bifrost-intent --example scale -- HOSTS PORTS VPCS`.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::time::{Duration, Instant};

use bifrost_intent::{Batch, Change, MAX_CHANGES, Model, Op, Spans};
use serde_json::{Value, json};

fn set(key: String, spec: Value) -> Change {
    Change { op: Op::Set, key: key.parse().unwrap(), spec: Some(spec), if_generation: None }
}

fn port(n: usize, hosts: usize, vpcs: usize) -> Change {
    // The ports of a VPC are on many hosts.
    let (vpc, host) = (n % vpcs, (n / vpcs + n) % hosts);
    let groups = [format!("g{vpc}")];
    let spec = json!({"subnets": [format!("s{vpc}")], "host": format!("h{host}"), "netns": format!("n{n}"), "security_groups": groups});
    set(format!("port/demo/p{n}"), spec)
}

fn make(model: &mut Model, batch: Batch) -> Vec<(bifrost_intent::Key, Option<bifrost_intent::Stored>)> {
    let plan = model.plan(&batch, 1).unwrap();
    let write = |(key, stored): (bifrost_intent::Key, Option<_>)| {
        let before = match stored {
            Some(stored) => model.set(key.clone(), stored),
            None => model.remove(&key),
        };
        (key, before)
    };
    plan.writes.into_iter().map(write).collect()
}

/// Resident memory, MB.
fn memory() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4 / 1024
}

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|arg| arg.parse().unwrap()).collect();
    let [hosts, ports, vpcs] = numbers[..] else { panic!("HOSTS PORTS VPCS") };
    let mut model = Model::default();
    let mut changes: Vec<Change> = Vec::new();
    changes.extend((0..hosts).map(|n| {
        set(format!("host/h{n}"), json!({"addresses": [format!("10.{}.{}.{}", n >> 16, n >> 8 & 255, n & 255)]}))
    }));
    changes.extend((0..vpcs).map(|n| set(format!("vpc/demo/v{n}"), json!({}))));
    changes.extend(
        (0..vpcs).map(|n| set(format!("subnet/demo/s{n}"), json!({"vpc": format!("v{n}"), "prefix": "10.0.0.0/8"}))),
    );
    changes
        .extend((0..vpcs).map(|n| set(format!("security_group/demo/g{n}"), json!({"ingress": [{"protocol": "tcp"}]}))));
    changes.extend((0..ports).map(|n| port(n, hosts, vpcs)));
    let start = Instant::now();
    for changes in changes.chunks(MAX_CHANGES) {
        make(&mut model, Batch { changes: changes.to_vec() });
    }
    let each = start.elapsed() / changes.len() as u32;
    println!("{} objects planned one by one: {each:?} each, {} MB", changes.len(), memory());
    let start = Instant::now();
    let mut spans = Spans::of(&model);
    println!("spans of {hosts} hosts: {:?}, {} MB", start.elapsed(), memory());
    let start = Instant::now();
    let all = spans.of_host("h0");
    println!("all of a host: {} items in {:?}", all.len(), start.elapsed());

    let mut times: Vec<(Duration, usize)> = Vec::new();
    for n in ports..ports + 200 {
        let start = Instant::now();
        let changed = make(&mut model, Batch { changes: vec![port(n, hosts, vpcs)] });
        let told = spans.change(&model, &changed, &|_| true);
        times.push((start.elapsed(), told.len()));
    }
    times.sort();
    println!("a port more: median {:?}, longest {:?}, {} hosts told", times[100].0, times[199].0, times[100].1);
    let host = set("host/new".into(), json!({"addresses": ["192.0.2.1"]}));
    make(&mut model, Batch { changes: vec![host] });
    let start = Instant::now();
    let mut first = port(ports + 200, hosts, vpcs);
    first.spec.as_mut().unwrap()["host"] = "new".into();
    let changed = make(&mut model, Batch { changes: vec![first] });
    let told = spans.change(&model, &changed, &|_| true);
    println!("a first port of a host: {:?}, {} hosts told", start.elapsed(), told.len());
}
