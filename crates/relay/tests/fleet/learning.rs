//! A VPC whose routes hosts learn when a packet needs them.

use std::net::IpAddr;
use std::time::Instant;

use bifrost_control::api::LearnedRoute;

use crate::netns::Net;
use crate::world::World;
use crate::{eventually, ping, traffic};

/// What a host has learned of an address.
fn learned(world: &World, host: usize, address: &str) -> Option<LearnedRoute> {
    let address: IpAddr = address.parse().unwrap();
    let routes = world.hosts()[host].client().learned().unwrap();
    routes.into_iter().find(|route| route.range.contains(&address))
}

/// Which host a host sends packets for an address to.
fn peer(world: &World, host: usize, address: &str) -> Option<String> {
    learned(world, host, address).map(|route| route.peer)
}

/// The sum of a host's counters with names that begin so.
fn counter(world: &World, host: usize, prefix: &str) -> u64 {
    let samples = world.hosts()[host].client().samples().unwrap();
    samples.iter().filter(|sample| sample.counter.starts_with(prefix)).map(|sample| sample.value).sum()
}

/// Every packet is accounted for, those that wait for a route, too.
fn assert_balanced(world: &World) {
    for host in world.hosts() {
        let unexplained = bifrost_control::balance::unexplained(&host.client().samples().unwrap());
        assert!(unexplained.is_empty(), "{}: {unexplained:#?}", host.name());
    }
}

/// Three hosts, a VPC with a subnet of which `web` on h1, `db` on h2 and `spare` on h2 are, and another of `app` on h3.
fn network(world: &World, guests: [&Net; 4]) {
    let [web, db, spare, app] = guests.map(|guest| guest.name().to_owned());
    world.apply(&format!(
        "- {{key: host/h1, addresses: [192.0.2.1]}}\n- {{key: host/h2, addresses: [192.0.2.2]}}\n\
         - {{key: host/h3, addresses: [192.0.2.3]}}\n- {{key: vpc/demo/net, learned: [10.0.0.0/8]}}\n\
         - {{key: subnet/demo/a, vpc: net, prefix: 10.0.0.0/24}}\n- {{key: subnet/demo/b, vpc: net, prefix: 10.1.0.0/24}}\n\
         - {{key: port/demo/web, subnets: [a], host: h1, netns: {web}, addresses: [10.0.0.2]}}\n\
         - {{key: port/demo/db, subnets: [a], host: h2, netns: {db}, addresses: [10.0.0.3]}}\n\
         - {{key: port/demo/spare, subnets: [a], host: h2, netns: {spare}, addresses: [10.0.0.4]}}\n\
         - {{key: port/demo/app, subnets: [b], host: h3, netns: {app}, addresses: [10.1.0.2], routed: [10.9.0.0/16]}}\n"
    ));
}

