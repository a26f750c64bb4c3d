//! Containers stop and restart while the daemon runs, or do not exist when it starts.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::common::traffic::{Talk, ping};
use crate::common::{Guest, Lab, Options, eventually};

/// Time for a device to follow its namespace, which is polled every quarter of a second.
const SOON_S: f64 = 5.0;

/// The devices in the namespace of `file`, which may have no name any more.
pub fn devices(file: &File) -> String {
    std::thread::scope(|scope| {
        let list = || {
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            std::fs::read_to_string("/proc/thread-self/net/dev").unwrap()
        };
        scope.spawn(list).join().unwrap()
    })
}

#[test]
fn a_container_that_starts_after_the_daemon_gets_its_device() {
    for workers in [1, 2] {
        let mut lab = Lab::new(Options { workers, ..Options::default() });
        lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
        lab.add(0, Guest::new("c", 3, &["10.0.0.3/24"]));
        lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
        lab.delete_net("a");
        lab.start();
        let host = &lab.hosts[0];
        assert!(host.port("a").waiting && !host.port("c").waiting, "{:?}", host.client.ports());
        assert!(host.log().contains("waits for its network namespace"), "{}", host.log());
        assert_eq!(ping(lab.net("c"), "10.0.0.2", 3, 56), 3, "another guest is not affected");
        lab.make_net("a");
        eventually(SOON_S, "the port has its device", || !lab.hosts[0].port("a").waiting);
        assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
        assert_eq!(ping(lab.net("b"), "10.0.0.1", 3, 56), 3);
    }
}

#[test]
fn a_restarted_container_gets_a_new_device_without_effect_on_others() {
    let mut lab = Lab::running(Options::default());
    lab.add(0, Guest::new("c", 3, &["10.0.0.3/24"]));
    for host in &lab.hosts {
        host.write_config();
        host.client.reload().unwrap();
    }
    let mut talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
    talk.say(1000);
    assert_eq!(ping(lab.net("c"), "10.0.0.2", 3, 56), 3);
    for round in 0..3 {
        let former = File::open(format!("/run/netns/{}", lab.net("c").name())).unwrap();
        assert!(devices(&former).contains("eth0"));
        lab.delete_net("c");
        if round == 0 {
            // Once with a pause, later as quickly as a restart.
            eventually(SOON_S, "the port waits", || lab.hosts[0].port("c").waiting);
            talk.say(1000);
            std::thread::sleep(Duration::from_millis(300));
        }
        lab.make_net("c");
        eventually(SOON_S, "it has a device again", || lab.net("c").has_device("eth0"));
        eventually(SOON_S, "the old device is removed", || !devices(&former).contains("eth0"));
        // The other host may have been notified that the vNIC is unknown, which it caches for a moment.
        eventually(SOON_S, "it is reachable", || ping(lab.net("b"), "10.0.0.3", 1, 56) == 1);
        assert_eq!(ping(lab.net("c"), "10.0.0.2", 3, 56), 3);
        talk.say(1000);
    }
    assert_eq!(
        lab.net("a").needed_retransmits() + lab.net("b").needed_retransmits(),
        0,
        "another guest's stream lost packets"
    );
}

#[test]
fn a_reload_recreates_a_deleted_device() {
    let lab = Lab::running(Options::default());
    lab.net("a").ip("link del eth0\n");
    eventually(SOON_S, "the failure is detected", || lab.hosts[0].port("a").failed);
    lab.hosts[0].client.reload().unwrap();
    assert!(!lab.hosts[0].port("a").failed);
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
}
