//! What an ACL or a security group denies does not pass in fragments or behind extension headers.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bifrost_lab::programs::packet_socket::{OFFLOAD_LEN, PacketSocket};

use crate::common::front_end::{FrontEnd, Kind};
use crate::common::packets::{End, ICMPV6, Listener, MORE, TCP, UDP, fragment_header, icmp, ipv4, ipv6, tcp, udp};
use crate::common::tenants::{Attachment, Pace, Tenants, Threads, repeat_here};
use crate::common::{Lab, raw};

const X: u8 = 1;
const Y: u8 = 2;
const SYN: u8 = 2;
const ATTACHMENTS: [Attachment; 2] = [Attachment::Tap, Attachment::Machine];
/// Frames per second.
const RATE: f64 = 4000.0;

/// Adds lines to the configuration of the attackers' network on a host.
fn add_rules(lab: &mut Lab, host: usize, rules: &str) {
    let gateway = "gateway = [\"10.9.0.254\", \"fd09::fe\"]\n";
    assert!(lab.hosts[host].config.contains(gateway));
    lab.hosts[host].config = lab.hosts[host].config.replace(gateway, &format!("{gateway}{rules}"));
}

/// Gives a port a security group.
fn add_group(lab: &mut Lab, host: usize, port: &str, group: &str, rules: &str) {
    let line = format!("name = \"{port}\"\n");
    let config = &mut lab.hosts[host].config;
    *config = config.replacen(&line, &format!("{line}security_groups = [\"{group}\"]\n"), 1);
    config.push_str(&format!("[[security_group]]\nname = \"{group}\"\n{rules}"));
}

/// Sends frames from `x`, however it is attached.
enum Sender {
    Tap(PacketSocket),
    Machine(FrontEnd),
}

impl Sender {
    /// Must be called in the guest's namespace, if the guest has one.
    fn open(attachment: Attachment, socket: &Path) -> Sender {
        match attachment {
            Attachment::Tap => Sender::Tap(PacketSocket::open("eth0").unwrap()),
            Attachment::Machine => {
                let kind = Kind { packed: false, size: 256 };
                Sender::Machine(FrontEnd::running(socket, kind).expect("the port serves a machine"))
            }
        }
    }

    fn send(&mut self, frame: &[u8]) -> bool {
        match self {
            Sender::Tap(socket) => socket.send(&[0; OFFLOAD_LEN], frame).is_ok(),
            Sender::Machine(front_end) => {
                front_end.receive();
                front_end.send(frame)
            }
        }
    }
}

/// Sends these frames from `x` in a loop.
fn flood(tenants: &Tenants, attachment: Attachment, frames: Vec<Vec<u8>>, stop: &Arc<AtomicBool>) -> Threads {
    let (socket, stop) = (tenants.socket(), Arc::clone(stop));
    let run = move || {
        let (mut sender, mut pace, mut n) = (Sender::open(attachment, &socket), Pace::new(RATE), 0);
        repeat_here(&stop, || {
            pace.wait();
            n += 1;
            u64::from(sender.send(&frames[n % frames.len()]))
        })
    };
    match attachment {
        Attachment::Tap => vec![tenants.lab.net("x").spawn(run)],
        Attachment::Machine => vec![std::thread::spawn(run)],
    }
}

