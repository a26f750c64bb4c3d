//! Objects from a relay, through an agent: a relay controlled by the test, the agent, and real daemons.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::Duration;

use bifrost_agent::follow;
use bifrost_agent::metrics::Metrics;
use bifrost_agent::run::{Settings, run};
use bifrost_control::api::{ApplyItem, ApplyOp, ApplySpec, ObjectsQuery};
use bifrost_control::config::Kind;
use bifrost_relay_api::Change;
use serde_json::json;
use tokio::runtime::Runtime;

use crate::common::host::{Host, PATIENT};
use crate::common::traffic::{exchange, ping};
use crate::common::{Lab, Net, Options, eventually};
use crate::relay::{Relay, Session, gone, set};

const MEGABYTES: u64 = 1 << 20;

/// An agent. Dropping it is like a `kill -9`.
struct Agent {
    runtime: Option<Runtime>,
    metrics: Arc<Metrics>,
}

impl Agent {
    fn start(relay: &Relay, host: &Host) -> Agent {
        let follow = follow::Settings {
            relays: vec![format!("http://{}", relay.address)],
            host: host.name.to_owned(),
            tls: None,
            instance: "1".into(),
        };
        let socket: PathBuf = host.socket();
        let metrics = Arc::new(Metrics::default());
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let counted = Arc::clone(&metrics);
        let settings = Settings { follow, socket, traces: None };
        runtime.spawn(async move { run(settings, counted, std::future::pending()).await.unwrap() });
        Agent { runtime: Some(runtime), metrics }
    }

    /// A value of its metrics.
    fn metric(&self, name: &str) -> f64 {
        let text = self.metrics.text().unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("bifrost_agent_{name} ")));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn port(net: &Net, n: u8) -> Change {
    let name = format!("p{n}");
    let spec = json!({"name": name, "vni": 100, "mac": format!("02:00:00:00:00:{n:02x}"), "netns": net.name(),
                      "addresses": [format!("10.0.0.{n}/24")], "device": "eth0"});
    set("port", &name, &spec)
}

fn route(peer: &str, n: u8) -> Change {
    let prefix = format!("10.0.0.{n}/32");
    let spec = json!({"vni": 100, "prefix": prefix, "peer": peer, "mac": format!("02:00:00:00:00:{n:02x}")});
    set("route", &format!("100/{prefix}"), &spec)
}

fn route_key(n: u8) -> String {
    format!("100/10.0.0.{n}/32")
}

fn keys(host: &Host) -> Vec<String> {
    let fleet = ObjectsQuery { owner: Some("fleet".into()), ..ObjectsQuery::default() };
    host.client.objects(&fleet).unwrap().objects.into_iter().map(|object| object.key).collect()
}

/// The streams of both hosts, in the hosts' order.
fn sessions(relay: &Relay) -> [Session; 2] {
    let (one, other) = (relay.session(), relay.session());
    if one.hello.host == "host-a" { [one, other] } else { [other, one] }
}

/// Sends all objects, as after a connection.
fn send_all(sessions: &[Session; 2], [c, d]: &[Net; 2], revision: u64) {
    sessions[0].send(vec![route("host-b", 4), port(c, 3)], revision);
    sessions[1].send(vec![port(d, 4), route("host-a", 3)], revision);
}

/// Sets a flag when dropped.
struct Stopper<'a>(&'a AtomicBool);

impl Drop for Stopper<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Two daemons with agents, and a guest on each, created by the relay.
struct Fleet {
    agents: Vec<Agent>,
    sessions: [Session; 2],
    relay: Relay,
    nets: [Net; 2],
    lab: Lab,
}

impl Fleet {
    fn new() -> Fleet {
        let lab = Lab::running(Options { transport: PATIENT.to_owned(), ..Options::default() });
        let nets = [Net::new(lab.tag(), "c"), Net::new(lab.tag(), "d")];
        let relay = Relay::start(0, None);
        let agents = lab.hosts.iter().map(|host| Agent::start(&relay, host)).collect();
        let sessions = sessions(&relay);
        let fleet = Fleet { agents, sessions, relay, nets, lab };
        send_all(&fleet.sessions, &fleet.nets, 1);
        for session in &fleet.sessions {
            let report = session.reported(1);
            assert_eq!((report.objects, report.problems), (2, vec![]));
        }
        fleet
    }

    fn answers(&self) -> u32 {
        ping(&self.nets[0], "10.0.0.4", 5, 56)
    }
}

