//! What may fail of relays and of their etcd, and what must hold then: real etcd, relays, agents and daemons.
//! `BIFROST_ETCD=$(scripts/install-etcd.sh) cargo test -p bifrost-relay --test fleet -- --ignored`.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::netns::Net;
use crate::world::{Tool, World};
use crate::{eventually, ping};

/// How long hosts may have what is stale.
const STALE: f64 = 5.0;
/// How long a cluster may elect a leader, and a relay notice.
const ELECTION: f64 = 30.0;
/// Longest time until a relay takes its store for lost, s: it looks for another member for 30 s.
const LOSS: f64 = 60.0;
/// Two hosts with a guest each, and a host without an agent, whose ports are routes of the others.
const NETWORK: &str = "- {key: host/h1, addresses: [192.0.2.1]}\n- {key: host/h2, addresses: [192.0.2.2]}\n\
    - {key: host/h9, addresses: [192.0.2.9]}\n- key: vpc/demo/net\n- {key: subnet/demo/a, vpc: net, prefix: 10.0.0.0/20}\n";

/// Two relays with an etcd, and two hosts whose guests reach each other.
struct Fleet {
    world: World,
    web: Net,
    _db: Net,
}

impl Fleet {
    fn new() -> Fleet {
        let mut world = World::in_etcd(2, 2);
        (0..2).for_each(|relay| world.start_relay_of(relay));
        world.start_daemons();
        // Agents stay with the first relay that knows their hosts.
        world.apply(NETWORK);
        (0..2).for_each(|host| world.start_agent(host));
        let (web, db) = (world.guest("web"), world.guest("db"));
        let port = |name: &str, host: &str, net: &Net| {
            format!("- {{key: port/demo/{name}, subnets: [a], host: {host}, netns: {}}}\n", net.name())
        };
        world.apply(&format!("{}{}", port("web", "h1", &web), port("db", "h2", &db)));
        let fleet = Fleet { world, web, _db: db };
        fleet.carries(20);
        fleet
    }

    /// Guests reach each other, without a loss.
    fn carries(&self, pings: u32) {
        assert_eq!(ping(&self.web, "10.0.0.3", pings), pings, "{}", self.world.logs());
    }

    /// Agents of both hosts follow a relay.
    fn await_agents(&self, relay: usize) {
        let tool = self.world.tool(relay);
        eventually(20.0, &format!("both agents follow relay {relay}"), || {
            let hosts = tool.json("hosts").unwrap_or_default();
            ["h1", "h2"].iter().all(|name| {
                let is_here =
                    |host: &&Value| host["name"] == *name && host["connected"] == true && host["relay"].is_null();
                hosts.as_array().is_some_and(|hosts| hosts.iter().any(|host| is_here(&host)))
            })
        });
    }

    /// The ports on h9 that a host has routes to.
    fn routes(&self, host: usize) -> BTreeSet<String> {
        self.world.hosts()[host].objects().into_iter().filter_map(|object| remote(&object)).collect()
    }

