//! One engine with arbitrary datagrams and calls at arbitrary times: it does not panic, stays within its bounds,
//! honours the contract about handles, sends nothing malformed, and releases everything when it becomes idle.

use bifrost_rte::{
    Admission, Arrival, CcKind, Config, Control, Destination, Engine, LocalVnic, MS, Ordering, Outbound, Output,
    PeerId, S, Time, US, Verdict,
};
use bifrost_wire::Mac;
use bifrost_wire::bifrost::{AckHeader, AckKind, Bitmap, Cid, DataHeader, Packet, Psn, Setup, SetupKind, parse};

use super::forge::Knowledge;
use super::ledger::{Ledger, check_wire};
use crate::Input;

const VNI: u32 = 100;
const CONNECTIONS: u32 = 8;
const PAGES: u32 = 80;
/// Ports 0..3 of vNICs 1..=3 are on this host; the input chooses those of peers.
const LOCAL: usize = 3;

fn mac(n: usize) -> Mac {
    Mac([2, 0, 0, 0, 0, n as u8 + 1])
}

struct Rig {
    engine: Engine,
    ledger: Ledger<()>,
    out: Output,
    now: Time,
    peers: Vec<PeerId>,
    /// Packets that the engine sent recently, for valid answers.
    data: Vec<(PeerId, DataHeader)>,
    requests: Vec<(PeerId, Setup)>,
    known: Knowledge,
    /// Calls of `on_timeout`, to bound how often timers fire.
    timeouts: u32,
}

pub(crate) fn run(bytes: &[u8]) {
    let input = &mut Input::new(bytes);
    let config = Config {
        version_max: if input.chance(16) { 1 } else { 4 },
        congestion_control: if input.chance(64) { CcKind::None } else { CcKind::Swift },
        initial_window: if input.chance(64) { 8 } else { 512 },
        setup_queue_packets: if input.chance(64) { 4 } else { 256 },
        ack_delay_ns: if input.chance(64) { Some(0) } else { None },
        max_connections: CONNECTIONS,
        max_pages: PAGES,
        #[cfg(feature = "mutations")]
        first_psn: if input.chance(128) { u32::MAX - 200 } else { 0 },
        ..Config::default()
    };
    #[cfg(not(feature = "mutations"))]
    let _ = input.u8();
    let mut engine = Engine::new(config, 0, 1000, input.u32());
    let peers = vec![engine.add_peer(1 + input.below(8)), engine.add_peer(4)];
    let now = Time(u64::from(input.u32()) * MS + 1);
    let mut rig = Rig {
        engine,
        ledger: Ledger::default(),
        out: Output::default(),
        now,
        peers,
        data: Vec::new(),
        requests: Vec::new(),
        known: Knowledge {
            now,
            cids: Vec::new(),
            peer_cids: Vec::new(),
            psn: Psn(0),
            vnics: (0..6).map(mac).collect(),
        },
        timeouts: 0,
    };
    while !input.is_empty() {
        rig.step(input);
        rig.carry_out();
        rig.check_bounds();
    }
    rig.leave_alone();
}

impl Rig {
    fn step(&mut self, input: &mut Input<'_>) {
        let arrival = Arrival {
            peer: if input.chance(24) { PeerId(7) } else { input.pick(&self.peers) },
            vni: if input.chance(8) { VNI + 1 } else { VNI },
            nic_rx: Time(self.now.0.saturating_sub(u64::from(input.u8()) * US)),
            hops: input.u8() & 15,
            marked: input.chance(64),
        };
        match input.below(24) {
            0..=2 => self.transmit(input),
            3..=5 => self.data(&arrival, self.known.header(input), input),
            6..=7 => {
                let ack = self.known.ack(input);
                self.engine.on_ack(self.now, &arrival, &ack, &mut self.out);
            }
            8..=9 => self.setup(&arrival, &self.known.setup(input)),
            10 => {
                let reset = self.known.reset(input);
                self.engine.on_reset(self.now, &arrival, &reset, &mut self.out);
            }
            11 => {
                let header = DataHeader { probe: true, ..self.known.header(input) };
                self.engine.on_probe(self.now, &arrival, &header, &mut self.out);
            }
            12 => {
                let header = self.known.header(input);
                self.engine.on_skip(self.now, &arrival, &header, &mut self.out);
            }
            13 => self.raw(&arrival, input),
            14..=15 => self.respond(input),
            16..=17 => self.acknowledge(input),
            18..=21 => {
                let wait = match input.below(4) {
                    0 => u64::from(input.u8()) * US,
                    1 => u64::from(input.u8()) * 20 * US,
                    2 => u64::from(input.u8()) * MS,
                    _ => u64::from(input.u8()) * S / 4,
                };
                // Late, as on a busy host, or on time.
                if input.chance(128) {
                    self.now = self.now.after(wait);
                    self.engine.on_timeout(self.now, &mut self.out);
                } else {
                    self.run_until(self.now.after(wait));
                }
            }
            22 => {
                let owner = input.below(LOCAL) as u32;
                self.engine.remove_owner(owner, &mut self.out);
                self.ledger.forget(owner);
            }
            _ => {
                let at = input.below(self.peers.len());
                self.engine.remove_peer(self.peers[at], &mut self.out);
                self.carry_out();
                self.peers[at] = self.engine.add_peer(1 + input.below(8));
            }
        }
    }