/// A TCP SYN segment to a port, fragmented and wrapped in many ways.
fn pieces(from: End, to: End, port: u16) -> Vec<Vec<u8>> {
    let v4 = tcp(from, to, false, (5000, port), SYN);
    let v6 = tcp(from, to, true, (5000, port), SYN);
    let mut frames = vec![
        // A first fragment with the whole TCP header, and the fragment after it.
        ipv4(from, to, TCP, 1, MORE, &v4),
        ipv4(from, to, TCP, 1, 3, &[0; 8]),
        // Tiny fragments: the first one has the ports only, the second one has the flags (RFC 1858).
        ipv4(from, to, TCP, 2, MORE, &v4[..8]),
        ipv4(from, to, TCP, 2, 1, &v4[8..]),
        ipv4(from, to, TCP, 3, MORE, &v4[..16]),
        ipv4(from, to, TCP, 3, 2, &v4[16..]),
        // Overlapping fragments: first a permitted port, then a denied one at the same offset (RFC 3128).
        ipv4(from, to, TCP, 4, MORE, &tcp(from, to, false, (5000, 80), SYN)),
        ipv4(from, to, TCP, 4, MORE, &v4),
        ipv4(from, to, TCP, 4, 3, &[0; 8]),
        // Out of order: the last fragment first.
        ipv4(from, to, TCP, 5, 3, &[0; 8]),
        ipv4(from, to, TCP, 5, MORE, &v4),
        // The reserved flag is set (RFC 791), in an otherwise unfragmented packet.
        ipv4(from, to, TCP, 6, 0x8000, &v4),
    ];
    let fragment = |offset, more, id, payload: &[u8]| {
        ipv6(from, to, 44, 64, &[&fragment_header(TCP, offset, more, id)[..], payload].concat())
    };
    frames.extend([
        fragment(0, true, 1, &v6),
        fragment(3, false, 1, &[0; 8]),
        fragment(0, true, 2, &v6[..8]),
        fragment(1, false, 2, &v6[8..]),
        fragment(0, true, 3, &tcp(from, to, true, (5000, 80), SYN)),
        fragment(0, true, 3, &v6),
        fragment(3, false, 3, &[0; 8]),
        // An atomic fragment (RFC 6946).
        fragment(0, false, 4, &v6),
    ]);
    // Destination, hop-by-hop and routing headers: alone, combined, and before and after a fragment header.
    let option = |next: u8| [next, 0, 1, 4, 0, 0, 0, 0];
    let routing = |next: u8| [next, 0, 0, 0, 0, 0, 0, 0];
    frames.extend([
        ipv6(from, to, 60, 64, &[&option(TCP)[..], &v6].concat()),
        ipv6(from, to, 0, 64, &[&option(TCP)[..], &v6].concat()),
        ipv6(from, to, 43, 64, &[&routing(TCP)[..], &v6].concat()),
        ipv6(from, to, 60, 64, &[&option(60)[..], &option(43), &routing(TCP), &v6].concat()),
        ipv6(from, to, 60, 64, &[&option(44)[..], &fragment_header(TCP, 0, false, 9), &v6].concat()),
        ipv6(from, to, 44, 64, &[&fragment_header(60, 0, true, 10)[..], &option(TCP), &v6].concat()),
        ipv6(from, to, 44, 64, &[&fragment_header(60, 0, false, 11)[..], &option(TCP), &v6].concat()),
        ipv6(from, to, 44, 64, &[&fragment_header(60, 0, true, 12)[..], &option(TCP)].concat()),
        ipv6(from, to, 44, 64, &[&fragment_header(60, 1, false, 12)[..], &v6].concat()),
    ]);
    frames
}

/// Whether a frame contains the ports of a segment to port 22. A receiver of these has everything that the rule denies.
fn has_denied_ports(frame: &[u8]) -> bool {
    frame.windows(4).any(|bytes| bytes == [0x13, 0x88, 0, 22])
}

/// Whether a frame is a whole TCP segment to port 80.
fn is_to_80(frame: &[u8]) -> bool {
    frame[12..14] == [8, 0] && frame[23] == TCP && frame[36..38] == [0, 80]
}

const DENY_22: &str = "[[vpc.acl]]\ndirection = \"DIRECTION\"\naction = \"deny\"\nprotocol = \"tcp\"\nports = [22]\n";

#[test]
fn an_acl_that_denies_a_port_lets_no_piece_of_a_segment_to_it_out() {
    for attachment in ATTACHMENTS {
        let tenants = Tenants::with(attachment, |lab| add_rules(lab, 0, &DENY_22.replace("DIRECTION", "egress")));
        let (x, y) = (End::attacker(X), End::attacker(Y));
        let listener = Listener::start(tenants.lab.net("y"), x);
        let what = format!("{attachment:?}: pieces of what an ACL denies, out");
        tenants.judge(&what, |t, stop| flood(t, attachment, pieces(x, y, 22), stop));
        let passed: Vec<_> = listener.take().into_iter().filter(|frame| has_denied_ports(frame)).collect();
        assert!(passed.is_empty(), "{attachment:?}: {} frames passed, such as {:02x?}", passed.len(), passed[0]);
        // A segment that is not denied passes.
        let stop = Arc::default();
        let whole = ipv4(x, y, TCP, 1, 0, &tcp(x, y, false, (5000, 80), SYN));
        let threads = flood(&tenants, attachment, vec![whole], &stop);
        let seen = listener.sees(3.0, is_to_80);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        threads.into_iter().for_each(|thread| assert!(thread.join().unwrap() > 0));
        assert!(seen, "{attachment:?}: a segment to port 80 does not pass");
    }
}

