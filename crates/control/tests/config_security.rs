//! Security groups, ACLs and bounds of sessions in configuration files.

#![allow(clippy::unwrap_used)]

use bifrost_control::config::{Action, Config, Direction, Remote, Rule, Sessions};

/// Line numbers in the table below refer to this text.
const GOOD: &str = r#"[host]
name = "host-a"
[underlay]
addresses = ["192.0.2.1"]
[sessions]
total = 2048
per_port = 100
[[security_group]]
name = "web"
[[security_group.ingress]]
protocol = "tcp"
ports = [80, "443", "8000-8099"]
from = ["0.0.0.0/0", "::/0"]
[[security_group.ingress]]
protocol = "icmp"
[[security_group.egress]]
protocol = 47
to = ["10.0.0.0/8"]
[[security_group]]
name = "closed"
[[vpc]]
vni = 100
[[vpc.acl]]
direction = "egress"
action = "deny"
protocol = "udp"
ports = [53]
to = ["192.0.2.53/32"]
[[vpc.acl]]
direction = "ingress"
action = "allow"
[[port]]
name = "web1"
vni = 100
security_groups = ["web", "closed"]
mac = "02:00:00:00:00:01"
addresses = ["10.0.0.1/24"]
"#;

#[test]
fn every_key_arrives() {
    let c = Config::parse(GOOD, "good.toml").unwrap();
    assert_eq!(c.sessions, Sessions { total: 2048, per_port: 100, flow_records: 1 << 15, vectors: true });
    let web = &c.security_groups[0];
    assert_eq!((web.name.as_str(), web.ingress.len(), web.egress.len()), ("web", 2, 1));
    let nets = |nets: &[&str]| nets.iter().map(|n| n.parse().unwrap()).collect::<Vec<ipnet::IpNet>>();
    let ports = vec![80..=80, 443..=443, 8000..=8099];
    assert_eq!(
        web.ingress[0],
        Rule { protocols: vec![6], from: nets(&["0.0.0.0/0", "::/0"]), to: vec![], remotes: vec![], ports, log: false }
    );
    assert_eq!(
        web.ingress[1],
        Rule { protocols: vec![1, 58], from: vec![], to: vec![], remotes: vec![], ports: vec![], log: false }
    );
    assert_eq!((web.egress[0].protocols.as_slice(), &web.egress[0].to), (&[47][..], &nets(&["10.0.0.0/8"])));
    assert!(c.security_groups[1].ingress.is_empty() && c.security_groups[1].egress.is_empty());
    let acl = &c.vpcs[0].acl;
    assert_eq!(
        (acl[0].direction, acl[0].action, acl[0].rule.ports.clone()),
        (Direction::Egress, Action::Deny, vec![53..=53])
    );
    assert_eq!((acl[1].direction, acl[1].action), (Direction::Ingress, Action::Allow));
    assert_eq!(c.ports[0].security_groups, ["web", "closed"]);
    let without = Config::parse(&GOOD.replace("[sessions]\ntotal = 2048\nper_port = 100\n", ""), "t").unwrap();
    assert_eq!(without.sessions, Sessions { total: 1 << 20, per_port: 100_000, flow_records: 1 << 15, vectors: true });
    let none = Config::parse(&GOOD.replace("per_port = 100\n", "flow_records = 0\nvectors = false\n"), "t").unwrap();
    assert_eq!(none.sessions, Sessions { total: 2048, per_port: 2048, flow_records: 0, vectors: false });
}