    fn transmit(&mut self, input: &mut Input<'_>) {
        let local = input.below(LOCAL);
        let to = Destination {
            vni: VNI,
            owner: local as u32,
            local: mac(local),
            remote: mac(LOCAL + input.below(3)),
            peer: input.pick(&self.peers),
            ordering: input.pick(&[Ordering::Flow, Ordering::Strict, Ordering::Off]),
        };
        let packet = Outbound {
            handle: self.ledger.fresh(),
            segments: if input.chance(64) { input.u8().max(1) } else { 1 },
            flow: u32::from(input.u8() % 8),
        };
        if self.engine.transmit(self.now, &to, packet, &mut self.out) == Admission::Accepted {
            self.ledger.accepted((to.owner, packet.handle), packet.segments);
        }
    }

    fn data(&mut self, arrival: &Arrival, header: DataHeader, input: &mut Input<'_>) {
        let verdict = self.engine.on_data(self.now, arrival, &header, &mut self.out);
        let Verdict::Place { owner, slot } = verdict else { return };
        assert!(self.engine.pair_of(slot).is_some_and(|p| p.local == mac(owner as usize)));
        match input.below(16) {
            1 => self.engine.not_placed(slot),
            2 => self.engine.policy_dropped(self.now, slot, &mut self.out),
            3 => self.engine.rate_limited(slot),
            _ => {
                let handle = (owner, self.ledger.fresh());
                // In the ledger first: placing may publish it at once.
                if self.engine.placed(self.now, slot, handle.1, &mut self.out) {
                    self.ledger.placed(handle, ());
                }
            }
        }
    }

    fn setup(&mut self, arrival: &Arrival, setup: &Setup) {
        // Only packets that the parser accepts.
        let bytes = setup.emit();
        let Ok(Packet::Setup(setup)) = parse(&bytes) else { return };
        let vnic = (0..LOCAL).find(|n| mac(*n) == setup.to).map(|n| LocalVnic {
            owner: n as u32,
            ordering: Ordering::Flow,
            reliable: true,
        });
        self.engine.on_setup(self.now, arrival, &setup, vnic, &mut self.out);
    }

    fn raw(&mut self, arrival: &Arrival, input: &mut Input<'_>) {
        let len = input.below(80);
        match parse(input.bytes(len)) {
            Ok(Packet::Data(header, _)) => self.data(arrival, header, input),
            Ok(Packet::Probe(header)) => self.engine.on_probe(self.now, arrival, &header, &mut self.out),
            Ok(Packet::Skip(header)) => self.engine.on_skip(self.now, arrival, &header, &mut self.out),
            Ok(Packet::Ack(ack)) => self.engine.on_ack(self.now, arrival, &ack, &mut self.out),
            Ok(Packet::Setup(setup)) => self.setup(arrival, &setup),
            Ok(Packet::Reset(reset)) => self.engine.on_reset(self.now, arrival, &reset, &mut self.out),
            Ok(Packet::Bundle(_)) | Err(_) => {}
        }
    }

