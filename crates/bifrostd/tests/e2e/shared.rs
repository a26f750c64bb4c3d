//! Shared addresses of containers on one and on two hosts, moved by announcements and by keepalived.

use std::net::UdpSocket;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::common::host::vpc;
use crate::common::raw;
use crate::common::traffic::{Talk, ping};
use crate::common::{Guest, Lab, Net, Options, eventually};

const SHARED: &str = "10.0.0.100";
const SHARED_V6: &str = "fd00::100";

/// `a`, `c` and `e` are on the first host, `b` and `d` on the second one; `a`, `b` and `e` share addresses.
fn lab(workers: usize) -> Lab {
    let more = "gateway = [\"10.0.0.254\", \"fd00::fe\"]\n";
    let vpcs = format!("{}{more}", vpc(100, "tcp", "flow"));
    let mut lab = Lab::new(Options { workers, vpcs, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24", "fd00::1/64"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24", "fd00::2/64"]));
    lab.add(0, Guest::new("c", 3, &["10.0.0.3/24", "fd00::3/64"]));
    lab.add(1, Guest::new("d", 4, &["10.0.0.4/24", "fd00::4/64"]));
    lab.add(0, Guest::new("e", 5, &["10.0.0.5/24", "fd00::5/64"]));
    for host in &mut lab.hosts {
        for n in [1, 2, 5] {
            let mac = format!("mac = \"02:00:00:00:00:{n:02x}\"\n");
            let shares = format!("{mac}shared = [\"{SHARED}\", \"{SHARED_V6}\"]\n");
            assert!(host.config.contains(&mac));
            host.config = host.config.replace(&mac, &shares);
        }
    }
    lab.start();
    lab
}

/// Adds the addresses in the kernel of guest `n`, and announces the IPv4 address.
fn take(net: &Net, n: u8) {
    net.ip(&format!("addr add {SHARED}/32 dev eth0\naddr add {SHARED_V6}/128 dev eth0 nodad\n"));
    let (mac, address) = ([2, 0, 0, 0, 0, n], [10, 0, 0, 100]);
    let frame = raw::ethernet([0xff; 6], mac, 0x0806, &raw::arp(1, (mac, address), (mac, address)));
    assert_eq!(raw::send_frames(net, "eth0", vec![frame]), 1);
}

fn remove(net: &Net) {
    net.ip(&format!("addr del {SHARED}/32 dev eth0\naddr del {SHARED_V6}/128 dev eth0\n"));
}

#[test]
fn guests_share_an_address() {
    let lab = lab(2);
    let [a, b, c, d, e] = ["a", "b", "c", "d", "e"].map(|name| lab.net(name));
    let clients = [c, d];
    assert!(clients.iter().all(|client| ping(client, SHARED, 1, 100) == 0), "the address has no holder");
    // On the same host and on the other one. The clients' kernels have the gateway as the address's neighbor.
    let mut before = None;
    for (turn, (holder, n)) in [(a, 1), (e, 5), (b, 2), (a, 1)].into_iter().enumerate() {
        if let Some(before) = before.replace(holder) {
            remove(before);
        }
        take(holder, n);
        for client in clients {
            eventually(5.0, "the address has moved", || ping(client, SHARED, 1, 100) == 1);
            let mut talk = Talk::start(client, holder, SHARED, 5000 + turn as u16);
            talk.say(1000);
        }
    }
    // The IPv6 address was not announced: without a holder, a packet from it is enough.
    a.enter(|| UdpSocket::bind((SHARED_V6, 0)).unwrap().send_to(b"claim", ("fd00::4", 9)).unwrap());
    for client in clients {
        eventually(5.0, "a has it", || ping(client, SHARED_V6, 1, 100) == 1);
    }
    for host in &lab.hosts {
        assert!(host.log().matches("a shared address has moved").count() >= 4, "{}", host.log());
        host.assert_balanced();
    }
    assert_eq!(lab.hosts[0].drops("a", "spoofed_arp") + lab.hosts[1].drops("b", "spoofed_arp"), 0);
    // Another guest cannot take the address.
    take(d, 4);
    remove(d);
    eventually(5.0, "its announcement is dropped", || lab.hosts[1].drops("d", "spoofed_arp") > 0);
    assert_eq!(ping(c, SHARED, 2, 100), 2);
}

/// A keepalived in a guest's namespace.
struct Keepalived(Child);