#[test]
fn rules_name_groups_and_sets() {
    let text = GOOD
        .replace("from = [\"0.0.0.0/0\", \"::/0\"]", "from = [\"10.0.0.0/8\", \"group:closed\", \"set:office\"]")
        .replace(
            "name = \"closed\"\n",
            "name = \"closed\"\negress = []\n[[address_set]]\nname = \"office\"\naddresses = [\"10.9.0.0/16\"]\n",
        );
    let c = Config::parse(&text, "t").unwrap();
    let rule = &c.security_groups[0].ingress[0];
    assert_eq!(rule.from, ["10.0.0.0/8".parse().unwrap()]);
    assert_eq!(rule.remotes, [Remote::Group("closed".to_owned()), Remote::Set("office".to_owned())]);
    assert_eq!(c.security_groups.iter().map(|g| g.restricts_egress).collect::<Vec<_>>(), [true, true]);
    assert!(c.security_groups[1].egress.is_empty());
    assert_eq!((c.address_sets.len(), c.address_sets[0].addresses.len()), (1, 1));
    let without = text.replace("egress = []\n", "");
    assert!(!Config::parse(&without, "t").unwrap().security_groups[1].restricts_egress);
    for (from, to, expected) in [
        ("group:closed", "group:clsed", "no security group named \"clsed\"; did you mean \"closed\"?"),
        ("set:office", "set:nowhere", "no address set named \"nowhere\"; known names: office"),
        ("set:office", "sets:office", "is not an address with a prefix length"),
        ("name = \"office\"", "name = \"of fice\"", "is not 1 to 63 of"),
        ("10.9.0.0/16", "10.9.0.1/16", "address_set[0].addresses: 10.9.0.1/16 has host bits set; write 10.9.0.0/16"),
        ("to = [\"192.0.2.53/32\"]", "to = [\"group:web\"]", "vpc[0].acl[0].to[0]"),
    ] {
        let errors = Config::parse(&text.replacen(from, to, 1), "t").unwrap_err().to_string();
        assert!(errors.contains(expected), "{to}: {errors}");
    }
}

#[test]
fn networks_behind_a_guest_have_no_other_owner() {
    let port = |n: u8, routed: &str| {
        format!(
            "[[port]]\nname = \"p{n}\"\nvni = 100\nmac = \"02:00:00:00:01:{n:02x}\"\naddresses = [\"10.0.1.{n}/24\"]\nrouted = [{routed}]\n"
        )
    };
    let with = |a: &str, b: &str| Config::parse(&format!("{GOOD}{}{}", port(1, a), port(2, b)), "t");
    let config = with("\"10.5.0.0/16\", \"fd05::/64\"", "\"10.5.1.0/24\"").unwrap();
    assert_eq!(config.ports[1].routed.len(), 2);
    for (a, b, expected) in [
        ("\"10.5.0.0/16\"", "\"10.5.0.0/16\"", "10.5.0.0/16 in VNI 100 is already port[1].routed"),
        ("\"10.5.0.1/16\"", "", "10.5.0.1/16 has host bits set; write 10.5.0.0/16"),
        ("\"10.0.0.1/32\"", "", "10.0.0.1 is the address of the local port \"web1\""),
        ("\"10.5.0.0\"", "", "lacks a prefix length"),
    ] {
        let errors = with(a, b).unwrap_err().to_string();
        assert!(errors.contains(expected), "{a} {b}: {errors}");
    }
}

#[test]
fn shared_addresses_have_no_other_owner() {
    let port = |n: u8, more: &str| {
        format!(
            "[[port]]\nname = \"p{n}\"\nvni = 100\nmac = \"02:00:00:00:01:{n:02x}\"\naddresses = [\"10.0.1.{n}/24\"]\n{more}\n"
        )
    };
    let good = GOOD.replacen("vni = 100\n", "vni = 100\ngateway = [\"10.0.0.254\"]\n", 1);
    let with = |good: &str, a: &str, b: &str| Config::parse(&format!("{good}{}{}", port(1, a), port(2, b)), "t");
    let shared = "shared = [\"10.0.0.100\", \"fd00::100\"]";
    let config = with(&good, shared, shared).unwrap();
    assert_eq!(config.ports[1].shared, config.ports[2].shared);
    assert_eq!(config.ports[1].shared.len(), 2);
    for (a, b, expected) in [
        ("shared = [\"10.0.1.2\"]", "", "port[1].shared[0]: 10.0.1.2 has another owner in VNI 100"),
        ("shared = [\"10.0.0.254\"]", "", "port[1].shared[0]: 10.0.0.254 has another owner in VNI 100"),
        (shared, "routed = [\"10.0.0.100/32\"]", "port[1].shared[0]: 10.0.0.100 has another owner in VNI 100"),
        ("shared = [\"10.0.0.9\", \"10.0.0.9\"]", "", "port[1].shared[1]: 10.0.0.9 is listed twice"),
        ("", "shared = [\"224.0.0.18\"]", "port[2].shared[0]: 224.0.0.18 is not the address of a host"),
        ("", "shared = [\"10.0.0.100/32\"]", "port[2].shared[0]"),
    ] {
        let errors = with(&good, a, b).unwrap_err().to_string();
        assert!(errors.contains(expected), "{a} {b}: {errors}");
    }
    let errors = with(GOOD, shared, "").unwrap_err().to_string();
    assert!(errors.contains("port[1].shared[0]: VNI 100 has no gateway"), "{errors}");
}

