//! The dashboards and alert rules, asked of a real Prometheus that reads a relay, agents and daemons.

use crate::world::World;
use crate::{eventually, ping, prometheus};

#[test]
#[ignore = "needs BIFROST_PROMETHEUS"]
fn every_panel_shows_something() {
    let program = prometheus::program();
    let mut world = World::new(2);
    let targets = world.expose_metrics();
    world.run_all();
    let listen = world.beside_relay(9090);
    let arguments = prometheus::configure(world.directory(), &listen, &targets);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let _prometheus = world.run_beside_relay(&program, &arguments, "prometheus.log");
    world.wait_for_listener(&listen, "prometheus.log");
    let ask = |target: &str| world.http_get(&listen, target);
    let prometheus = prometheus::Asked(&ask);
    prometheus.wait(targets.len());

    // What panels are about happens after Prometheus has begun to read.
    let (web, db) = (world.guest("web"), world.guest("db"));
    world.apply(&format!(
        "- {{key: host/h1, addresses: [192.0.2.1]}}\n- {{key: host/h2, addresses: [192.0.2.2]}}\n- key: vpc/demo/net\n\
         - {{key: subnet/demo/a, vpc: net, prefix: 10.0.0.0/24}}\n- {{key: security_group/demo/open, ingress: [{{}}]}}\n\
         - {{key: port/demo/web, subnets: [a], host: h1, netns: {}, security_groups: [open]}}\n\
         - {{key: port/demo/db, subnets: [a], host: h2, netns: {}, security_groups: [open]}}\n",
        web.name(),
        db.name()
    ));
    let bad = "add port/demo/bad subnets=a host=h2 netns=/etc/hostname --wait 20";
    world.tool(0).run(bad).unwrap_err();
    eventually(30.0, "there is traffic for some seconds", || {
        (0..4).all(|_| ping(&web, "10.0.0.3", 50) == 50 && ping(&db, "10.0.0.2", 50) == 50)
    });
    prometheus.check_rules();
    let asked = prometheus.check_dashboard("fleet", &[]) + prometheus.check_dashboard("hosts", &[]);
    assert!(asked > 25, "{asked}");
}
