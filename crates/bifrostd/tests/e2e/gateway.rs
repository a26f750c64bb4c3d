//! A gateway (`bifrost-nicd` and `bifrost-gw`) as the next hop of a host's guests over plain VXLAN: to the Internet, to
//! another VPC, to a cloud service.

use std::fs::File;
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use bifrost_control::Client;

use crate::common::host::vpc;
use crate::common::traffic::{exchange, ping, ping_with};
use crate::common::{Guest, Lab, Options, eventually};

const MEGABYTES: u64 = 1 << 20;
/// An Internet server: the first host's kernel.
const OUTSIDE: &str = "198.51.100.1";

/// Both programs, in the second host's namespace, on its end of the link.
struct Gateway {
    nicd: Child,
    gw: Child,
    directory: PathBuf,
}

impl Drop for Gateway {
    fn drop(&mut self) {
        for child in [&mut self.gw, &mut self.nicd] {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            for name in ["bifrost-nicd", "bifrost-gw"] {
                let log = std::fs::read_to_string(self.directory.join(format!("{name}.log")));
                eprintln!("==== {name}: {}", log.unwrap_or_default());
            }
        }
    }
}

impl Gateway {
    fn start(lab: &Lab) -> Gateway {
        let net = &lab.hosts[1].net;
        net.ip("addr flush dev l0\n");
        let directory = lab.hosts[1].directory.clone();
        let start = |name: &str, config: String| -> Child {
            let program = Path::new(env!("CARGO_BIN_EXE_bifrostd")).with_file_name(name);
            assert!(program.exists(), "{} is missing: cargo build -p bifrost-gatewayd", program.display());
            let file = directory.join(format!("{name}.toml"));
            std::fs::write(&file, config).unwrap();
            let log = File::create(directory.join(format!("{name}.log"))).unwrap();
            let mut command = net.command(program.to_str().unwrap());
            command.arg("--config").arg(file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap()
        };
        let at = |name: &str| directory.join(name);
        let (control, memif) = (at("nicd.sock"), at("memif.sock"));
        let nicd = format!(
            r#"control = {{ socket = {control:?} }}
device = {{ name = "l0", mtu = 1700 }}
[[pods]]
name = "vpc"
number = 1
cores = 2
timeout_us = 100000
own = ["172.31.0.2"]
interfaces = [{{ socket = {memif:?} }}]
"#
        );
        let control = at("gw.sock");
        let gw = format!(
            r#"control = {{ socket = {control:?} }}
[gateway]
pod = 1
cores = 2
interfaces = [{memif:?}]
addresses = ["172.31.0.2"]
mac = "02:00:00:00:00:fe"
mtu = 1700
on_link = ["172.31.0.0/24"]
[[pools]]
name = "nat"
addresses = ["203.0.113.1"]
[[pools]]
name = "service"
vni = 300
addresses = ["10.3.9.1"]
[[vpcs]]
vni = 100
snat = "nat"
routes = [{{ prefix = "10.1.0.0/24", to = "local" }}, {{ prefix = "10.2.0.0/24", to = "peer:200" }}, {{ prefix = "0.0.0.0/0", to = "internet" }}]
hosts = [{{ address = "10.1.0.1", mac = "02:00:00:00:00:01", vtep = "172.31.0.1" }}]
[[vpcs]]
vni = 200
routes = [{{ prefix = "10.1.0.0/24", to = "peer:100" }}]
hosts = [{{ address = "10.2.0.2", mac = "02:00:00:00:00:02", vtep = "172.31.0.1" }}]
[[vpcs]]
vni = 300
routes = [{{ prefix = "10.3.0.0/24", to = "local" }}]
hosts = [{{ address = "10.3.0.80", mac = "02:00:00:00:00:03", vtep = "172.31.0.1" }}]
[[services]]
vni = 100
address = "10.1.9.9"
protocol = 6
port = 80
backend_vni = 300
pool = "service"
backends = ["10.3.0.80:8080"]
[[internet]]
prefix = "0.0.0.0/0"
next_hop = "172.31.0.1"
"#
        );
        let gateway = Gateway { nicd: start("bifrost-nicd", nicd), gw: start("bifrost-gw", gw), directory };
        eventually(20.0, "the gateway knows the host", || {
            let known = Client::new(&control).unwrap().gateway_pod();
            known.is_ok_and(|pod| pod.neighbours.get("172.31.0.1").is_some_and(Option::is_some))
        });
        gateway
    }
}

#[test]
fn guests_reach_all_services_of_the_gateway() {
    let gateways = |n: u32, address: &str| format!("{}gateway = [\"{address}\"]\n", vpc(n, "tcp", "flow"));
    let vpcs = gateways(100, "10.1.0.254") + &gateways(200, "10.2.0.254") + &gateways(300, "10.3.0.254");
    let mut lab = Lab::new(Options { links: 1, peer: "plain", vpcs, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.1.0.1/24"]).gateway("10.1.0.254"));
    lab.add(0, Guest::new("b", 2, &["10.2.0.2/24"]).vni(200).gateway("10.2.0.254"));
    lab.add(0, Guest::new("c", 3, &["10.3.0.80/24"]).vni(300).gateway("10.3.0.254"));
    for vni in [100, 200, 300] {
        lab.hosts[0].config.push_str(&format!(
            "[[route]]\nvni = {vni}\nprefix = \"0.0.0.0/0\"\npeer = \"host-b\"\nmac = \"02:00:00:00:00:fe\"\n"
        ));
    }
    let host = &lab.hosts[0].net;
    // A veth pair leaves checksums incomplete, which a NIC would complete.
    let output = host.run("ethtool", &["-K", "l0", "tx", "off", "tso", "off", "gso", "off"], "");
    assert!(output.status.success(), "{output:?}");
    host.ip(&format!("addr add {OUTSIDE}/32 dev lo\nlink set lo up\nroute add 203.0.113.0/24 via 172.31.0.2 dev l0\n"));
    lab.hosts[0].start();
    let gateway = Gateway::start(&lab);
    let (a, b, c) = (lab.net("a"), lab.net("b"), lab.net("c"));

    // The Internet, through NAT.
    assert_eq!(ping_with(a, OUTSIDE, 5, 56, 64).len(), 5, "the Internet answers");
    exchange(a, &lab.hosts[0].net, OUTSIDE, 5001, 2 * MEGABYTES);
    let refused = a.enter(|| {
        let socket = UdpSocket::bind("10.1.0.1:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        socket.connect((OUTSIDE, 9)).unwrap();
        socket.send(b"no listener").unwrap();
        socket.recv(&mut [0; 16]).unwrap_err().kind()
    });
    assert_eq!(refused, ErrorKind::ConnectionRefused, "the ICMP error reaches the guest through NAT");

    // Another VPC, in both directions.
    assert_eq!((ping(a, "10.2.0.2", 5, 1472), ping(b, "10.1.0.1", 5, 56)), (5, 5));
    exchange(a, b, "10.2.0.2", 5002, 2 * MEGABYTES);

    // A cloud service, which listens on another address and port.
    let server = c.spawn(|| {
        let listener = std::net::TcpListener::bind("10.3.0.80:8080").unwrap();
        let (mut stream, peer) = listener.accept().unwrap();
        std::io::copy(&mut stream.try_clone().unwrap(), &mut stream).unwrap();
        peer
    });
    let answered = a.enter(|| {
        use std::io::{Read as _, Write as _};
        let connect = || std::net::TcpStream::connect("10.1.9.9:80");
        let mut stream = (0..50)
            .find_map(|_| connect().map_err(|_| std::thread::sleep(Duration::from_millis(20))).ok())
            .expect("the service answers");
        stream.write_all(b"hello").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    });
    assert_eq!(answered, "hello");
    assert_eq!(server.join().unwrap().ip().to_string(), "10.3.9.1", "the service does not see the client's address");

    let pod = Client::new(gateway.directory.join("gw.sock")).unwrap().gateway_pod().unwrap();
    let count = |name: &str| pod.workers.iter().map(|worker| worker.get(name).copied().unwrap_or(0)).sum::<u64>();
    for service in ["vpc", "internet", "cloud_service"] {
        assert!(count(&format!("forwarded_{service}_packets")) >= 8, "{service}: {pod:?}");
    }
    let pipeline = Client::new(gateway.directory.join("nicd.sock")).unwrap().pipeline().unwrap();
    let order = &pipeline.pods[0].order;
    assert_eq!((order["timed_out_packets"], order["sent_late_packets"]), (0, 0));
    assert!(pipeline.stages.iter().all(|stage| stage.packets > 0 && stage.busy_ns > 0), "{:?}", pipeline.stages);
}
