//! Routes that hosts learn: what agents are told when their answers become wrong.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant;

use bifrost_relay_api::{Answered, Question};
use ipnet::IpNet;
use proptest::prelude::*;

use super::*;

/// What an agent was answered, as text.
fn answers(told: &mut Told) -> Vec<String> {
    assert_eq!(told.take(), None);
    let text = |Answer { vni, range, what }: Answer| {
        let what = match what {
            Answered::Hop { peer, .. } => peer,
            Answered::Nothing => "nothing".to_owned(),
            Answered::Withdrawn => "withdrawn".to_owned(),
        };
        format!("{vni} {range} {what}")
    };
    std::mem::take(&mut told.answers).into_iter().map(text).collect()
}

fn learning() -> (World, Told) {
    let mut world = World::new();
    world.make(vec![set("vpc/demo/net", json!({"learned": ["10.0.0.0/8"]}))]);
    world.make(vec![port("web", "h1"), port("db", "h2")]);
    let told = Told::new(&mut world, "h1");
    (world, told)
}

fn ask(world: &mut World, told: &Told, address: &str) -> bool {
    world.fleet.resolve("h1", told.number, &[Question { vni: 4096, address: address.parse().unwrap() }])
}

#[test]
fn agents_are_told_when_their_answers_become_wrong() {
    let (mut world, mut h1) = learning();
    assert!(ask(&mut world, &h1, "10.0.0.3") && ask(&mut world, &h1, "10.0.0.9"));
    assert_eq!(answers(&mut h1), ["4096 10.0.0.3/32 h2", "4096 10.0.0.8/29 nothing"]);
    // What it did not ask for does not concern it.
    world.make(vec![set(
        "port/demo/c",
        json!({"subnets": ["a"], "host": "h2", "netns": "c", "addresses": ["10.0.0.77"]}),
    )]);
    assert_eq!(answers(&mut h1), Vec::<String>::new());
    // A move, a deletion, and a port where none was.
    world.make(vec![set("host/h3", json!({"addresses": ["192.0.2.3"]})), port("db", "h3")]);
    assert_eq!(answers(&mut h1), ["4096 10.0.0.3/32 withdrawn", "4096 10.0.0.3/32 h3"]);
    world.make(vec![delete("port/demo/db")]);
    assert_eq!(answers(&mut h1), ["4096 10.0.0.3/32 withdrawn", "4096 10.0.0.3/32 nothing"]);
    world.make(vec![set(
        "port/demo/d",
        json!({"subnets": ["a"], "host": "h2", "netns": "d", "addresses": ["10.0.0.12"]}),
    )]);
    assert_eq!(answers(&mut h1), ["4096 10.0.0.8/29 withdrawn", "4096 10.0.0.12/32 h2"]);
    // The VPC learns no longer. Of what no route is in, the host itself knows that.
    world.make(vec![set("vpc/demo/net", json!({}))]);
    assert_eq!(answers(&mut h1), ["4096 10.0.0.12/32 withdrawn"]);
    assert_eq!(world.fleet.resolved().remembered, 1);
}

#[test]
fn only_who_may_and_can_learns() {
    let (mut world, mut h1) = learning();
    // Another VPC, and what is not learned.
    world.make(vec![set("vpc/demo/other", json!({"learned": ["10.0.0.0/8"]}))]);
    let question = |vni, address: &str| Question { vni, address: address.parse().unwrap() };
    let questions = [question(4097, "10.0.0.3"), question(7, "10.0.0.3"), question(4096, "192.0.2.1")];
    assert!(world.fleet.resolve("h1", h1.number, &questions));
    assert_eq!((answers(&mut h1), world.fleet.resolved().refused), (Vec::new(), 3));
    // An earlier stream hears nothing of a later one's questions.
    ask(&mut world, &h1, "10.0.0.3");
    let mut again = Told::new(&mut world, "h1");
    assert!(h1.take().is_some() && ask(&mut world, &h1, "10.0.0.3"));
    world.make(vec![delete("port/demo/db")]);
    assert_eq!(answers(&mut again), Vec::<String>::new(), "it has asked for nothing");
    // An agent of an earlier version is not answered, and is noticed.
    let attached = world.fleet.attach("h1", "agent 0", false, 1).unwrap();
    assert!(attached.misses_learning && world.fleet.resolved().unable == 1);
    assert!(!world.fleet.resolve("h1", attached.number, &questions));
    assert!(!world.fleet.attach("h2", "agent 0", false, 1).unwrap().misses_learning, "its only port is gone");
}

