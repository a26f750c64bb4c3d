//! Services of a network, created in one place, carry traffic on several hosts.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::eventually;
use crate::netns::Net;
use crate::world::World;

const PATIENCE: Duration = Duration::from_secs(2);

/// Says its name to everybody who connects, and who that is, as long as the process lives.
pub(crate) fn serve(net: &Net, at: &str, name: &'static str) {
    let at = at.to_owned();
    let listener = net.enter(move || TcpListener::bind(at).unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let Ok(client) = stream.peer_addr() else { continue };
            let _ = stream.write_all(format!("{name} {client}").as_bytes());
        }
    });
}

/// What a server says, if there is one: its name, and whom it takes the client for.
fn ask(net: &Net, at: &str) -> Option<(String, SocketAddr)> {
    ask_within(PATIENCE, net, at)
}

fn ask_within(patience: Duration, net: &Net, at: &str) -> Option<(String, SocketAddr)> {
    let at: SocketAddr = at.parse().unwrap();
    net.enter(move || {
        let mut stream = TcpStream::connect_timeout(&at, patience).ok()?;
        stream.set_read_timeout(Some(patience)).unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).ok()?;
        let (name, client) = said.split_once(' ')?;
        Some((name.to_owned(), client.parse().ok()?))
    })
}

/// Those who answer several connections.
pub(crate) fn answers(net: &Net, at: &str) -> BTreeSet<String> {
    (0..12).filter_map(|_| ask(net, at)).map(|(name, _)| name).collect()
}

/// Whether all connections of some get to one server.
fn is_only(net: &Net, at: &str, server: &str) -> bool {
    (0..8).all(|_| ask_within(PATIENCE / 4, net, at).is_some_and(|(name, _)| name == server))
}

/// Guests of two hosts reach the backends, which are on both, by one address; what fails gets no
/// more connections, nor what is drained.
#[test]
fn a_load_balancer_works_on_all_hosts() {
    let mut world = World::new(2);
    world.run_all();
    let [a, b, web1, web2] = ["a", "b", "web1", "web2"].map(|role| world.guest(role));
    let port = |name: &str, host: u32, net: &Net| {
        format!("- {{key: port/demo/{name}, subnets: [a], host: h{host}, netns: {}}}\n", net.name())
    };
    world.apply(&format!(
        "- {{key: host/h1, addresses: [192.0.2.1]}}\n- {{key: host/h2, addresses: [192.0.2.2]}}\n- key: vpc/demo/net\n\
         - {{key: subnet/demo/a, vpc: net, prefix: 10.0.0.0/24}}\n{}{}{}{}",
        port("a", 1, &a),
        port("b", 2, &b),
        port("web1", 1, &web1),
        port("web2", 2, &web2),
    ));
    let address = |name: &str| {
        let object = world.fleet_json(&format!("get port/demo/{name}"));
        object[0]["spec"]["addresses"][0].as_str().unwrap().to_owned()
    };
    serve(&web1, &format!("{}:8080", address("web1")), "one");
    serve(&web2, &format!("{}:8080", address("web2")), "two");
    world.fleet(
        "add load_balancer/demo/web subnet=a address=10.0.0.100 port=80 \
         backends=[{guest=\"web1\",port=8080},{guest=\"web2\",port=8080}] \
         check={interval_ms=100,timeout_ms=500,rise=1,fall=2} --wait 20",
    );
    let both = BTreeSet::from(["one".to_owned(), "two".to_owned()]);
    for client in [&a, &b] {
        assert_eq!(answers(client, "10.0.0.100:80"), both, "{}", world.logs());
    }
    // Each host finds out by itself that a backend does not answer.
    web2.ip("link set eth0 down\n");
    for client in [&a, &b] {
        eventually(20.0, "only the one that works gets connections", || is_only(client, "10.0.0.100:80", "one"));
    }
    let why = world.fleet_json("why load_balancer/demo/web");
    assert_eq!(why["hosts"].as_array().unwrap().len(), 2, "{why}");
    // What the relay says of its API is what it answers to.
    let api = world.get("/v1/openapi.json");
    for (path, methods) in api["paths"].as_object().unwrap() {
        let needs = |p: &serde_json::Value| p["required"] == true;
        if let Some(get) =
            methods.get("get").filter(|get| !get["parameters"].as_array().into_iter().flatten().any(needs))
        {
            assert!(!world.get(path).is_null(), "{get}");
        }
    }
    world.fleet("delete load_balancer/demo/web --wait 20");
    assert_eq!(ask(&a, "10.0.0.100:80"), None);
    assert!(world.hosts().iter().all(|host| !host.objects().iter().any(|object| object.contains("load_balancer"))));
}