#[test]
fn the_first_packet_arrives_and_changes_are_followed() {
    let mut world = World::new(3);
    world.run_all();
    let [web, db, spare, app] = ["web", "db", "spare", "app"].map(|role| world.guest(role));
    network(&world, [&web, &db, &spare, &app]);
    for host in world.hosts() {
        let objects = host.objects();
        assert!(!objects.iter().any(|object| object.starts_with("route ")), "{}: {objects:?}", host.name());
        assert_eq!(objects.iter().filter(|object| object.starts_with("peer ")).count(), 2, "{objects:?}");
    }
    // Beside the guest, and behind the router, to the router's own range.
    assert_eq!(ping(&web, "10.0.0.3", 10), 10, "{}", world.logs());
    assert_eq!(ping(&web, "10.1.0.2", 10), 10, "{}", world.logs());
    let route = learned(&world, 0, "10.0.0.3").unwrap();
    assert_eq!((route.peer.as_str(), route.range.to_string().as_str()), ("h2", "10.0.0.3/32"));
    assert_eq!(peer(&world, 0, "10.1.0.2").as_deref(), Some("h3"));
    // Its own port, the other guest's in the reply, and nothing else.
    assert_eq!(peer(&world, 1, "10.0.0.2").as_deref(), Some("h1"));
    assert_eq!(world.hosts()[2].client().learned().unwrap().len(), 1);
    // A prefix behind a guest is one answer.
    traffic::ping_briefly(&web, "10.9.1.1", 1, 56);
    eventually(5.0, "the prefix is learned", || learned(&world, 0, "10.9.200.1").is_some());
    assert_eq!(learned(&world, 0, "10.9.200.1").unwrap().range.to_string(), "10.9.0.0/16");
    // TCP, so that flows of the reliable transport begin without a route, too.
    traffic::exchange(&web, &spare, "10.0.0.4", 7000, 200_000);
    assert_balanced(&world);

    // A port moves with its address. Those who talk to it are told.
    let moved = world.guest("moved");
    world.fleet(&format!("set port/demo/db host=h3 netns={} --wait 20", moved.name()));
    eventually(5.0, "the move is known", || peer(&world, 0, "10.0.0.3").as_deref() == Some("h3"));
    assert_eq!(ping(&web, "10.0.0.3", 10), 10, "{}", world.logs());

    // Nobody has the address. Then somebody has.
    assert_eq!(traffic::ping_briefly(&web, "10.0.0.77", 3, 56), 0);
    assert!(counter(&world, 0, "learned.negative_answers") > 0);
    assert!(counter(&world, 0, "avs.dropped_unknown_neighbour_packets") > 0);
    let new = world.guest("new");
    world.fleet(&format!("add port/demo/new subnets=a host=h2 netns={} addresses=10.0.0.77 --wait 20", new.name()));
    // The negative answer was corrected rather than waited for; the kernel asks again within a second.
    eventually(3.0, "the new port is reached", || ping(&web, "10.0.0.77", 1) == 1);

    world.fleet("delete port/demo/app --wait 20");
    eventually(5.0, "the deleted port is forgotten", || learned(&world, 0, "10.1.0.2").is_none());
    assert!(learned(&world, 0, "10.9.200.1").is_none());
    assert_eq!(traffic::ping_briefly(&web, "10.1.0.2", 3, 56), 0);
    assert_balanced(&world);

    // Other routes are pushed, and the VPC may learn none again.
    world.fleet("set vpc/demo/net learned= --wait 20");
    assert!(world.hosts()[0].objects().iter().any(|object| object.ends_with("/10.0.0.77/32")), "{}", world.logs());
    eventually(5.0, "nothing is learned any more", || world.hosts()[0].client().learned().unwrap().is_empty());
    assert_eq!(ping(&web, "10.0.0.77", 10), 10);
}

#[test]
fn what_is_learned_needs_no_relay_and_is_corrected_when_one_is_back() {
    let mut world = World::new(3);
    world.run_all();
    let [web, db, spare, app] = ["web", "db", "spare", "app"].map(|role| world.guest(role));
    network(&world, [&web, &db, &spare, &app]);
    assert_eq!(ping(&web, "10.0.0.3", 10), 10, "{}", world.logs());
    world.kill_relay();
    // Longer than a negative answer holds.
    let begin = Instant::now();
    while begin.elapsed().as_secs() < 3 {
        assert_eq!(ping(&web, "10.0.0.3", 20), 20, "what was learned stays");
    }
    // A new destination fails, visibly.
    assert_eq!(traffic::ping_briefly(&web, "10.1.0.2", 3, 56), 0);
    eventually(5.0, "it is counted", || counter(&world, 0, "port.learn_timeout_packets") > 0);
    assert_balanced(&world);
    world.start_relay();
    eventually(20.0, "new destinations are reached again", || ping(&web, "10.1.0.2", 1) == 1);

    // What changes while the agent is away is corrected when it is back, and what did not change stays.
    world.hosts_mut()[0].kill_agent();
    let moved = world.guest("moved");
    world.fleet(&format!("set port/demo/db host=h3 netns={}", moved.name()));
    world.fleet("delete port/demo/app");
    eventually(10.0, "the guest has moved", || moved.has_device("eth0"));
    assert_eq!(peer(&world, 0, "10.0.0.3").as_deref(), Some("h2"), "nobody has told the host");
    assert!(learned(&world, 0, "10.1.0.2").is_some());
    world.start_agent(0);
    eventually(20.0, "the move is known", || peer(&world, 0, "10.0.0.3").as_deref() == Some("h3"));
    eventually(20.0, "the deletion is known", || learned(&world, 0, "10.1.0.2").is_none());
    assert_eq!(ping(&web, "10.0.0.3", 10), 10, "{}", world.logs());

    // A daemon that begins again has learned nothing, and learns.
    world.hosts_mut()[0].kill_daemon();
    world.hosts_mut()[0].start_daemon();
    eventually(20.0, "the network works again", || ping(&web, "10.0.0.3", 1) == 1);
    assert_eq!(ping(&web, "10.0.0.3", 10), 10, "{}", world.logs());
}

