//! Time for a relay to start with a full store, and for all agents to reconnect.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::agents::Agents;
use crate::cli::{Cold, Size};
use crate::program::Relay;
use crate::propagate::load;
use crate::report::Report;

/// Bars: time until the relay follows its store, seconds; its memory then, MB; time until all agents have everything,
/// seconds.
const START_BAR: f64 = 5.0;
const MEMORY_BAR: f64 = 500.0;
const AGENTS_BAR: f64 = 30.0;

pub(crate) async fn run(options: &Cold) -> Result<Report> {
    let size = options.size;
    let directory = tempfile::tempdir()?;
    let mut relay = Relay::start(directory.path())?;
    relay.wait_ready().await?;
    load(&relay.api(), size).await?;
    relay.kill();

    let start = Instant::now();
    relay.restart()?;
    let status = relay.wait_ready().await?;
    let ready = start.elapsed();
    let (memory, _) = relay.usage()?;
    let mut agents = Agents::start(size.hosts, &relay.endpoint())?;
    let connected = agents.wait_in_sync(status.revision, Duration::from_secs(120)).await?;
    let (most, _) = relay.usage()?;
    let items: usize = agents.all.iter().map(|agent| crate::agents::lock(agent).has.len()).sum();
    // Again, all at once: the relay is killed and restarted.
    relay.kill();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let start = Instant::now();
    relay.restart()?;
    relay.wait_ready().await?;
    agents.wait_in_sync(status.revision, Duration::from_secs(120)).await?;
    let again = start.elapsed();
    agents.stop();

    let Size { hosts, ports, .. } = size;
    let mut report = Report::new(format!("a relay starts: {} objects, {hosts} hosts, {ports} ports", status.objects));
    report.bar("until it follows its store", ready.as_secs_f64(), "s", START_BAR);
    report.bar("its memory then", memory as f64, "MB", MEMORY_BAR);
    report.tell("time until all agents have everything", connected.as_secs_f64(), "s");
    report.tell("objects sent to agents", items as f64, "");
    report.tell("peak memory meanwhile", most as f64, "MB");
    report.bar("after a kill: until all agents have everything again", again.as_secs_f64(), "s", AGENTS_BAR);
    Ok(report)
}
