//! Small messages with one ACK each, or one for several (paper: figures 4a and 16).

use anyhow::{Result, ensure};
use serde_json::json;

use super::plot::Panel;
use super::runs::{each, percentile};
use super::{Bar, Outcome};
use crate::rdma::{Fabric, Load, Machine, MessageNode, MessageOptions, RdmaWorld, connect, nic};

const RATE: f64 = 50e9;
const DELAY_NS: u64 = 25_000;
/// Work requests per ACK.
const TRIGGERS: [u8; 5] = [1, 2, 4, 8, 16];
/// Connections per direction, and open messages on each.
const CONNECTIONS: usize = 8;
const DEPTH: u32 = 32;
/// Message length as in the paper, bytes.
const LEN: usize = 128;

struct Answer {
    /// Millions per second and direction.
    rate: f64,
    /// From sending until the sender knows that the message has arrived, us.
    p50_us: f64,
    p99_us: f64,
}

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let times = if quick { (1_000_000, 6_000_000) } else { (5_000_000, 55_000_000) };
    let answers = each(&TRIGGERS, |&trigger| measure(trigger, times))?;
    let mut outcome = Outcome::default();
    let mut data = Vec::new();
    for (trigger, answer) in TRIGGERS.iter().zip(&answers) {
        let Answer { rate, p50_us, p99_us } = answer;
        outcome.lines.push(format!(
            "an ACK for {trigger}: {rate:.2} million messages a second, acknowledged after P50 {p50_us:.0} us P99 {p99_us:.0} us"
        ));
        data.push(json!({ "trigger": trigger, "million_per_s": rate, "p50_us": p50_us, "p99_us": p99_us }));
    }
    let gain = (answers[TRIGGERS.len() - 1].rate / answers[0].rate - 1.0) * 100.0;
    outcome.lines.push(format!("an ACK for 16 instead of one for each: {gain:.0} % more messages"));
    outcome.bars.push(Bar {
        name: "messages with an ACK for each, % of those with an ACK for 16".into(),
        value: answers[0].rate / answers[TRIGGERS.len() - 1].rate * 100.0,
        // The paper reports more than 40 % more.
        limit: 100.0 / 1.4,
    });
    let over = || TRIGGERS.map(|trigger| if trigger == 1 { "at once".to_owned() } else { trigger.to_string() });
    let line = |value: fn(&Answer) -> f64| answers.iter().map(value).enumerate().map(|(x, y)| (x as f64, y));
    outcome.panels = vec![
        Panel::new("Messages of 128 bytes", "work requests an ACK", "million a second")
            .over(over())
            .line("each direction", line(|answer| answer.rate)),
        Panel::new("Until a message is acknowledged", "work requests an ACK", "us")
            .over(over())
            .line("P50", line(|answer| answer.p50_us))
            .line("P99", line(|answer| answer.p99_us)),
    ];
    outcome.data = data.into();
    Ok(outcome)
}

/// Two hosts that send to each other as much as their processors allow.
fn measure(trigger: u8, (warm, end): (u64, u64)) -> Result<Answer> {
    let options = MessageOptions { ack_requests: trigger, ..MessageOptions::default() };
    let connections = 2 * CONNECTIONS as u32;
    let node = |index| MessageNode::new(nic(index, 1, connections * 3 + 1), connections, 4 << 20, index as u64);
    let (mut a, mut b) = (node(0)?, node(1)?);
    for _ in 0..CONNECTIONS {
        connect(&mut a, &mut b, &options)?;
        connect(&mut b, &mut a, &options)?;
    }
    for host in [&mut a, &mut b] {
        host.send(Load { len: LEN, depth: DEPTH, begin_ns: 0, stagger_ns: 0 });
    }
    let mut world = RdmaWorld::new(Fabric::new(RATE, DELAY_NS), vec![a, b], 1);
    (0..2).for_each(|index| world.set_machine(index, Machine::OLD));
    world.run_until(warm);
    (0..2).for_each(|index| drop(world.node_mut(index).take_latencies_ns()));
    world.run_until(end);
    let mut times = Vec::new();
    for index in 0..2 {
        ensure!(world.node(index).mistakes() == (0, 0), "host {index}: {:?}", world.node(index).mistakes());
        times.extend(world.node_mut(index).take_latencies_ns().into_iter().map(|ns| ns as f64 / 1e3));
    }
    Ok(Answer {
        rate: times.len() as f64 / 2.0 / (end - warm) as f64 * 1e3,
        p50_us: percentile(&mut times, 0.5),
        p99_us: percentile(&mut times, 0.99),
    })
}
