//! `[[peering]]` in configuration files, good and bad.

#![allow(clippy::unwrap_used)]

use bifrost_control::Config;
use bifrost_control::config::Peering;

/// A VPC of another tenant in addition to the guest's. The line number below refers to this text.
const GOOD: &str = r#"[host]
name = "host-a"
[underlay]
addresses = ["192.0.2.1"]
mtu = 1600
[[peer]]
name = "host-b"
addresses = ["192.0.2.2"]
[[vpc]]
vni = 100
gateway = ["10.0.0.254"]
[[vpc]]
vni = 200
gateway = ["10.2.0.254"]
[[port]]
name = "web1"
vni = 100
mac = "02:00:00:00:00:01"
addresses = ["10.0.0.1/24"]
[[route]]
vni = 100
prefix = "10.0.1.0/24"
peer = "host-b"
mac = "02:00:00:00:00:03"
"#;

/// The errors with these sections appended, without file and line.
fn with_peerings(text: &str, sections: &str) -> Result<Config, Vec<String>> {
    let errors = match Config::parse(&format!("{text}{sections}"), "t") {
        Ok(config) => return Ok(config),
        Err(errors) => errors.to_string(),
    };
    Err(errors.lines().map(|line| line.splitn(3, ':').nth(2).unwrap().trim().to_owned()).collect())
}

#[test]
fn peerings_need_gateways_and_a_peering_in_return() {
    let lame = &GOOD.replace("gateway = [\"10.2.0.254\"]\n", "");
    let peering =
        |vni: u32, prefix: &str, to: u32| format!("[[peering]]\nvni = {vni}\nprefix = \"{prefix}\"\nto_vni = {to}\n");
    let (there, back) = (peering(100, "10.2.0.0/16", 200), peering(200, "10.1.0.0/16", 100));
    let config = with_peerings(GOOD, &format!("{there}{back}")).unwrap();
    let of = |p: &Peering| (p.vni.value(), p.prefix.to_string(), p.to_vni.value());
    let expected = [(100, "10.2.0.0/16".to_owned(), 200), (200, "10.1.0.0/16".to_owned(), 100)];
    assert_eq!(config.peerings.iter().map(of).collect::<Vec<_>>(), expected);

    let cases: &[(&str, String, &[&str])] = &[
        (
            GOOD,
            there.clone(),
            &[
                "peering[0].to_vni: the peering in the other direction is missing; add a [[peering]] with vni = 200, an IPv4 prefix and to_vni = 100",
            ],
        ),
        (
            GOOD,
            format!("{there}{}", peering(200, "fd01::/16", 100)),
            &[
                "peering[0].to_vni: the peering in the other direction is missing; add a [[peering]] with vni = 200, an IPv4 prefix and to_vni = 100",
                "peering[1].vni: VNI 200 has no IPv6 gateway, which the peering needs; add one",
                "peering[1].to_vni: VNI 100 has no IPv6 gateway, which the peering needs; add one",
                "peering[1].to_vni: the peering in the other direction is missing; add a [[peering]] with vni = 100, an IPv6 prefix and to_vni = 200",
            ],
        ),
        (
            lame,
            format!("{there}{back}"),
            &[
                "peering[0].to_vni: VNI 200 has no IPv4 gateway, which the peering needs; add one",
                "peering[1].vni: VNI 200 has no IPv4 gateway, which the peering needs; add one",
            ],
        ),
        (
            GOOD,
            peering(100, "10.2.0.0/16", 100),
            &["peering[0].to_vni: a VPC cannot be peered with itself; name a VPC other than 100"],
        ),
        (
            GOOD,
            peering(100, "10.2.0.7/16", 300),
            &[
                "peering[0].prefix: 10.2.0.7/16 has host bits set; write 10.2.0.0/16",
                "peering[0].to_vni: no [[vpc]] has VNI 300; known VNIs: 100, 200",
            ],
        ),
        (
            GOOD,
            format!("{}{back}", peering(100, "10.0.1.0/24", 200)),
            &["peering[0].prefix: 10.0.1.0/24 in VNI 100 is already route[0].prefix (line 22)"],
        ),
        (
            GOOD,
            format!("{}{back}", peering(100, "10.0.0.1/32", 200)),
            &["peering[0].prefix: 10.0.0.1 is the address of the local port \"web1\""],
        ),
        (
            GOOD,
            "[[peering]]\nvni = 100\nto = 200\n".to_owned(),
            &[
                "peering[0].to: unknown key; known keys: vni, prefix, to_vni",
                "peering[0].prefix: missing",
                "peering[0].to_vni: missing",
            ],
        ),
    ];
    for (text, sections, expected) in cases {
        let mut found = with_peerings(text, sections).unwrap_err();
        let mut expected: Vec<_> = expected.iter().map(|e| e.to_string()).collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected, "{sections}");
    }
}
