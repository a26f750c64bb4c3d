//! `[[uplink]]`, `[[nat]]`, `[[floating_ip]]` and `[[port_forward]]`: accepted values, and all errors with their lines.

#![allow(clippy::unwrap_used)]

use bifrost_control::config::Config;

const BASE: &str = r#"[host]
name = "a"
[underlay]
addresses = ["192.0.2.1"]
[[vpc]]
vni = 100
gateway = ["10.0.0.254"]
[[vpc]]
vni = 900
[[port]]
name = "web"
vni = 100
mac = "02:00:00:00:00:01"
addresses = ["10.0.0.1/24"]
[[port]]
name = "wan"
vni = 900
mac = "02:00:00:00:00:09"
addresses = ["203.0.113.1/24"]
mtu = 1500
[[uplink]]
port = "wan"
[[nat]]
vni = 100
uplink = "wan"
addresses = ["203.0.113.10", "203.0.113.11"]
[[floating_ip]]
vni = 100
uplink = "wan"
address = "203.0.113.20"
inside = "10.0.0.1"
[[port_forward]]
vni = 100
uplink = "wan"
address = "203.0.113.10"
port = 8080
inside = "10.0.0.2"
"#;

#[test]
fn all_keys_are_read() {
    let config = Config::parse(BASE, "t").unwrap();
    let source = &config.nat.sources[0];
    assert_eq!((source.ports, source.ports_per_guest), ((1024, 65535), 32256));
    assert_eq!((config.nat.forwards[0].port, config.nat.forwards[0].inside_port), (8080, 8080));
    assert!(config.is_uplink(config.port("wan").unwrap()) && !config.is_uplink(config.port("web").unwrap()));
    assert!(Config::parse(&BASE.replace("mtu = 1500", "mtu = 9000"), "t").is_ok(), "the underlay does not bound it");
    let several = Config::parse(&BASE.replace("[underlay]", "[workers]\ncount = 2\n[underlay]"), "t").unwrap();
    assert!(several.is_served_by_one(several.port("wan").unwrap()));
    assert!(!several.is_served_by_one(several.port("web").unwrap()));
    let ports = BASE.replace("203.0.113.11\"]", "203.0.113.11\"]\nports = [2000, 2999]\nports_per_guest = 2000");
    let source = Config::parse(&ports, "t").unwrap().nat.sources[0].clone();
    assert_eq!((source.ports, source.ports_per_guest), ((2000, 2999), 2000));
}