#[test]
fn fleet_objects_carry_traffic_with_or_without_relay_and_agent() {
    let mut fleet = Fleet::new();
    assert_eq!(fleet.answers(), 5);
    exchange(&fleet.nets[0], &fleet.nets[1], "10.0.0.4", 5002, MEGABYTES);

    // Agents are killed and restarted, and the relay stops: existing objects are not affected.
    let cids = |lab: &Lab| lab.hosts[0].client.conns().unwrap().iter().map(|conn| conn.cid).collect::<Vec<_>>();
    let before = cids(&fleet.lab);
    let port_of_relay = fleet.relay.address.port();
    let (stop, streams) = (AtomicBool::new(false), AtomicU16::new(0));
    let [c, d] = &fleet.nets;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let number = streams.fetch_add(1, Ordering::Relaxed);
                exchange(c, d, "10.0.0.4", 6000 + number, 16 * MEGABYTES);
            }
        });
        // Also stops the streams after a panic.
        let _stopper = Stopper(&stop);
        fleet.agents.clear();
        fleet.agents = fleet.lab.hosts.iter().map(|host| Agent::start(&fleet.relay, host)).collect();
        fleet.sessions = sessions(&fleet.relay);
        send_all(&fleet.sessions, &fleet.nets, 2);
        fleet.sessions.iter().for_each(|session| assert_eq!(session.reported(2).problems, []));
        drop(std::mem::replace(&mut fleet.relay, Relay::start(0, None)));
        eventually(20.0, "the agents notice", || fleet.agents.iter().all(|agent| agent.metric("in_sync") == 0.0));
        let so_far = streams.load(Ordering::Relaxed);
        eventually(20.0, "two more streams", || streams.load(Ordering::Relaxed) >= so_far + 2);
    });
    assert_eq!(fleet.nets[0].needed_retransmits() + fleet.nets[1].needed_retransmits(), 0, "a stream lost packets");
    fleet.lab.assert_nothing_given_up();
    assert_eq!(cids(&fleet.lab), before, "a connection was restarted");
    // For the requested time; a second is enough to see that nothing depends on the relay.
    let away = std::env::var("BIFROST_RELAY_AWAY_S").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    for _ in 0..away {
        assert_eq!(fleet.answers(), 5);
        std::thread::sleep(Duration::from_secs(1));
    }

    // Objects deleted in the meantime are removed once the relay has sent everything, and not before.
    fleet.relay = Relay::start(port_of_relay, None);
    fleet.sessions = sessions(&fleet.relay);
    fleet.sessions[0].say(bifrost_relay_api::ToAgent::Changes(vec![port(&fleet.nets[0], 3)]));
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(keys(&fleet.lab.hosts[0]), ["p3", &route_key(4)]);
    fleet.sessions[0].send(vec![], 3);
    assert_eq!(fleet.sessions[0].reported(3).objects, 1);
    assert_eq!(keys(&fleet.lab.hosts[0]), ["p3"]);
    fleet.sessions[0].send(vec![gone("port", "p3")], 4);
    fleet.sessions[0].reported(4);
    eventually(5.0, "the port's device is removed", || !fleet.nets[0].has_device("eth0"));
    // The file's guests do not belong to the fleet.
    assert_eq!(ping(fleet.lab.net("a"), "10.0.0.2", 5, 56), 5);
}

#[test]
fn a_killed_daemon_gets_all_objects_again() {
    let mut fleet = Fleet::new();
    assert_eq!(fleet.answers(), 5);
    // Without a state directory it restarts with only the objects of its file.
    fleet.lab.hosts[0].crash();
    fleet.lab.hosts[0].start();
    eventually(10.0, "the agent has noticed", || keys(&fleet.lab.hosts[0]).len() == 2);
    eventually(5.0, "the agent is in sync", || fleet.agents[0].metric("in_sync") == 1.0);
    assert_eq!(fleet.answers(), 5);
    assert_eq!(fleet.agents[0].metric("drift_objects_total"), 0.0);
}

#[test]
fn a_port_that_cannot_be_created_does_not_block_others() {
    let fleet = Fleet::new();
    let [c, d] = &fleet.nets;
    let mut bad = port(c, 9);
    bad.spec =
        bad.spec.map(|spec| String::from_utf8_lossy(&spec).replace(c.name(), "/etc/hostname").into_bytes().into());
    let e = Net::new(fleet.lab.tag(), "e");
    fleet.sessions[0].send(vec![bad, port(&e, 5), route("nobody", 7)], 2);
    let report = fleet.sessions[0].reported(2);
    assert_eq!((report.objects, report.problems.len()), (3, 2), "{report:?}");
    assert!(report.problems.iter().any(|p| p.key == "p9" && p.what.contains("/etc/hostname")), "{report:?}");
    assert!(report.problems.iter().any(|p| p.what.contains("no peer named \"nobody\"")), "{report:?}");
    assert_eq!(ping(c, "10.0.0.5", 3, 56), 3);
    assert_eq!(ping(c, "10.0.0.4", 3, 56), 3);
    // A correct version.
    fleet.sessions[0].send(vec![port(c, 3), gone("port", "p9"), gone("route", &route_key(7))], 3);
    assert_eq!(fleet.sessions[0].reported(3).problems, []);
    // An operator deletes objects of the fleet.
    let delete = |kind, key: &str| ApplyItem {
        op: ApplyOp::Delete,
        kind,
        key: Some(key.into()),
        generation: None,
        owner: "fleet".into(),
        spec: None,
    };
    let items = vec![delete(Kind::Route, &route_key(4)), delete(Kind::Port, "p5")];
    fleet.lab.hosts[0].client.apply(&ApplySpec { items, ..ApplySpec::default() }).unwrap();
    // The digests are compared every minute, which is too long for a test. A change compares nothing, but an agent that
    // starts does.
    let agent = Agent::start(&fleet.relay, &fleet.lab.hosts[0]);
    let session = fleet.relay.session();
    session.send(vec![port(c, 3), route("host-b", 4), port(&e, 5)], 4);
    assert_eq!(session.reported(4).objects, 3);
    assert_eq!((fleet.answers(), ping(d, "10.0.0.3", 3, 56)), (5, 3));
    drop(agent);
}
