//! Flow logs in upgrades: each packet of a conversation is in one record, whichever daemon has counted it.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::common::host::vpc;
use crate::common::traffic::Talk;
use crate::common::{Guest, Lab, Options, eventually};
use crate::upgrade::faulty;
use crate::upgrade_workers::set_workers;

/// Records are created by a thread that scans all conversations within a second.
const SOON_S: f64 = 15.0;
const BYTES: usize = 200;

/// A network whose first host logs flows into a file and to a collector.
fn logging(workers: usize) -> (Lab, PathBuf, UdpSocket) {
    let acl = "[[vpc.acl]]\ndirection = \"egress\"\naction = \"deny\"\nprotocol = \"udp\"\nports = [9]\nlog = true\n";
    let vpcs = format!("{}{acl}", vpc(100, "tcp", "flow"));
    let mut lab = Lab::new(Options { vpcs, workers, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    let host = &mut lab.hosts[0];
    host.net.ip("link set lo up\n");
    let collector = host.net.enter(|| UdpSocket::bind("127.0.0.1:0").unwrap());
    collector.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let address = collector.local_addr().unwrap();
    let [json, rules] = ["flows.json", "rules.json"].map(|name| host.directory.join(name));
    let named = json.with_file_name("named.json");
    host.config += &format!(
        "[[vpc_flow_log]]\nname = \"named\"\njson = {named:?}\nports = [\"a\"]\nidle_timeout_s = 5\n[flow_log]\njson = {json:?}\nrules_json = {rules:?}\ncollector = \"{address}\"\nvpcs = [100]\n\
         idle_timeout_s = 5\ntemplate_interval_s = 3600\n"
    );
    // The other host logs nothing.
    lab.hosts[1].config = lab.hosts[1].config.replace("log = true\n", "");
    lab.start();
    (lab, json, collector)
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).expect("each line is an object")).collect()
}

/// Packets and bytes that the guest has sent from this port, over all records.
fn sent(path: &Path, port: u16) -> (u64, u64) {
    let of_it = lines(path).into_iter().filter(|line| line["source_port"] == port);
    of_it.fold((0, 0), |(packets, bytes), line| {
        (packets + line["packets"].as_u64().unwrap(), bytes + line["bytes"].as_u64().unwrap())
    })
}

fn send(from: &UdpSocket, to: &str, count: u64) {
    for _ in 0..count {
        from.send_to(&[1; BYTES], to).unwrap();
    }
}

/// By the exporter's address: the numbers and lengths of its messages, and how many of them have templates.
#[derive(Default)]
struct Exporter {
    /// Sequence number of the message, and number of its data records.
    messages: Vec<(u32, u32)>,
    templates: usize,
}

/// Reads messages until none comes any more.
fn collect(socket: &UdpSocket) -> BTreeMap<SocketAddr, Exporter> {
    let mut exporters: BTreeMap<SocketAddr, Exporter> = BTreeMap::new();
    let mut buffer = vec![0; 65536];
    while let Ok((len, from)) = socket.recv_from(&mut buffer) {
        let message = &buffer[..len];
        let word = |at: usize| u32::from_be_bytes(message[at..at + 4].try_into().unwrap());
        let half = |at: usize| usize::from(u16::from_be_bytes(message[at..at + 2].try_into().unwrap()));
        let exporter = exporters.entry(from).or_default();
        // A message has templates, with three records that describe elements, or data of one template.
        let records = if half(16) == 2 {
            exporter.templates += 1;
            3
        } else {
            count_records(&message[20..16 + half(18)], half(16))
        };
        exporter.messages.push((word(8), records));
    }
    exporters
}

/// Data records of a set: their lengths depend on the names in them.
fn count_records(mut set: &[u8], template: usize) -> u32 {
    // Bytes in front of the port's name, and behind it in front of the last name.
    let (before, between) = match template {
        256 => (8 + 8 + 8 + 5 + 2 * 18 + 3 + 8, 4),
        259 => (8 + 8 + 8 + 5 + 16 + 2 + 8, 0),
        other => panic!("template {other}"),
    };
    let mut count = 0;
    while !set.is_empty() {
        let name = before + 1 + usize::from(set[before]) + between;
        set = &set[name + 1 + usize::from(set[name])..];
        count += 1;
    }
    count
}