#[test]
fn a_scan_is_bounded_and_rules_that_name_groups_are_refused() {
    let mut world = World::new(3);
    world.run_all();
    let [web, db, spare, app] = ["web", "db", "spare", "app"].map(|role| world.guest(role));
    network(&world, [&web, &db, &spare, &app]);
    let refused = |command: &str| world.tool(0).run(command).unwrap_err();
    world.fleet("add security_group/demo/open ingress=[{protocol=\"icmp\"}]");
    world.fleet("add security_group/demo/named ingress=[{protocol=\"icmp\",from=[\"group:open\"]}]");
    let what = refused("set port/demo/web security_groups=named");
    assert!(what.contains("security_groups") && what.contains("hosts do not know their members"), "{what}");
    world.fleet("set port/demo/spare security_groups=open --wait 20");
    let what = refused("set security_group/demo/open ingress=[{protocol=\"icmp\",from=[\"group:named\"]}]");
    assert!(what.contains("hosts do not know their members"), "{what}");
    // Rules without names work, and with them flow records.
    assert_eq!(ping(&web, "10.0.0.4", 10), 10, "{}", world.logs());

    // Its neighbour floods its router with packets to everywhere; others go on, and learn.
    let neighbour = world.guest("scan");
    world.fleet(&format!("add port/demo/scan subnets=a host=h1 netns={} --wait 20", neighbour.name()));
    let scanning = neighbour.spawn(|| {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        let begin = Instant::now();
        let mut sent = 0u32;
        while begin.elapsed().as_secs() < 5 {
            let n = sent.wrapping_mul(2_654_435_761);
            let [_, b, c, d] = n.to_be_bytes();
            // Not its own subnet: the kernel would have to ask for each neighbour first.
            let _ = socket.send_to(&[7; 20], (std::net::Ipv4Addr::new(10, b | 2, c, d), 9));
            sent += 1;
        }
        sent
    });
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert_eq!(ping(&web, "10.0.0.3", 100), 100, "a new destination, during the scan: {}", world.logs());
    assert_eq!(ping(&web, "10.0.0.4", 100), 100, "a known one");
    let sent = scanning.join().unwrap();
    // Answers that nobody has an address are about as many addresses as possible, so that few questions remain.
    let dropped = counter(&world, 0, "port.learn_") + counter(&world, 0, "avs.dropped_no_route_packets");
    assert!(sent > 10_000 && dropped > 10_000, "{dropped} of {sent} were dropped");
    let asked = counter(&world, 0, "learned.negative_answers");
    assert!((1..5000).contains(&asked), "{asked} negative answers for {sent} packets");
    assert!(counter(&world, 0, "port.learning_packets") <= 4096);
    assert_balanced(&world);
}

/// Over IPv6: beside the guest, behind the router, and to a prefix behind a guest.
#[test]
fn routes_of_ipv6_are_learned() {
    let mut world = World::new(2);
    world.run_all();
    let [web, db, app] = ["web", "db", "app"].map(|role| world.guest(role));
    let [of_web, of_db, of_app] = [&web, &db, &app].map(|guest| guest.name().to_owned());
    world.apply(&format!(
        "- {{key: host/h1, addresses: [192.0.2.1]}}\n- {{key: host/h2, addresses: [192.0.2.2]}}\n\
         - {{key: vpc/demo/net, learned: [\"fd00::/16\"]}}\n\
         - {{key: subnet/demo/a, vpc: net, prefix: \"fd00:a::/64\"}}\n- {{key: subnet/demo/b, vpc: net, prefix: \"fd00:b::/64\"}}\n\
         - {{key: port/demo/web, subnets: [a], host: h1, netns: {of_web}, addresses: [\"fd00:a::2\"]}}\n\
         - {{key: port/demo/db, subnets: [a], host: h2, netns: {of_db}, addresses: [\"fd00:a::3\"]}}\n\
         - {{key: port/demo/app, subnets: [b], host: h2, netns: {of_app}, addresses: [\"fd00:b::2\"], routed: [\"fd00:c::/48\"]}}\n"
    ));
    assert!(!world.hosts()[0].objects().iter().any(|object| object.starts_with("route ")));
    eventually(10.0, "the guests' addresses are there", || traffic::ping_briefly(&web, "fd00:a::1", 1, 56) == 1);
    assert_eq!(ping(&web, "fd00:a::3", 10), 10, "{}", world.logs());
    assert_eq!(ping(&web, "fd00:b::2", 10), 10, "{}", world.logs());
    let range = |address: &str| learned(&world, 0, address).map(|route| (route.peer, route.range.to_string()));
    assert_eq!(range("fd00:a::3"), Some(("h2".to_owned(), "fd00:a::3/128".to_owned())));
    assert_eq!(range("fd00:b::2"), Some(("h2".to_owned(), "fd00:b::2/128".to_owned())));
    traffic::ping_briefly(&web, "fd00:c::77", 1, 56);
    eventually(5.0, "the prefix is learned", || range("fd00:c::9").is_some());
    assert_eq!(range("fd00:c:0:1::").unwrap().1, "fd00:c::/48");
    // Nobody has it; then somebody has.
    assert_eq!(traffic::ping_briefly(&web, "fd00:b::77", 3, 56), 0);
    assert!(counter(&world, 0, "learned.negative_answers") > 0);
    let new = world.guest("new");
    world.fleet(&format!("add port/demo/new subnets=b host=h2 netns={} addresses=fd00:b::77 --wait 20", new.name()));
    eventually(10.0, "the new port is reached", || ping(&web, "fd00:b::77", 1) == 1);
    world.fleet("delete port/demo/app --wait 20");
    eventually(5.0, "the deleted port is forgotten", || range("fd00:b::2").is_none() && range("fd00:c::9").is_none());
    assert_balanced(&world);
}