impl Keepalived {
    /// With a VRRP router for each family: an advertisement every 100 ms; a backup takes over after 300 ms and its skew
    /// time.
    fn start(lab: &Lab, guest: &str, priority: u8) -> Keepalived {
        let directory = lab.hosts[0].directory.join(format!("keepalived-{guest}"));
        std::fs::create_dir_all(&directory).unwrap();
        let router = |name: &str, id: u8, address: &str, more: &str| {
            format!(
                "vrrp_instance {name} {{\n state BACKUP\n interface eth0\n virtual_router_id {id}\n priority {priority}\n \
                 advert_int 0.1\n{more} virtual_ipaddress {{\n  {address}\n }}\n}}\n"
            )
        };
        let text = format!(
            "global_defs {{\n vrrp_version 3\n vrrp_garp_master_delay 1\n}}\n{}{}",
            router("V4", 51, &format!("{SHARED}/32"), ""),
            router("V6", 52, &format!("{SHARED_V6}/128"), " native_ipv6\n"),
        );
        let file = |name: &str| directory.join(name).display().to_string();
        std::fs::write(file("conf"), text).unwrap();
        let arguments = ["--dont-fork", "--log-console", "--vrrp", "-f", &file("conf"), "-p", &file("pid"), "-r"];
        let log = std::fs::File::create(file("log")).unwrap();
        let mut command = lab.net(guest).command("keepalived");
        command.args(arguments).arg(file("vrrp-pid")).stdout(Stdio::from(log.try_clone().unwrap())).stderr(log);
        Keepalived(command.spawn().unwrap())
    }

    /// Kills it silently, so that the addresses stay in the guest's kernel. The child is killed first, because it would
    /// clean up after its parent; the parent is stopped meanwhile, so that it does not start another child.
    fn crash(mut self) {
        use rustix::process::{Pid, Signal, kill_process};
        let pid = self.0.id();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        kill_process(Pid::from_child(&self.0), Signal::STOP).unwrap();
        for child in children.split_whitespace().filter_map(|child| Pid::from_raw(child.parse().ok()?)) {
            kill_process(child, Signal::KILL).unwrap();
        }
        self.0.kill().unwrap();
        self.0.wait().unwrap();
        std::mem::forget(self);
    }
}

impl Drop for Keepalived {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(rustix::process::Pid::from_child(&self.0), rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}

/// Two keepalived on two hosts, over multicast: one is master, and after it fails the other one takes over within its
/// timeout.
#[test]
#[ignore = "VRRP's timeouts of 300 ms need a machine that is not busy: docs/VERIFICATION.md"]
fn keepalived_moves_an_address_between_hosts() {
    let lab = lab(1);
    let [c, d] = ["c", "d"].map(|name| lab.net(name));
    let has = |guest: &str| {
        let output = lab.net(guest).run("ip", &["addr", "show", "dev", "eth0"], "");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.contains(&format!("{SHARED}/32")) && text.contains(&format!("{SHARED_V6}/128"))
    };
    let reaches = |client: &Net| ping(client, SHARED, 1, 100) == 1 && ping(client, SHARED_V6, 1, 100) == 1;
    let first = Keepalived::start(&lab, "a", 150);
    eventually(10.0, "a is master", || has("a") && reaches(c) && reaches(d));
    let second = Keepalived::start(&lab, "b", 100);
    // Long enough for b to become master if it did not receive a's advertisements.
    std::thread::sleep(Duration::from_millis(1500));
    assert!(has("a") && !has("b"), "b receives a's advertisements");
    assert!(lab.hosts[0].sample("avs.copied_packets") > 0);

    // A crash: a keeps the address in its kernel, and sends nothing.
    let crashed = Instant::now();
    first.crash();
    // Its kernel no longer answers, either.
    remove(lab.net("a"));
    eventually(5.0, "b is master", || has("b"));
    let took_over = crashed.elapsed();
    eventually(5.0, "clients reach b", || reaches(c) && reaches(d));
    let reached_again = crashed.elapsed();
    // Three advertisement intervals and the skew are up to 361 ms; the rest is for a busy machine.
    assert!(reached_again < Duration::from_secs(4), "b took over after {took_over:?}, reached after {reached_again:?}");
    let mut talk = Talk::start(c, lab.net("b"), SHARED, 5000);
    talk.say(1000);
    println!("b took over after {took_over:?}, clients reached it after {reached_again:?}");
    drop(second);
    lab.hosts.iter().for_each(|host| host.assert_balanced());
}
