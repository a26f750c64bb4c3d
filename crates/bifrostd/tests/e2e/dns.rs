//! DNS: real resolvers (glibc's and BusyBox's) in a guest's namespace query its gateway for other guests.

use std::net::UdpSocket;
use std::time::Duration;

use crate::common::host::vpc;
use crate::common::{Guest, Lab, Options};

/// The result of glibc's resolver in a namespace whose only name server is the gateway.
fn resolved(lab: &Lab, guest: &str, gateway: &str, name: &str) -> Option<String> {
    let resolv = lab.hosts[0].directory.join("resolv.conf");
    std::fs::write(&resolv, format!("nameserver {gateway}\nsearch vpc1.internal\noptions timeout:5 attempts:2\n"))
        .unwrap();
    let script = format!("mount --bind {resolv:?} /etc/resolv.conf && exec getent ahosts {name}");
    let mut command = lab.net(guest).command("unshare");
    let output = command.args(["--mount", "sh", "-c", &script]).output().unwrap();
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
}

/// The output of BusyBox's `nslookup`.
fn nslookup(lab: &Lab, guest: &str, arguments: &[&str]) -> String {
    let mut command = lab.net(guest).command("busybox");
    let output = command.arg("nslookup").args(arguments).output().unwrap();
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

#[test]
fn guests_find_each_other_by_name() {
    let more = "gateway = [\"10.0.0.254\", \"fd00::fe\"]\ndomain = \"vpc1.internal\"\n";
    let vpcs = format!("{}{more}{}gateway = [\"10.0.0.254\"]\n", vpc(100, "tcp", "flow"), vpc(200, "tcp", "flow"));
    let mut lab = Lab::new(Options { vpcs, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24", "fd00::1/64"]));
    lab.add(0, Guest::new("b", 2, &["10.0.0.2/24", "fd00::2/64"]));
    lab.add(1, Guest::new("far", 3, &["10.0.0.3/24"]));
    lab.add(0, Guest::new("d", 4, &["10.0.0.4/24"]).vni(200));
    // Names of guests on other hosts come from their routes.
    let mac = "mac = \"02:00:00:00:00:03\"\n";
    let config = &mut lab.hosts[0].config;
    assert!(config.contains(mac));
    *config = config.replacen(mac, &format!("{mac}name = \"far\"\n"), 1);
    lab.start();

    for gateway in ["10.0.0.254", "fd00::fe"] {
        let b = resolved(&lab, "a", gateway, "b").expect("b has a name");
        assert!(b.contains("10.0.0.2") && b.contains("fd00::2"), "{b}");
        assert!(resolved(&lab, "a", gateway, "far.vpc1.internal").is_some_and(|far| far.contains("10.0.0.3")));
        // A name of another VPC, an unknown name, and a name in another domain.
        for name in ["d", "nobody", "example.com"] {
            assert_eq!(resolved(&lab, "a", gateway, name), None, "{name} by {gateway}");
        }
    }
    let back = nslookup(&lab, "a", &["10.0.0.2", "10.0.0.254"]);
    assert!(back.contains("b.vpc1.internal"), "{back}");
    let nobody = nslookup(&lab, "a", &["nobody.vpc1.internal", "10.0.0.254"]);
    assert!(nobody.contains("NXDOMAIN"), "{nobody}");
    let other = nslookup(&lab, "a", &["example.com", "10.0.0.254"]);
    assert!(other.contains("REFUSED"), "{other}");

    // A VPC without a domain has no name server, and malformed queries are counted.
    let ask = |guest: &str, message: &'static [u8]| {
        lab.net(guest).enter(move || {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
            socket.send_to(message, "10.0.0.254:53").unwrap();
            socket.recv(&mut [0; 512]).is_ok()
        })
    };
    const QUESTION: &[u8] =
        b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01b\x04vpc1\x08internal\x00\x00\x01\x00\x01";
    assert!(ask("a", QUESTION) && !ask("d", QUESTION) && !ask("a", b"no question"));
    let host = &lab.hosts[0];
    assert_eq!((host.drops("a", "dns_malformed"), host.drops("a", "dns_rate")), (1, 0));
    assert_eq!(host.drops("d", "gateway_service"), 1);

    // A reload removes names.
    let host = &mut lab.hosts[0];
    host.config = host.config.replacen("name = \"far\"\n", "name = \"farther\"\n", 1);
    host.write_config();
    assert_eq!(host.client.reload().unwrap().routes.changed.len(), 1);
    assert!(
        resolved(&lab, "a", "10.0.0.254", "far").is_none() && resolved(&lab, "a", "10.0.0.254", "farther").is_some()
    );
}
