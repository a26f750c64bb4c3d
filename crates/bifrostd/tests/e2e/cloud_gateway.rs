//! Guests reach the Internet, another VPC and a cloud service through a gateway: `bifrost-nicd` and `bifrost-gw` on a third host, to which routes of the
//! VPCs lead over plain VXLAN, or over the reliable transport, whose packets are lost at random.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use bifrost_control::Client;
use bifrost_control::api::{GatewayHost, GatewayTransport};

use crate::common::host::{Host, PATIENT, vpc};
use crate::common::traffic::{exchange, ping, ping_with};
use crate::common::{Guest, Lab, Net, Options, eventually};

const MEGABYTES: u64 = 1 << 20;
const NICD: &str = r#"control = { socket = "DIR/nicd.sock" }
device = { name = "l0", mtu = 1700 }
[[pods]]
name = "vpc"
number = 1
cores = 2
timeout_us = 100000
own = ["172.31.0.3"]
interfaces = [{ socket = "DIR/vpc.sock" }]
"#;
const TRANSPORT: &str = r#"[pods.transport]
addresses = ["172.31.0.3"]
mac = "02:00:00:00:00:fe"
vnis = [100, 200, 300]
hosts = [["172.31.0.1"], ["172.31.0.2"]]
initial_rto_us = 200000
rto_floor_us = 200000
"#;
/// What the bridge loses: 3 % of the transport's packets, in both directions.
const LOSS: &str = "table bridge loss {
  chain c {
    type filter hook forward priority 0
    udp dport 4794 numgen random mod 100 < 3 counter drop
  }
}
";
const POD: &str = r#"control = { socket = "DIR/gw.sock" }
[gateway]
pod = 1
cores = 2
interfaces = ["DIR/vpc.sock"]
addresses = ["172.31.0.3"]
mac = "02:00:00:00:00:fe"
mtu = 1700
on_link = ["172.31.0.0/24"]
[[pools]]
name = "nat"
addresses = ["203.0.113.200"]
[[pools]]
name = "service"
vni = 300
addresses = ["100.64.1.1"]
[[vpcs]]
vni = 100
routers = ["10.1.0.254"]
snat = "nat"
routes = [
  { prefix = "10.1.0.0/24", to = "local" },
  { prefix = "10.2.0.0/24", to = "peer:200" },
  { prefix = "0.0.0.0/0", to = "internet" },
]
hosts = [{ address = "10.1.0.1", mac = "02:00:00:00:00:01", vtep = "172.31.0.1" }]
[[vpcs]]
vni = 200
routes = [{ prefix = "10.2.0.0/24", to = "local" }, { prefix = "10.1.0.0/24", to = "peer:100" }]
hosts = [{ address = "10.2.0.2", mac = "02:00:00:00:00:02", vtep = "172.31.0.2" }]
[[vpcs]]
vni = 300
routes = [{ prefix = "100.64.0.0/24", to = "local" }]
hosts = [{ address = "100.64.0.80", mac = "02:00:00:00:00:03", vtep = "172.31.0.2" }]
[[services]]
vni = 100
address = "10.9.0.80"
protocol = 6
port = 80
backend_vni = 300
pool = "service"
backends = ["100.64.0.80:8080"]
[[internet]]
prefix = "0.0.0.0/0"
next_hop = "172.31.0.9"
"#;

/// A VPC whose guests send what is not of their subnet to the gateway.
fn network(vni: u32, router: &str) -> (String, String) {
    let section = format!("{}gateway = [\"{router}\"]\n", vpc(vni, "all", "flow"));
    let mac = "02:00:00:00:00:fe";
    (section, format!("[[route]]\nvni = {vni}\nprefix = \"0.0.0.0/0\"\npeer = \"host-c\"\nmac = \"{mac}\"\n"))
}

struct World {
    /// The hosts use the transport to the gateway.
    transport: bool,
    lab: Lab,
    internet: Net,
    gateway: [Child; 2],
}

impl Drop for World {
    fn drop(&mut self) {
        for child in &mut self.gateway {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            for name in ["bifrost-nicd", "bifrost-gw"] {
                let log = self.lab.hosts[2].directory.join(format!("{name}.log"));
                eprintln!("{name}: {}", std::fs::read_to_string(log).unwrap_or_default());
            }
        }
    }
}

/// Starts both programs of the gateway.
fn gateway(host: &Host, transport: bool) -> [Child; 2] {
    let nicd = if transport { format!("{NICD}{TRANSPORT}") } else { NICD.to_owned() };
    [("bifrost-nicd", nicd.as_str()), ("bifrost-gw", POD)].map(|(name, text)| start(host, name, text))
}

