//! Flow logs of real traffic: JSON lines, and IPFIX that tshark reads back; logs that come and go.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::host::{Host, vpc};
use crate::common::{Guest, Lab, Options, eventually};

const PORT: u16 = 4739;
const BODY: usize = 300_000;
/// Records are created when a connection has been closed for a second, by a thread that scans all of them within a
/// second.
const SOON_S: f64 = 10.0;

/// A collector: its address and socket.
fn collect(host: &Host) -> (SocketAddr, UdpSocket) {
    let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), PORT);
    let socket = host.net.enter(move || UdpSocket::bind(address).unwrap());
    socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    (address, socket)
}

/// Writes a collector's messages as a file of raw IPv4 packets.
fn pcap(path: &Path, messages: &[Vec<u8>]) {
    let mut file = Vec::new();
    // Magic, version 2.4, time zone 0, accuracy 0, maximum packet length, LINKTYPE_RAW.
    for word in [0xa1b2_c3d4_u32, 0x0002_0004, 0, 0, 65535, 101] {
        file.extend(word.to_be_bytes());
    }
    for message in messages {
        let len = (28 + message.len()) as u16;
        [0, 0, u32::from(len), u32::from(len)].iter().for_each(|word| file.extend(word.to_be_bytes()));
        file.extend([0x45, 0]);
        file.extend(len.to_be_bytes());
        file.extend([0, 0, 0, 0, 64, 17, 0, 0, 127, 0, 0, 1, 127, 0, 0, 1]);
        [PORT, PORT, len - 20, 0].iter().for_each(|word| file.extend(word.to_be_bytes()));
        file.extend(message);
    }
    std::fs::write(path, file).unwrap();
}

fn tshark(path: &Path) -> String {
    let output = Command::new("tshark")
        .args(["-n", "-V", "-d", &format!("udp.port=={PORT},cflow"), "-r"])
        .arg(path)
        .output()
        .expect("tshark is there: scripts/install-debian-packages.sh installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn lines(path: &PathBuf) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).expect("each line is an object")).collect()
}

fn exchange(lab: &Lab, port: u16) {
    let server = lab.net("b").enter(move || TcpListener::bind(("10.0.0.2", port)).unwrap());
    let serving = std::thread::spawn(move || {
        let (mut stream, _) = server.accept().unwrap();
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).unwrap();
        stream.write_all(b"thanks").unwrap();
        heard.len()
    });
    let mut client = lab.net("a").enter(move || TcpStream::connect(("10.0.0.2", port)).unwrap());
    client.write_all(&vec![7; BODY]).unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    client.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(serving.join().unwrap(), BODY);
}

