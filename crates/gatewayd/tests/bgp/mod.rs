//! Pods that announce their addresses: FRR is their proxy, and FRR is a switch whose kernel forwards. Probes pass
//! through the pod that the switch chooses. Without FRR, the test is skipped and prints that.
//!
//! ```text
//!  host 10.2.0.11 ---+            +--- pods 10.1.0.11, .12, which announce 10.0.0.1 and fd00::1 (behind bifrost-nicd)
//!                    +-- switch --+
//!  host 10.3.0.12 ---+            +--- proxy 10.1.0.2
//! ```
//!
//! Pods also have fd01::11 and fd01::12 on the link.

mod lines;

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::site::{BFD_MS, DETECTION, Probes, Process, Site, VIP, configuration, has_frr, post, until};

const VIP6: &str = "fd00::1";

fn start() -> Site {
    let site = Site::empty("bg", &["sw", "proxy", "gw", "a", "b"]);
    site.within("sw", "ip link add br0 type bridge mcast_snooping 0");
    site.within("sw", "ip link set br0 up");
    site.within("sw", "ip addr add 10.1.0.254/24 dev br0");
    site.within(
        "sw",
        "sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.fib_multipath_hash_policy=1",
    );
    for (space, device, port) in [("proxy", "u0", "p0"), ("gw", "gw0", "p1"), ("a", "u0", "p2"), ("b", "u0", "p3")] {
        site.link((space, device), ("sw", port));
    }
    for (port, address) in [("p2", "10.2.0.254/24"), ("p3", "10.3.0.254/24")] {
        site.within("sw", &format!("ip addr add {address} dev {port}"));
    }
    for port in ["p0", "p1"] {
        site.within("sw", &format!("ip link set {port} master br0"));
    }
    site.within("proxy", "ip addr add 10.1.0.2/24 dev u0");
    for (space, address) in
        [("sw", "fd01::fe/64 dev br0"), ("proxy", "fd01::2/64 dev u0"), ("proxy", "fe80::2/64 dev u0")]
    {
        site.within(space, &format!("ip addr add {address} nodad"));
    }
    for (space, address) in [("a", "10.2.0"), ("b", "10.3.0")] {
        let last = if space == "a" { 11 } else { 12 };
        site.within(space, &format!("ip addr add {address}.{last}/24 dev u0"));
        site.within(space, &format!("ip route add default via {address}.254"));
    }
    site
}

/// Starts FRR with the configuration of `bifrostctl gw bgp config` for one end.
fn start_frr(site: &mut Site, space: &str, end: &str) {
    let link = ["--proxy", "10.1.0.2", "--pods", "10.1.0.0/24", "--switch", "10.1.0.254"];
    let more = [&link[..], &["--vips", "10.0.0.0/24,fd00::/64", "--bfd-ms", BFD_MS]].concat();
    site.start_frr(space, &configuration(end, &more));
}

fn start_nicd(site: &mut Site) {
    let text = format!(
        "pods_directory = {:?}\ncontrol = {{ socket = {:?} }}\n\
         device = {{ name = \"gw0\", mtu = 1600, mode = \"packet\", frames = 4096 }}\n",
        site.path("nicd-pods"),
        site.path("nicd.sock")
    );
    let nicd = site.start_nicd("gw", "nicd", &text);
    site.processes.push(nicd);
}

fn add(site: &Site, name: &str, number: u8) {
    let settings = format!(
        "name = \"{name}\"\nnumber = {number}\ncores = 1\nmac = \"02:00:00:00:01:{number:02x}\"\ntimeout_us = 1000000\n\
         own = [\"10.1.0.{number}\", \"fd01::{number}\", \"{VIP}\", \"{VIP6}\"]\ninterfaces = [{{ socket = {:?} }}]\n",
        site.path(&format!("{name}.sock"))
    );
    let added = post(&site.path("nicd.sock"), &json!({ "command": "add_pod", "settings": settings }));
    assert_eq!(added, json!({}));
}

fn start_pod(site: &Site, name: &str, number: u8) -> Process {
    let text = format!(
        "control = {{ socket = {:?} }}\n[gateway]\npod = {number}\ncores = 1\ninterfaces = [{:?}]\n\
         mac = \"02:00:00:00:01:{number:02x}\"\naddresses = [\"{VIP}\", \"{VIP6}\"]\n\
         link_addresses = [\"10.1.0.{number}\", \"fd01::{number}\"]\n\
         on_link = [\"10.1.0.0/24\"]\nrouter = \"10.1.0.254\"\nsessions = 1024\n\
         [bgp]\nasn = 64512\npeers = [\"10.1.0.2\"]\nbfd = {{ interval_ms = {BFD_MS}, multiplier = 3 }}\n\
         [[vpcs]]\nvni = 100\nroutes = [{{ prefix = \"192.168.0.0/24\", to = \"local\" }}]\nhosts = [\
         {{ address = \"192.168.0.1\", mac = \"02:00:00:00:02:01\", vtep = \"10.2.0.11\" }}, \
         {{ address = \"192.168.0.2\", mac = \"02:00:00:00:02:02\", vtep = \"10.3.0.12\" }}]\n",
        site.path(&format!("{name}-control.sock")),
        site.path(&format!("{name}.sock")),
    );
    site.start_gw("gw", name, &text)
}

