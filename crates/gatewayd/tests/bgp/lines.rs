//! The purpose of each line in the configurations of `bifrostctl gw bgp config`. Real daemons read them, and processes
//! of GoBGP are their peers, some of which do what a line forbids. Each check passes with the configuration and fails
//! without its lines.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::podman::output;
use crate::site::{Site, configuration, has_frr, until};

/// Interval of BFD, ms: neither FRR's default nor BIRD's.
const BFD_MS: u64 = 100;
/// Longer than a peer needs to establish a session, where it must not.
const SETTLES: Duration = Duration::from_secs(3);

/// The daemon that reads a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Daemon {
    Proxy,
    FrrSwitch,
    BirdSwitch,
}

/// Replacements of lines, and a condition that holds only with the original lines.
struct Check {
    what: &'static str,
    instead: &'static [(&'static str, &'static str)],
    holds: fn(&World) -> bool,
}

/// A filter that accepts everything, for FRR.
const ANY: (&str, &str) =
    ("ip prefix-list none seq 5 deny any", "ip prefix-list none seq 5 deny any\nip prefix-list any seq 5 permit any");

const fn check(
    what: &'static str,
    instead: &'static [(&'static str, &'static str)],
    holds: fn(&World) -> bool,
) -> Check {
    Check { what, instead, holds }
}

/// A peer: a process of GoBGP.
struct Peer {
    address: &'static str,
    /// Whether it sends with a hop limit of 255.
    near: bool,
    routes: &'static [&'static str],
}