    /// Each host has routes to just the ports that there are on h9.
    fn await_routes(&self, relay: usize, seconds: f64) -> BTreeSet<String> {
        let tool = self.world.tool(relay);
        let mut wanted = BTreeSet::new();
        let begin = Instant::now();
        loop {
            wanted = tool.json("get port").map_or(wanted, |ports| addresses(&ports, "h9"));
            let all: Vec<BTreeSet<String>> = (0..2).map(|host| self.routes(host)).collect();
            if all.iter().all(|has| *has == wanted) && !wanted.is_empty() {
                return wanted;
            }
            let differ: Vec<_> = all.iter().map(|has| has.symmetric_difference(&wanted).collect::<Vec<_>>()).collect();
            let late = begin.elapsed().as_secs_f64() > seconds;
            assert!(!late, "not within {seconds} s: {differ:?} differ\n{}", self.world.logs());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The addresses of the ports on a host.
fn addresses(ports: &Value, host: &str) -> BTreeSet<String> {
    let on_host = ports.as_array().unwrap().iter().filter(|port| port["spec"]["host"] == host);
    on_host.map(|port| port["spec"]["addresses"][0].as_str().unwrap().to_owned()).collect()
}

/// The address of a route on a host, but for those between the guests.
fn remote(object: &str) -> Option<String> {
    let address = object.strip_prefix("route ")?.split_once('/')?.1.strip_suffix("/32")?;
    (!["10.0.0.2", "10.0.0.3"].contains(&address)).then(|| address.to_owned())
}

/// Says that something is to end, also if the test fails.
struct Stopper<'a>(&'a AtomicBool);

impl Drop for Stopper<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Adds ports until it is to stop, by one relay after the other. Gives the addresses that were acknowledged, and the longest time without.
fn write(tools: &[Tool], stop: &AtomicBool) -> (Vec<String>, Duration) {
    let (mut acknowledged, mut longest, mut last) = (Vec::new(), Duration::ZERO, Instant::now());
    for tool in tools.iter().cycle() {
        if let Ok(address) = add(tool, &format!("w{}", fastrand::u32(..))) {
            acknowledged.push(address);
            longest = longest.max(last.elapsed());
            last = Instant::now();
        }
        if stop.load(Ordering::SeqCst) {
            break;
        }
    }
    (acknowledged, longest)
}

/// Adds a port on h9; gives its address.
fn add(tool: &Tool, name: &str) -> Result<String, String> {
    let answer = tool.run(&format!("--json add port/demo/{name} subnets=a host=h9 netns={name}"))?;
    let applied: Value = serde_json::from_str(&answer).unwrap();
    Ok(applied["changed"][0]["spec"]["addresses"][0].as_str().unwrap().to_owned())
}

/// The same as soon as the cluster has a leader, and the relay reaches it.
fn add_soon(tool: &Tool) -> String {
    let mut added = Err(String::new());
    eventually(ELECTION, "a change is made", || {
        added = add(tool, &format!("s{}", fastrand::u32(..)));
        added.is_ok()
    });
    added.unwrap()
}

/// Relays are killed, one after the other, while changes are made; an agent, and a host with all that it keeps.
#[test]
#[ignore = "needs BIFROST_ETCD"]
fn relays_agents_and_hosts_are_killed() {
    let mut fleet = Fleet::new();
    fleet.await_agents(0);
    for (killed, other) in [(0, 1), (1, 0)] {
        let stop = AtomicBool::new(false);
        let tools = [fleet.world.tool(0), fleet.world.tool(1)];
        std::thread::scope(|scope| {
            let stopper = Stopper(&stop);
            let writer = scope.spawn(|| write(&tools, &stop));
            std::thread::sleep(Duration::from_millis(500));
            fleet.world.kill_relay_of(killed);
            fleet.carries(20);
            fleet.await_agents(other);
            drop(stopper);
            let (acknowledged, _) = writer.join().unwrap();
            let there = fleet.await_routes(other, STALE);
            assert!(acknowledged.len() > 5, "{acknowledged:?}");
            assert!(acknowledged.iter().all(|one| there.contains(one)), "{acknowledged:?} are not all in {there:?}");
        });
        fleet.world.start_relay_of(killed);
    }

    // What was deleted while an agent was away goes with the first relay that it finds.
    fleet.world.hosts_mut()[0].kill_agent();
    let ports = fleet.world.tool(0).json("get port").unwrap();
    let first = ports.as_array().unwrap().iter().find(|port| port["spec"]["host"] == "h9").unwrap();
    fleet.world.tool(1).run(&format!("delete {}", first["key"].as_str().unwrap())).unwrap();
    fleet.world.start_agent(0);
    fleet.await_routes(1, STALE);

    // A host begins with nothing.
    fleet.world.hosts_mut()[0].kill_agent();
    fleet.world.hosts_mut()[0].kill_daemon();
    fleet.world.hosts_mut()[0].lose_state();
    fleet.world.hosts_mut()[0].start_daemon();
    assert_eq!(fleet.world.hosts()[0].objects(), Vec::<String>::new());
    fleet.world.start_agent(0);
    fleet.await_routes(0, STALE);
    eventually(STALE, "guests reach each other", || ping(&fleet.web, "10.0.0.3", 1) == 1);
    fleet.carries(20);
}

/// Both relays choose addresses at the same time.
#[test]
#[ignore = "needs BIFROST_ETCD"]
fn two_relays_never_give_one_address_twice() {
    let mut world = World::in_etcd(0, 2);
    world.start_relay_of(0);
    world.start_relay_of(1);
    world.apply(NETWORK);
    let all = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for (relay, of) in [(0, "x"), (1, "y"), (0, "z"), (1, "u")] {
            let (tool, all) = (world.tool(relay), &all);
            scope.spawn(move || {
                for n in 0..50 {
                    let address = add(&tool, &format!("{of}{n}")).unwrap();
                    all.lock().unwrap().push(address);
                }
            });
        }
    });
    let all = all.into_inner().unwrap();
    assert_eq!((all.len(), BTreeSet::from_iter(&all).len()), (200, 200), "{all:?}");
    for relay in [0, 1] {
        eventually(STALE, "both relays know all", || {
            addresses(&world.tool(relay).json("get port").unwrap(), "h9") == all.iter().cloned().collect()
        });
    }
}

