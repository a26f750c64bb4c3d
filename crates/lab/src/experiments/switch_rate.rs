//! `switch-rate`: packets a second from a vhost-user port into VXLAN and back, beside Open vSwitch with DPDK (Triton, figure 8).
//!
//! One switch on one processor; the guest, `dpdk-testpmd`, has the other and lets a number of packets circle: what comes back
//! goes out again, so nobody is offered more than it carries. The peer is a mirror: a rule of nftables at the far end of the
//! underlay link, which swaps addresses, chooses the flow, and sends the frame back.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::experiment::{Experiment, Lab};
use crate::interrupt;
use crate::netns::Namespace;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::process::Program;
use crate::programs::open_vswitch::{Datapath, OpenVswitch};
use crate::programs::testpmd::{self, Testpmd};
use crate::progress::Progress;
use crate::report::{Table, factor, number};
use crate::results::{from_values, to_values};
use crate::stats::{median_of, paired_ratio};
use crate::topology::UNDERLAY_MTU;

/// Conversations that the packets belong to.
const FLOWS: [u32; 2] = [1, 10_000];
/// Descriptors of each ring.
const RING: u32 = 1024;
/// Bursts of 32 packets that begin to circle at each step, and steps: the rate that counts is the highest. A switch may lose some of them
/// before it knows where they go, and one that is offered too much loses what it cannot hold.
const BURSTS: u32 = 8;
const STEPS: u32 = 3;
/// Processors: of the switch, and of the guest.
const PROCESSORS: [usize; 2] = [0, 1];
/// How long a program may take to start.
const PATIENCE: Duration = Duration::from_secs(20);
/// Before packets are counted: caches and tables have filled.
const WARM_UP: Duration = Duration::from_millis(1500);

/// The guest's and the remote's addresses.
const GUEST_MAC: &str = "00:01:02:03:04:00";
const REMOTE_MAC: &str = "00:01:02:03:04:01";
const GUEST: &str = "10.254.0.1";
const REMOTE: &str = "10.253.0.1";
/// Ends of the underlay link, and the mirror's address behind the far one.
const NEAR_MAC: &str = "02:00:00:00:01:01";
const FAR_MAC: &str = "02:00:00:00:01:02";
const NEAR: &str = "172.31.0.1";
const FAR: &str = "172.31.0.2";

/// The remote's port and the guest's in the first flow.
const FIRST_PORTS: u32 = 1024 << 16 | 1024;

/// What lies between both: outer and inner addresses are swapped, and the ports become those of the next flow; the guest swaps
/// addresses and ports again. Offsets in bits from the outer IP header: IP, UDP and VXLAN have 36 bytes, the inner Ethernet header 14,
/// the inner IP header 20. Sums of addresses do not change by swapping; the inner UDP header has none. Both
/// ports are one number of 32 bits, for nftables writes a number's highest bits first, whatever the width of what is set.
fn mirror(flows: u32) -> String {
    format!(
        "table netdev bifrost_lab_mirror {{\n chain mirror {{\n \
         type filter hook ingress device u1 priority 0\n \
         udp dport 4789 ether saddr set {FAR_MAC} ether daddr set {NEAR_MAC} \
         ip saddr set {FAR} ip daddr set {NEAR} @nh,288,48 set 0x000102030400 @nh,336,48 set 0x000102030401 \
         @nh,496,32 set 0x0afd0001 @nh,528,32 set 0x0afe0001 @nh,560,32 set numgen inc mod {flows} offset {FIRST_PORTS} \
         fwd to u1\n }}\n}}\n"
    )
}

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct SwitchRate;

/// What forwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Switch {
    /// Open vSwitch with DPDK.
    OvsDpdk,
    /// `bifrostd`, reliability off.
    Off,
}

impl Switch {
    const ALL: [Switch; 2] = [Switch::OvsDpdk, Switch::Off];
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Switch::OvsDpdk => "ovs_dpdk",
            Switch::Off => "off",
        })
    }
}