#[test]
fn errors_name_line_and_field() {
    let cases: &[(&str, &str, &str)] = &[
        ("per_port = 100", "per_port = 4096", "7: sessions.per_port: 4096 is not in 16..=2048"),
        ("per_port = 100", "flow_records = 1048577", "7: sessions.flow_records: 1048577 is not in 0..=1048576"),
        (
            "name = \"closed\"",
            "name = \"web\"",
            "20: security_group[1].name: security group \"web\" is already security_group[0].name (line 9)",
        ),
        (
            "protocol = \"tcp\"",
            "protocol = \"tpc\"",
            "11: security_group[0].ingress[0].protocol: \"tpc\" is not one of",
        ),
        ("protocol = 47", "protocol = 256", "17: security_group[0].egress[0].protocol: 256 is not in 0..=255"),
        (
            "protocol = \"icmp\"",
            "protocol = \"icmp\"\nports = [8]",
            "16: security_group[0].ingress[1].ports: only \"tcp\" and \"udp\" have ports",
        ),
        ("\"443\"", "\"99999\"", "12: security_group[0].ingress[0].ports[1]: \"99999\" is neither a port"),
        (
            "\"8000-8099\"",
            "\"8099-8000\"",
            "12: security_group[0].ingress[0].ports[2]: \"8099-8000\" ends before it begins",
        ),
        (
            "to = [\"10.0.0.0/8\"]",
            "to = [\"10.0.0.1/8\"]",
            "18: security_group[0].egress[0].to: 10.0.0.1/8 has host bits set; write 10.0.0.0/8",
        ),
        ("to = [\"10.0.0.0/8\"]", "from = [\"10.0.0.0/8\"]", "18: security_group[0].egress[0].from: unknown key"),
        ("action = \"deny\"\n", "", "23: vpc[0].acl[0].action: missing: one of \"deny\", \"allow\""),
        (
            "\"web\", \"closed\"",
            "\"wbe\"",
            "35: port[0].security_groups[0]: no security group named \"wbe\"; did you mean \"web\"?",
        ),
        ("vni = 100\n[[vpc.acl]]", "vni = 100\ngateway = [\"10.0.0.254\"]\n[[vpc.acl]]", ""),
    ];
    for (from, to, expected) in cases {
        let text = GOOD.replacen(from, to, 1);
        assert_ne!(text, GOOD, "{from}");
        match Config::parse(&text, "t") {
            Ok(_) => assert!(expected.is_empty(), "{to}: accepted, not {expected}"),
            Err(errors) => {
                assert!(
                    !expected.is_empty() && errors.to_string().contains(expected),
                    "{to}: {errors}, not {expected}"
                );
            }
        }
    }
}

#[test]
fn ports_with_routed_sessions_have_one_worker() {
    let workers = |count| format!("[workers]\ncount = {count}\n");
    let routed = GOOD.replacen("vni = 100\n", "vni = 100\ngateway = [\"10.0.0.254\"]\n", 1);
    for (text, expected) in [(GOOD, false), (&*routed, true)] {
        let config = Config::parse(&(text.to_owned() + &workers(2)), "t").unwrap();
        let guarded = config.ports.iter().filter(|port| !port.security_groups.is_empty());
        assert!(guarded.clone().next().is_some() && guarded.clone().all(|p| config.is_served_by_one(p) == expected));
        let config = Config::parse(&(text.to_owned() + &workers(1)), "t").unwrap();
        assert!(config.ports.iter().all(|port| !config.is_served_by_one(port)), "there is no other");
    }
}