#[test]
fn errors_name_line_and_field() {
    let floating = "[[floating_ip]]\nvni = 100\nuplink = \"wan\"\naddress = \"203.0.113.20\"\ninside = \"10.0.0.1\"\n";
    let forward = "[[port_forward]]\nvni = 100\nuplink = \"wan\"\naddress = \"203.0.113.10\"\nport = 8080\ninside = \"10.0.0.2\"\n";
    let source = "[[nat]]\nvni = 100\nuplink = \"wan\"\naddresses = [\"203.0.113.10\", \"203.0.113.11\"]\n";
    let cases: [(&str, &str, &str); 24] = [
        ("port = \"wan\"", "port = \"wam\"", "uplink[0].port: no port named \"wam\"; did you mean \"wan\"?"),
        (
            "port = \"wan\"\n",
            "port = \"wan\"\n[[uplink]]\nport = \"wan\"\n",
            "uplink[1].port: port \"wan\" is already an uplink",
        ),
        (
            "vni = 900\n[[port]]",
            "vni = 900\ngateway = [\"203.0.113.254\"]\n[[port]]",
            "uplink[0].port: VNI 900 of port \"wan\" must not have another port",
        ),
        (
            "mtu = 1500",
            "mtu = 1500\nsecurity_groups = [\"g\"]\n[[security_group]]\nname = \"g\"",
            "uplink[0].port: port \"wan\" has security groups",
        ),
        (
            "uplink = \"wan\"\naddresses",
            "uplink = \"web\"\naddresses",
            "nat[0].uplink: \"web\" is not an uplink; add an [[uplink]]",
        ),
        (
            "vni = 100\nuplink = \"wan\"\naddresses",
            "vni = 900\nuplink = \"wan\"\naddresses",
            "nat[0].vni: VNI 900 is the uplink's",
        ),
        (
            "vni = 100\nuplink = \"wan\"\naddresses",
            "vni = 7\nuplink = \"wan\"\naddresses",
            "nat[0].vni: there is no [[vpc]] with vni = 7",
        ),
        ("gateway = [\"10.0.0.254\"]\n", "", "nat[0].vni: VNI 100 has no IPv4 gateway"),
        ("\"203.0.113.11\"", "\"203.0.113.10\"", "nat[0].addresses[1]: 203.0.113.10 is listed twice"),
        (
            "\"203.0.113.11\"",
            "\"203.0.113.1\"",
            "nat[0].addresses[1]: 203.0.113.1 is the address of the port \"wan\" itself",
        ),
        ("\"203.0.113.11\"", "\"224.0.0.1\"", "nat[0].addresses[1]: 224.0.0.1 cannot be an outside address"),
        (
            "\"203.0.113.11\"]",
            "\"203.0.113.11\"]\nports = [2000]",
            "nat[0].ports: expected the first and the last port",
        ),
        (
            "\"203.0.113.11\"]",
            "\"203.0.113.11\"]\nports = [2000, 1000]",
            "nat[0].ports: expected the first and the last port",
        ),
        (
            "\"203.0.113.11\"]",
            "\"203.0.113.11\"]\nports = [2000, 2000]\nports_per_guest = 3",
            "nat[0].ports_per_guest: 3",
        ),
        (
            floating,
            "[[floating_ip]]\nvni = 100\nuplink = \"wan\"\naddress = \"203.0.113.11\"\ninside = \"10.0.0.1\"\n",
            "floating_ip[0].address: 203.0.113.11 is already in use",
        ),
        (
            "inside = \"10.0.0.1\"",
            "inside = \"fd00::1\"",
            "floating_ip[0].inside: fd00::1 is of another family than 203.0.113.20",
        ),
        ("inside = \"10.0.0.1\"", "inside = \"10.0.0.254\"", "floating_ip[0].inside: 10.0.0.254 is the gateway's"),
        (
            forward,
            "[[floating_ip]]\nvni = 100\nuplink = \"wan\"\naddress = \"203.0.113.21\"\ninside = \"10.0.0.1\"\n",
            "floating_ip[1].inside: 10.0.0.1 already has a floating address",
        ),
        (
            "inside = \"10.0.0.2\"",
            "inside = \"10.0.0.1\"",
            "port_forward[0].inside: 10.0.0.1 has a floating address, which already makes all its ports reachable",
        ),
        (
            "address = \"203.0.113.10\"",
            "address = \"203.0.113.20\"",
            "port_forward[0].address: 203.0.113.20 is already in use",
        ),
        ("port = 8080\n", "", "port_forward[0].port: missing"),
        ("port = 8080\n", "port = 8080\nprotocol = \"sctp\"\n", "port_forward[0].protocol: \"sctp\" is not one of"),
        (
            "[[uplink]]",
            "[[peer]]\nname = \"b\"\naddresses = [\"192.0.2.2\"]\n[[route]]\nvni = 100\nprefix = \"0.0.0.0/0\"\npeer = \"b\"\nmac = \"02:00:00:00:00:07\"\n[[uplink]]",
            "nat[0].vni: VNI 100 has another IPv4 default route",
        ),
        (source, "[[nat]]\nvni = 100\nuplink = \"wan\"\naddresses = []\n", "nat[0].addresses: missing"),
    ];
    let mut missing = Vec::new();
    for (from, to, message) in cases {
        assert!(BASE.contains(from), "{from}");
        let text = BASE.replacen(from, to, 1);
        let errors = Config::parse(&text, "t").unwrap_err();
        let found =
            errors.errors().iter().find(|error| format!("{}: {}", error.field, error.message).starts_with(message));
        let Some(error) = found else {
            missing.push(format!("{message}\n{errors}"));
            continue;
        };
        // The line contains the key, or starts the section that lacks it.
        let line = text.lines().nth(error.line - 1).unwrap();
        let key = error.field.rsplit('.').next().unwrap().split('[').next().unwrap();
        assert!(line.starts_with(key) || line.starts_with("[["), "{error}: {line}");
    }
    assert!(missing.is_empty(), "{}", missing.join("\n\n"));
    // A second forward of the same outside end, and one of the same inside end.
    let twice = format!("{BASE}{}", forward.replace("10.0.0.2", "10.0.0.3"));
    assert!(Config::parse(&twice, "t").unwrap_err().to_string().contains("port_forward[1].port: port 8080"));
    let same = format!("{BASE}{}", forward.replace("port = 8080", "port = 8081\ninside_port = 8080"));
    assert!(Config::parse(&same, "t").unwrap_err().to_string().contains("port_forward[1].inside: port "));
    assert!(Config::parse(&format!("{BASE}{source}"), "t").unwrap_err().to_string().contains("already has a [[nat]]"));
}