/// One number of flows, through one switch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What forwarded.
    pub mode: Switch,
    /// Conversations that the packets belong to.
    pub flows: u32,
    /// Counts from 0.
    pub repetition: u32,
    /// How long packets were counted, s.
    pub duration_s: f64,
    /// What the guest got back, packets a second.
    pub packets_per_s: f64,
    /// Of what the switch took from the guest in that time, the share that did not come back, percent.
    pub missing_percent: f64,
}

impl Experiment for SwitchRate {
    fn name(&self) -> &'static str {
        "switch-rate"
    }

    fn summary(&self) -> &'static str {
        "Packets a second from a vhost-user port into VXLAN and back, beside Open vSwitch with DPDK"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::Off]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        if std::thread::available_parallelism().map_or(1, usize::from) < PROCESSORS.len() {
            bail!("switch-rate needs two processors: the switch and the guest never sleep");
        }
        let (repetitions, seconds) = (lab.repetitions(3), lab.seconds(4.0, 2.0));
        let mut progress = Progress::new(u64::from(repetitions) * (FLOWS.len() * Switch::ALL.len()) as u64);
        let mut rows = Vec::new();
        for repetition in 0..repetitions {
            for flows in FLOWS {
                for mode in Switch::ALL {
                    progress.begin(&format!("{mode}, {flows} flows"));
                    let row = measure(lab, mode, flows, repetition, seconds)?;
                    progress.end(&format!(
                        "{mode}, {flows} flows: {:.3} million packets a second, {:.2} % missing",
                        row.packets_per_s / 1e6,
                        row.missing_percent
                    ));
                    rows.push(row);
                }
            }
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&["flows", "switch", "million packets/s", "missing, %", "over Open vSwitch"]);
        for flows in FLOWS {
            for mode in Switch::ALL {
                let of = |mode, field| medians(&rows, mode, flows, field).unwrap_or(f64::NAN);
                let rate: fn(&Row) -> f64 = |r| r.packets_per_s;
                table.row(vec![
                    flows.to_string(),
                    mode.to_string(),
                    number(of(mode, rate) / 1e6),
                    number(of(mode, |r| r.missing_percent)),
                    factor(of(mode, rate), of(Switch::OvsDpdk, rate)),
                ]);
            }
        }
        Ok(format!(
            "Frames of 64 bytes circle: from a vhost-user port into VXLAN, to a mirror, back, and to the same port; one processor for \
             the switch and the mirror, one for the guest. Packets that came back, with {} to {} under way, whichever are \
             carried best. Medians.\n\n{}",
            BURSTS * 32,
            BURSTS * 32 * STEPS,
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let line = |mode| -> Vec<(f64, f64)> {
            let at =
                |(x, flows): (usize, &u32)| Some((x as f64, medians(&rows, mode, *flows, |r| r.packets_per_s)? / 1e6));
            FLOWS.iter().enumerate().filter_map(at).collect()
        };
        let panel = Panel {
            title: "out in VXLAN and back".to_owned(),
            x_title: "flows".to_owned(),
            y_title: "million packets/s".to_owned(),
            log_y: false,
            categories: FLOWS.map(|flows| flows.to_string()).to_vec(),
            lines: vec![
                (Series::on("bifrostd"), line(Switch::Off)),
                (Series::off("Open vSwitch with DPDK"), line(Switch::OvsDpdk)),
            ],
            marks: Vec::new(),
        };
        Ok(vec![plot::draw(&directory.join("rate.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let bar = |flows| {
            let is = |mode| move |r: &Row| r.mode == mode && r.flows == flows;
            let both = (is(Switch::Off), is(Switch::OvsDpdk));
            let ratio = paired_ratio(&rows, |r| r.repetition, both, |r| r.packets_per_s);
            let name = format!("packets/s over those of Open vSwitch with DPDK, {flows} flows");
            Bar::new(name, ratio, Sense::AtLeast, 1.0, "x")
        };
        Ok(FLOWS.map(bar).to_vec())
    }
}

/// The median over repetitions; `None` if that was not measured.
fn medians(rows: &[Row], mode: Switch, flows: u32, field: fn(&Row) -> f64) -> Option<f64> {
    median_of(rows.iter().filter(|row| row.mode == mode && row.flows == flows).map(field))
}

/// What is being measured, while it runs.
enum Running {
    Ovs(OpenVswitch),
    Bifrost(Program),
}

impl Running {
    /// Starts a switch, with a vhost-user port that listens at the path that this returns.
    fn start(lab: &Lab, mode: Switch, host: &Namespace, logs: &Path) -> Result<(Running, PathBuf)> {
        let directory = lab.run.directory().join("switch-rate");
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
        let socket = directory.join("guest");
        let running = match mode {
            Switch::OvsDpdk => {
                let switch = OpenVswitch::start(
                    host,
                    Datapath::Dpdk { processor: PROCESSORS[0] },
                    directory,
                    &logs.join("ovs"),
                )?;
                switch.configure(&format!(
                    "-- add-br under -- set bridge under datapath_type=netdev other-config:hwaddr={NEAR_MAC} \
                     -- add-port under link -- set interface link type=dpdk options:dpdk-devargs=net_af_packet0,iface=u0 \
                     -- add-br br0 -- set bridge br0 datapath_type=netdev fail_mode=secure \
                     -- add-port br0 guest -- set interface guest ofport_request=1 type=dpdkvhostuser \
                     -- add-port br0 vx0 -- set interface vx0 ofport_request=2 type=vxlan options:remote_ip={FAR} options:key=100"
                ))?;
                host.ip_batch(&format!("addr add {NEAR}/24 dev under\nlink set under up\n"))?;
                // It learns of the address by and by, and remembers that it could not send a packet before.
                let deadline = Instant::now() + PATIENCE;
                while switch.tell(&["ovs/route/lookup", FAR]).is_err() {
                    if Instant::now() > deadline {
                        bail!("Open vSwitch knows no way to {FAR}; its output is in {}", logs.display());
                    }
                    interrupt::sleep(Duration::from_millis(100))?;
                }
                switch.tell(&["tnl/neigh/set", "under", FAR, FAR_MAC])?;
                switch.replace_flows("br0", "in_port=1,actions=output:2\nin_port=2,actions=output:1\n")?;
                Running::Ovs(switch)
            }
            Switch::Off => {
                host.ip_batch(&format!(
                    "addr add {NEAR}/24 dev u0\nneigh add {FAR} lladdr {FAR_MAC} dev u0 nud permanent\n"
                ))?;
                let config = logs.join("bifrostd.toml");
                std::fs::write(&config, configuration(&directory.join("control"), &socket))
                    .with_context(|| format!("writing {}", config.display()))?;
                let mut command = host.command(&lab.binaries.bifrostd);
                command.arg("--config").arg(&config);
                Running::Bifrost(Program::start(command, "bifrostd", &logs.join("switch"))?)
            }
        };
        Ok((running, socket))
    }

    fn check_alive(&mut self) -> Result<()> {
        match self {
            Running::Ovs(switch) => switch.check_alive(),
            Running::Bifrost(daemon) => match daemon.try_wait()? {
                None => Ok(()),
                Some(status) => bail!("bifrostd ended ({status}): {}", daemon.output()?),
            },
        }
    }
}

fn measure(lab: &Lab, mode: Switch, flows: u32, repetition: u32, seconds: f64) -> Result<Row> {
    let logs = lab.logs(&format!("{mode}-{flows}-{repetition}"));
    std::fs::create_dir_all(&logs).with_context(|| format!("creating {}", logs.display()))?;
    let mut host = Namespace::create(format!("{}-switch", lab.run.id()))?;
    host.pin(PROCESSORS[0]);
    let mut guest = Namespace::create(format!("{}-guest", lab.run.id()))?;
    guest.pin(PROCESSORS[1]);
    host.ip_batch(&format!(
        "link add u0 mtu {UNDERLAY_MTU} address {NEAR_MAC} type veth peer name u1 mtu {UNDERLAY_MTU} address {FAR_MAC}\n\
         link set u0 up\nlink set u1 up\n"
    ))?;
    for device in ["u0", "u1"] {
        let off = ["-K", device, "tso", "off", "gso", "off", "gro", "off", "tx-udp-segmentation", "off"];
        host.run("ethtool", &off, "")?;
    }
    host.run("nft", &["-f", "-"], &mirror(flows)).context("making a mirror")?;
    let (mut switch, socket) = Running::start(lab, mode, &host, &logs)?;
    let deadline = Instant::now() + PATIENCE;
    while !socket.exists() {
        switch.check_alive()?;
        if Instant::now() > deadline {
            bail!("the switch does not listen; its output is in {}", logs.display());
        }
        interrupt::sleep(Duration::from_millis(20))?;
    }
    let device = format!("net_virtio_user0,path={},queue_size={RING},mac={GUEST_MAC}", socket.display());
    let (from_to, peer) = (format!("--tx-ip={GUEST},{REMOTE}"), format!("--eth-peer=0,{REMOTE_MAC}"));
    let options = ["--forward-mode=5tswap", "--no-flush-rx", &from_to, &peer];
    let mut guest = Testpmd::start_with(&guest, PROCESSORS[1], &[device], &options, &logs.join("guest"))?;
    let mut best: Option<Row> = None;
    for _ in 0..STEPS {
        // Those that are under way stay in the rings meanwhile.
        guest.tell("stop")?;
        guest.tell(&format!("start tx_first {BURSTS}"))?;
        interrupt::sleep(WARM_UP)?;
        let began = Instant::now();
        guest.tell("show port stats all")?;
        interrupt::sleep(Duration::from_secs_f64(seconds))?;
        let duration_s = began.elapsed().as_secs_f64();
        guest.tell("show port stats all")?;
        interrupt::sleep(Duration::from_millis(300))?;
        switch.check_alive()?;
        let counts = testpmd::port_packets(&guest.printed(), 0);
        let [.., (received, sent), (received_then, sent_then)] = counts[..] else {
            bail!("dpdk-testpmd shows no statistics; its output is in {}", logs.display());
        };
        let (received, sent) = (received_then - received, sent_then - sent);
        let packets_per_s = received as f64 / duration_s;
        if received > 0 && best.as_ref().is_none_or(|best| best.packets_per_s < packets_per_s) {
            // Some were on their way when counting began.
            let missing_percent = sent.saturating_sub(received) as f64 / sent.max(1) as f64 * 100.0;
            best = Some(Row { mode, flows, repetition, duration_s, packets_per_s, missing_percent });
        }
    }
    guest.tell("stop")?;
    best.with_context(|| format!("no packet came back to the guest (see {})", logs.display()))
}

/// The daemon's configuration: one port, one route to the mirror.
fn configuration(control: &Path, socket: &Path) -> String {
    format!(
        "[host]\nname = \"host-a\"\n\n[control]\nsocket = \"{}\"\n\n[workers]\ncount = 1\n\n\
         [underlay]\naddresses = [\"{NEAR}\"]\nmtu = {UNDERLAY_MTU}\n\n[[vpc]]\nvni = 100\nreliability = \"off\"\n\n\
         [[port]]\nname = \"guest\"\nkind = \"vhost-user\"\nsocket = \"{}\"\nvni = 100\nmac = \"{GUEST_MAC}\"\n\
         addresses = [\"{GUEST}/32\"]\n\n[[peer]]\nname = \"mirror\"\naddresses = [\"{FAR}\"]\n\n\
         [[route]]\nvni = 100\nprefix = \"{REMOTE}/32\"\npeer = \"mirror\"\nmac = \"{REMOTE_MAC}\"\n",
        control.display(),
        socket.display(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bar_can_fail() {
        let row = |mode, flows, packets_per_s| Row {
            mode,
            flows,
            repetition: 0,
            duration_s: 4.0,
            packets_per_s,
            missing_percent: 0.0,
        };
        let passed = |one, many| -> Vec<bool> {
            let rows = [
                row(Switch::OvsDpdk, 1, 1e6),
                row(Switch::OvsDpdk, 10_000, 1e6),
                row(Switch::Off, 1, one),
                row(Switch::Off, 10_000, many),
            ];
            SwitchRate.bars(&to_values(&rows).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed(1.1e6, 1.1e6), [true, true]);
        assert_eq!(passed(0.9e6, 1.1e6), [false, true]);
        assert_eq!(passed(1.1e6, 0.9e6), [true, false]);
    }
}