/// `workers`: at first, and after each upgrade.
fn flows_continue(workers: [usize; 4]) {
    let (mut lab, json, collector) = logging(workers[0]);
    let [rules, named] = ["rules.json", "named.json"].map(|name| json.with_file_name(name));
    let of_a = |port: u16| lab.net("a").enter(move || UdpSocket::bind(("10.0.0.1", port)).unwrap());
    let [accepted, rejected, short] = [5000, 6000, 7000].map(of_a);
    // Something is sent to the collector before.
    send(&short, "10.0.0.2:7", 1);
    eventually(SOON_S, "a record is written", || sent(&json, 7000).0 == 1);
    let mut talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
    talk.say(1000);
    let mut count = 0;
    for next in &workers[1..] {
        set_workers(&mut lab.hosts[0], *next);
        send(&accepted, "10.0.0.2:7", 10);
        send(&rejected, "10.0.0.2:9", 3);
        count += 1;
        let report = lab.hosts[0].upgrade(None).unwrap_or_else(|e| panic!("{e}\n{}", lab.hosts[0].log()));
        assert_eq!(lab.hosts[0].client.status().unwrap().pid, report.pid);
        // The first packet after the upgrade comes from the other side.
        std::mem::swap(&mut talk.client, &mut talk.server);
        talk.say(1000);
        std::mem::swap(&mut talk.client, &mut talk.server);
        talk.say(1000);
    }
    drop(talk);
    let (packets, bytes) = (10 * count, 10 * count * (BYTES as u64 + 28));
    let find = |port: u16| lines(&json).into_iter().filter(|line| line["source_port"] == port).collect::<Vec<_>>();
    let of_talk = || lines(&json).into_iter().filter(|line| line["destination_port"] == 5001).collect::<Vec<_>>();
    eventually(SOON_S, "all conversations have ended", || {
        !find(5000).is_empty() && !find(6000).is_empty() && !of_talk().is_empty()
    });
    std::thread::sleep(Duration::from_millis(1500));
    // One record of each conversation, with all its packets.
    let log = lab.hosts[0].log();
    assert_eq!((sent(&json, 5000), find(5000).len()), ((packets, bytes), 1), "{:?}\n{log}", find(5000));
    assert_eq!((sent(&json, 6000).0, find(6000).len()), (3 * count, 1), "{:?}\n{log}", find(6000));
    assert_eq!(find(6000)[0]["reason"], "acl");
    // The other log has them, too.
    assert_eq!((sent(&named, 5000), sent(&named, 6000).0), ((packets, bytes), 3 * count), "{:?}", lines(&named));
    assert_eq!(lines(&named).len(), lines(&json).len(), "{:?}", lines(&named));
    assert!(lines(&named).iter().all(|line| line["log"] == "named"));
    let talks = of_talk();
    let [talk] = &talks[..] else { panic!("{:?}", lines(&json)) };
    assert_eq!(
        (&talk["direction"], &talk["end"], &talk["source"]),
        (&"egress".into(), &"closed".into(), &"10.0.0.1".into())
    );
    assert!(talk["handshake_us"].is_u64(), "{talk}");
    assert!(talk["bytes"].as_u64().unwrap() > 4000 && talk["reverse_bytes"].as_u64().unwrap() > 3000, "{talk}");
    // Records of rules: those of each daemon.
    eventually(SOON_S, "rejected packets are logged", || sent(&rules, 6000).0 == 3 * count);
    // To the collector it is one exporter: the numbers have no gap, and the templates have come once.
    let exporters = collect(&collector);
    assert_eq!(exporters.len(), 1, "{:?}", exporters.keys());
    let exporter = exporters.values().next().unwrap();
    let mut next = 0;
    for (sequence, records) in &exporter.messages {
        assert_eq!(*sequence, next, "{:?}", exporter.messages);
        next += records;
    }
    assert_eq!(exporter.templates, 1);
    let status = lab.hosts[0].client.flow_log().unwrap();
    assert_eq!((status.lost_records, status.json_lost_records, status.ipfix_lost_records), (0, 0, 0), "{status:?}");
    // The counters of all daemons together.
    let samples = lab.hosts[0].client.samples().unwrap();
    let sum = |counter: &str| samples.iter().filter(|s| s.counter == counter).map(|s| s.value).sum::<u64>();
    let written = (lines(&json).len() + lines(&named).len()) as u64;
    let counted = ["flow_log.json_records", "avs.flow_log_created_records"].map(sum);
    assert_eq!(counted, [written; 2], "{}", lab.hosts[0].log());
}

#[test]
fn flows_continue_in_the_new_daemon() {
    flows_continue([1; 4]);
}

#[test]
fn flows_continue_in_the_new_daemon_with_two_workers() {
    flows_continue([2; 4]);
}

#[test]
fn flows_continue_with_another_number_of_workers() {
    flows_continue([2, 3, 1, 4]);
}

/// A daemon that does not take over flow logs leaves their records to the old one, which writes them.
#[test]
fn a_daemon_that_takes_no_records_loses_none() {
    let (mut lab, json, _collector) = logging(1);
    let socket = lab.net("a").enter(|| UdpSocket::bind("10.0.0.1:5000").unwrap());
    let packets = || sent(&json, 5000).0;
    send(&socket, "10.0.0.2:7", 10);
    let older = faulty(&lab.hosts[0], "older");
    lab.hosts[0].upgrade(Some(&older)).unwrap();
    assert_eq!(packets(), 10, "{}", lab.hosts[0].log());
    assert_eq!(lines(&json)[0]["end"], "forced");
    let named = json.with_file_name("named.json");
    assert_eq!(sent(&named, 5000).0, 10);
    send(&socket, "10.0.0.2:7", 5);
    // And from it to one that would take them.
    lab.hosts[0].upgrade(None).unwrap();
    send(&socket, "10.0.0.2:7", 4);
    eventually(SOON_S, "all packets are in a record", || packets() == 19 && sent(&named, 5000).0 == 19);
    assert!(!lab.hosts[0].log().contains("are lost"), "{}", lab.hosts[0].log());
}

/// After an upgrade that fails, the old daemon has its conversations.
#[test]
fn a_failed_upgrade_loses_no_records() {
    let (mut lab, json, _collector) = logging(1);
    let socket = lab.net("a").enter(|| UdpSocket::bind("10.0.0.1:5000").unwrap());
    for fault in ["exit prepared", "kill stopped", "exit working"] {
        send(&socket, "10.0.0.2:7", 10);
        let program = faulty(&lab.hosts[0], fault);
        lab.hosts[0].upgrade(Some(&program)).unwrap_err();
    }
    eventually(SOON_S, "all packets are in a record", || sent(&json, 5000).0 == 30);
    assert_eq!(lines(&json).iter().filter(|line| line["source_port"] == 5000).count(), 1);
}
