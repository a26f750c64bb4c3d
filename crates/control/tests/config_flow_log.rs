//! `[flow_log]` and `[[vpc_flow_log]]`: defaults and errors.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use bifrost_control::config::{Config, ConfigErrors, VpcFlowLog};
use bifrost_control::diff::ConfigDiff;

fn parse(section: &str) -> Result<Config, ConfigErrors> {
    let text = format!(
        "[host]\nname = \"h\"\n[underlay]\naddresses = [\"192.0.2.1\"]\n[[vpc]]\nvni = 100\n[[vpc]]\nvni = 200\n\
         [[port]]\nname = \"a\"\nvni = 100\nmac = \"02:00:00:00:00:01\"\naddresses = [\"10.0.0.1/24\"]\n\
         [[port]]\nname = \"b\"\nvni = 200\nmac = \"02:00:00:00:00:02\"\naddresses = [\"10.0.0.1/24\"]\n{section}"
    );
    Config::parse(&text, "t")
}

fn logged(section: &str) -> Vec<String> {
    let config = parse(section).unwrap_or_else(|e| panic!("{e}"));
    let log = config.flow_log.clone().unwrap();
    config.ports.iter().filter(|port| log.has(port)).map(|port| port.name.clone()).collect()
}

#[test]
fn ports_are_logged_by_name_by_vpc_or_all() {
    let json = "[flow_log]\njson = \"/tmp/f\"\n";
    assert_eq!(logged(json), ["a", "b"]);
    assert_eq!(logged(&format!("{json}vpcs = [200]\n")), ["b"]);
    assert_eq!(logged(&format!("{json}ports = [\"a\"]\n")), ["a"]);
    assert_eq!(logged(&format!("{json}vpcs = [200]\nports = [\"a\"]\n")), ["a", "b"]);
}

#[test]
fn without_the_section_nothing_is_logged_and_a_reload_changes_it() {
    let off = parse("").unwrap();
    assert_eq!(off.flow_log, None);
    let on = parse("[flow_log]\ncollector = \"[2001:db8::1]:4739\"\n").unwrap();
    let log = on.flow_log.clone().unwrap();
    assert_eq!((log.active_timeout, log.idle_timeout), (Duration::from_secs(60), Duration::from_secs(15)));
    assert_eq!((log.accepted, log.rejected, log.flows, log.domain), (true, true, 65_536, 1));
    let diff = ConfigDiff::between(&off, &on).unwrap();
    assert!(diff.flow_log && !diff.is_empty());
    assert_eq!(diff.report().to_string(), "reloaded\nflow logs changed");
}

#[test]
fn rules_are_logged_with_flows_or_alone() {
    let rule = "[[security_group]]\nname = \"g\"\negress = [{ log = true }, {}]\n";
    let on = |keys: &str| parse(&format!("[flow_log]\n{keys}{rule}")).unwrap_or_else(|e| panic!("{e}"));
    for (keys, flows) in [
        ("rules_json = \"/r\"\n", false),
        ("rules_json = \"/r\"\njson = \"/f\"\n", true),
        ("collector = \"192.0.2.9:4739\"\n", true),
        ("collector = \"192.0.2.9:4739\"\nrecord = \"rules\"\n", false),
    ] {
        let config = on(keys);
        let log = config.flow_log.as_ref().unwrap();
        assert_eq!((log.has_flows(), log.has_rules()), (flows, true), "{keys}");
        assert_eq!((log.rules_per_s, log.rules_interval), (100, Duration::from_secs(10)));
        assert_eq!(config.security_groups[0].egress.iter().map(|r| r.log).collect::<Vec<_>>(), [true, false]);
    }
}