/// The frames that arrive at `x`, however it is attached, while `work` runs.
fn received(tenants: &Tenants, attachment: Attachment, work: impl FnOnce()) -> Vec<Vec<u8>> {
    match attachment {
        Attachment::Tap => {
            let listener = Listener::start(tenants.lab.net("x"), End::attacker(Y));
            work();
            std::thread::sleep(std::time::Duration::from_millis(100));
            listener.take()
        }
        Attachment::Machine => {
            let mut front_end = tenants.front_end(false, 4096);
            work();
            std::thread::sleep(std::time::Duration::from_millis(100));
            front_end.receive()
        }
    }
}

#[test]
fn an_acl_that_denies_a_port_lets_no_piece_of_a_segment_to_it_in() {
    for attachment in ATTACHMENTS {
        let tenants = Tenants::with(attachment, |lab| add_rules(lab, 0, &DENY_22.replace("DIRECTION", "ingress")));
        let (x, y) = (End::attacker(X), End::attacker(Y));
        let seen = received(&tenants, attachment, || {
            tenants.judge(&format!("{attachment:?}: pieces of what an ACL denies, in"), |tenants, stop| {
                let (stop, frames) = (Arc::clone(stop), pieces(y, x, 22));
                vec![tenants.lab.net("y").spawn(move || {
                    let (socket, mut pace, mut n) = (PacketSocket::open("eth0").unwrap(), Pace::new(RATE), 0);
                    repeat_here(&stop, || {
                        pace.wait();
                        n += 1;
                        u64::from(socket.send(&[0; OFFLOAD_LEN], &frames[n % frames.len()]).is_ok())
                    })
                })]
            });
        });
        let passed: Vec<_> = seen.into_iter().filter(|frame| has_denied_ports(frame)).collect();
        assert!(passed.is_empty(), "{attachment:?}: {} frames passed, such as {:02x?}", passed.len(), passed[0]);
        let whole = ipv4(y, x, TCP, 1, 0, &tcp(y, x, false, (5000, 80), SYN));
        let seen = received(&tenants, attachment, || {
            raw::send_frames(tenants.lab.net("y"), "eth0", vec![whole; 3]);
        });
        assert!(seen.iter().any(|frame| is_to_80(frame)), "{attachment:?}: a segment to port 80 does not pass");
    }
}

