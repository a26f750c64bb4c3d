//! A packet is captured at every stage, and a dropped one with its reason; read back with tshark.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use bifrost_control::Client;
use bifrost_control::api::CaptureSpec;
use bifrost_control::client::ClientError;

use crate::common::traffic::Talk;
use crate::common::{Lab, Options, eventually, netns, raw};

/// A capture that can be read while it grows.
#[derive(Clone, Default)]
pub(crate) struct Shared(pub(crate) Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A packet's fields from tshark.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) stage: String,
    pub(crate) comment: String,
    /// From the innermost TCP header.
    pub(crate) sequence: Option<u32>,
    pub(crate) payload: u32,
    syn: bool,
    /// Innermost source address.
    pub(crate) source: String,
    psn: Option<u32>,
}

pub(crate) fn read(file: &Path) -> Vec<Seen> {
    let dissector = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/wireshark/bifrost.lua");
    let fields =
        ["frame.interface_name", "frame.comment", "tcp.seq_raw", "tcp.len", "tcp.flags.syn", "ip.src", "bifrost.psn"];
    let output = Command::new("tshark")
        .args(["-n", "-X", &format!("lua_script:{}", dissector.display()), "-T", "fields", "-E", "occurrence=l"])
        .args(fields.iter().flat_map(|field| ["-e", field]))
        .arg("-r")
        .arg(file)
        .output()
        .expect("tshark is there: scripts/install-debian-packages.sh installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows = String::from_utf8(output.stdout).unwrap();
    let row = |row: &str| {
        let [stage, comment, sequence, payload, syn, source, psn] = row.split('\t').collect::<Vec<_>>()[..] else {
            panic!("{row:?}")
        };
        Seen {
            stage: stage.split('/').next().unwrap().to_string(),
            comment: comment.to_string(),
            sequence: sequence.parse().ok(),
            payload: payload.parse().unwrap_or(0),
            syn: syn == "1" || syn == "True",
            source: source.to_string(),
            psn: psn.parse().ok(),
        }
    };
    rows.lines().map(row).collect()
}

#[test]
fn a_packet_is_seen_at_every_stage_and_a_drop_with_its_reason() {
    let lab = Lab::running(Options::default());
    lab.hosts[1].path_fault("host-a", None, |fault| fault.loss_percent = 5.0);
    let out = Shared::default();
    let capture = {
        let (socket, mut out) = (lab.hosts[0].socket(), out.clone());
        let filter = "tcp port 5001 or src host 10.0.0.3".to_string();
        let spec = CaptureSpec { filter, seconds: 4, ..CaptureSpec::default() };
        std::thread::spawn(move || Client::new(socket).unwrap().capture(&spec, &mut out))
    };
    eventually(5.0, "the capture has started", || !out.0.lock().unwrap().is_empty());
    // Only one capture at a time.
    let second = lab.hosts[0].client.capture(&CaptureSpec::default(), &mut std::io::sink());
    assert!(matches!(&second, Err(ClientError::Api(e)) if e.what.contains("another capture")), "{second:?}");
    let (a, b) = (lab.guest("a").mac_bytes(), lab.guest("b").mac_bytes());
    let spoofed = raw::udp_in_ipv4([10, 0, 0, 3], [10, 0, 0, 2], &[7; 40]);
    assert_eq!(raw::send_frames(lab.net("a"), "eth0", vec![raw::ethernet(b, a, 0x0800, &spoofed)]), 1);
    let mut talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
    for _ in 0..60 {
        talk.say(20_000);
    }
    // Another connection, which the filter excludes.
    Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5002).say(1000);
    capture.join().unwrap().unwrap();

    let file = netns::directory(lab.tag()).join("capture.pcapng");
    std::fs::write(&file, &*out.0.lock().unwrap()).unwrap();
    let seen = read(&file);
    let at = |stage: &'static str| seen.iter().filter(move |s| s.stage == stage);
    // Outbound: the first segment of a large packet has the packet's sequence number.
    let first = at("guest-tx").find(|s| s.payload > 1448).expect("a packet that is to be segmented");
    let same = |s: &&Seen| s.sequence == first.sequence && s.source == "10.0.0.1" && s.payload > 0;
    for (stage, comment) in [
        ("pre", "parsed; port a; vni 100"),
        ("avs", "to another host, reliably; port a; peer host-b"),
        ("rte", "accepted; port a; peer host-b; vni 100"),
        ("post", "sent; port a; peer host-b; vni 100; path "),
        ("underlay-tx", "sent; peer host-b; vni 100; path "),
    ] {
        let found = at(stage).find(same).unwrap_or_else(|| panic!("not at {stage}: {first:?}"));
        assert!(found.comment.starts_with(comment), "{stage}: {found:?}");
    }
    let segment = at("post").find(same).unwrap();
    let datagram = at("underlay-tx").find(same).unwrap();
    assert_eq!(segment.payload, datagram.payload);
    assert!(segment.comment.contains(&format!("PSN {}; CID ", datagram.psn.unwrap())), "{segment:?} {datagram:?}");
    // Inbound: the answer to the first packet.
    let first = at("guest-rx").find(|s| s.syn && s.source == "10.0.0.2").expect("the guest gets the SYN, ACK");
    for stage in ["underlay-rx", "pre", "rte", "avs"] {
        assert!(at(stage).any(|s| s.syn && s.sequence == first.sequence && s.source == "10.0.0.2"), "not at {stage}");
    }
    assert!(first.comment.starts_with("shown to the guest; port a; peer host-b"), "{first:?}");
    // The other host loses packets: these leave twice, with the same number.
    let again = at("post").find(|s| s.comment.starts_with("sent again")).expect("a retransmission");
    assert!(at("post").any(|s| s.comment.starts_with("sent; ") && s.sequence == again.sequence), "{again:?}");
    // The switch's drop.
    let dropped: Vec<&Seen> = at("drop").filter(|s| s.source == "10.0.0.3").collect();
    assert_eq!(dropped.len(), 1, "{dropped:?}");
    assert!(dropped[0].comment.starts_with("dropped: spoofed_ip; port a; vni 100; flow 0x"), "{dropped:?}");
    assert!(!at("post").chain(at("rte")).any(|s| s.source == "10.0.0.3"));
    // Only packets that match the filter.
    let ports = String::from_utf8(
        Command::new("tshark").args(["-n", "-Y", "tcp.port == 5002", "-r"]).arg(&file).output().unwrap().stdout,
    );
    assert_eq!(ports.unwrap(), "");
    // The next capture can start; invalid requests get an error.
    for (spec, what) in [
        (CaptureSpec { filter: "tcp prot 1".into(), ..CaptureSpec::default() }, "column 5: "),
        (CaptureSpec { at: vec!["nowhere".into()], ..CaptureSpec::default() }, "unknown stage \"nowhere\""),
        (CaptureSpec { port: Some("z".into()), ..CaptureSpec::default() }, "no port named \"z\""),
    ] {
        let error = lab.hosts[0].client.capture(&spec, &mut std::io::sink()).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    }
    let spec = CaptureSpec { at: vec!["drop".into()], seconds: 1, ..CaptureSpec::default() };
    let mut short = Vec::new();
    lab.hosts[0].client.capture(&spec, &mut short).unwrap();
    assert!(short.len() > 100, "a header, an interface, statistics");
}
