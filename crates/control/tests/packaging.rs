//! Files shipped with the programs: the example configuration, the systemd unit, the reference of all keys.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use bifrost_control::{Config, counters};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(file: &str) -> String {
    fs::read_to_string(repository().join(file)).unwrap()
}

/// Whether a line of the example is a commented-out setting.
fn is_default(line: &str) -> bool {
    line.strip_prefix('#').is_some_and(|l| l.starts_with(|c: char| c.is_ascii_lowercase() || c == '['))
}

#[test]
fn the_example_passes_and_its_comments_are_the_defaults() {
    let example = read("packaging/bifrostd.toml");
    let config = Config::parse(&example, "bifrostd.toml").unwrap_or_else(|e| panic!("{e}"));
    let uncommented: Vec<&str> = example.lines().map(|l| if is_default(l) { &l[1..] } else { l }).collect();
    let spelled_out = Config::parse(&uncommented.join("\n"), "bifrostd.toml").unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(config, spelled_out);
}

#[test]
fn the_machine_of_the_example_passes_and_spells_out_defaults() {
    let example = read("packaging/bifrostd.toml");
    let machine: Vec<&str> =
        example.lines().filter_map(|l| l.strip_prefix("# ")).skip_while(|l| *l != "[[port]]").collect();
    let end = machine.iter().position(|l| !l.contains(" = ") && *l != "[[port]]").unwrap_or(machine.len());
    let without = |keys: &[&str]| {
        let kept = machine[..end].iter().filter(|l| !keys.iter().any(|key| l.starts_with(&format!("{key} = "))));
        let text = kept.fold(example.clone(), |text, line| text + line + "\n");
        Config::parse(&text, "bifrostd.toml").unwrap_or_else(|e| panic!("{e}"))
    };
    let config = without(&[]);
    assert_eq!(config.ports[1].name, "vm1");
    assert_eq!(config, without(&["mode", "packed", "slicing", "queues"]));
}

/// All keys, as listed in error messages.
fn all_keys() -> Vec<(String, Vec<String>)> {
    let single =
        ["host", "control", "workers", "underlay", "transport", "sessions", "flow_log"].map(|s| (s, format!("[{s}]")));
    let lists = [
        "security_group",
        "address_set",
        "peer",
        "vpc",
        "port",
        "route",
        "peering",
        "load_balancer",
        "uplink",
        "nat",
        "floating_ip",
        "port_forward",
        "mirror",
        "vpc_flow_log",
    ]
    .map(|s| (s, format!("[[{s}]]")));
    let machine = [("port", "[[port]]\nkind = \"vhost-user\"".to_owned())];
    let parts = ["[[load_balancer.backend]]", "[load_balancer.check]"];
    let parts = parts.map(|part| ("load_balancer", format!("[[load_balancer]]\n{part}")));
    let keys_of = |(name, header): (&str, String)| {
        let errors = Config::parse(&format!("{header}\nzzzzzzzzz = 1\n"), "t").unwrap_err();
        let unknown = errors.errors().iter().find(|e| e.message.starts_with("unknown key")).unwrap();
        let keys = unknown.message.strip_prefix("unknown key; known keys: ").unwrap();
        (name.to_owned(), keys.split(", ").map(str::to_owned).collect())
    };
    single.into_iter().chain(lists).chain(machine).chain(parts).map(keys_of).collect()
}

#[test]
fn the_example_and_the_reference_have_every_key() {
    let example = read("packaging/bifrostd.toml");
    let reference = read("docs/operations/configuration.md");
    for (section, keys) in all_keys() {
        let heading = reference.find(&format!("### `[{section}]`")).or(reference.find(&format!("### `[[{section}]]`")));
        let text = &reference[heading.unwrap_or_else(|| panic!("no section {section}"))..];
        let text = &text[..text[4..].find("\n##").map_or(text.len(), |end| end + 4)];
        for key in keys {
            assert!(text.contains(&format!("\n| `{key}` |")), "configuration.md lacks {section}.{key}");
            let written = |l: &str| {
                let l = l.trim_start_matches(['#', ' ']);
                let part = format!("[{section}.{key}]");
                l.starts_with(&format!("{key} = ")) || l == part || l == format!("[{part}]")
            };
            assert!(example.lines().any(written), "the example lacks {section}.{key}");
        }
    }
}

#[test]
fn the_unit_has_what_the_daemon_needs() {
    let unit = read("packaging/bifrostd.service");
    let value = |key: &str| {
        let line = unit.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix('='));
        line.unwrap_or_else(|| panic!("no {key}")).to_owned()
    };
    assert_eq!(value("ExecReload"), "/bin/kill -HUP $MAINPID");
    assert_eq!(value("Restart"), "on-failure");
    assert_eq!(value("ExecStartPre"), format!("{} --check", value("ExecStart")));
    for capability in ["CAP_NET_ADMIN", "CAP_SYS_ADMIN", "CAP_BPF", "CAP_NET_RAW"] {
        assert!(value("CapabilityBoundingSet").split(' ').any(|c| c == capability), "{capability}");
    }
    // AF_XDP needs locked memory.
    assert!(value("RestrictAddressFamilies").split(' ').any(|family| family == "AF_XDP"));
    assert_eq!(value("LimitMEMLOCK"), "infinity");
    // The default socket is in the directory that systemd creates.
    let socket = Path::new(bifrost_control::config::DEFAULT_SOCKET);
    assert_eq!(socket.parent().unwrap(), Path::new("/run").join(value("RuntimeDirectory")));
    // It also contains sockets of virtual machines and records of their rings, which the next daemon needs.
    assert_eq!(value("RuntimeDirectoryPreserve"), "yes");
    assert_eq!(value("StateDirectory"), "bifrost", "the postrm script removes /var/lib/bifrost");
}