/// A guest whose security group permits only DNS queries to it, and which replies in fragments.
#[test]
fn a_fragment_of_an_answer_opens_no_other_port() {
    for attachment in ATTACHMENTS {
        let tenants = Tenants::with(attachment, |lab| {
            let rules = "ingress = [{ protocol = \"udp\", ports = [53] }]\n";
            add_group(lab, 0, "x", "dns", rules);
        });
        let (x, y) = (End::attacker(X), End::attacker(Y));
        let query = ipv4(y, x, UDP, 1, 0, &udp(y, x, false, (4000, 53), b"what is the address?"));
        let answer = udp(x, y, false, (53, 4000), &[7; 1000]);
        let answers = vec![ipv4(x, y, UDP, 7, MORE, &answer[..504]), ipv4(x, y, UDP, 7, 63, &answer[504..])];
        let other = udp(y, x, false, (4000, 111), &[9; 1000]);
        let others = [
            ipv4(y, x, UDP, 9, 0, &other),
            ipv4(y, x, UDP, 10, MORE, &other[..504]),
            ipv4(y, x, UDP, 10, 63, &other[504..]),
            ipv4(y, x, UDP, 11, 63, &other[504..]),
            ipv4(y, x, UDP, 12, MORE, &udp(y, x, false, (53, 111), &[9; 64])),
        ];
        let is_other = |frame: &[u8]| frame[12..14] == [8, 0] && frame[23] == UDP && frame.ends_with(&[9; 8]);
        let listener = (attachment == Attachment::Tap).then(|| Listener::start(tenants.lab.net("x"), y));
        let seen: Arc<std::sync::Mutex<Vec<Vec<u8>>>> = Arc::default();
        tenants.judge(&format!("{attachment:?}: fragments of answers, and to other ports"), |tenants, stop| {
            let (theirs, answers, socket) = (Arc::clone(&seen), answers.clone(), tenants.socket());
            let (is_over, frames, query) = (Arc::clone(stop), others.clone(), query.clone());
            let answering = move || {
                let (mut sender, mut pace, mut n) = (Sender::open(attachment, &socket), Pace::new(1000.0), 0);
                repeat_here(&is_over, || {
                    pace.wait();
                    n += 1;
                    if let Sender::Machine(front_end) = &mut sender {
                        theirs.lock().unwrap().extend(front_end.receive());
                    }
                    u64::from(sender.send(&answers[n % 2]))
                })
            };
            let answering = match attachment {
                Attachment::Tap => tenants.lab.net("x").spawn(answering),
                Attachment::Machine => std::thread::spawn(answering),
            };
            let is_over = Arc::clone(stop);
            let asking = tenants.lab.net("y").spawn(move || {
                let (socket, mut pace, mut n) = (PacketSocket::open("eth0").unwrap(), Pace::new(3000.0), 0);
                repeat_here(&is_over, || {
                    pace.wait();
                    n += 1;
                    let frame = if n % 8 == 0 { &query } else { &frames[n % frames.len()] };
                    u64::from(socket.send(&[0; OFFLOAD_LEN], frame).is_ok())
                })
            });
            vec![answering, asking]
        });
        let seen = listener.map_or_else(|| std::mem::take(&mut *seen.lock().unwrap()), |listener| listener.take());
        let is_query = |frame: &Vec<u8>| frame.ends_with(b"what is the address?");
        assert!(seen.iter().any(is_query), "{attachment:?}: no query arrived");
        let passed = seen.iter().filter(|frame| is_other(frame)).count();
        assert_eq!(passed, 0, "{attachment:?}: {passed} fragments to other ports passed");
    }
}

/// Neighbour discovery passes every rule, because every network needs it. Packets that only look like it do not pass.
#[test]
fn what_only_looks_like_neighbour_discovery_passes_no_rule() {
    let deny = |direction: &str| format!("[[vpc.acl]]\ndirection = \"{direction}\"\naction = \"deny\"\n");
    for attachment in ATTACHMENTS {
        let tenants = Tenants::with(attachment, |lab| {
            add_rules(lab, 0, &(deny("egress") + &deny("ingress")));
            add_group(lab, 0, "x", "closed", "egress = [{ protocol = \"tcp\", ports = [1] }]\n");
        });
        let (x, y) = (End::attacker(X), End::attacker(Y));
        let mut frames = Vec::new();
        for kind in [133, 134, 135, 136, 137] {
            for hop_limit in [64, 255] {
                for to in [y, End { mac: End::gateway().mac, ..y }] {
                    let body = [&[0, 0, 0, 0][..], &[b'x'; 1000]].concat();
                    frames.push(ipv6(x, to, ICMPV6, hop_limit, &icmp(x, y, true, kind, &body)));
                }
            }
        }
        let listener = Listener::start(tenants.lab.net("y"), x);
        let what = format!("{attachment:?}: payload behind neighbour discovery");
        tenants.judge(&what, |t, stop| flood(t, attachment, frames.clone(), stop));
        let carries = |frame: &Vec<u8>| frame.windows(64).any(|bytes| bytes == [b'x'; 64]);
        let passed: Vec<_> = listener.take().into_iter().filter(carries).collect();
        assert!(passed.is_empty(), "{attachment:?}: {} frames passed, such as {:02x?}", passed.len(), &passed[0][..60]);
    }
}