#[test]
fn an_agent_that_reads_no_answers_is_ended() {
    let (mut world, mut h1) = learning();
    let mut asked = 0;
    while asked < 100_000 && h1.feed.len() == 0 {
        let questions: Vec<_> =
            (0..1000u32).map(|n| Question { vni: 4096, address: [10, 1, (n >> 8) as u8, n as u8].into() }).collect();
        world.fleet.resolve("h1", h1.number, &questions);
        asked += 1000;
    }
    assert!(h1.take().is_some_and(|why| why.contains("too many answers")));
}

/// What an agent has: ranges, each with the host of its addresses.
type Table = BTreeMap<IpNet, Option<String>>;

/// Takes over answers as a host does.
fn learn(table: &mut Table, answers: Vec<Answer>) {
    for Answer { range, what, .. } in answers {
        table.retain(|known, _| !known.contains(&range) && !range.contains(known));
        match what {
            Answered::Hop { peer, .. } => drop(table.insert(range, Some(peer))),
            Answered::Nothing => drop(table.insert(range, None)),
            Answered::Withdrawn => {}
        }
    }
}

#[derive(Clone, Debug)]
enum Event {
    /// A port comes to a host, or moves there.
    Put(u8, usize),
    Delete(u8),
    Ask(usize, u8),
    /// Some answers are corrected.
    Correct(usize),
    /// An agent connects again.
    Connect(usize),
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => (0..6u8, 0..3usize).prop_map(|(port, host)| Event::Put(port, host)),
        2 => (0..6u8).prop_map(Event::Delete),
        6 => (0..3usize, 0..40u8).prop_map(|(host, address)| Event::Ask(host, address)),
        2 => (1..4usize).prop_map(Event::Correct),
        1 => (0..3usize).prop_map(Event::Connect),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever changes while answers are asked for and corrected: in the end what each agent has is what it would be
    /// answered now, address by address.
    #[test]
    fn in_the_end_all_answers_are_right(events in prop::collection::vec(any_event(), 0..40)) {
        let mut world = World { is_slow: true, ..World::default() };
        world.make(network());
        world.make(vec![set("host/h3", json!({"addresses": ["192.0.2.3"]})),
                        set("vpc/demo/net", json!({"learned": ["10.0.0.0/24"]}))]);
        let names = ["h1", "h2", "h3"];
        // Each host has to do with the VPC.
        world.make((0..3).map(|n| at(&format!("own{n}"), names[n], 200 + n as u8)).collect());
        let mut agents: Vec<Told> = names.iter().map(|name| Told::new(&mut world, name)).collect();
        for event in events {
            match event {
                Event::Put(port, host) => {
                    let change = at(&format!("p{port}"), names[host], 2 + 5 * port);
                    let (_, txn) = world.fleet.plan(&Batch { changes: vec![change] }, 7, b"test").unwrap();
                    world.write(txn.writes);
                }
                Event::Delete(port) => {
                    let key: Key = format!("port/demo/p{port}").parse().unwrap();
                    if world.fleet.why(&key).is_some() {
                        world.make(vec![delete(&key.to_string())]);
                    }
                }
                Event::Ask(host, address) => {
                    let question = Question { vni: 4096, address: Ipv4Addr::new(10, 0, 0, address).into() };
                    prop_assert!(world.fleet.resolve(names[host], agents[host].number, &[question]));
                }
                Event::Correct(most) => drop(world.fleet.correct(most)),
                Event::Connect(host) => agents[host] = Told::new(&mut world, names[host]),
            }
        }
        world.correct();
        let mut learned = 0;
        for (name, agent) in names.iter().zip(&mut agents) {
            prop_assert_eq!(agent.take(), None);
            let mut table = Table::new();
            learn(&mut table, std::mem::take(&mut agent.answers));
            learned += table.len();
            for (range, hop) in &table {
                for address in range.hosts() {
                    let question = Question { vni: 4096, address };
                    prop_assert!(world.fleet.resolve(name, agent.number, &[question]));
                }
                prop_assert_eq!(agent.take(), None);
                let mut now = Table::new();
                learn(&mut now, std::mem::take(&mut agent.answers));
                for address in range.hosts() {
                    let (_, answer) = now.iter().find(|(range, _)| range.contains(&address)).unwrap();
                    prop_assert_eq!(answer, hop, "{} of {} at {}", address, range, name);
                }
            }
        }
        // Answers that were asked for just now are others, of as many addresses.
        prop_assert!(learned == 0 || world.fleet.resolved().remembered > 0);
    }
}