const fn peer(address: &'static str, near: bool, routes: &'static [&'static str]) -> Peer {
    Peer { address, near, routes }
}

const MANY: [&str; 6] =
    ["10.0.0.40/32", "10.0.0.41/32", "10.0.0.42/32", "10.0.0.43/32", "10.0.0.44/32", "10.0.0.45/32"];
/// Peers of a proxy: two pods with the same address, one that is too far away, one that announces too much, and a
/// switch.
const OF_PROXY: [Peer; 5] = [
    peer("10.1.0.11", true, &["10.0.1.1/32", "10.0.0.128/25", "10.0.0.1/32"]),
    peer("10.1.0.12", true, &["10.0.0.1/32"]),
    peer("10.1.0.13", false, &["10.0.0.3/32"]),
    peer("10.1.0.14", true, &MANY),
    peer("10.1.0.254", true, &["10.0.0.77/32"]),
];
/// Peers of a switch: a proxy of two pods with the same address, one that announces too much, one that is too far away,
/// and another proxy.
const OF_SWITCH: [Peer; 4] = [
    peer(
        "10.1.0.2",
        true,
        &[
            "10.0.1.1/32",
            "10.0.0.128/25",
            "10.0.0.1/32 identifier 1 nexthop 10.1.0.11",
            "10.0.0.1/32 identifier 2 nexthop 10.1.0.12",
        ],
    ),
    peer("10.1.0.3", true, &MANY),
    peer("10.1.0.4", false, &["10.0.0.3/32"]),
    peer("10.1.0.5", true, &["10.0.0.5/32"]),
];

/// A daemon and its peers.
struct World {
    site: Site,
    daemon: Daemon,
}

impl World {
    fn start(daemon: Daemon, label: &str, edit: impl FnOnce(String) -> String) -> World {
        let site = Site::empty(&format!("bl{label}"), &["daemon", "peers"]);
        let mut world = World { site, daemon };
        let site = &mut world.site;
        let link = format!("ip link add u0 type veth peer name u0 netns {}", site.space("daemon"));
        site.within("peers", &link);
        for space in ["daemon", "peers"] {
            site.within(space, "ip link set u0 up");
        }
        site.within("daemon", &format!("ip addr add {}/24 dev u0", daemon.address()));
        let peers: &[Peer] = if daemon == Daemon::Proxy { &OF_PROXY } else { &OF_SWITCH };
        peers.iter().for_each(|peer| world.start_peer(peer));
        let text = edit(daemon.configuration());
        match daemon {
            Daemon::BirdSwitch => world.start_bird(&text),
            _ => world.site.start_frr("daemon", &text),
        }
        world
    }

    fn start_peer(&mut self, peer: &Peer) {
        let Peer { address, near, routes } = peer;
        let (own, own_asn) = (self.daemon.address(), if self.daemon == Daemon::Proxy { 64_512 } else { 65_000 });
        let asn = if *address == "10.1.0.254" { 65_000 } else { 64_512 };
        // Pods open connections. The daemons of the proxy and the switch open the others.
        let passive = asn != own_asn;
        let of_switch = if passive { "[neighbors.add-paths.config]\nreceive = true\nsend-max = 8\n" } else { "" };
        let text = format!(
            "[global.config]\nas = {asn}\nrouter-id = \"{address}\"\nlocal-address-list = [\"{address}\"]\n\
             [[neighbors]]\n[neighbors.config]\nneighbor-address = \"{own}\"\npeer-as = {own_asn}\n\
             [neighbors.timers.config]\nconnect-retry = 5\n\
             [neighbors.as-path-options.config]\nallow-own-as = 2\n\
             [neighbors.transport.config]\nlocal-address = \"{address}\"\npassive-mode = {passive}\n\
             [neighbors.ttl-security.config]\nenabled = {near}\nttl-min = 255\n{of_switch}"
        );
        let file = self.site.path(&format!("{address}.toml"));
        std::fs::write(&file, text).unwrap();
        self.site.within("peers", &format!("ip addr add {address}/24 dev u0"));
        let (file, api) = (file.display().to_string(), self.api(address));
        let arguments = ["-f", &file, "--api-hosts", &api, "--pprof-disable"];
        let process = self.site.spawn("peers", address, "gobgpd", &arguments);
        self.site.processes.push(process);
        until("GoBGP answers", || self.gobgp(address, "global").ok());
        for route in *routes {
            self.gobgp(address, &format!("global rib add {route}")).unwrap();
        }
    }

    fn start_bird(&mut self, text: &str) {
        let site = &mut self.site;
        let (file, socket) = (site.path("bird.conf"), site.path("bird.ctl"));
        std::fs::write(&file, text).unwrap();
        let (file, control) = (file.display().to_string(), socket.display().to_string());
        let bird = site.spawn("daemon", "bird", "bird", &["-R", "-f", "-c", &file, "-s", &control]);
        site.processes.push(bird);
        until("BIRD starts", || socket.exists().then_some(()));
        // GoBGP has no BFD, so FRR answers BFD at one address. BIRD sends multihop BFD with a hop limit of 64.
        let bfd = "bfd\n peer 10.1.0.254 multihop local-address 10.1.0.2\n  minimum-ttl 1\n  receive-interval 50\n  \
                   transmit-interval 50\n exit\nexit\n";
        site.start_frr("peers", bfd);
    }

    fn api(&self, address: &str) -> String {
        format!("unix://{}", self.site.path(&format!("{address}.sock")).display())
    }

    fn gobgp(&self, address: &str, words: &str) -> Result<String, String> {
        output(Command::new("gobgp").args(["--target", &self.api(address)]).args(words.split(' ')))
    }

    /// A peer's output about its session.
    fn of_peer(&self, address: &str) -> String {
        self.gobgp(address, &format!("neighbor {}", self.daemon.address())).unwrap_or_default()
    }

    fn is_established(&self, address: &str) -> bool {
        self.of_peer(address).contains("BGP state = ESTABLISHED")
    }

    /// Next hops of a prefix, or of all prefixes, that the daemon has announced to a peer.
    fn told(&self, address: &str, prefix: Option<&str>) -> Vec<String> {
        let text = self.gobgp(address, &format!("-j neighbor {} adj-in", self.daemon.address())).unwrap_or_default();
        let all: Value = serde_json::from_str(&text).unwrap_or_default();
        let routes = all.as_object().into_iter().flatten();
        let of_prefix = routes.filter(|(name, _)| prefix.is_none_or(|prefix| *name == prefix));
        let paths = of_prefix.flat_map(|(_, paths)| paths.as_array().cloned().unwrap_or_default());
        let attributes = paths.flat_map(|path| path["attrs"].as_array().cloned().unwrap_or_default());
        let mut all: Vec<_> = attributes.filter_map(|one| Some(one["nexthop"].as_str()?.to_owned())).collect();
        all.sort();
        all
    }

    fn frr(&self, what: &str) -> Value {
        let directory = self.site.path("daemon").display().to_string();
        let show = format!("show {what} json");
        let text = output(Command::new("vtysh").args(["--vty_socket", &directory, "-c", &show])).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    fn bird(&self, words: &str) -> String {
        let socket = self.site.path("bird.ctl").display().to_string();
        output(Command::new("birdc").args(["-r", "-s", &socket]).args(words.split(' '))).unwrap_or_default()
    }

    /// Number of paths to a prefix that the daemon has accepted.
    fn paths(&self, prefix: &str) -> usize {
        match self.daemon {
            Daemon::BirdSwitch => self.bird(&format!("show route {prefix}")).matches(" unicast [").count(),
            _ => self.frr("bgp ipv4 unicast")["routes"][prefix].as_array().map_or(0, Vec::len),
        }
    }

    /// Number of next hops of the pods' address in the kernel.
    fn next_hops(&self) -> usize {
        let routes = self.site.run(&format!("ip -n {} -j route", self.site.space("daemon")));
        let routes: Value = serde_json::from_str(&routes).unwrap();
        let found = routes.as_array().unwrap().iter().find(|route| route["dst"] == "10.0.0.1");
        found.map_or(0, |route| route["nexthops"].as_array().map_or(1, Vec::len))
    }

    /// FRR's state of a peer for IPv4 routes.
    fn of_frr(&self, address: &str) -> Value {
        self.frr(&format!("bgp neighbors {address}"))[address]["addressFamilyInfo"]["ipv4Unicast"].clone()
    }

    /// The filter for announcements to a peer.
    fn filter_out(&self, address: &str) -> Value {
        self.of_frr(address)["outgoingUpdatePrefixFilterList"].clone()
    }

    /// The interval of FRR's BFD session with a peer, ms.
    fn bfd_ms(&self, address: &str) -> Option<u64> {
        let peers = self.frr("bfd peers");
        let peer = peers.as_array()?.iter().find(|known| known["peer"] == address)?;
        (peer["detect-multiplier"] == 3).then(|| peer["receive-interval"].as_u64())?
    }

    /// Whether the daemon has told a peer that it keeps its routes during a restart.
    fn restarts_gracefully(&self, address: &str) -> bool {
        let text = self.of_peer(address);
        let told = text.split_once("graceful-restart:").and_then(|(_, rest)| rest.split_once("Remote: restart time"));
        told.and_then(|(_, rest)| rest.lines().nth(1)).is_some_and(|line| line.contains("ipv4-unicast"))
    }

    fn was_cut_off(&self, address: &str) -> bool {
        let log = std::fs::read_to_string(self.site.path(&format!("{address}.log"))).unwrap();
        log.contains("maximum number of prefixes reached")
    }
}

impl Daemon {
    fn address(self) -> &'static str {
        if self == Daemon::Proxy { "10.1.0.2" } else { "10.1.0.254" }
    }

    fn configuration(self) -> String {
        let (end, daemon, more) = match self {
            Daemon::Proxy => ("proxy", "frr", "--proxy 10.1.0.2 --max-pods 8"),
            Daemon::FrrSwitch => ("switch", "frr", "--proxy 10.1.0.2,10.1.0.3,10.1.0.4,10.1.0.5 --max-pods 1"),
            Daemon::BirdSwitch => ("switch", "bird", "--proxy 10.1.0.2,10.1.0.3,10.1.0.4,10.1.0.5 --max-pods 1"),
        };
        let link = "--pods 10.1.0.0/24 --switch 10.1.0.254 --max-prefixes 3 --vips 10.0.0.0/24";
        let options = format!("--daemon {daemon} {more} {link} --bfd-ms {BFD_MS}");
        configuration(end, &options.split(' ').collect::<Vec<_>>())
    }
}

fn refuses_others(world: &World) -> bool {
    world.paths("10.0.1.1/32") == 0 && world.paths("10.0.0.128/25") == 0
}

fn has_both_pods(world: &World) -> bool {
    world.paths("10.0.0.1/32") == 2
}

/// Runs a daemon with its configuration; then with one in which the lines of all checks are replaced; then with one
/// without GTSM.
fn try_lines(daemon: Daemon, label: &str, checks: &[Check], gtsm: &[(&str, &str)], far: &str) {
    let is_here = |program: &str| output(Command::new(program).arg("--version")).is_ok();
    if !has_frr() || !is_here("bird") || !is_here("gobgpd") {
        return println!("SKIPPED: FRR, BIRD or GoBGP is not on this machine");
    }
    let good =
        if daemon == Daemon::Proxy { &["10.1.0.11", "10.1.0.12", "10.1.0.254"][..] } else { &["10.1.0.2", "10.1.0.5"] };
    let settle = |world: &World| {
        let is = || good.iter().all(|peer| world.is_established(peer)) && world.paths("10.0.0.1/32") > 0;
        until("good peers are established", || is().then_some(()));
        std::thread::sleep(SETTLES);
    };
    let replaced = |text: String, pairs: &[(&str, &str)]| {
        pairs.iter().fold(text, |text, (line, other)| {
            assert!(text.contains(line), "{line:?} is not in {text}");
            text.replace(line, other)
        })
    };
    let world = World::start(daemon, &format!("{label}a"), |text| text);
    if daemon == Daemon::Proxy {
        // The rules of docs/GATEWAY.md.
        for rule in [
            "table inet bifrost_bgp",
            "chain inet bifrost_bgp input { type filter hook input priority 0 ; }",
            "rule inet bifrost_bgp input ip saddr 10.1.0.0/24 tcp dport 179 ip ttl != 255 drop",
        ] {
            world.site.within("daemon", &format!("nft add {rule}"));
        }
    }
    settle(&world);
    for Check { what, holds, .. } in checks {
        until(what, || holds(&world).then_some(()));
    }
    assert!(!world.is_established(far), "a peer that is further away than the link");
    drop(world);

    let all: Vec<_> = checks.iter().flat_map(|check| check.instead).copied().collect();
    let world = World::start(daemon, &format!("{label}b"), |text| replaced(text, &all));
    settle(&world);
    for Check { what, holds, .. } in checks.iter().filter(|check| !check.instead.is_empty()) {
        until(&format!("it is noticed that a line is not there: {what}"), || (!holds(&world)).then_some(()));
    }
    drop(world);

    let world = World::start(daemon, &format!("{label}c"), |text| replaced(text, gtsm));
    until("without GTSM, a peer that is further away speaks", || world.is_established(far).then_some(()));
}

#[test]
#[ignore = "runs some tens of daemons, for half a minute"]
fn lines_of_a_proxy_of_frr_do_what_they_are_for() {
    let checks = [
        check("addresses of others", &[("neighbor pods prefix-list vips in", "!")], refuses_others),
        check(
            "routes of the switch",
            &[("neighbor 10.1.0.254 prefix-list none in", "neighbor 10.1.0.254 prefix-list vips in")],
            |world| world.paths("10.0.0.77/32") == 0,
        ),
        check("nothing to pods", &[("neighbor pods prefix-list none out", "!")], |world| {
            world.filter_out("10.1.0.11") == "none"
        }),
        check(
            "only pods' addresses to the switch",
            &[ANY, ("neighbor 10.1.0.254 prefix-list vips out", "neighbor 10.1.0.254 prefix-list any out")],
            |world| world.filter_out("10.1.0.254") == "vips",
        ),
        check("too many addresses", &[("neighbor pods maximum-prefix 3", "!")], |world| world.was_cut_off("10.1.0.14")),
        check(
            "all pods to the switch, with their next hops",
            &[("neighbor 10.1.0.254 addpath-tx-all-paths", "!")],
            |world| world.told("10.1.0.254", Some("10.0.0.1/32")).len() == 2,
        ),
        check("next hops are pods", &[("neighbor 10.1.0.254 attribute-unchanged next-hop", "!")], |world| {
            // Without the line, FRR keeps only next hops that are on the link with the switch.
            let hops = world.told("10.1.0.254", Some("10.0.0.1/32"));
            let are_pods = hops.iter().all(|hop| ["10.1.0.11", "10.1.0.12"].contains(&&**hop));
            let unchanged = world.of_frr("10.1.0.254")["unchangedNextHopPropogatedToNbr"] == true;
            !hops.is_empty() && are_pods && unchanged
        }),
        check("graceful restart", &[("\n bgp graceful-restart\n", "\n")], |world| {
            world.restarts_gracefully("10.1.0.254")
        }),
        check("BFD of pods", &[("neighbor pods bfd profile bifrost", "!")], |world| {
            world.bfd_ms("10.1.0.11") == Some(BFD_MS)
        }),
        check("BFD of the switch", &[("neighbor 10.1.0.254 bfd profile bifrost", "!")], |world| {
            world.bfd_ms("10.1.0.254") == Some(BFD_MS)
        }),
        check("both pods", &[], has_both_pods),
    ];
    // FRR does not check the hop limit of dynamic peers. An nftables rule does, and the last run has none.
    try_lines(Daemon::Proxy, "p", &checks, &[], "10.1.0.13");
}

#[test]
#[ignore = "runs some tens of daemons, for half a minute"]
fn lines_of_a_switch_of_frr_do_what_they_are_for() {
    let checks = [
        check("addresses of others", &[ANY, ("prefix-list vips in", "prefix-list any in")], refuses_others),
        check("nothing to proxies", &[("prefix-list none out", "prefix-list vips out")], |world| {
            world.is_established("10.1.0.2") && world.told("10.1.0.2", None).is_empty()
        }),
        check("too many addresses", &[("maximum-prefix 3", "maximum-prefix 100")], |world| {
            world.was_cut_off("10.1.0.3")
        }),
        check("all pods", &[("maximum-paths 64", "maximum-paths 1")], |world| world.next_hops() == 2),
        check("graceful restart", &[("\n bgp graceful-restart\n", "\n")], |world| {
            world.restarts_gracefully("10.1.0.2")
        }),
        check("BFD", &[(" bfd profile bifrost", " bfd")], |world| world.bfd_ms("10.1.0.2") == Some(BFD_MS)),
        check("both pods by one proxy", &[], has_both_pods),
    ];
    try_lines(Daemon::FrrSwitch, "f", &checks, &[("ttl-security hops 1", "description far")], "10.1.0.4");
}

#[test]
#[ignore = "runs some tens of daemons, for half a minute"]
fn lines_of_a_switch_of_bird_do_what_they_are_for() {
    let checks = [
        check("addresses of others", &[("import where net ~ vips_ipv4", "import all")], refuses_others),
        check("nothing to proxies", &[("    export none;", "    export all;")], |world| {
            world.is_established("10.1.0.2") && world.told("10.1.0.2", None).is_empty()
        }),
        check("too many addresses", &[("    import limit 3 action disable;\n", "")], |world| {
            world.was_cut_off("10.1.0.3")
        }),
        check("both pods by one proxy", &[("    add paths rx;\n", "")], has_both_pods),
        check("all pods", &[("  merge paths on limit 64;\n", "")], |world| world.next_hops() == 2),
        check("graceful restart", &[("  graceful restart on;\n", "")], |world| world.restarts_gracefully("10.1.0.2")),
        check(
            "BFD",
            &[("multihop { interval 100 ms; multiplier 3; }", "multihop { interval 400 ms; multiplier 5; }")],
            |world| {
                let sessions = world.bird("show bfd sessions");
                let session = sessions.lines().find(|line| line.starts_with("10.1.0.2 ")).unwrap_or_default();
                session.contains(" Up ") && session.contains(" 0.100 ")
            },
        ),
    ];
    try_lines(Daemon::BirdSwitch, "b", &checks, &[("ttl security on;", "ttl security off;")], "10.1.0.4");
}