/// Each host's agent follows another relay, and either relay knows of both.
#[test]
#[ignore = "needs BIFROST_ETCD"]
fn relays_know_of_the_agents_of_each_other() {
    let mut fleet = Fleet::new();
    fleet.world.hosts_mut()[1].kill_agent();
    fleet.world.start_agent_with(1, 1);
    let tools = [fleet.world.tool(0), fleet.world.tool(1)];
    let of_other = |relay: usize| {
        let hosts = tools[relay].json("hosts").unwrap();
        let is_there = |host: &&Value| host["connected"] == true && host["relay"].is_string();
        hosts.as_array().unwrap().iter().filter(is_there).map(|host| host["name"].to_string()).collect::<Vec<_>>()
    };
    eventually(STALE, "relay 0 knows that h2 is with the other", || of_other(0) == ["\"h2\""]);
    eventually(STALE, "relay 1 knows that h1 is", || of_other(1) == ["\"h1\""]);
    // What is waited for is waited for on both.
    for (n, tool) in tools.iter().cycle().enumerate().take(4) {
        let lease = 1000 + n;
        let begin = Instant::now();
        tool.run(&format!("set vpc/demo/net dhcp_lease_s={lease} --wait 20")).unwrap();
        assert!(begin.elapsed().as_secs_f64() < STALE, "{:?}", begin.elapsed());
        for host in fleet.world.hosts() {
            assert!(host.specs().iter().any(|spec| spec["dhcp_lease_s"] == lease), "{:?}", host.specs());
        }
    }
    // And refused by one of the other relay.
    let refused = tools[0].run("add port/demo/bad subnets=a host=h2 netns=/etc/hostname --wait 20").unwrap_err();
    assert!(refused.contains("refused on h2"), "{refused}");
    tools[1].run("delete port/demo/bad --wait 20").unwrap();
    // A host that is gone is waited for, until it is back elsewhere.
    fleet.world.hosts_mut()[1].kill_agent();
    let late = tools[0].run("set vpc/demo/net dhcp_lease_s=2000 --wait 2").unwrap_err();
    assert!(late.contains("h2"), "{late}");
    fleet.world.kill_relay_of(1);
    fleet.world.start_agent_with(1, 1);
    tools[0].run("set vpc/demo/net dhcp_lease_s=2001 --wait 20").unwrap();
}

