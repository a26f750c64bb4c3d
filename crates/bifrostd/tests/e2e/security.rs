//! Security groups and ACLs between real kernels.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use bifrost_control::api::{Session, SessionFilter, TraceSpec};

use crate::common::traffic::{Exchange, exchange, ping};
use crate::common::{Lab, Options, eventually};

const MEGABYTES: u64 = 1 << 20;

/// Guest a's group: some TCP inbound, everything outbound.
const GROUP: &str = "[[security_group]]\nname = \"web\"\n\
    [[security_group.ingress]]\nprotocol = \"tcp\"\nports = [\"5001-5002\"]\nfrom = [\"10.0.0.0/24\"]\n";

/// A lab in which port a has security groups.
fn guarded(rules: &str) -> Lab {
    let mut lab = Lab::running(Options::default());
    let config = lab.hosts[0].config.replacen("name = \"a\"\n", "name = \"a\"\nsecurity_groups = [\"web\"]\n", 1);
    lab.hosts[0].config = config + rules;
    lab.hosts[0].write_config();
    let report = lab.hosts[0].client.reload().unwrap();
    assert_eq!((report.ports.changed, report.security_groups.added), (vec!["a".to_string()], vec!["web".to_string()]));
    lab
}

/// Whether a TCP connection from b to a listening socket of a is established.
fn connects(lab: &Lab, port: u16) -> bool {
    let listener = lab.net("a").enter(move || TcpListener::bind(("10.0.0.1", port)).unwrap());
    let address = SocketAddr::from(([10, 0, 0, 1], port));
    let connected =
        lab.net("b").enter(move || TcpStream::connect_timeout(&address, Duration::from_millis(400)).is_ok());
    drop(listener);
    connected
}

#[test]
fn groups_allow_what_they_name_and_answers_to_the_guest() {
    let lab = guarded(GROUP);
    let (a, b) = (lab.net("a"), lab.net("b"));
    exchange(b, a, "10.0.0.1", 5001, 2 * MEGABYTES);
    exchange(a, b, "10.0.0.2", 5003, 2 * MEGABYTES);
    assert_eq!(ping(a, "10.0.0.2", 5, 56), 5, "answers to the guest pass");
    assert_eq!(ping(b, "10.0.0.1", 3, 56), 0, "others may not ping it");
    let before = lab.hosts[0].drops("a", "group_ingress");
    assert!(before >= 3, "{before}");
    assert!(!connects(&lab, 5003));
    assert!(lab.hosts[0].drops("a", "group_ingress") > before);
    let counters = lab.hosts[0].counters();
    assert!(counters["avs.created_sessions"] >= 3 && counters["avs.current_sessions"] >= 3, "{counters:?}");
    sessions_are_listed(&lab);
    // Refused packets were acknowledged: the sender does not retransmit them.
    assert_eq!(lab.hosts[1].counter("rte.given_up_packets"), 0);
    assert!(counters.get("rte.policy_dropped_packets").is_none_or(|n| *n >= 1));
}

/// Lists the sessions of the traffic above, filtered and page by page.
fn sessions_are_listed(lab: &Lab) {
    let list = |filter: SessionFilter| lab.hosts[0].client.sessions(&filter).unwrap();
    let all = list(SessionFilter::default());
    let is_of_a = |session: &Session| session.port == "a" && session.remote_address.to_string() == "10.0.0.2";
    assert!(all.iter().all(is_of_a), "{all:?}");
    let some = |protocol: &str, number| {
        let (protocol, port) = (Some(protocol.to_owned()), Some("a".to_owned()));
        list(SessionFilter { protocol, port, number, ..SessionFilter::default() })
    };
    let [inbound, outbound] = [5001, 5003].map(|number| some("tcp", Some(number)));
    assert!(inbound.iter().all(|session| session.local_port == 5001 && !session.is_outbound), "{inbound:?}");
    assert!(outbound.iter().all(|session| session.remote_port == 5003 && session.is_outbound), "{outbound:?}");
    assert!(!inbound.is_empty() && !outbound.is_empty() && !some("icmp", None).is_empty(), "{all:?}");
    let mut paged = Vec::new();
    while let [session] =
        &list(SessionFilter { limit: Some(1), after: paged.last().copied(), ..SessionFilter::default() })[..]
    {
        paged.push(session.id);
    }
    assert_eq!(paged, all.iter().map(|session| session.id).collect::<Vec<_>>());
    let unknown = SessionFilter { port: Some("unknown".to_owned()), ..SessionFilter::default() };
    assert!(lab.hosts[0].client.sessions(&unknown).is_err());
}

