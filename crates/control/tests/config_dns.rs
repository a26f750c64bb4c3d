//! `domain` and `name`, for DNS: accepted and refused values.

#![allow(clippy::unwrap_used)]

use bifrost_control::config::{Config, ConfigErrors};

/// A VPC with these keys, its port, and a route with these keys.
fn parse(vpc: &str, port: &str, route: &str) -> Result<Config, ConfigErrors> {
    let text = format!(
        "[host]\nname = \"h\"\n[underlay]\naddresses = [\"192.0.2.1\"]\n[[peer]]\nname = \"p\"\naddresses = [\"192.0.2.2\"]\n\
         [[vpc]]\nvni = 100\n{vpc}\n[[port]]\nname = {port:?}\nvni = 100\nmac = \"02:00:00:00:00:01\"\n\
         addresses = [\"10.0.0.1/24\"]\n[[route]]\nvni = 100\npeer = \"p\"\nmac = \"02:00:00:00:00:02\"\n{route}"
    );
    Config::parse(&text, "t")
}

const VPC: &str = "gateway = [\"10.0.0.254\"]\ndomain = \"vpc-1.internal\"";
const ROUTE: &str = "prefix = \"10.0.0.2/32\"\nname = \"Db_1.x\"\n";

#[test]
fn a_vpc_has_a_domain_and_other_hosts_guests_have_names() {
    let config = parse(VPC, "web.1", ROUTE).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(config.vpcs[0].domain.as_deref(), Some("vpc-1.internal"));
    assert_eq!(config.routes.iter().next().unwrap().name.as_deref(), Some("Db_1.x"));
    let config = parse("", "a..b", "prefix = \"10.0.0.2/32\"\n").unwrap_or_else(|e| panic!("{e}"));
    assert_eq!((&config.vpcs[0].domain, &config.routes.iter().next().unwrap().name), (&None, &None));
}

#[test]
fn errors_name_line_and_field() {
    let gateway = "gateway = [\"10.0.0.254\"]\n";
    for (vpc, port, route, expected) in [
        (
            "domain = \"d\"",
            "a",
            "prefix = \"10.0.0.2/32\"\n",
            "vpc[0].domain: VNI 100 has no gateway, which is the name server",
        ),
        (&format!("{gateway}domain = \"\""), "a", ROUTE, "vpc[0].domain: \"\" is not a domain"),
        (&format!("{gateway}domain = \"a..b\""), "a", ROUTE, "vpc[0].domain: \"a..b\" is not a domain"),
        (&format!("{gateway}domain = \"A\""), "a", ROUTE, "vpc[0].domain: \"A\" is not a domain"),
        (&format!("{gateway}domain = \"{}.d\"", "x".repeat(64)), "a", ROUTE, "is not a domain: labels of 1 to 63"),
        (&format!("{gateway}domain = \"{}d\"", "x.".repeat(95)), "a", ROUTE, "at most 189 characters"),
        (VPC, "a..b", ROUTE, "port[0].name: \"a..b\" has an empty label"),
        (VPC, "a", "prefix = \"10.0.0.2/32\"\nname = \".b\"\n", "route[0].name: \".b\" has an empty label"),
        (VPC, "a", "prefix = \"10.0.2.0/24\"\nname = \"b\"\n", "route[0].name: 10.0.2.0/24 is more than one address"),
        (VPC, "a", "prefix = \"10.0.0.2/32\"\nname = \"b c\"\n", "route[0].name: \"b c\" is not 1 to 63 of"),
        (gateway, "a", ROUTE, "route[0].name: VNI 100 has no domain; add `domain` to its [[vpc]]"),
    ] {
        let errors = parse(vpc, port, route).unwrap_err().to_string();
        assert!(errors.contains(expected), "{vpc} {port} {route}: {errors}");
    }
}