/// `make try-guide` runs the guide's blocks; this test detects blocks without instructions for it.
#[test]
fn every_block_of_the_guide_is_tried_or_says_why_not() {
    let index = read("docs/OPERATIONS.md");
    let pages: Vec<&str> =
        index.split("](").skip(1).filter_map(|link| link.split_once(')')).map(|link| link.0).collect();
    let pages: Vec<&str> = pages.into_iter().filter(|page| page.starts_with("operations/")).collect();
    let there = fs::read_dir(repository().join("docs/operations")).unwrap().count();
    assert_eq!(pages.len(), there, "OPERATIONS.md names each page once: {pages:?}");
    let (mut opened, mut tried) = (0, 0);
    for page in pages {
        let text = read(&format!("docs/{page}"));
        let lines: Vec<&str> = text.lines().collect();
        let fences = (0..lines.len()).filter(|&i| lines[i].starts_with("```"));
        for line in fences.step_by(2) {
            opened += 1;
            let mark = lines[line - 1];
            assert!(
                mark.ends_with(" -->") && (mark.starts_with("<!-- tried on ") || mark.starts_with("<!-- not tried: ")),
                "{page}, line {}: neither tried nor said why not",
                line + 1
            );
            tried += usize::from(mark.starts_with("<!-- tried on "));
        }
    }
    assert!(opened > tried && tried > 15, "{tried} of {opened} blocks are tried");
}

/// The name of a counter in Prometheus.
fn metric(counter: &str, kind: counters::Kind) -> String {
    let unit = counters::unit(counter);
    let name = counter.strip_suffix(unit).unwrap().replace('.', "_");
    let unit = match unit {
        "ns" => "seconds",
        "ppm" => "ratio",
        unit => unit,
    };
    let end = if kind == counters::Kind::Gauge { "" } else { "_total" };
    format!("bifrost_{name}{unit}{end}")
}

#[test]
fn alerts_and_dashboards_use_existing_counters() {
    let known: BTreeSet<String> = counters::all().map(|(counter, meaning)| metric(&counter, meaning.kind)).collect();
    let mut asked = 0;
    for file in ["prometheus/bifrost.rules.yml", "grafana/bifrost-hosts.json", "grafana/bifrost-fleet.json"] {
        let text = read(&format!("packaging/{file}"));
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let others = ["bifrost_relay_", "bifrost_agent_", "bifrost_nicd_", "bifrost_gw_"];
        for word in words.filter(|w| w.starts_with("bifrost_") && !others.iter().any(|other| w.starts_with(other))) {
            asked += 1;
            assert!(known.contains(word), "{file}: {word}");
        }
    }
    assert!(asked >= 30, "{asked}");
}

#[test]
fn dashboards_have_the_structure_that_grafana_reads() {
    for name in ["hosts", "fleet", "gateway"] {
        let board: serde_json::Value =
            serde_json::from_str(&read(&format!("packaging/grafana/bifrost-{name}.json"))).unwrap();
        assert_eq!(board["uid"], format!("bifrost-{name}"));
        let panels = board["panels"].as_array().unwrap();
        let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
        assert!(panels.len() > 5 && ids.len() == panels.len());
        for panel in panels {
            let place = &panel["gridPos"];
            assert!(place["x"].as_u64().unwrap() + place["w"].as_u64().unwrap() <= 24, "{panel}");
            assert!(!panel["fieldConfig"]["defaults"]["unit"].as_str().unwrap().is_empty());
            assert!(!panel["targets"].as_array().unwrap().is_empty());
        }
    }
}

#[test]
fn links_between_pages_are_not_broken() {
    let docs = repository().join("docs");
    let pages = ["", "operations"].into_iter().flat_map(|folder| fs::read_dir(docs.join(folder)).unwrap());
    let pages: Vec<_> =
        pages.map(|page| page.unwrap().path()).filter(|page| page.extension() == Some("md".as_ref())).collect();
    for page in &pages {
        let text = fs::read_to_string(page).unwrap();
        for link in text.split("](").skip(1).filter_map(|link| link.split_once(')')).map(|link| link.0) {
            if link.contains("://") || link.contains(' ') {
                continue;
            }
            let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
            let target = if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            assert!(target.exists(), "{}: {link} does not exist", page.display());
            let Some(anchor) = anchor.filter(|_| file.is_empty() || file.ends_with(".md")) else { continue };
            let text = fs::read(&target).unwrap();
            let headings =
                String::from_utf8_lossy(&text).lines().filter(|l| l.starts_with('#')).map(slug).collect::<Vec<_>>();
            assert!(headings.iter().any(|heading| heading == anchor), "{}: no heading for {link}", page.display());
        }
    }
}

/// The anchor of a heading.
fn slug(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}