#[test]
fn a_reload_only_ends_sessions_that_are_no_longer_allowed() {
    let mut lab = guarded(GROUP);
    // Two connections that stay open; one of them will no longer be allowed.
    let listen = |port| lab.net("a").enter(move || TcpListener::bind(("10.0.0.1", port)).unwrap());
    let listeners = [5001, 5002].map(listen);
    let connect = |port| lab.net("b").enter(move || TcpStream::connect(("10.0.0.1", port)).unwrap());
    let mut clients = [5001, 5002].map(connect);
    let mut servers = listeners.map(|listener| listener.accept().unwrap().0);
    let index =
        |lab: &Lab| lab.net("a").enter(|| std::fs::read_to_string("/sys/class/net/eth0/ifindex").unwrap_or_default());
    let device = index(&lab);
    let stream = Exchange::start(lab.net("b"), lab.net("a"), "10.0.0.1", 5001, 32 * MEGABYTES);

    lab.hosts[0].config = lab.hosts[0].config.replace("5001-5002", "5001");
    lab.hosts[0].write_config();
    assert_eq!(lab.hosts[0].client.reload().unwrap().security_groups.changed, ["web"]);
    for (n, (client, server)) in clients.iter_mut().zip(&mut servers).enumerate() {
        server.set_read_timeout(Some(Duration::from_secs(if n == 0 { 10 } else { 1 }))).unwrap();
        client.write_all(b"twelve bytes").unwrap();
        let mut heard = [0; 12];
        let result = server.read_exact(&mut heard);
        assert_eq!(result.is_ok(), n == 0, "connection {n}: {result:?}");
    }
    stream.finish();
    eventually(2.0, "the session is counted", || lab.hosts[0].counter("avs.revoked_sessions") >= 1);
    assert_eq!(index(&lab), device, "the guest's device is the same");
}

/// Guest a's group: allows ingress from members of the group "web" on any host, and from an address set; no egress.
const NAMED: &str = "[[security_group]]\nname = \"web\"\negress = []\n\
    [[security_group.ingress]]\nprotocol = \"tcp\"\nports = [5001]\nfrom = [\"group:web\"]\n\
    [[security_group.ingress]]\nprotocol = \"tcp\"\nports = [5002]\nfrom = [\"set:office\"]\n\
    [[address_set]]\nname = \"office\"\naddresses = []\n";

#[test]
fn rules_name_groups_and_sets_of_addresses() {
    let mut lab = guarded(NAMED);
    assert!(!connects(&lab, 5001) && !connects(&lab, 5002));
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 1, 56), 0, "no egress is allowed");
    assert!(lab.hosts[0].drops("a", "group_egress") > 0);
    // The other host's guest becomes a member of the group.
    let route = lab.hosts[0].config.find("[[route]]\n").unwrap() + "[[route]]\n".len();
    lab.hosts[0].config.insert_str(route, "security_groups = [\"web\"]\n");
    lab.hosts[0].write_config();
    assert_eq!(lab.hosts[0].client.reload().unwrap().routes.changed.len(), 1);
    assert!(connects(&lab, 5001) && !connects(&lab, 5002));
    // The address set gets a member.
    lab.hosts[0].config = lab.hosts[0].config.replace("addresses = []", "addresses = [\"10.0.0.2/32\"]");
    lab.hosts[0].write_config();
    assert_eq!(lab.hosts[0].client.reload().unwrap().address_sets.changed, ["office"]);
    assert!(connects(&lab, 5001) && connects(&lab, 5002));
    let spec = TraceSpec { from_peer: Some("172.31.0.2".parse().unwrap()), vni: Some(100), ..TraceSpec::default() };
    let (from, to) = ("10.0.0.2".parse().unwrap(), "10.0.0.1".parse().unwrap());
    let spec = TraceSpec { from: Some(from), to: Some(to), tcp: Some((40_000, 5002)), ..spec };
    let trace = format!("{:?}", lab.hosts[0].client.trace(&spec).unwrap());
    assert!(trace.contains("ingress rule 2 of security group web (tcp set:office port 5002)"), "{trace}");
}

#[test]
fn an_acl_denies_without_groups() {
    let mut lab = Lab::running(Options::default());
    let acl = "[[vpc.acl]]\ndirection = \"ingress\"\naction = \"deny\"\nprotocol = \"tcp\"\nports = [5003]\n";
    let at = lab.hosts[0].config.find("[[vpc]]").unwrap();
    let end = lab.hosts[0].config[at + 7..].find("\n[").map_or(lab.hosts[0].config.len(), |n| at + 7 + n + 1);
    lab.hosts[0].config.insert_str(end, acl);
    lab.hosts[0].write_config();
    assert_eq!(lab.hosts[0].client.reload().unwrap().vpcs.changed, ["100"]);
    assert!(connects(&lab, 5001) && !connects(&lab, 5003));
    assert!(lab.hosts[0].drops("a", "acl") > 0);
    assert_eq!(lab.hosts[0].counter("avs.created_sessions"), 0);
}
