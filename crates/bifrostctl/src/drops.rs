//! `bifrostctl drops`: what was dropped, where, how fast, and what to do.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

use bifrost_control::Client;
use bifrost_control::api::{DropCount, Drops, Place};
use bifrost_control::balance::Balance;
use clap::Args;
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{self, Output};

#[derive(Debug, Args)]
pub(crate) struct DropsArgs {
    /// Only counters, ports and peers whose name contains this
    pattern: Option<String>,
    /// Look again every so many seconds, and show how much each grew in that time
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    watch: Option<f64>,
    /// End after so many looks
    #[arg(long, value_name = "N", requires = "watch", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

fn seconds(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.05..=3600.0).contains(&value) { Ok(value) } else { Err("not in 0.05 to 3600 seconds".to_owned()) }
}

/// Drops, and how fast they grow.
#[derive(Clone, Debug, Serialize)]
struct Watched {
    uptime_s: f64,
    /// Over which time the rates are; none: since the start.
    interval_s: Option<f64>,
    drops: Vec<Rated>,
    unexplained: Vec<Balance>,
}

#[derive(Clone, Debug, Serialize)]
struct Rated {
    #[serde(flatten)]
    drop: DropCount,
    per_s: f64,
}

impl Watched {
    /// Rates since `before`, a look that was so many seconds ago, or since the start.
    fn between(before: Option<(&Drops, f64)>, now: Drops) -> Watched {
        let old: BTreeMap<(&str, &Place), u64> =
            before.iter().flat_map(|(b, _)| &b.drops).map(|d| ((d.counter.as_str(), &d.at), d.count)).collect();
        // A daemon that was restarted has counted all of it since.
        let restarted = before.is_some_and(|(b, _)| b.uptime_s > now.uptime_s);
        let since = before.map(|(_, seconds)| seconds);
        let seconds = since.unwrap_or(now.uptime_s).max(1e-3);
        let drops = now.drops.into_iter().map(|drop| {
            let before = if restarted { 0 } else { old.get(&(drop.counter.as_str(), &drop.at)).copied().unwrap_or(0) };
            let per_s = drop.count.saturating_sub(before) as f64 / seconds;
            Rated { drop, per_s }
        });
        Watched { uptime_s: now.uptime_s, interval_s: since, drops: drops.collect(), unexplained: now.unexplained }
    }

    fn text(&self) -> String {
        let over = self.interval_s.map_or("since the start".to_owned(), |s| format!("over {s:.1} s"));
        let mut out = match self.drops.len() {
            0 => "nothing was dropped".to_owned(),
            _ => format!("drops since the start, and rates {over}"),
        };
        for Rated { drop, per_s } in &self.drops {
            let _ = write!(out, "\n\n{:<44}{:<28}{:>12}{per_s:>12.1}/s", drop.counter, drop.at.to_string(), drop.count);
            let _ = write!(out, "\n    {}\n    -> {}", drop.what, drop.advice);
        }
        let _ = write!(out, "\n\nunexplained: {}", self.unexplained.iter().map(|b| b.unexplained().abs()).sum::<i64>());
        for account in &self.unexplained {
            let Balance { stage, at, entered, left } = account;
            let _ = write!(out, "\n    {stage} ({at}): {entered} packets entered, {left} left; report this");
        }
        out
    }
}

/// Prints drops, once or again and again.
pub(crate) fn run(client: &Client, args: &DropsArgs, out: Output) -> Result<(), Failure> {
    let look = || -> Result<(Drops, Instant), Failure> {
        let mut drops = client.drops()?;
        let wanted = |text: &str| args.pattern.as_ref().is_none_or(|pattern| text.contains(pattern));
        drops
            .drops
            .retain(|d| wanted(&d.counter) || [&d.at.port, &d.at.peer].into_iter().flatten().any(|name| wanted(name)));
        Ok((drops, Instant::now()))
    };
    let (mut before, mut at) = look()?;
    let Some(interval) = args.watch else {
        return out.print(&Watched::between(None, before), Watched::text);
    };
    let mut looks = 0;
    loop {
        std::thread::sleep(Duration::from_secs_f64(interval));
        let (now, then) = look()?;
        let watched = Watched::between(Some((&before, (then - at).as_secs_f64())), now.clone());
        let text = if out.json { serde_json::to_string(&watched)? } else { watched.text() + "\n" };
        looks += 1;
        if !output::line(&text)? || args.count.is_some_and(|count| looks >= count) {
            return Ok(());
        }
        (before, at) = (now, then);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drops(uptime_s: f64, counts: &[(&str, u64)]) -> Drops {
        let drop = |(counter, count): &(&str, u64)| DropCount {
            counter: (*counter).to_owned(),
            at: Place { worker: Some(0), ..Place::default() },
            count: *count,
            what: "what".to_owned(),
            advice: "advice".to_owned(),
        };
        Drops { uptime_s, drops: counts.iter().map(drop).collect(), unexplained: Vec::new() }
    }

    #[test]
    fn rates() {
        let per_s = |watched: &Watched| watched.drops.iter().map(|d| d.per_s).collect::<Vec<_>>();
        let first = drops(10.0, &[("a", 5), ("b", 20)]);
        assert_eq!(per_s(&Watched::between(None, first.clone())), [0.5, 2.0]);
        let second = drops(12.0, &[("a", 5), ("b", 30), ("c", 4)]);
        assert_eq!(per_s(&Watched::between(Some((&first, 2.0)), second)), [0.0, 5.0, 2.0]);
        let restarted = drops(1.0, &[("b", 21)]);
        assert_eq!(per_s(&Watched::between(Some((&first, 2.0)), restarted)), [10.5]);
    }

    #[test]
    fn text_explains() {
        let text = Watched::between(None, drops(2.0, &[("drop.x_packets", 3)])).text();
        assert!(text.contains("drop.x_packets") && text.contains("worker 0") && text.contains(" 1.5/s"), "{text}");
        assert!(text.ends_with("\n    what\n    -> advice\n\nunexplained: 0"), "{text}");
        let mut vanished = drops(2.0, &[]);
        let at = Place { worker: Some(1), ..Place::default() };
        vanished.unexplained.push(Balance { stage: "switch".to_owned(), at, entered: 9, left: 6 });
        let text = Watched::between(None, vanished).text();
        let expected = "unexplained: 3\n    switch (worker 1): 9 packets entered, 6 left; report this";
        assert!(text.starts_with("nothing was dropped\n") && text.ends_with(expected), "{text}");
    }
}
