//! Packets that arrive by a link whose next hop does not answer any more. The test plays the network at the other ends
//! of both devices.

use std::time::{Duration, Instant};

use bifrost_port::raw::{RawConfig, RawDevice, RawMode};
use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::{Mac, Vni, arp, vxlan};
use serde_json::Value;

use super::trunk::VLAN;
use crate::site::{Process, Site, until};
use crate::world::ip_udp;

const POD: Mac = Mac([2, 0, 0, 0, 0, 1]);
const GATEWAY: [u8; 4] = [10, 0, 0, 1];
const PACKETS: u32 = 1000;
/// Payload lengths of inner packets: the first pipeline delivers a small packet whole, and only the headers of a large
/// one.
const SMALL: usize = 4;
const LARGE: usize = 400;

/// Links 0 and 1 are VLANs of the first device. Link 2 is the second device.
struct Server {
    wires: [RawDevice; 2],
    /// Whether the router of each link answers.
    answers: [bool; 3],
    _processes: Vec<Process>,
    site: Site,
}

impl Server {
    fn start() -> Server {
        let site = Site::empty("lr", &["gw", "net"]);
        for device in 0..2 {
            site.link(("gw", &format!("gw{device}")), ("net", &format!("wire{device}")));
        }
        let socket = |name: &str| site.path(&format!("{name}.sock"));
        let pipeline = |number: u8, interfaces: &str, more: &str| {
            let text = format!(
                "control = {{ socket = {:?} }}\n\
                 device = {{ name = \"gw{number}\", mtu = 1600, mode = \"packet\", frames = 4096 }}\n\
                 [[pods]]\nname = \"vpc\"\nnumber = 1\ncores = 2\norder_queues = 2\ntimeout_us = 1000000\n{more}\
                 own = [\"10.1.0.11\", \"10.1.1.11\", \"10.1.2.11\", \"10.0.0.1\"]\ninterfaces = [{interfaces}]\n",
                socket(&format!("nicd{number}")),
            );
            site.start_nicd("gw", &format!("nicd{number}"), &text)
        };
        let vlans = format!(
            "{{ vlan = {VLAN}, socket = {:?} }}, {{ vlan = {}, socket = {:?} }}",
            socket("0"),
            VLAN + 1,
            socket("1")
        );
        let mut processes = vec![
            pipeline(0, &vlans, "header_only_from = 200\n"),
            pipeline(1, &format!("{{ socket = {:?} }}", socket("2")), ""),
        ];
        let links = [0, 1, 2].map(|link| {
            format!(
                "[[links]]\nsocket = {:?}\npipeline = {}\naddresses = [\"10.1.{link}.11\"]\n\
                 on_link = [\"10.1.{link}.0/24\"]\nrouter = \"10.1.{link}.254\"\n",
                socket(&link.to_string()),
                link / 2
            )
        });
        let text = format!(
            "control = {{ socket = {:?} }}\ntests = {{ jitter_us = 20 }}\n\
             [gateway]\npod = 1\ncores = 2\nmac = \"{POD}\"\naddresses = [\"10.0.0.1\"]\nsessions = 1024\n\
             [[vpcs]]\nvni = 100\nroutes = [{{ prefix = \"192.168.0.0/24\", to = \"local\" }}]\nhosts = [\
             {{ address = \"192.168.0.1\", mac = \"02:00:00:00:02:01\", vtep = \"10.2.0.11\" }}, \
             {{ address = \"192.168.0.2\", mac = \"02:00:00:00:02:02\", vtep = \"10.3.0.12\" }}]\n{}",
            socket("gw"),
            links.concat(),
        );
        processes.push(site.start_gw("gw", "gw", &text));
        let wires = ["wire0", "wire1"].map(|device| {
            site.open("net", move || {
                let config = RawConfig { device: device.into(), mode: RawMode::Packet, longest: 1700, frames: 4096 };
                RawDevice::open(&config).unwrap()
            })
        });
        Server { wires, answers: [true; 3], _processes: processes, site }
    }

    /// Waits until the egress of each link is as given.
    fn until_egress(&mut self, egress: [u64; 3]) -> Value {
        until("links", || {
            self.drain();
            let pod = self.site.pod("gw");
            let is = |link: usize| pod["links"][link]["egress"] == egress[link];
            // Before the first answers, no link has an egress that works.
            let connected = pod["links"][2]["state"] == "up" && pod["connected"] == true;
            (connected && (0..3).all(is)).then_some(pod)
        })
    }

