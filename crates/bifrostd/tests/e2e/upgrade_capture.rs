//! Captures during upgrades: the client's file goes on in the new daemon, and has everything that either daemon carried.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bifrost_control::Client;
use bifrost_control::api::CaptureSpec;
use bifrost_control::client::ClientError;

use crate::capture::{Shared, read};
use crate::common::host::Host;
use crate::common::traffic::{Requests, ping};
use crate::common::{Guest, Lab, Options, eventually, netns};
use crate::kept::serve_echo;
use crate::upgrade::faulty;
use crate::upgrade_workers::set_workers;

/// Time limit of captures that last for several upgrades.
const CAPTURED: Duration = Duration::from_secs(15);

fn running(workers: usize) -> Lab {
    let mut lab = Lab::new(Options { workers, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    lab.start();
    lab
}

fn start(host: &Host, spec: CaptureSpec) -> (Shared, JoinHandle<Result<(), ClientError>>) {
    let (out, socket) = (Shared::default(), host.socket());
    let mut theirs = out.clone();
    let capture = std::thread::spawn(move || Client::new(socket).unwrap().capture(&spec, &mut theirs));
    eventually(5.0, "the capture has started", || !out.0.lock().unwrap().is_empty());
    (out, capture)
}

fn save(lab: &Lab, name: &str, bytes: &[u8]) -> PathBuf {
    let file = netns::directory(lab.tag()).join(name);
    std::fs::write(&file, bytes).unwrap();
    file
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes[..4].try_into().unwrap())
}

/// Checks the blocks of a file: one section, packets of known interfaces, and statistics that agree with them. Returns
/// the number of packets, and of those without room.
fn check(file: &[u8]) -> (u64, u64) {
    let (mut interfaces, mut packets, mut statistics) = (0, BTreeMap::<u32, u64>::new(), BTreeMap::new());
    let mut rest = file;
    while !rest.is_empty() {
        let (kind, len) = (number(rest), number(&rest[4..]) as usize);
        assert!(len.is_multiple_of(4) && number(&rest[len - 4..]) as usize == len);
        let body = &rest[8..len - 4];
        match kind {
            0x0a0d_0d0a => assert_eq!(rest.len(), file.len(), "one section"),
            1 => interfaces += 1,
            5 if body[12..14] == [4, 0] => {
                let count = |at: usize| u64::from_le_bytes(body[at..at + 8].try_into().unwrap());
                assert!(statistics.insert(number(body), (count(16), count(28))).is_none(), "twice");
            }
            5 => {}
            6 => *packets.entry(number(body)).or_default() += 1,
            kind => panic!("a block of kind {kind}"),
        }
        rest = &rest[len..];
    }
    assert_eq!(statistics.len(), interfaces);
    for (interface, (seen, missed)) in &statistics {
        assert_eq!(packets.get(interface).copied().unwrap_or(0), seen - missed, "interface {interface}");
    }
    (packets.values().sum(), statistics.values().map(|(_, missed)| missed).sum())
}

/// The requests of one connection, one byte each, were all captured: at no stage is a number missing.
fn assert_whole(lab: &Lab, file: &[u8], stages: &[&str], workers: usize) {
    let (packets, missed) = check(file);
    let seen = read(&save(lab, "capture.pcapng", file));
    assert_eq!((seen.len() as u64, missed), (packets, 0));
    for stage in stages {
        let source = if *stage == "guest-tx" { "10.0.0.1" } else { "10.0.0.2" };
        let of_stage = seen.iter().filter(|seen| seen.stage == *stage && seen.source == source && seen.payload > 0);
        let mut numbers: Vec<u32> = of_stage.map(|seen| seen.sequence.unwrap()).collect();
        assert!(numbers.len() > 100, "{} at {stage} with {workers} workers", numbers.len());
        numbers.sort_unstable();
        numbers.dedup();
        let hole = numbers.windows(2).find(|pair| pair[1] - pair[0] != 1);
        assert_eq!(hole, None, "at {stage} with {workers} workers");
    }
}

/// `counts`: numbers of workers, at first and after each upgrade.
fn continues_over_upgrades(counts: [usize; 4]) {
    let workers = counts.into_iter().max().unwrap_or_default();
    let mut lab = running(counts[0]);
    serve_echo(lab.net("b"), "10.0.0.2", 5003);
    let at = ["guest-tx", "guest-rx"];
    let spec = CaptureSpec {
        at: at.map(str::to_owned).to_vec(),
        filter: "tcp port 5003".to_owned(),
        port: Some("a".to_owned()),
        snaplen_bytes: 128,
        seconds: CAPTURED.as_secs(),
        ..CaptureSpec::default()
    };
    let began = Instant::now();
    let (out, capture) = start(&lab.hosts[0], spec);
    let requests = Requests::start(lab.net("a"), "10.0.0.2", 5003);
    let mut pids = Vec::new();
    for upgrade in 0..3 {
        requests.wait_for(100);
        let before = out.0.lock().unwrap().len();
        set_workers(&mut lab.hosts[0], counts[upgrade + 1]);
        if upgrade == 1 {
            // It continues in the old daemon, too. The new one fails before it carries packets, which would be missing.
            let program = faulty(&lab.hosts[0], "exit begun");
            lab.hosts[0].upgrade(Some(&program)).unwrap_err();
            requests.wait_for(100);
        }
        pids.push(lab.hosts[0].upgrade(None).unwrap().pid);
        if capture.is_finished() {
            assert!(began.elapsed() >= CAPTURED, "it has ended early: {:?}", capture.join().unwrap());
            eprintln!("the machine is too slow for this test");
            return;
        }
        // Still only one.
        let second = lab.hosts[0].client.capture(&CaptureSpec::default(), &mut std::io::sink());
        assert!(matches!(&second, Err(ClientError::Api(e)) if e.what.contains("another capture")), "{second:?}");
        requests.wait_for(100);
        eventually(5.0, "the file grows", || out.0.lock().unwrap().len() > before);
    }
    capture.join().unwrap().unwrap();
    let lasted = began.elapsed();
    // The time limit counts from the start of the capture.
    assert!(lasted > CAPTURED - Duration::from_secs(1), "{lasted:?}");
    assert!(lasted < CAPTURED + Duration::from_secs(2) || lab.stood_still(), "{lasted:?}");
    requests.finish();
    let file = out.0.lock().unwrap().clone();
    assert_whole(&lab, &file, &at, workers);
    // The interruption is stated in the file, at the first packet of each daemon.
    let seen = read(&save(&lab, "capture.pcapng", &file));
    let remarks: Vec<&str> = seen.iter().map(|seen| &*seen.comment).filter(|c| c.contains("continues the")).collect();
    assert_eq!(remarks.len(), 3, "{remarks:?}");
    for (remark, pid) in remarks.iter().zip(&pids) {
        assert!(remark.contains(&format!("(process {pid}) continues the capture of bifrostd ")), "{remark}");
        let (_, gap) = remark.rsplit_once("captured for ").unwrap();
        let gap: f64 = gap.strip_suffix(" ms").unwrap().parse().unwrap();
        println!("{workers} workers: no packets for {gap} ms");
        assert!(gap > 0.0 && (gap < 1000.0 || lab.stood_still()), "{remark}");
    }
    assert_eq!(String::from_utf8_lossy(&file).matches("continues the capture").count(), 6, "notes and packets");
    // The next capture can start.
    let spec = CaptureSpec { seconds: 1, ..CaptureSpec::default() };
    lab.hosts[0].client.capture(&spec, &mut std::io::sink()).unwrap();
}

#[test]
fn a_capture_continues_over_upgrades() {
    continues_over_upgrades([1; 4]);
}

#[test]
fn a_capture_continues_over_upgrades_with_two_workers() {
    continues_over_upgrades([2; 4]);
}

#[test]
fn a_capture_continues_over_upgrades_with_another_number_of_workers() {
    continues_over_upgrades([2, 3, 1, 2]);
}

/// The limits of the request hold for both daemons together.
#[test]
fn limits_of_a_capture_count_over_an_upgrade() {
    let mut lab = running(1);
    serve_echo(lab.net("b"), "10.0.0.2", 5003);
    let requests = Requests::start(lab.net("a"), "10.0.0.2", 5003);
    let unlimited = CaptureSpec::default();
    for (name, packets, bytes) in [("packets", 3000, unlimited.bytes), ("bytes", unlimited.packets, 3000 * 40)] {
        let filter = "src host 10.0.0.1 and tcp port 5003".to_owned();
        let at = vec!["guest-tx".to_owned()];
        let spec = CaptureSpec { at, filter, snaplen_bytes: 40, packets, bytes, ..CaptureSpec::default() };
        let began = Instant::now();
        let (out, capture) = start(&lab.hosts[0], spec);
        requests.wait_for(200);
        lab.hosts[0].upgrade(None).unwrap();
        assert!(!capture.is_finished(), "{name}");
        requests.wait_for(200);
        capture.join().unwrap().unwrap();
        assert_eq!(check(&out.0.lock().unwrap()), (3000, 0), "{name}");
        assert!(began.elapsed() < Duration::from_secs(50), "{name}: not the time limit");
    }
    requests.finish();
}

/// A capture whose reader does not read, or whose client knows no chunks, ends with an upgrade and hardly delays it; so
/// does one that the new daemon cannot continue.
#[test]
fn a_capture_that_cannot_continue_does_not_stop_an_upgrade() {
    let mut lab = running(1);
    let ask = |host: &Host, version: &str| {
        let mut stream = UnixStream::connect(host.socket()).unwrap();
        let body = "{\"seconds\": 60}";
        let request =
            format!("POST /v1/capture HTTP/{version}\r\nHost: a\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        stream.write_all(request.as_bytes()).unwrap();
        stream
    };
    // It does not read.
    let stalled = ask(&lab.hosts[0], "1.1");
    ping(lab.net("a"), "10.0.0.2", 3, 56);
    let requests = {
        serve_echo(lab.net("b"), "10.0.0.2", 5003);
        Requests::start(lab.net("a"), "10.0.0.2", 5003)
    };
    requests.wait_for(1000);
    let began = Instant::now();
    lab.hosts[0].upgrade(None).unwrap();
    println!("with a reader that stalls: {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(8) || lab.stood_still(), "{:?}", began.elapsed());
    drop(stalled);
    // The body ends with the connection.
    let free = |host: &Host| {
        eventually(5.0, "no capture is running", || {
            let spec = CaptureSpec { seconds: 1, packets: 1, ..CaptureSpec::default() };
            host.client.capture(&spec, &mut std::io::sink()).is_ok()
        });
    };
    free(&lab.hosts[0]);
    let mut old = ask(&lab.hosts[0], "1.0");
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        old.read_to_end(&mut all).unwrap();
        all
    });
    requests.wait_for(100);
    lab.hosts[0].upgrade(None).unwrap();
    let all = reader.join().unwrap();
    let body = all.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
    assert_eq!(all[body..body + 4], [0x0a, 0x0d, 0x0d, 0x0a]);
    free(&lab.hosts[0]);
    // The client leaves after an upgrade: the next capture can start.
    let leaving = ask(&lab.hosts[0], "1.1");
    let reader = std::thread::spawn({
        let mut stream = leaving.try_clone().unwrap();
        move || std::io::copy(&mut stream, &mut std::io::sink())
    });
    requests.wait_for(100);
    lab.hosts[0].upgrade(None).unwrap();
    requests.wait_for(100);
    leaving.shutdown(std::net::Shutdown::Both).unwrap();
    let _ = reader.join().unwrap();
    drop(leaving);
    free(&lab.hosts[0]);
    // A new daemon that takes no captures.
    let (_, capture) = start(&lab.hosts[0], CaptureSpec { seconds: 60, ..CaptureSpec::default() });
    let program = faulty(&lab.hosts[0], "older");
    lab.hosts[0].upgrade(Some(&program)).unwrap();
    capture.join().unwrap().unwrap();
    requests.finish();
}

/// The file of a continued capture ends when the daemon stops.
#[test]
fn a_continued_capture_ends_with_the_daemon() {
    let mut lab = running(1);
    serve_echo(lab.net("b"), "10.0.0.2", 5003);
    let requests = Requests::start(lab.net("a"), "10.0.0.2", 5003);
    let (out, capture) = start(&lab.hosts[0], CaptureSpec { seconds: 60, ..CaptureSpec::default() });
    lab.hosts[0].upgrade(None).unwrap();
    requests.wait_for(100);
    requests.finish();
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(lab.hosts[0].pid() as i32).unwrap(),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    capture.join().unwrap().unwrap();
    let seen = read(&save(&lab, "stopped.pcapng", &out.0.lock().unwrap()));
    let continued = seen.iter().skip_while(|seen| !seen.comment.contains("continues the capture"));
    assert!(continued.count() > 200);
}