fn at(name: &str, host: &str, address: u8) -> Change {
    let address = format!("10.0.0.{address}");
    set(&format!("port/demo/{name}"), json!({"subnets": ["a"], "host": host, "netns": name, "addresses": [address]}))
}

/// How long others wait while a thousand hosts are told that their answers are wrong.
#[test]
#[ignore = "measures"]
fn measure_corrections() {
    const HOSTS: usize = 1000;
    let mut world = World::new();
    world.is_slow = true;
    let hosts: Vec<_> = (3..=HOSTS)
        .map(|n| set(&format!("host/h{n}"), json!({"addresses": [format!("192.1.{}.{}", n / 250, n % 250 + 1)]})))
        .collect();
    hosts.chunks(400).for_each(|hosts| world.make(hosts.to_vec()));
    world.make(vec![
        set("vpc/demo/big", json!({"learned": ["10.0.0.0/8"]})),
        set("subnet/demo/big", json!({"vpc": "big", "prefix": "10.4.0.0/16"})),
    ]);
    let address = |n: usize| IpAddr::from([10, 4, (n / 250 + 1) as u8, (n % 250 + 1) as u8]);
    let port = |n: usize, host: usize| {
        let spec = json!({"subnets": ["big"], "host": format!("h{host}"), "netns": format!("b{n}"), "addresses": [address(n)]});
        set(&format!("port/demo/b{n}"), spec)
    };
    let ports: Vec<_> = (0..2000).map(|n| port(n, n % HOSTS + 1)).collect();
    ports.chunks(400).for_each(|ports| world.make(ports.to_vec()));
    world.correct();
    let vni = world.fleet.overview().vpcs.iter().find(|vpc| vpc.key.name() == "big").unwrap().vni.unwrap();
    let mut told: Vec<Told> = (1..=HOSTS).map(|n| Told::new(&mut world, &format!("h{n}"))).collect();
    let questions: Vec<Question> = (0..900).map(|n| Question { vni, address: address(n) }).collect();
    for (host, one) in told.iter().enumerate() {
        world.fleet.resolve(&format!("h{}", host + 1), one.number, &questions);
    }
    // What waits for agents that do not read would be copied with each answer more.
    told.iter_mut().for_each(|one| assert_eq!(one.take(), None));
    let mut measure = |what: &str, changes: Vec<Change>| {
        let (_, txn) = world.fleet.plan(&Batch { changes }, 7, b"test").unwrap();
        let before = world.fleet.resolved().corrected;
        let begin = Instant::now();
        world.write(txn.writes);
        let (change, mut steps, mut longest) = (begin.elapsed(), 0, Instant::now() - Instant::now());
        loop {
            let begin = Instant::now();
            let is_more = world.fleet.correct(crate::relay::CORRECTED);
            (steps, longest) = (steps + 1, longest.max(begin.elapsed()));
            if !is_more {
                break;
            }
        }
        let corrected = world.fleet.resolved().corrected - before;
        eprintln!(
            "{what}: the change {change:.1?}; {corrected} corrections in {steps} steps, the longest {longest:.1?}; \
             in all {:.1?}",
            begin.elapsed()
        );
    };
    measure("one port moves that all have learned", vec![port(5, 700)]);
    measure("another one", vec![port(6, 700)]);
    measure("one port moves that nobody has learned", vec![port(1905, 700)]);
    measure("100 ports move that all have learned", (10..110).map(|n| port(n, 701)).collect());
    measure("100 ports move that nobody has learned", (1010..1110).map(|n| port(n, 701)).collect());
    measure("400 ports move that nobody has learned", (1200..1600).map(|n| port(n, 702)).collect());
}
