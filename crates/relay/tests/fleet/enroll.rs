//! A host gets its certificates from a relay: the first one for a token, and further ones by itself.

use crate::eventually;
use crate::world::World;

/// How long certificates are valid, seconds. A further one is fetched after about 5.
const LIFETIME_S: u32 = 8;

#[test]
fn a_host_enrolls_by_a_token_and_renews_its_certificate() {
    let mut world = World::new(1);
    world.give_certificates(LIFETIME_S);
    world.start_relay();
    world.start_daemons();
    let refused = world.tool(0).run("host enroll h1").unwrap_err();
    assert!(refused.contains("there is no host/h1"), "{refused}");
    world.fleet("add host/h1 addresses=192.0.2.1");
    let token = world.fleet("host enroll h1 --ttl 60");
    let token = token.trim();

    // Another secret, and another authority.
    let (secret, authority) = token.split_once('.').unwrap();
    let turned = |digits: &str| digits.bytes().map(|b| if b == b'0' { '1' } else { '0' }).collect::<String>();
    let log = world.start_agent_enrolling(0, "guess", &format!("{}.{authority}", turned(secret)));
    let says = |log: &std::path::Path, what: &str| std::fs::read_to_string(log).unwrap_or_default().contains(what);
    eventually(20.0, "a guess is refused", || says(&log, "the token is not valid"));
    let log = world.start_agent_enrolling(0, "forged", &format!("{secret}.{}", turned(authority)));
    eventually(20.0, "another relay is not believed", || says(&log, "UnknownIssuer"));
    assert!(!says(&log, secret), "secrets are not told");

    world.start_agent_enrolling(0, "identity", token);
    let host = |world: &World| world.fleet_json("hosts")[0].clone();
    eventually(20.0, "the host is connected", || host(&world)["connected"] == true);
    let (since, first) = (host(&world)["since_ms"].clone(), world.hosts()[0].file("identity/identity.pem"));
    assert!(first.contains("CERTIFICATE") && first.contains("PRIVATE KEY"));
    eventually(20.0, "there is a new certificate", || world.hosts()[0].file("identity/identity.pem") != first);
    assert_eq!((&host(&world)["since_ms"], &host(&world)["connected"]), (&since, &true.into()), "the stream goes on");
    let metrics = world.metrics(0);
    for (name, least) in [("hosts_enrolled_total 1", 1), ("certificates_refused_total 1", 1)] {
        assert!(metrics.matches(&format!("bifrost_relay_{name}")).count() >= least, "{metrics}");
    }
    // The new one is taken.
    world.kill_relay();
    world.start_relay();
    eventually(20.0, "the host is connected again", || host(&world)["connected"] == true);
    // A token is of one key.
    let log = world.start_agent_enrolling(0, "again", token);
    eventually(20.0, "it was used", || says(&log, "the token is not valid"));
}
