//! The console in a real browser, beside real agents and daemons.

use std::path::Path;
use std::process::Command;

use bifrost_control::api::{Direction, FaultSpec, FaultTarget};
use serde_json::json;

use crate::world::World;
use crate::{eventually, ping};

/// The path of a Chromium.
pub(crate) fn program() -> String {
    std::env::var("BIFROST_BROWSER").expect("BIFROST_BROWSER: the path of chromium")
}

/// What the browser makes of a page, as text; and a picture of it, if there is to be one. `command` starts the browser.
pub(crate) fn browse(command: impl Fn() -> Command, profile: &Path, page: &str, picture: Option<&Path>) -> String {
    let run = |arguments: &[String]| {
        let mut command = command();
        // Root has no sandbox; two polls fit into six seconds of the page's time.
        command.args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "--window-size=1200,900",
            "--virtual-time-budget=6000",
        ]);
        command.arg(format!("--user-data-dir={}", profile.display()));
        let output = command.args(arguments).arg(page).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    if let Some(picture) = picture {
        run(&[format!("--screenshot={}", picture.display())]);
    }
    run(&["--dump-dom".to_owned()])
}

/// `BIFROST_BROWSER` is a Chromium; with `BIFROST_SCREENSHOTS=DIRECTORY` it leaves pictures of the pages there.
#[test]
#[ignore = "needs BIFROST_BROWSER"]
fn a_browser_shows_the_fleet() {
    let browser = program();
    let mut world = World::new(3);
    world.run_all();
    let (web, db) = (world.guest("web"), world.guest("db"));
    world.apply(&format!(
        "- {{key: host/h1, addresses: [192.0.2.1]}}\n- {{key: host/h2, addresses: [192.0.2.2]}}\n\
         - {{key: host/h3, addresses: [192.0.2.3]}}\n- key: vpc/shop/net\n- key: vpc/shop/office\n\
         - {{key: peering/shop/p, vpcs: [net, office]}}\n- {{key: subnet/shop/front, vpc: net, prefix: 10.0.0.0/28}}\n\
         - {{key: subnet/shop/desk, vpc: office, prefix: 10.1.0.0/24}}\n\
         - {{key: security_group/shop/web, ingress: [{{protocol: tcp, ports: [80, 443]}}, {{protocol: icmp}}]}}\n\
         - {{key: security_group/shop/db, ingress: [{{protocol: tcp, ports: [5432], from: [\"group:web\"]}}, {{protocol: icmp}}]}}\n\
         - {{key: port/shop/web1, subnets: [front], host: h1, netns: {}, security_groups: [web]}}\n\
         - {{key: port/shop/db1, subnets: [front], host: h2, netns: {}, security_groups: [db]}}\n",
        web.name(),
        db.name()
    ));
    eventually(20.0, "two hosts are in sync", || world.fleet_json("status")["hosts"]["in_sync"] == 3);
    // A path that fails while there is traffic.
    let target = FaultTarget::Peer { name: "h2".into(), path: Some(1) };
    let fault = FaultSpec { direction: Direction::Tx, down: true, ..FaultSpec::new(target) };
    world.hosts()[0].client().add_fault(&fault).unwrap();
    eventually(40.0, "the path that fails is reported", || {
        ping(&web, "10.0.0.3", 20);
        world.fleet_json("hosts")[0]["paths"]["impaired"] == json!([{"peer": "h2", "paths": 4, "working": 3}])
    });
    // A port that its host refuses, with a reason that is HTML, and an agent that is gone.
    let file = world.directory().join("<b>hostname");
    std::fs::write(&file, "no namespace").unwrap();
    let refused = format!("add port/shop/bad subnets=front host=h2 netns={} --wait 20", file.display());
    world.tool(0).run(&refused).unwrap_err();
    world.hosts_mut()[2].kill_agent();
    eventually(20.0, "the relay has noticed", || world.fleet_json("status")["hosts"]["connected"] == 2);

    let pictures = std::env::var("BIFROST_SCREENSHOTS").ok();
    let show = |page: &str, name: &str, expected: &[&str]| {
        let picture = pictures.as_deref().map(|to| Path::new(to).join(name));
        let address = format!("http://{}/{page}", world.beside_relay(4791));
        let command = || world.command_beside_relay(&browser);
        let dom = browse(command, &world.directory().join("browser"), &address, picture.as_deref());
        for text in expected {
            assert!(dom.contains(text), "{page}: {text:?} is missing\n{dom}");
        }
        assert!(!dom.contains("<b>hostname"), "a text of a host became HTML\n{dom}");
    };
    show(
        "",
        "console-overview.png",
        &["1 / 3", "2 / 3", "&lt;b&gt;hostname", "agent disconnected", "#vpc/shop/office", "3 of 4 paths to h2 work"],
    );
    show("#hosts", "console-hosts.png", &["refuses objects", "in sync", "agent disconnected"]);
    show("#host/h2", "console-host.png", &["&lt;b&gt;hostname", "#vpc/shop/net"]);
    show("#vpc/shop/net", "console-network.png", &["10.0.0.0/28", "Ports (3)", "web1", "29 %"]);
    let port = ["Who may open connections", "5432", "group:web: ", "#port/shop/web1", "Everywhere", "in force"];
    show("#port/shop/db1", "console-port.png", &port);
    show("#port/shop/none", "console-none.png", &["there is no such object"]);
}