#[test]
fn logs_of_vpcs_have_names_and_settings_of_their_own() {
    let one = |name: &str, keys: &str| format!("[[vpc_flow_log]]\nname = \"{name}\"\n{keys}");
    let web = one("demo.web", "vpcs = [200]\njson = \"/w\"\nrecord = \"rejected\"\n");
    let all = one("all", "collector = \"192.0.2.9:4739\"\n");
    let config = parse(&format!("{web}{all}")).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(config.flow_log, None);
    let [web_log, all_log] = &config.flow_logs[..] else { panic!("{:?}", config.flow_logs) };
    let logged = |log: &VpcFlowLog| config.ports.iter().filter(|port| log.log.has(port)).count();
    assert_eq!(
        (web_log.name.as_str(), logged(web_log), all_log.name.as_str(), logged(all_log)),
        ("demo.web", 1, "all", 2)
    );
    assert_eq!((web_log.log.accepted, web_log.log.rejected, all_log.log.flows), (false, true, 8192));
    // One is added, one removed, and one changes.
    let later = parse(&format!("{}{}", web.replace("200", "100"), one("new", "json = \"/n\"\n"))).unwrap();
    let report = ConfigDiff::between(&config, &later).unwrap().report();
    assert_eq!(
        report.to_string(),
        "reloaded\nflow logs added: new\nflow logs removed: all\nflow logs changed: demo.web"
    );
    let many: String = (0..64).map(|n| one(&format!("n{n}"), "json = \"/n\"\n")).collect();
    let expected = "vpc_flow_log: 64 are more than 63";
    assert!(parse(&many).unwrap_err().to_string().contains(expected));
    for (log, expected) in [
        (one("a", ""), "vpc_flow_log[0].json: missing: name a file (json), an IPFIX collector (collector), or both"),
        (one("a", "json = \"f\"\n"), "vpc_flow_log[0].json: \"f\" is not an absolute path"),
        (one("a", "json = \"/f\"\nrecord = \"rules\"\n"), "vpc_flow_log[0].record: \"rules\" is not one of"),
        (one("a", "json = \"/f\"\nrules_json = \"/r\"\n"), "vpc_flow_log[0].rules_json: unknown key"),
        (one("a", "json = \"/f\"\nvpcs = [7]\n"), "vpc_flow_log[0].vpcs[0]: there is no [[vpc]] with vni = 7"),
        (one("a", "json = \"/f\"\nports = [\"c\"]\n"), "vpc_flow_log[0].ports[0]: no port named \"c\""),
        (one("a/b", "json = \"/f\"\n"), "vpc_flow_log[0].name: \"a/b\" is not 1 to 63 of"),
        (one("a", "json = \"/f\"\n").repeat(2), "vpc_flow_log[1].name: flow log \"a\" is defined twice"),
    ] {
        let errors = parse(&log).unwrap_err();
        assert_eq!(errors.errors().len(), 1, "{errors}");
        assert!(errors.to_string().contains(expected), "{errors}");
    }
}

#[test]
fn errors_name_line_and_field() {
    for (section, expected) in [
        (
            "[flow_log]\n",
            "flow_log.json: missing: name a file (json, rules_json), an IPFIX collector (collector), or both",
        ),
        ("[flow_log]\njson = \"f\"\n", "flow_log.json: \"f\" is not an absolute path"),
        ("[flow_log]\ncollector = \"192.0.2.9\"\n", "flow_log.collector: \"192.0.2.9\" is not an address with a port"),
        (
            "[flow_log]\ncollector = \"192.0.2.9:0\"\n",
            "flow_log.collector: \"192.0.2.9:0\" is not an address with a port",
        ),
        ("[flow_log]\njson = \"/f\"\nvpcs = [300]\n", "flow_log.vpcs[0]: there is no [[vpc]] with vni = 300"),
        ("[flow_log]\njson = \"/f\"\nvpcs = [0]\n", "flow_log.vpcs[0]: 0 is not in 1..="),
        ("[flow_log]\njson = \"/f\"\nports = [\"c\"]\n", "flow_log.ports[0]: no port named \"c\""),
        ("[flow_log]\njson = \"/f\"\nrecord = \"none\"\n", "flow_log.record: \"none\" is not one of"),
        ("[flow_log]\njson = \"/f\"\nrules_json = \"/f\"\n", "flow_log.rules_json: is the same file as `json`"),
        ("[flow_log]\njson = \"/f\"\nrecord = \"rules\"\n", "flow_log.json: stays empty with `record"),
        ("[flow_log]\nrules_json = \"f\"\n", "flow_log.rules_json: \"f\" is not an absolute path"),
        (
            "[flow_log]\njson = \"/f\"\n[[security_group]]\nname = \"g\"\ningress = [{}, { log = true }]\n",
            "security_group[0].ingress[1].log: no destination for its records; set `rules_json`",
        ),
        ("[flow_log]\njson = \"/f\"\nflows = 1\n", "flow_log.flows: 1 is not in 64..=1048576"),
        ("[flow_log]\njson = \"/f\"\nactive_timeout = 1\n", "flow_log.active_timeout: unknown key; did you mean"),
    ] {
        let errors = parse(section).unwrap_err();
        assert_eq!(errors.errors().len(), 1, "{errors}");
        assert!(errors.to_string().contains(expected), "{errors}");
    }
}