    /// Sends packets by a link, and receives. Returns the link and the number of each received packet.
    fn exchange(&mut self, link: usize, payload: usize) -> Vec<(usize, u32)> {
        let mut all = Vec::new();
        for number in 0..PACKETS {
            let frame = frame(number, payload);
            let [a, b] = (VLAN + link as u16).to_be_bytes();
            match link {
                2 => self.wires[1].send(&[&frame]),
                _ => self.wires[0].send(&[&frame[..12], &[0x81, 0, a, b], &frame[12..]]),
            }
            if number % 32 == 31 {
                self.wires.iter_mut().for_each(RawDevice::flush);
                all.extend(self.drain());
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        self.wires.iter_mut().for_each(RawDevice::flush);
        let mut last = Instant::now();
        while all.len() < PACKETS as usize && last.elapsed() < Duration::from_secs(1) {
            let came = self.drain();
            last = if came.is_empty() { last } else { Instant::now() };
            all.extend(came);
        }
        all
    }

    /// Receives what has arrived, and answers ARP for the routers that answer.
    fn drain(&mut self) -> Vec<(usize, u32)> {
        let mut all = Vec::new();
        for device in 0..2 {
            let wire = &mut self.wires[device];
            loop {
                let mut answers = Vec::new();
                let count = wire.receive().unwrap();
                for index in 0..count {
                    let frame = wire.frame(index).to_vec();
                    let (link, frame) = match frame[12..16] {
                        [0x81, 0, a, b] => {
                            let link = usize::from(u16::from_be_bytes([a, b]) - VLAN);
                            (link, [&frame[..12], &frame[16..]].concat())
                        }
                        _ => (2, frame),
                    };
                    if frame[12..14] != ethertype::ARP.to_be_bytes() {
                        all.extend(number(&frame, link).map(|number| (link, number)));
                    } else if self.answers[link] {
                        answers.extend(answer(&frame, link).map(|answer| (link, answer)));
                    }
                }
                for (link, answer) in &answers {
                    let [a, b] = (VLAN + *link as u16).to_be_bytes();
                    match link {
                        2 => wire.send(&[answer]),
                        _ => wire.send(&[&answer[..12], &[0x81, 0, a, b], &answer[12..]]),
                    }
                }
                wire.flush();
                if count == 0 {
                    break;
                }
            }
        }
        all
    }

    /// A counter, summed over all workers.
    fn counter(&self, name: &str) -> u64 {
        // Workers report their counters every 20 ms.
        std::thread::sleep(Duration::from_millis(200));
        let pod = self.site.pod("gw");
        pod["workers"].as_array().unwrap().iter().map(|worker| worker[name].as_u64().unwrap()).sum()
    }
}

/// The router of a link.
fn router(link: usize) -> Mac {
    Mac([2, 0, 0, 1, link as u8, 254])
}

fn frame(number: u32, payload: usize) -> Vec<u8> {
    let mut bytes = number.to_be_bytes().to_vec();
    bytes.resize(payload, number as u8);
    let inner = ip_udp([192, 168, 0, 1], [192, 168, 0, 2], (7, 9), &bytes);
    let link = |to: Mac, from: Mac| ethernet::Header::new(to, from, ethertype::IPV4).emit();
    let guest = Mac([2, 0, 0, 0, 2, 1]);
    let payload = [&vxlan::emit(Vni::new(100).unwrap())[..], &link(POD, guest), &inner].concat();
    let outer = ip_udp([10, 2, 0, 11], GATEWAY, (50_000, 4789), &payload);
    [&link(POD, router(0))[..], &outer].concat()
}

/// The number of a packet that the gateway has forwarded by a link.
fn number(frame: &[u8], link: usize) -> Option<u32> {
    let outer = bifrost_nic::parse(frame, frame.len()).ok().filter(|outer| outer.dst_port == vxlan::UDP_PORT)?;
    assert_eq!((outer.dst_mac, outer.src_mac), (router(link), POD));
    let (_, inner) = vxlan::parse(&frame[usize::from(outer.payload)..]).unwrap();
    let parsed = bifrost_nic::parse(inner, inner.len()).unwrap();
    let payload = &inner[usize::from(parsed.payload)..];
    let number = u32::from_be_bytes(*payload.first_chunk().unwrap());
    assert!(payload[4..].iter().all(|byte| *byte == number as u8), "the payload is its own");
    Some(number)
}

fn answer(frame: &[u8], link: usize) -> Option<Vec<u8>> {
    let request = arp::Packet::parse(&frame[14..]).ok()?;
    let asked = request.operation == arp::Operation::Request;
    assert_eq!(request.target_ip.octets(), [10, 1, link as u8, 254], "each link asks for its own router");
    let header = ethernet::Header::new(request.sender_mac, router(link), ethertype::ARP);
    asked.then(|| [&header.emit()[..], &request.reply(router(link)).emit()].concat())
}

#[test]
fn packets_leave_by_another_link_if_the_next_hop_of_their_own_is_silent() {
    let mut server = Server::start();
    server.until_egress([0, 1, 2]);
    let all = |link: usize| (0..PACKETS).map(|number| (link, number)).collect::<Vec<_>>();
    for link in 0..3 {
        assert!(server.exchange(link, LARGE) == all(link), "as they came, and in order");
    }
    assert_eq!(server.counter("rerouted_packets"), 0);

    // The other link of the same pipeline preserves order and payloads.
    server.answers[0] = false;
    let pod = server.until_egress([1, 1, 2]);
    assert_eq!(pod["links"][0]["state"], "down");
    for payload in [SMALL, LARGE] {
        assert!(server.exchange(0, payload) == all(1), "by link 1, and in order");
    }
    assert_eq!(["rerouted_packets", "rerouted_lost_packets"].map(|name| server.counter(name)), [2000, 0]);

    // By the other pipeline, whole packets leave, in any order. Packets whose payload is in their own pipeline are
    // lost.
    server.answers[1] = false;
    server.until_egress([2, 2, 2]);
    let mut came = server.exchange(1, SMALL);
    came.sort_unstable();
    assert!(came == all(2), "{} came", came.len());
    assert_eq!(server.exchange(0, LARGE), []);
    assert_eq!(["rerouted_packets", "rerouted_lost_packets"].map(|name| server.counter(name)), [3000, 1000]);
    let nicd: Value = crate::site::state(&server.site.path("nicd0.sock"));
    assert_eq!(nicd["pods"][0]["order"]["timed_out_packets"], 0, "their places are given up at once");

    // Everything is as before when the routers answer again.
    server.answers = [true; 3];
    server.until_egress([0, 1, 2]);
    assert!(server.exchange(0, LARGE) == all(0));
}