/// Waits until the switch has exactly these next hops, given by their last bytes, for both addresses. Returns how long
/// it took.
fn until_next_hops(site: &Site, last: &[u8]) -> Duration {
    let began = Instant::now();
    for (address, link) in [(VIP, "10.1.0."), (VIP6, "fd01::")] {
        let wanted: Vec<_> = last.iter().map(|last| format!("{link}{last}")).collect();
        until("the switch has the routes", || (site.next_hops("sw", address) == wanted).then_some(()));
    }
    began.elapsed()
}

/// A pod's report about its sessions.
fn sessions(site: &Site, name: &str) -> Value {
    site.pod(name)["bgp"].clone()
}

/// Starts a pod, and waits until the switch has it as next hop and BFD is up. `others` are the pods that already run.
fn start_watched(site: &Site, name: &str, number: u8, others: &[u8]) -> Process {
    let pod = start_pod(site, name, number);
    let mut all = [others, &[number]].concat();
    all.sort_unstable();
    until_next_hops(site, &all);
    until_watched(site, name, number);
    pod
}

/// Waits until BFD is up at both ends: before, the proxy waits for a pod for seconds.
fn until_watched(site: &Site, name: &str, number: u8) {
    let peer = format!("10.1.0.{number}");
    until("BFD is up", || {
        let peers = site.show("proxy", "bfd peers");
        let is_up = peers.as_array().unwrap().iter().any(|known| known["peer"] == *peer && known["status"] == "up");
        (is_up && sessions(site, name)[0]["bfd"] == "up").then_some(())
    });
}

#[test]
fn pods_announce_themselves_and_an_address_moves_without_loss() {
    if !has_frr() {
        return println!("SKIPPED: there is no FRR on this machine");
    }
    let mut site = start();
    start_nicd(&mut site);
    start_frr(&mut site, "sw", "switch");
    start_frr(&mut site, "proxy", "proxy");
    add(&site, "one", 11);
    let one = start_pod(&site, "one", 11);
    println!("in the switch's FIB {:?} after the pod's start", until_next_hops(&site, &[11]));
    // The switch resolves the IPv6 next hop by neighbour discovery.
    let socket = site.open("sw", || std::net::UdpSocket::bind("[fd01::fe]:0").unwrap());
    until("the pod answers neighbour discovery", || {
        socket.send_to(&[0], (VIP6, 4789)).unwrap();
        let known = site.run(&format!("ip -n {} -6 neigh show fd01::11", site.space("sw")));
        known.contains("lladdr 02:00:00:00:01:0b").then_some(())
    });

    // Make before break: the new pod announces, then the old one withdraws its routes and ends.
    let probes = Probes::start(&site);
    std::thread::sleep(Duration::from_millis(500));
    add(&site, "two", 12);
    let two = start_pod(&site, "two", 12);
    until_next_hops(&site, &[11, 12]);
    std::thread::sleep(Duration::from_millis(500));
    post(&site.path("one-control.sock"), &json!({ "command": "drain", "drain": true }));
    until_next_hops(&site, &[12]);
    std::thread::sleep(Duration::from_millis(200));
    one.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(500));
    drop(one);
    let (sent, lost) = probes.stop();
    let lost = lost.len();
    println!("{sent} probes, {lost} lost");
    assert!(sent > 1000 && lost == 0, "{lost} of {sent} probes are lost");
    let sessions = sessions(&site, "two");
    let expected = json!({ "address": "10.1.0.2", "state": "established", "bfd": "up", "announced": ["10.0.0.1/32", "fd00::1/128"] });
    assert_eq!(sessions.as_array().unwrap().len(), 1, "{sessions}");
    for (field, value) in expected.as_object().unwrap() {
        assert_eq!(&sessions[0][field], value, "{field}");
    }

    // A pod that ends withdraws its routes. BFD detects one that hangs or is killed.
    let one = start_watched(&site, "one", 11, &[12]);
    two.signal(Signal::TERM);
    until_next_hops(&site, &[11]);
    drop(two);
    let two = start_watched(&site, "two", 12, &[11]);
    // `ip netns exec` becomes the program, so the signal reaches the pod.
    two.signal(Signal::STOP);
    let hung = until_next_hops(&site, &[11]);
    drop(two);
    let two = start_watched(&site, "two", 12, &[11]);
    // A busy machine may have kept the first pod from running for the detection time, so that its session went down.
    let downs = site.pod("one")["bgp"][0]["bfd_downs"].clone();
    until_watched(&site, "one", 11);
    let known = site.show("proxy", "bfd peers");
    one.signal(Signal::KILL);
    let killed = until_next_hops(&site, &[12]);
    println!("the switch's route is gone {hung:?} after a pod hangs, {killed:?} after it is killed");
    println!("the killed pod's BFD sessions went down {downs} times before");
    assert!(hung < DETECTION && killed < DETECTION, "{hung:?} {killed:?}, the proxy had {known}");
    drop((one, two));
}