/// Guests of two hosts reach the outside by one address, each host with ports of its own; and a
/// guest is reached by an address that goes with it to another host.
#[test]
fn a_nat_gateway_works_on_all_hosts() {
    let mut world = World::new(2);
    world.run_all();
    let [a, b, moved] = ["a", "b", "moved"].map(|role| world.guest(role));
    // The outside, as each host sees it: its kernel is that of a server.
    let outside = ["out1", "out2"].map(|role| world.guest(role));
    let host = |n: usize| {
        let uplink = format!("{{addresses: [203.0.113.{n}/24], netns: {}}}", outside[n - 1].name());
        format!("- {{key: host/h{n}, addresses: [192.0.2.{n}], uplink: {uplink}}}\n")
    };
    let port = |name: &str, host: u32, net: &Net| {
        format!("- {{key: port/demo/{name}, subnets: [a], host: h{host}, netns: {}}}\n", net.name())
    };
    world.apply(&format!(
        "{}{}- key: vpc/demo/net\n- {{key: subnet/demo/a, vpc: net, prefix: 10.0.0.0/24}}\n{}{}\
         - {{key: nat_gateway/demo/out, vpc: net, addresses: [203.0.113.10], ports_per_host: 1000}}\n\
         - {{key: floating_ip/demo/b, guest: b, address: 203.0.113.20}}\n",
        host(1),
        host(2),
        port("a", 1, &a),
        port("b", 2, &b),
    ));
    for (net, name) in outside.iter().zip(["one", "two"]) {
        net.ip("addr add 198.51.100.7/32 dev lo\n");
        serve(net, "198.51.100.7:80", name);
    }
    let blocks = world.fleet_json("get nat_gateway/demo/out")[0]["spec"]["blocks"].clone();
    assert_eq!(blocks["h1"]["ports"], serde_json::json!([1024, 2023]), "{blocks}");
    assert_eq!(blocks["h2"]["ports"], serde_json::json!([2024, 3023]), "{blocks}");
    let (name, seen) = ask(&a, "198.51.100.7:80").unwrap_or_else(|| panic!("{}", world.logs()));
    assert_eq!((&*name, seen.ip().to_string()), ("one", "203.0.113.10".into()));
    assert!((1024..2024).contains(&seen.port()), "{seen}");
    let (name, seen) = ask(&b, "198.51.100.7:80").unwrap_or_else(|| panic!("{}", world.logs()));
    assert_eq!((&*name, seen.ip().to_string()), ("two", "203.0.113.20".into()), "it has an address of its own");

    serve(&b, "10.0.0.3:80", "b");
    assert_eq!(ask(&outside[1], "203.0.113.20:80").map(|(name, _)| name), Some("b".into()), "{}", world.logs());
    // Without its own address it shares that of the gateway, with the ports of its host.
    world.fleet("delete floating_ip/demo/b --wait 20");
    let (_, seen) = ask(&b, "198.51.100.7:80").unwrap_or_else(|| panic!("{}", world.logs()));
    assert!(seen.ip().to_string() == "203.0.113.10" && (2024..3024).contains(&seen.port()), "{seen}");
    world.fleet("add floating_ip/demo/b guest=b address=203.0.113.20");
    world.fleet(&format!("set port/demo/b host=h1 netns={} --wait 20", moved.name()));
    serve(&moved, "10.0.0.3:80", "moved");
    assert_eq!(ask(&outside[0], "203.0.113.20:80").map(|(name, _)| name), Some("moved".into()), "{}", world.logs());
    world.fleet("delete floating_ip/demo/b nat_gateway/demo/out --wait 20");
    assert_eq!(ask(&a, "198.51.100.7:80"), None);
}