#[test]
fn flows_are_logged_as_json_and_ipfix() {
    let acl = "[[vpc.acl]]\ndirection = \"egress\"\naction = \"deny\"\nprotocol = \"udp\"\nports = [9]\n";
    let vpcs = format!("{}{acl}", vpc(100, "tcp", "flow"));
    let mut lab = Lab::new(Options { vpcs, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    let (address, collector) = collect(&lab.hosts[0]);
    let host = &mut lab.hosts[0];
    let json = host.directory.join("flows.json");
    let section = format!(
        "[flow_log]\njson = {json:?}\ncollector = \"{address}\"\nvpcs = [100]\nidle_timeout_s = 1\n\
         template_interval_s = 1\ndomain = 77\nenterprise = 54321\n"
    );
    let off = host.config.clone();
    host.config = format!("{off}{section}");
    lab.start();

    exchange(&lab, 8080);
    let denied = lab.net("a").enter(|| UdpSocket::bind("10.0.0.1:5000").unwrap());
    for _ in 0..3 {
        denied.send_to(&[1; 100], "10.0.0.2:9").unwrap();
    }
    let find = |protocol: u64, port: u64| {
        let is_it = |line: &Value| line["protocol"] == protocol && line["destination_port"] == port;
        lines(&json).into_iter().find(is_it)
    };
    eventually(SOON_S, "both are logged", || find(6, 8080).is_some() && find(17, 9).is_some());
    let tcp = find(6, 8080).unwrap();
    let number = |line: &Value, key: &str| line[key].as_u64().unwrap_or_else(|| panic!("{key} of {line}"));
    assert_eq!((&tcp["port"], &tcp["direction"], &tcp["action"]), (&"a".into(), &"egress".into(), &"accepted".into()));
    assert_eq!(
        (&tcp["source"], &tcp["destination"], &tcp["end"]),
        (&"10.0.0.1".into(), &"10.0.0.2".into(), &"closed".into())
    );
    assert_eq!(number(&tcp, "vni"), 100);
    // Segments of 1460 bytes, each with its headers.
    let (packets, bytes) = (number(&tcp, "packets"), number(&tcp, "bytes"));
    assert!(packets >= 200 && bytes >= (BODY + 40 * 200) as u64 && bytes < 2 * BODY as u64, "{tcp}");
    assert!(number(&tcp, "reverse_packets") >= 3 && number(&tcp, "reverse_bytes") >= 150, "{tcp}");
    assert!((1..5_000_000).contains(&number(&tcp, "handshake_us")), "{tcp}");
    assert!(number(&tcp, "start_ms") <= number(&tcp, "end_ms"));
    let now_ms = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
    assert!(now_ms - number(&tcp, "end_ms") < 60_000, "{tcp}");
    let udp = find(17, 9).unwrap();
    assert_eq!((&udp["action"], &udp["reason"]), (&"rejected".into(), &"acl".into()));
    assert_eq!((number(&udp, "packets"), number(&udp, "bytes"), number(&udp, "source_port")), (3, 3 * 128, 5000));

    // The same in IPFIX, with repeated templates.
    std::thread::sleep(Duration::from_millis(1200));
    exchange(&lab, 8081);
    let mut messages = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut buffer = vec![0; 65536];
    while Instant::now() < deadline
        && !messages.iter().any(|m: &Vec<u8>| m.windows(2).any(|w| w == 8081u16.to_be_bytes()))
    {
        if let Ok(len) = collector.recv(&mut buffer) {
            messages.push(buffer[..len].to_vec());
        }
    }
    let file = lab.hosts[0].directory.join("flows.pcap");
    pcap(&file, &messages);
    let text = tshark(&file);
    for expected in [
        "Observation Domain Id: 77",
        "Private Enterprise Number: 54321",
        "tcpHandshakeMicroseconds",
        "SrcAddr: 10.0.0.1",
        "DstAddr: 10.0.0.2",
        "SrcPort: 5000",
        "DstPort: 9",
        "DstPort: 8080",
        "DstPort: 8081",
        "Protocol: TCP (6)",
        "Protocol: UDP (17)",
        "Packets: 3",
        "Octets: 384",
        &format!("Octets: {bytes}"),
        &format!("Packets: {packets}"),
        "Flow End Reason: End of Flow detected (3)",
    ] {
        assert!(text.contains(expected), "no {expected:?} in {text}");
    }
    assert!(text.matches("Template FlowSet").count() + text.matches("Data Template").count() >= 2, "{text}");
    for trouble in ["Malformed", "No template found", "Expert Info (Error", "Expert Info (Warning"] {
        assert!(!text.contains(trouble), "{trouble} in {text}");
    }

    // When logging is disabled, open flows are logged, and nothing after that.
    let open = lab.net("a").enter(|| UdpSocket::bind("10.0.0.1:6000").unwrap());
    open.send_to(&[1; 10], "10.0.0.2:7").unwrap();
    let host = &mut lab.hosts[0];
    host.config = off;
    host.write_config();
    assert!(host.client.reload().unwrap().flow_log_changed);
    eventually(SOON_S, "the open flow is logged", || find(17, 7).is_some());
    let host = &lab.hosts[0];
    eventually(SOON_S, "the workers track no flows", || host.client.flow_log().unwrap().flows == 0);
    let before = lines(&json).len();
    exchange(&lab, 8082);
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(lines(&json).len(), before);
    let host = &lab.hosts[0];
    let status = host.client.flow_log().unwrap();
    assert!(
        !status.on && status.json_records as usize == before && status.ipfix_records as usize == before,
        "{status:?}"
    );
    assert_eq!((status.json_lost_records, status.ipfix_lost_records, status.lost_records), (0, 0, 0));
    assert_eq!(host.counter("avs.flow_log_unlogged_packets"), 0);
}

#[test]
fn an_unwritable_file_and_an_unreachable_collector_only_lose_records() {
    let mut lab = Lab::new(Options::default());
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    let host = &mut lab.hosts[0];
    let directory = host.directory.join("later");
    let json = directory.join("flows.json");
    host.config += &format!("[flow_log]\njson = {json:?}\ncollector = \"127.0.0.1:1\"\nidle_timeout_s = 1\n");
    lab.start();
    exchange(&lab, 8080);
    let host = &lab.hosts[0];
    eventually(SOON_S, "records are lost", || host.client.flow_log().unwrap().json_lost_records > 0);
    std::fs::create_dir(&directory).unwrap();
    exchange(&lab, 8081);
    eventually(SOON_S, "the file is written", || !lines(&json).is_empty());
    // As logrotate does.
    std::fs::rename(&json, directory.join("flows.json.1")).unwrap();
    exchange(&lab, 8082);
    eventually(SOON_S, "a new file is created", || lines(&json).iter().any(|line| line["destination_port"] == 8082));
    eventually(SOON_S, "the collector refuses", || host.client.flow_log().unwrap().ipfix_lost_records > 0);
}

/// Logs come, change and go by the API; the records of others stay open, and a file does not grow without a limit.
#[test]
fn logs_of_ports_come_and_go_by_the_api() {
    let mut lab = Lab::new(Options::default());
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    let host = &mut lab.hosts[0];
    let file = |name: &str| host.directory.join(name);
    let (of_host, named, other) = (file("flows.json"), file("named.json"), file("other.json"));
    host.config += &format!("[flow_log]\njson = {of_host:?}\nidle_timeout_s = 600\n");
    lab.start();
    let client = &lab.hosts[0].client;
    let apply = |op: &str, spec: Value| {
        let key = if op == "delete" { spec["name"].clone() } else { Value::Null };
        let spec = if op == "delete" { Value::Null } else { spec };
        let item = json!({"op": op, "kind": "vpc_flow_log", "owner": "test", "key": key, "spec": spec});
        client.apply(&serde_json::from_value(json!({"items": [item]})).unwrap()).unwrap();
    };
    let sender = lab.net("a").enter(|| UdpSocket::bind("10.0.0.1:5000").unwrap());
    let receiver = lab.net("b").enter(|| UdpSocket::bind("10.0.0.2:7").unwrap());
    receiver.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    // What has arrived is counted.
    let send = |count: usize| {
        for _ in 0..count {
            sender.send_to(&[1; 100], "10.0.0.2:7").unwrap();
            receiver.recv(&mut [0; 100]).unwrap();
        }
    };
    let packets = |path: &PathBuf| {
        let of_it: Vec<_> = lines(path).into_iter().filter(|line| line["source_port"] == 5000).collect();
        (of_it.iter().map(|line| line["packets"].as_u64().unwrap()).sum::<u64>(), of_it.len())
    };
    send(1);
    apply("set", json!({"name": "named", "ports": ["a"], "json": named, "idle_timeout_s": 600}));
    send(2);
    apply("set", json!({"name": "other", "vpcs": [100], "json": other}));
    send(4);
    apply(
        "set",
        json!({"name": "named", "ports": ["a"], "json": named, "idle_timeout_s": 600, "active_timeout_s": 600}),
    );
    // The thread that writes records looks for new logs every 100 ms.
    std::thread::sleep(Duration::from_secs(1));
    apply("delete", json!({"name": "other"}));
    eventually(SOON_S, "the log that ends has written", || packets(&other) == (4, 1));
    assert_eq!((packets(&of_host), packets(&named)), ((0, 0), (0, 0)), "the others have open records");
    assert_eq!(lines(&other)[0]["end"], "forced");
    let status = client.flow_log().unwrap();
    assert_eq!(status.logs.iter().map(|log| (&*log.name, log.ports.len())).collect::<Vec<_>>(), [("named", 1)]);
    send(8);
    apply("delete", json!({"name": "named"}));
    eventually(SOON_S, "all its packets are in one record", || packets(&named) == (14, 1));
    assert_eq!((&lines(&named)[0]["log"], &lines(&named)[0]["vni"]), (&"named".into(), &100.into()));
    let host = &mut lab.hosts[0];
    host.config = host.config.split("[flow_log]").next().unwrap().to_owned();
    host.write_config();
    host.client.reload().unwrap();
    eventually(SOON_S, "so are those of the host's log", || packets(&of_host) == (15, 1));
    assert_eq!(lines(&of_host)[0].get("log"), None);
}
