//! `[[mirror]]`: accepted values, and all errors with their lines.

#![allow(clippy::unwrap_used)]

use bifrost_control::config::Config;

const BASE: &str = r#"[host]
name = "a"
[underlay]
addresses = ["192.0.2.1"]
[[vpc]]
vni = 100
[[port]]
name = "web"
vni = 100
mac = "02:00:00:00:00:01"
addresses = ["10.0.0.1/24"]
[[mirror]]
name = "ids"
ports = ["web"]
protocol = "tcp"
prefixes = ["10.0.9.0/24"]
l4_ports = [80, "8000-8099"]
target = "192.0.2.9:4789"
target_vni = 4242
"#;

#[test]
fn all_keys_are_read() {
    let config = Config::parse(BASE, "t").unwrap();
    let mirror = &config.mirrors[0];
    assert_eq!((mirror.one_in, mirror.truncate, mirror.from_guests, mirror.to_guests), (1, 256, true, true));
    assert_eq!((&mirror.protocols[..], &mirror.l4_ports[..]), (&[6][..], &[80..=80, 8000..=8099][..]));
    assert!(mirror.has(&config.ports[0]));
    let other = Config::parse(&BASE.replace("ports = [\"web\"]", "vpcs = [100]"), "t").unwrap();
    assert!(other.mirrors[0].has(&other.ports[0]));
}

#[test]
fn errors_name_line_and_field() {
    let cases = [
        ("ports = [\"web\"]", "ports = [\"wab\"]", "mirror[0].ports[0]: no port named \"wab\""),
        ("ports = [\"web\"]", "vpcs = [7]", "mirror[0].vpcs[0]: there is no [[vpc]] with vni = 7"),
        ("\"10.0.9.0/24\"", "\"10.0.9.1/24\"", "mirror[0].prefixes: 10.0.9.1/24 has host bits set"),
        ("protocol = \"tcp\"", "protocol = \"icmp\"", "mirror[0].l4_ports: only \"tcp\" and \"udp\" have ports"),
        ("192.0.2.9:4789", "192.0.2.9", "mirror[0].target: \"192.0.2.9\" is not an address with a port"),
        ("target = \"192.0.2.9:4789\"\n", "", "mirror[0].target: missing"),
        ("target_vni = 4242", "target_vni = 0", "mirror[0].target_vni: 0"),
        ("target_vni = 4242", "target_vni = 1\none_in = 0", "mirror[0].one_in: 0"),
        ("target_vni = 4242", "target_vni = 1\ntruncate = 1565", "mirror[0].truncate: 1565 does not fit underlay.mtu"),
        ("target_vni = 4242", "target_vni = 1\ndirection = \"up\"", "mirror[0].direction: \"up\" is not one of"),
    ];
    for (from, to, message) in cases {
        let text = BASE.replacen(from, to, 1);
        assert_ne!(text, BASE, "{from}");
        let errors = Config::parse(&text, "t").unwrap_err();
        let found = errors.errors().iter().find(|e| format!("{}: {}", e.field, e.message).starts_with(message));
        let error = found.unwrap_or_else(|| panic!("{message}\n{errors}"));
        let line = text.lines().nth(error.line - 1).unwrap();
        let key = error.field.rsplit('.').next().unwrap().split('[').next().unwrap();
        assert!(line.starts_with(key) || line.starts_with("[["), "{error}: {line}");
    }
    let mirror = &BASE[BASE.find("[[mirror]]").unwrap()..];
    let twice = Config::parse(&format!("{BASE}{mirror}"), "t").unwrap_err();
    assert!(twice.to_string().contains("mirror[1].name: mirror \"ids\" is defined twice"));
    let many: String = (0..65).map(|n| mirror.replace("ids", &format!("ids{n}"))).collect();
    let many = Config::parse(&format!("{}{many}", &BASE[..BASE.len() - mirror.len()]), "t").unwrap_err();
    assert!(many.to_string().contains("65 are more than 64"));
}