/// Members of etcd are killed: the leader, and then two of three.
#[test]
#[ignore = "needs BIFROST_ETCD"]
fn members_of_etcd_are_killed() {
    let mut fleet = Fleet::new();
    let stop = AtomicBool::new(false);
    let tools = [fleet.world.tool(0), fleet.world.tool(1)];
    std::thread::scope(|scope| {
        let stopper = Stopper(&stop);
        let writer = scope.spawn(|| write(&tools, &stop));
        std::thread::sleep(Duration::from_millis(500));
        let etcd = fleet.world.etcd.as_mut().unwrap();
        let leader = etcd.leader();
        etcd.kill(leader);
        fleet.carries(100);
        // The others have elected one, and take changes.
        add_soon(&tools[0]);
        drop(stopper);
        let (acknowledged, longest) = writer.join().unwrap();
        assert!(longest.as_secs_f64() < ELECTION, "nothing was changed for {longest:?}");
        let there = fleet.await_routes(1, STALE);
        assert!(acknowledged.iter().all(|one| there.contains(one)), "{acknowledged:?} are not all in {there:?}");
        fleet.world.etcd.as_mut().unwrap().start_member(leader);
    });

    let before = fleet.await_routes(0, STALE);
    let etcd = fleet.world.etcd.as_mut().unwrap();
    etcd.kill(0);
    etcd.kill(1);
    let begin = Instant::now();
    let error = add(&tools[1], "refused").unwrap_err();
    assert!(error.contains("the store"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(25), "it is told after {:?}", begin.elapsed());
    fleet.carries(100);
    for host in fleet.world.hosts() {
        let has: BTreeSet<_> = host.objects().iter().filter_map(|object| remote(object)).collect();
        assert_eq!(has, before, "{} keeps what it has", host.name());
    }
    fleet.world.etcd.as_mut().unwrap().start_all();
    tools.iter().for_each(|tool| drop(add_soon(tool)));
    fleet.await_routes(1, STALE);
}

/// A relay does not reach the member that it uses, and then none, while etcd forgets what the relay has not seen.
#[test]
#[ignore = "needs BIFROST_ETCD"]
fn a_relay_is_cut_off_from_etcd() {
    let fleet = Fleet::new();
    fleet.await_agents(0);
    let tools = [fleet.world.tool(0), fleet.world.tool(1)];
    fleet.world.join(0, 0, false);
    add_soon(&tools[0]);
    fleet.await_routes(1, ELECTION);
    // Nor the others.
    fleet.world.join(0, 1, false);
    fleet.world.join(0, 2, false);
    let begin = Instant::now();
    let gone = add(&tools[1], "gone").unwrap();
    let refused = add(&tools[0], "refused").unwrap_err();
    assert!(refused.contains("the store"), "{refused}");
    // By then its watch is over: what comes is not in buffers of its connection.
    std::thread::sleep(Duration::from_secs(10).saturating_sub(begin.elapsed()));
    tools[1].run("delete port/demo/gone").unwrap();
    let other = add(&tools[1], "other").unwrap();
    let etcd = fleet.world.etcd.as_ref().unwrap();
    etcd.ctl(&format!("compaction {}", etcd.revision()));
    fleet.carries(20);
    (0..3).for_each(|member| fleet.world.join(0, member, true));
    let there = fleet.await_routes(1, ELECTION);
    assert!(there.contains(&other) && !there.contains(&gone), "{there:?}");
    add(&tools[0], "refused").expect("what was refused was not made");
}

/// An agent that starts while no member of etcd runs is served as soon as its relay follows etcd again.
#[test]
#[ignore = "needs BIFROST_ETCD"]
fn an_agent_starts_while_etcd_is_down() {
    let mut fleet = Fleet::new();
    let tool = fleet.world.tool(0);
    fleet.world.hosts_mut()[1].kill_agent();
    let pending = add(&tool, "pending").unwrap();
    fleet.world.etcd.as_mut().unwrap().kill_all();
    eventually(LOSS, "the relays notice", || {
        (0..2).all(|n| fleet.world.tool(n).json("status").is_some_and(|status| status["in_sync"] == false))
    });
    fleet.world.start_agent(1);
    // Long enough for the longest pauses of agents that are refused.
    std::thread::sleep(Duration::from_secs(25));
    fleet.carries(20);
    assert!(!fleet.routes(1).contains(&pending), "a relay that may have missed something has said something");
    fleet.world.etcd.as_mut().unwrap().start_all();
    eventually(ELECTION, "a relay follows etcd", || {
        (0..2).any(|n| fleet.world.tool(n).json("status").is_some_and(|status| status["in_sync"] == true))
    });
    eventually(STALE, "the agent has what was pending", || fleet.routes(1).contains(&pending));
}

/// etcd is as it was when it was copied; relays and agents run on.
#[test]
#[ignore = "needs BIFROST_ETCD"]
fn etcd_is_restored_from_a_backup() {
    let mut fleet = Fleet::new();
    let tools = [fleet.world.tool(0), fleet.world.tool(1)];
    let kept = add(&tools[0], "kept").unwrap();
    add(&tools[1], "deleted").unwrap();
    let etcd = fleet.world.etcd.as_mut().unwrap();
    etcd.kill_all();
    etcd.copy(false);
    etcd.start_all();
    eventually(ELECTION, "a port is deleted", || {
        let _ = tools[1].run("delete port/demo/deleted");
        tools[1].json("get port").is_some_and(|ports| addresses(&ports, "h9").len() == 1)
    });
    let after: Vec<_> = (0..10).map(|n| add_soon(&tools[n % 2])).collect();
    let there = fleet.await_routes(0, ELECTION);
    assert!(after.iter().all(|one| there.contains(one)), "{there:?}");

    let etcd = fleet.world.etcd.as_mut().unwrap();
    etcd.kill_all();
    etcd.copy(true);
    etcd.start_all();
    eventually(ELECTION, "both relays have what was restored", || {
        tools.iter().all(|tool| tool.json("get port").is_some_and(|ports| addresses(&ports, "h9").len() == 2))
    });
    let there = fleet.await_routes(0, ELECTION);
    assert!(there.contains(&kept) && there.len() == 2, "{there:?}");
    fleet.carries(20);
    // Changes reach all as before.
    for tool in &tools {
        add_soon(tool);
        fleet.await_routes(1, STALE);
    }
}
