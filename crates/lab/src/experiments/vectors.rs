//! `vectors`: packets and new conversations per second between two vhost-user ports, by a switch that looks up
//! packets one by one, by one that looks up all packets of a burst together, and by Open vSwitch with DPDK (Triton,
//! figures 12 and 13).
//!
//! One switch on one processor, with connection tracking; the guest, `dpdk-testpmd`, has the other. One of its ports
//! sends as fast as it can, with packets of all conversations in turn; the other one receives. There is no other
//! cost: no tunnel, and no kernel.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::circle::{PROCESSORS, need_processors};
use super::route_refresh::pace;
use super::tunnel::{CONFIGURATION, Running};
use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::interrupt;
use crate::lab::Lab;
use crate::netns::Namespace;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::programs::open_vswitch::{Datapath, OpenVswitch};
use crate::programs::testpmd::{self, Testpmd};
use crate::report::{Table, factor};
use crate::results::from_values;
use crate::stats::{Spread, cell, middle, paired_ratio};
use crate::turns;

/// Numbers of conversations: one for all packets; one for each packet of a vector, all in the processor's caches; and
/// more than fit into the caches.
const CONVERSATIONS: [u32; 3] = [1, 256, MANY];
const MANY: u32 = 1_000_000;
/// Descriptors of each ring.
const RING: u32 = 1024;
/// Timeout for the switch to learn the conversations, and the interval at which it is asked for their number.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(25);
/// Warm-up before packets are counted.
const WARM_UP: Duration = Duration::from_secs(1);

/// MAC addresses of the guest's two ports in frames that `dpdk-testpmd` generates.
const MACS: [&str; 2] = ["00:01:02:03:04:00", "00:01:02:03:04:01"];
const SENDER: &str = "10.254.0.0";
const RECEIVER: &str = "10.252.0.1";

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Vectors;

/// The switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Switch {
    /// Open vSwitch with DPDK.
    OvsDpdk,
    /// `bifrostd` with `vectors = false`: batches whose packets are looked up one by one.
    Batches,
    /// `bifrostd`.
    Vectors,
}

impl Switch {
    const ALL: [Switch; 3] = [Switch::OvsDpdk, Switch::Batches, Switch::Vectors];
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Switch::OvsDpdk => "ovs_dpdk",
            Switch::Batches => "batches",
            Switch::Vectors => "vectors",
        })
    }
}

/// The result for one number of conversations through one switch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The switch.
    pub mode: Switch,
    /// Number of conversations, used in turn.
    pub conversations: u32,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Conversations that the switch knew when counting began.
    pub sessions: u64,
    /// Duration of the count, s.
    pub duration_s: f64,
    /// Packets per second that the guest's other port received.
    pub packets_per_s: f64,
    /// Rate at which the switch learned conversations, from the tenth to the ninetieth percent, 1/s; only for the
    /// largest number of conversations.
    pub new_sessions_per_s: Option<f64>,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { mode, conversations, packets_per_s, new_sessions_per_s, .. } = self;
        write!(f, "{mode}, {conversations} conversations: {:.2} million packets/s", packets_per_s / 1e6)?;
        match new_sessions_per_s {
            Some(new) => write!(f, ", {new:.0} new conversations a second before"),
            None => Ok(()),
        }
    }
}