    /// A valid RESPONSE to a REQUEST that the engine sent.
    fn respond(&mut self, input: &mut Input<'_>) {
        let Some((peer, request)) = self.requests.pop() else { return };
        let arrival = Arrival { peer, vni: VNI, nic_rx: self.now, hops: 2, marked: false };
        let response = Setup {
            kind: SetupKind::Response,
            version: request.version,
            worker: 0,
            local: Cid(1 + u32::from(input.u8() % 8)),
            destination: request.local,
            to: request.from,
            from: request.to,
            instance: 500,
            generation: 1,
            window: if input.chance(32) { 16 } else { 4096 },
            ..request
        };
        self.engine.on_setup(self.now, &arrival, &response, None, &mut self.out);
    }

    /// A valid ACK of a packet that the engine sent.
    fn acknowledge(&mut self, input: &mut Input<'_>) {
        if self.data.is_empty() {
            return;
        }
        let (peer, header) = self.data[input.below(self.data.len().min(256))];
        let arrival = Arrival { peer, vni: VNI, nic_rx: self.now, hops: 2, marked: false };
        let mut bitmap = Bitmap::empty();
        if input.chance(128) {
            bitmap.set(input.below(256));
        }
        for snapshot in self.engine.connection_snapshots(self.now).filter(|c| c.peer == peer).collect::<Vec<_>>() {
            let ack = AckHeader {
                version: header.version,
                cc: 0,
                probe: false,
                path: header.path,
                hops: 2,
                kind: if bitmap.is_empty() { AckKind::Cumulative } else { AckKind::Selective },
                psn: header.psn,
                cid: snapshot.local_cid,
                sent: self.now.tick(),
                echo: header.timestamp,
                nic_rx: self.now.tick(),
                num_ack: 1,
                num_ece: 0,
                base: header.psn.next(),
                bitmap,
            };
            self.engine.on_ack(self.now, &arrival, &ack, &mut self.out);
        }
    }

    fn carry_out(&mut self) {
        let early = self.out.control.iter().any(|c| matches!(c.packet, Control::Ack(a) if !a.probe));
        assert!(!early, "an ACK confirms a packet that is not published yet");
        self.engine.flush_acks(self.now, &mut self.out);
        check_wire(&self.out);
        self.ledger.settle(&self.out);
        for control in &self.out.control {
            match control.packet {
                Control::Setup(s) if matches!(s.kind, SetupKind::Request { .. }) => {
                    self.requests.push((control.peer, s));
                }
                _ => {}
            }
        }
        self.data.extend(self.out.data.iter().map(|d| (d.peer, d.header)));
        let excess = self.data.len().saturating_sub(256);
        self.data.drain(..excess);
        self.out.clear();
    }

    fn check_bounds(&mut self) {
        assert!(self.engine.connections() <= CONNECTIONS as usize);
        let (send, receive) = self.engine.pages_used();
        assert!(send <= PAGES && receive <= PAGES, "pages {send} {receive}");
        assert!(self.engine.timers_pending() <= 2000, "{} timers", self.engine.timers_pending());
        self.known.now = self.now;
        let mut psn = Psn(0);
        self.known.cids.clear();
        self.known.peer_cids.clear();
        for c in self.engine.connection_snapshots(self.now) {
            assert!(c.in_flight_packets <= 4096 && c.window_packets <= 4096);
            self.known.cids.push(c.local_cid);
            self.known.peer_cids.push(c.peer_cid);
        }
        if let Some((_, header)) = self.data.last() {
            psn = header.psn;
        }
        self.known.psn = psn;
    }

    fn run_until(&mut self, end: Time) {
        while let Some(at) = self.engine.next_timeout().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.engine.on_timeout(self.now, &mut self.out);
            self.carry_out();
            self.timeouts += 1;
            assert!(self.timeouts < 500_000, "timers keep firing");
        }
        self.now = self.now.max(end);
    }

    /// The peers fall silent.
    fn leave_alone(&mut self) {
        self.run_until(self.now.after(200 * S));
        self.ledger.assert_empty();
        assert_eq!(self.engine.connections(), 0, "unused connections");
        assert_eq!(self.engine.pages_used(), (0, 0));
        assert!(self.engine.path_snapshots(self.now).all(|p| p.in_flight_packets == 0), "in flight forever");
        assert!(self.engine.timers_pending() <= 64, "{} timers", self.engine.timers_pending());
    }
}