/// Packets wait for a route while the daemon is upgraded: the next one asks again, and each arrives once.
#[test]
fn packets_that_wait_for_a_route_survive_an_upgrade() {
    let mut world = World::new(3);
    world.run_all();
    let [web, db, spare, app] = ["web", "db", "spare", "app"].map(|role| world.guest(role));
    network(&world, [&web, &db, &spare, &app]);
    // The router's own MAC address is known then.
    assert_eq!(ping(&web, "10.0.0.1", 1), 1);
    let server = app.enter(|| std::net::UdpSocket::bind("10.1.0.2:7").unwrap());
    server.set_read_timeout(Some(std::time::Duration::from_secs(3))).unwrap();
    world.hosts()[0].halt_agent(true);
    web.enter(|| {
        let client = std::net::UdpSocket::bind("10.0.0.2:0").unwrap();
        for n in 0..4u8 {
            client.send_to(&[n; 20], "10.1.0.2:7").unwrap();
        }
    });
    eventually(0.9, "they wait", || counter(&world, 0, "port.learning_packets") == 4);
    world.hosts_mut()[0].upgrade_daemon();
    assert!(learned(&world, 0, "10.1.0.2").is_none());
    world.hosts()[0].halt_agent(false);
    let mut bytes = [0; 100];
    let received: Vec<u8> = (0..4).map_while(|_| server.recv_from(&mut bytes).ok().map(|_| bytes[0])).collect();
    assert_eq!(received, [0, 1, 2, 3], "{}", world.logs());
    assert!(server.recv_from(&mut bytes).is_err(), "one came twice");
    assert_eq!(peer(&world, 0, "10.1.0.2").as_deref(), Some("h3"));
    assert_balanced(&world);
    world.hosts_mut()[0].kill_agent();
}

/// A guest moves, and the host of one that sends to it does not hear of it: the old host forwards.
#[test]
fn what_arrives_at_the_old_host_follows_the_guest() {
    let mut world = World::new(3);
    world.run_all();
    let [web, db, spare, app, moved] = ["web", "db", "spare", "app", "moved"].map(|role| world.guest(role));
    network(&world, [&web, &db, &spare, &app]);
    assert_eq!(ping(&app, "10.0.0.3", 3), 3, "{}", world.logs());
    assert_eq!(peer(&world, 2, "10.0.0.3").as_deref(), Some("h2"));
    world.hosts()[2].halt_agent(true);
    world.fleet(&format!("set port/demo/db host=h1 netns={} --wait 20", moved.name()));
    eventually(5.0, "the old host knows where", || peer(&world, 1, "10.0.0.3").as_deref() == Some("h1"));
    let server = moved.enter(|| std::net::UdpSocket::bind("10.0.0.3:7").unwrap());
    server.set_read_timeout(Some(std::time::Duration::from_secs(1))).unwrap();
    app.enter(|| {
        let client = std::net::UdpSocket::bind("10.1.0.2:0").unwrap();
        for n in 0..20u8 {
            client.send_to(&[n; 20], "10.0.0.3:7").unwrap();
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    });
    let mut bytes = [0; 100];
    let received: Vec<u8> = std::iter::from_fn(|| server.recv_from(&mut bytes).ok().map(|_| bytes[0])).collect();
    assert_eq!(peer(&world, 2, "10.0.0.3").as_deref(), Some("h2"), "nobody has told it");
    assert_eq!(received, (0..20).collect::<Vec<u8>>(), "{}", world.logs());
    assert!(counter(&world, 1, "datapath.followed_packets") >= 20);
    world.hosts()[2].halt_agent(false);
    eventually(10.0, "the move is known", || peer(&world, 2, "10.0.0.3").as_deref() == Some("h1"));
}