impl Experiment for Vectors {
    fn name(&self) -> &'static str {
        "vectors"
    }

    fn summary(&self) -> &'static str {
        "Packets per second by vectors and one by one, compared with Open vSwitch with DPDK (SIGCOMM'24 figures 12, 13)"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::Off]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let seconds = lab.seconds(4.0, 2.0);
        turns::alternate(lab.repetitions(3), &Switch::ALL, &CONVERSATIONS, |mode, conversations, repetition| {
            measure(lab, *mode, *conversations, repetition, seconds)
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&[
            "conversations",
            "switch",
            "million packets/s",
            "over batches",
            "over Open vSwitch",
            "new conversations/s",
            "over batches",
            "over Open vSwitch",
        ]);
        for conversations in CONVERSATIONS {
            for mode in Switch::ALL {
                let of = |mode, field| spread(&rows, mode, conversations, field);
                let over = |peer, field| factor(middle(of(mode, field)), middle(of(peer, field)));
                let new: fn(&Row) -> f64 = |r| r.new_sessions_per_s.unwrap_or(f64::NAN);
                let is_new = of(mode, new).is_some_and(|new| !new.median.is_nan());
                let if_new = |text: String| if is_new { text } else { "-".to_owned() };
                table.row(vec![
                    conversations.to_string(),
                    mode.to_string(),
                    cell(of(mode, |r| r.packets_per_s / 1e6)),
                    over(Switch::Batches, |r| r.packets_per_s),
                    over(Switch::OvsDpdk, |r| r.packets_per_s),
                    if_new(cell(of(mode, new))),
                    if_new(over(Switch::Batches, new)),
                    if_new(over(Switch::OvsDpdk, new)),
                ]);
            }
        }
        Ok(format!(
            "A port of `dpdk-testpmd` sends frames of 64 bytes as fast as it can, with packets of all conversations in \
             turn, through a switch with connection tracking to another of its ports. With one conversation all \
             packets of a vector reuse the lookup of the first; with {MANY}, records and sessions of a vector are \
             prefetched together; with 256 there is hardly anything to gain. One processor for the switch, one for the \
             guest. Medians, with the minimum and maximum of the repetitions in brackets.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let series = [
            (Series::on("vectors"), Switch::Vectors),
            (Series::other("batches, looked up one by one"), Switch::Batches),
            (Series::off("Open vSwitch with DPDK"), Switch::OvsDpdk),
        ];
        let panel = Panel::over(
            "between two vhost-user ports, with connection tracking",
            ("conversations", &CONVERSATIONS[..]),
            ("million packets/s", false),
            &series,
            |mode, conversations| spread(&rows, mode, *conversations, |r| r.packets_per_s / 1e6),
        );
        Ok(vec![plot::draw(&directory.join("rate.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let over = |peer, conversations, field: fn(&Row) -> f64| {
            let is = |mode| move |r: &Row| r.mode == mode && r.conversations == conversations;
            paired_ratio(&rows, |r| r.repetition, (is(Switch::Vectors), is(peer)), field)
        };
        let rate: fn(&Row) -> f64 = |r| r.packets_per_s;
        let new: fn(&Row) -> f64 = |r| r.new_sessions_per_s.unwrap_or(f64::NAN);
        let mut bars = vec![
            Bar::new(
                format!("packets/s by vectors over one by one, {MANY} conversations"),
                over(Switch::Batches, MANY, rate),
                Sense::AtLeast,
                1.25,
                "x",
            ),
            Bar::new(
                format!("new conversations/s over Open vSwitch with DPDK, {MANY} conversations"),
                over(Switch::OvsDpdk, MANY, new),
                Sense::AtLeast,
                2.0,
                "x",
            ),
        ];
        bars.extend(CONVERSATIONS.map(|conversations| {
            let name = format!("packets/s over Open vSwitch with DPDK, {conversations} conversations");
            Bar::new(name, over(Switch::OvsDpdk, conversations, rate), Sense::AtLeast, 1.5, "x")
        }));
        bars.extend([1, 256].map(|conversations| {
            let name = format!("packets/s by vectors over one by one, {conversations} conversations");
            Bar::new(name, over(Switch::Batches, conversations, rate), Sense::AtLeast, 0.95, "x")
        }));
        let worst = rows.iter().map(|r| r.sessions as f64 / f64::from(r.conversations)).reduce(f64::min);
        bars.push(Bar::new(
            "conversations known when counting began, of those that there are",
            worst.map(|share| share * 100.0),
            Sense::AtLeast,
            99.0,
            "%",
        ));
        Ok(bars)
    }
}

/// The median over repetitions; `None` if that was not measured.
fn spread(rows: &[Row], mode: Switch, conversations: u32, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| row.mode == mode && row.conversations == conversations).map(field))
}

fn measure(lab: &Lab, mode: Switch, conversations: u32, repetition: u32, seconds: f64) -> Result<Row> {
    need_processors()?;
    let logs = lab.logs(&format!("{mode}-{conversations}-{repetition}"));
    std::fs::create_dir_all(&logs).with_context(|| format!("creating {}", logs.display()))?;
    let directory = lab.run.directory().join("vectors");
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
    let mut host = Namespace::create(format!("{}-switch", lab.run.id()))?;
    host.pin(PROCESSORS[0]);
    let mut guest = Namespace::create(format!("{}-guest", lab.run.id()))?;
    guest.pin(PROCESSORS[1]);
    let sockets = [0, 1].map(|n| directory.join(format!("guest{n}")));
    let mut switch = match mode {
        Switch::OvsDpdk => Running::Ovs(open_vswitch(&host, &directory, &logs)?),
        Switch::Batches | Switch::Vectors => {
            let control = directory.join("control");
            let text = configuration(&control, &sockets, mode == Switch::Vectors);
            std::fs::write(logs.join(CONFIGURATION), text).context("writing a configuration")?;
            Running::bifrostd(lab, &host, control, &logs)?
        }
    };
    for socket in &sockets {
        switch.wait_for(socket, &logs)?;
    }
    let device =
        |n: usize| format!("net_virtio_user{n},path={},queue_size={RING},mac={}", sockets[n].display(), MACS[n]);
    let flows = format!("--flowgen-flows={conversations}");
    let devices = [device(0), device(1)];
    let options = ["--forward-mode=flowgen", &flows];
    let mut guest = Testpmd::start_with(&guest, PROCESSORS[1], &devices, &options, &logs.join("guest"))?;
    guest.tell("start")?;
    // One of the addresses is never used.
    let expected = u64::from(conversations.saturating_sub(1).max(1));
    let deadline = Instant::now() + PATIENCE;
    let mut learnt = vec![(Instant::now(), 0)];
    while learnt.last().is_none_or(|&(_, known)| known < expected) && Instant::now() < deadline {
        interrupt::sleep(POLL_INTERVAL)?;
        switch.check_alive()?;
        learnt.push((Instant::now(), switch.sessions()?));
    }
    interrupt::sleep(WARM_UP)?;
    let sessions = switch.sessions()?;
    let began = Instant::now();
    guest.tell("show port stats all")?;
    interrupt::sleep(Duration::from_secs_f64(seconds))?;
    let duration_s = began.elapsed().as_secs_f64();
    guest.tell("show port stats all")?;
    interrupt::sleep(Duration::from_millis(300))?;
    switch.check_alive()?;
    let counts = testpmd::port_packets(&guest.printed(), 1);
    let [(before, _), (after, _)] = counts[..] else {
        bail!("dpdk-testpmd shows no statistics; its output is in {}", logs.display());
    };
    guest.tell("stop")?;
    if after == before {
        bail!("no packet arrives (see {})", logs.display());
    }
    let new_sessions_per_s = if conversations == MANY { pace(&learnt, MANY) } else { None };
    let packets_per_s = (after - before) as f64 / duration_s;
    Ok(Row { mode, conversations, repetition, sessions, duration_s, packets_per_s, new_sessions_per_s })
}

/// A bridge with both ports. It does not poll the second port, whose packets do not count.
fn open_vswitch(host: &Namespace, directory: &Path, logs: &Path) -> Result<OpenVswitch> {
    let datapath = Datapath::Dpdk { processor: PROCESSORS[0], max_sleep_us: 0 };
    let switch = OpenVswitch::start(host, datapath, directory.to_path_buf(), &logs.join("ovs"))?;
    switch.configure(
        "-- add-br br0 -- set bridge br0 datapath_type=netdev fail_mode=secure -- add-port br0 guest0 -- set interface \
         guest0 ofport_request=1 type=dpdkvhostuser -- add-port br0 guest1 -- set interface guest1 ofport_request=2 \
         type=dpdkvhostuser other_config:pmd-rxq-affinity=0:63",
    )?;
    switch.tell(&["dpctl/ct-set-maxconns", &(2 * MANY).to_string()])?;
    switch.replace_flows(
        "br0",
        "table=0,priority=10,in_port=1,ip,ct_state=-trk,actions=ct(table=1)\n\
         table=1,priority=10,ip,ct_state=+trk+new,actions=ct(commit),output:2\n\
         table=1,priority=10,ip,ct_state=+trk-new,actions=output:2\n",
    )?;
    Ok(switch)
}

/// The daemon's configuration: the sender has a security group that lets it start any conversation; the receiver may
/// send hardly anything, although `dpdk-testpmd` sends there as well.
fn configuration(control: &Path, sockets: &[PathBuf; 2], vectors: bool) -> String {
    let port = |n: usize, address: &str, more: &str| {
        format!(
            "[[port]]\nname = \"guest{n}\"\nkind = \"vhost-user\"\nsocket = \"{}\"\nvni = 100\nmac = \"{}\"\n\
             addresses = [\"{address}/32\"]\nmtu = 1500\n{more}\n",
            sockets[n].display(),
            MACS[n]
        )
    };
    format!(
        "[host]\nname = \"host-a\"\n\n[control]\nsocket = \"{}\"\n\n[workers]\ncount = 1\n\n\
         [underlay]\naddresses = [\"127.0.0.1\"]\nmtu = 1600\n\n\
         [sessions]\nper_port = 1048576\nflow_records = 1048576\nvectors = {vectors}\n\n[[security_group]]\nname = \
         \"guests\"\n\n\
         [[vpc]]\nvni = 100\nreliability = \"off\"\n\n{}{}",
        control.display(),
        port(0, SENDER, "security_groups = [\"guests\"]\n"),
        port(1, RECEIVER, "tx_kpps = 1\n"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    fn rows() -> Vec<Row> {
        let row = |mode, conversations| Row {
            mode,
            conversations,
            repetition: 0,
            sessions: u64::from(conversations),
            duration_s: 4.0,
            packets_per_s: match mode {
                Switch::OvsDpdk => 1e6,
                Switch::Batches => 2e6,
                Switch::Vectors => 3e6,
            },
            new_sessions_per_s: (conversations == MANY).then_some(if mode == Switch::OvsDpdk { 1e5 } else { 3e5 }),
        };
        Switch::ALL.into_iter().flat_map(|mode| CONVERSATIONS.map(|conversations| row(mode, conversations))).collect()
    }

    /// Multiplies the rates of `mode` by these factors, one per number of conversations.
    fn quicker(row: &mut Row, mode: Switch, factors: [f64; 3]) {
        let position = CONVERSATIONS.iter().position(|n| *n == row.conversations).unwrap();
        row.packets_per_s *= if row.mode == mode { factors[position] } else { 1.0 };
    }

    #[test]
    fn each_bar_can_fail() {
        let missed = |change: fn(&mut Row)| {
            let mut rows = rows();
            rows.iter_mut().for_each(change);
            let bars = Vectors.bars(&to_values(&rows).unwrap()).unwrap();
            let missed = bars.iter().enumerate().filter(|(_, bar)| !bar.passes());
            missed.map(|(n, _)| n).collect::<Vec<_>>()
        };
        assert_eq!(missed(|_| {}), [0; 0]);
        assert_eq!(missed(|r| quicker(r, Switch::Batches, [1.0, 1.0, 1.3])), [0]);
        assert_eq!(missed(|r| r.new_sessions_per_s = Some(1e5)), [1]);
        assert_eq!(missed(|r| quicker(r, Switch::OvsDpdk, [2.1, 1.0, 1.0])), [2]);
        assert_eq!(missed(|r| quicker(r, Switch::OvsDpdk, [1.0, 2.1, 1.0])), [3]);
        assert_eq!(missed(|r| quicker(r, Switch::OvsDpdk, [1.0, 1.0, 2.1])), [4]);
        assert_eq!(missed(|r| quicker(r, Switch::Batches, [1.6, 1.0, 1.0])), [5]);
        assert_eq!(missed(|r| quicker(r, Switch::Batches, [1.0, 1.6, 1.0])), [6]);
        assert_eq!(missed(|r| r.sessions = u64::from(r.conversations) * 9 / 10), [7]);
        assert!(Vectors.bars(&[]).unwrap().iter().all(|bar| !bar.passes()));
    }

    #[test]
    fn only_vectors_differ() {
        let of = |vectors| configuration(Path::new("c"), &[PathBuf::from("a"), PathBuf::from("b")], vectors);
        assert_eq!(of(true).replace("vectors = true", "vectors = false"), of(false));
    }
}