/// Starts a program of the gateway, which the workspace's tests are built with.
fn start(host: &Host, name: &str, config: &str) -> Child {
    let program = Path::new(env!("CARGO_BIN_EXE_bifrostd")).with_file_name(name);
    assert!(program.is_file(), "{} is missing: cargo build -p bifrost-gatewayd", program.display());
    let directory = &host.directory;
    let file = directory.join(format!("{name}.toml"));
    std::fs::write(&file, config.replace("DIR", &directory.display().to_string())).unwrap();
    let log = File::create(directory.join(format!("{name}.log"))).unwrap();
    let mut command = host.net.command(program.to_str().unwrap());
    command.arg("--config").arg(file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().unwrap()
}

/// `a` is in VPC 100 on the first host, `b` in VPC 200 and `s`, a service's backend, in VPC 300 on the second; the third host's device is the gateway's.
fn world(transport: bool) -> World {
    let networks = [(100, "10.1.0.254"), (200, "10.2.0.254"), (300, "100.64.0.254")].map(|(n, r)| network(n, r));
    let vpcs = networks.iter().map(|(section, _)| section.as_str()).collect();
    let mut lab = Lab::of(3, Options { links: 1, vpcs, transport: PATIENT.to_owned(), ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.1.0.1/24"]).gateway("10.1.0.254"));
    lab.add(1, Guest::new("b", 2, &["10.2.0.2/24"]).vni(200).gateway("10.2.0.254"));
    lab.add(1, Guest::new("s", 3, &["100.64.0.80/24"]).vni(300).gateway("100.64.0.254"));
    // The peers of the first two hosts are each other, and the gateway.
    let (peer, plain) = ("[\"172.31.0.3\"]\ntransport = \"auto\"", "[\"172.31.0.3\"]\ntransport = \"plain\"");
    let tag = lab.tag().to_owned();
    for host in &mut lab.hosts[..2] {
        assert!(host.config.contains(peer));
        if !transport {
            host.config = host.config.replace(peer, plain);
        }
        networks.iter().for_each(|(_, route)| host.config.push_str(route));
    }
    // No packet comes from the Internet that is larger than the guests take.
    let internet = Net::new(&tag, "internet");
    internet.ip(&format!(
        "link add l0 mtu 1500 type veth peer name internet netns be{tag}-bridges\nlink set l0 up\n\
         addr add 172.31.0.9/24 dev l0\naddr add 198.51.100.1/32 dev lo\nroute add 203.0.113.0/24 via 172.31.0.3\n"
    ));
    let bridge = "link set internet master b0\nlink set internet up\n";
    let done = internet.run("ip", &["-n", &format!("be{tag}-bridges"), "-batch", "-"], bridge);
    assert!(done.status.success(), "{done:?}");
    lab.hosts[2].net.ip("addr flush dev l0\nlink set l0 addrgenmode none\n");
    // A veth pair leaves checksums unfinished, and segments uncut, for the other kernel. A NIC would not, and the gateway is none of these kernels.
    for net in [&lab.hosts[0].net, &lab.hosts[1].net, &internet] {
        let done = net.run("ethtool", &["-K", "l0", "tx", "off", "tso", "off", "gso", "off"], "");
        assert!(done.status.success(), "{done:?}");
    }
    let gateway = gateway(&lab.hosts[2], transport);
    lab.hosts[..2].iter_mut().for_each(|host| drop(host.start()));
    let world = World { transport, lab, internet, gateway };
    world.knows_its_neighbours();
    world
}

impl World {
    fn knows_its_neighbours(&self) {
        let client = Client::new(self.lab.hosts[2].directory.join("gw.sock")).unwrap();
        eventually(20.0, "the gateway knows its neighbours", || {
            let known = client.gateway_pod().map(|pod| pod.neighbours).unwrap_or_default();
            ["172.31.0.1", "172.31.0.2", "172.31.0.9"].iter().all(|a| known.get(*a).is_some_and(Option::is_some))
        });
    }

    /// Both programs are killed and started again.
    fn restart(&mut self) {
        for child in &mut self.gateway {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        self.gateway = gateway(&self.lab.hosts[2], self.transport);
        self.knows_its_neighbours();
    }

    fn bridge(&self, command: &str, input: &str) -> String {
        let arguments = ["netns", "exec", &format!("be{}-bridges", self.lab.tag()), "nft"];
        let arguments: Vec<&str> = arguments.into_iter().chain(command.split_whitespace()).collect();
        let done = self.internet.run("ip", &arguments, input);
        assert!(done.status.success(), "{done:?}");
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    /// The transport of the gateway's pod.
    fn transport(&self) -> GatewayTransport {
        let client = Client::new(self.lab.hosts[2].directory.join("nicd.sock")).unwrap();
        client.pipeline().unwrap().pods[0].transport.clone().unwrap_or_default()
    }
}

/// Segments that a guest's TCP has sent again for its timer or for acknowledgements; not those with which it asks what a peer has when nothing comes for
/// some milliseconds (RFC 8985, section 7), whether or not something is lost.
fn repeated_segments(net: &Net) -> u64 {
    net.enter(|| {
        let counters =
            ["snmp", "netstat"].map(|name| std::fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap());
        let get = |name: &str| {
            let mut lines = counters.iter().flat_map(|text| text.lines());
            while let (Some(names), Some(values)) = (lines.next(), lines.next()) {
                if let Some(at) = names.split_whitespace().position(|n| n == name) {
                    return values.split_whitespace().nth(at).unwrap().parse::<u64>().unwrap();
                }
            }
            panic!("no {name}");
        };
        get("RetransSegs") - get("TCPLossProbes").min(get("RetransSegs"))
    })
}

#[test]
fn guests_reach_the_internet_another_vpc_and_a_service_through_a_gateway() {
    let world = world(false);
    reach_everything(&world);
    for host in &world.lab.hosts[..2] {
        assert_eq!(host.counter("rte.requests_sent_packets"), 0, "nothing of this goes over the transport");
    }
}

#[test]
fn hosts_reach_the_gateway_over_the_transport_which_repairs_what_is_lost() {
    let mut world = world(true);
    let (a, b) = (world.lab.net("a"), world.lab.net("b"));
    eventually(20.0, "both hosts have connections with the gateway", || {
        ping(a, "198.51.100.1", 1, 56);
        ping(b, "10.1.0.1", 1, 56);
        world.transport().hosts.iter().all(|host| host.open_connections > 0)
    });
    world.bridge("-f -", LOSS);
    let before = [a, b].map(repeated_segments);
    reach_everything(&world);
    let after = [a, b].map(repeated_segments);
    let told = world.bridge("list table bridge loss", "");
    assert!(!told.contains("packets 0 "), "something was lost: {told}");
    assert_eq!(after, before, "the transport repairs what is lost, and not the guests");
    eventually(5.0, "the gateway and the hosts have repaired something", || {
        let repaired = |host: &GatewayHost| host.retransmitted_packets > 0 && host.counters["rx_frames"] > 1000;
        world.transport().hosts.iter().all(repaired)
    });
    for host in &world.lab.hosts[..2] {
        assert!(host.counter("rte.retransmitted_packets") > 0, "{:?}", host.counters());
    }
    let told = world.transport();
    for host in &told.hosts {
        assert_eq!((host.best_effort_connections, host.counters["surrendered_frames"]), (0, 0), "{host:?}");
    }

    world.bridge("delete table bridge loss", "");
    world.restart();
    let (a, b) = (world.lab.net("a"), world.lab.net("b"));
    eventually(20.0, "traffic goes on", || ping(a, "198.51.100.1", 1, 56) == 1 && ping(b, "10.1.0.1", 1, 56) == 1);
    exchange(a, b, "10.2.0.2", 5012, MEGABYTES);
    eventually(40.0, "over the transport", || {
        ping(a, "198.51.100.1", 1, 56);
        world.transport().hosts.iter().all(|host| host.open_connections > 0 && host.counters["delivered_frames"] > 0)
    });
}

/// The Internet, another VPC and a service, from VPC 100; and nothing else.
fn reach_everything(world: &World) {
    let (a, b, s) = (world.lab.net("a"), world.lab.net("b"), world.lab.net("s"));
    // The hosts' kernels have yet to ask for the gateway's address.
    eventually(10.0, "the Internet is reached", || ping(a, "198.51.100.1", 1, 56) == 1);
    // The switch and the gateway are a hop each; what comes back into a VPC crosses the gateway alone.
    assert_eq!(ping_with(a, "198.51.100.1", 5, 56, 64).len(), 5);
    exchange(a, &world.internet, "198.51.100.1", 5001, 2 * MEGABYTES);
    assert_eq!(ping(a, "198.51.100.1", 5, 4000), 5, "in pieces, which are translated both ways");

    assert_eq!(ping(a, "10.2.0.2", 5, 56), 5);
    exchange(a, b, "10.2.0.2", 5002, 2 * MEGABYTES);
    exchange(b, a, "10.1.0.1", 5003, 2 * MEGABYTES);

    let listener = s.enter(|| TcpListener::bind("100.64.0.80:8080").unwrap());
    let mut asking = a.enter(|| TcpStream::connect(SocketAddr::from(([10, 9, 0, 80], 80))).unwrap());
    let (mut answering, from) = listener.accept().unwrap();
    assert_eq!(from.ip().to_string(), "100.64.1.1", "the backend sees an address of the pool");
    for stream in [&asking, &answering] {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    }
    let mut heard = [0; 9];
    asking.write_all(b"a request").unwrap();
    answering.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"a request");
    answering.write_all(b"an answer").unwrap();
    asking.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"an answer");

    // From outside, nobody gets in who was not asked; and VPC 300 is only reached through its service.
    assert_eq!(ping(&world.internet, "203.0.113.200", 2, 56), 0);
    assert_eq!(ping(a, "100.64.0.80", 2, 56), 0);
}
