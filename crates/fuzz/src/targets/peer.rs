//! A whole host, message engine and NIC together, between an honest and a hostile peer. The hostile one sends packets
//! of any form on its own connection, and knows all keys, addresses and tags, including those of the other connection.
//!
//! Invariants: messages between the host and the honest peer arrive complete, once and in order; the hostile peer
//! cannot write memory without permission, and gets no packet with memory that it may not read; buffers and packets are
//! bounded.

use std::net::{IpAddr, Ipv6Addr};

use bifrost_endpoint::{
    Adaptive, Class, CloseReason, ConnectionConfig, ConnectionId, Host, HostConfig, HostEvent, Limits, Rights, Service,
    Swift, SwiftConfig,
};
use bifrost_rnic::{Burst, Config, Nic, Qpn, Route, Sequence};
use bifrost_wire::rdm::{
    Access, Ack, Close, Control, Grant, Immediate, Lane, LaneAddress, LanePhase, MAX_EAGER, MAX_LANES, MessageId,
    Number, Numbers, SendHeader, SendKind, Setup, SetupKind, Tag, UNIT,
};
use bifrost_wire::roce::{Bth, Deth, Header, Icrc, Opcode, Operation, Packet, Reth, Transport};

use crate::Input;

const MTU: u16 = 1024;
const PORT: u16 = 4791;
/// Length of each region, and the secret byte: all memory that the hostile peer must not see consists of it.
const REGION: usize = 512;
const SECRET: u8 = 0xdd;
/// A run of this many secret bytes is not accidental.
const ROW: [u8; 12] = [SECRET; 12];
/// The hostile peer's control queue pair, and the first of its lanes.
const CONTROL: u32 = 0x70;
const LANE: u32 = 0x60;
/// Maximum number of open messages of a connection, in each direction.
const WINDOW: u16 = 16;

pub(crate) fn run(bytes: &[u8]) {
    let input = &mut Input::new(bytes);
    let service = if input.chance(128) { Service::Both } else { Service::Uc };
    let mut world = World::new(service);
    for _ in 0..60 {
        if input.is_empty() {
            break;
        }
        world.act(input);
        world.pump();
        world.check();
    }
    world.end();
}

fn address(host: u16) -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host))
}

struct World {
    now: u64,
    /// The host under test, and its honest peer.
    victim: Host<Nic>,
    honest: Host<Nic>,
    /// The victim's connections with the hostile and the honest peer, and the honest peer's end.
    hostile: ConnectionId,
    friend: ConnectionId,
    own: ConnectionId,
    /// What the hostile peer was sent, and the numbers of its next packets.
    told: Setup,
    sequences: [u32; MAX_LANES],
    /// Tags and grants, of either connection.
    tags: [Tag; 2],
    grants: Vec<Grant>,
    /// After how many packets of the honest peer the hostile one writes where the latest grant is, with its key.
    theft: Option<usize>,
    /// Regions of the victim: the hostile peer may write the first, read the first two, and not access the others.
    regions: [u64; 4],
    /// The next message of the hostile peer.
    next: u32,
    /// Messages between the others, in either direction: started, and arrived.
    begun: [u32; 2],
    arrived: [u32; 2],
    burst: Burst,
}

/// A host with its own NIC.
fn host(number: u16) -> Host<Nic> {
    let seed = u64::from(number);
    let nic = Config { address: address(number), port: PORT, queue_pairs: 16, regions: 512, seed };
    Host::new(Nic::new(nic), HostConfig::new(2, seed)).expect("room")
}

fn complete(host: &mut Host<Nic>, id: ConnectionId, peer: &Setup, initiator: bool) {
    let mut config = ConnectionConfig::new(peer.service, MTU);
    config.initiator = initiator;
    let (chunking, swift) = (Box::new(Adaptive::default()), Box::new(Swift::new(SwiftConfig::new(50_000))));
    host.complete(0, id, peer, config, chunking, swift).expect("room");
}

/// A message between the victim and the honest peer.
fn secret(number: u32) -> Vec<u8> {
    let len = if number.is_multiple_of(3) { MAX_EAGER + 5000 } else { 100 + number * 11 % 5000 };
    let mut data = vec![SECRET; len as usize];
    data[..4].copy_from_slice(&number.to_be_bytes());
    data
}

impl World {
    fn new(service: Service) -> World {
        let (mut victim, mut honest) = (host(1), host(3));
        let mut limits = Limits::new(service, MTU);
        (limits.credits, limits.window, limits.longest) = (16, WINDOW, 1 << 20);
        let (hostile, told) = victim.prepare(SetupKind::Welcome, limits).expect("room");
        let lane = |index| LaneAddress { queue_pair: LANE + index as u32, sequence: 0 };
        let IpAddr::V6(own_address) = address(2) else { unreachable!("it is one of IPv6") };
        let hello = Setup {
            kind: SetupKind::Hello,
            address: own_address,
            control: CONTROL,
            tag: Tag(1),
            lanes: std::array::from_fn(lane),
            ..told
        };
        complete(&mut victim, hostile, &hello, false);
        let (friend, welcome) = victim.prepare(SetupKind::Welcome, limits).expect("room");
        let (own, hello) = honest.prepare(SetupKind::Hello, limits).expect("room");
        complete(&mut victim, friend, &hello, false);
        complete(&mut honest, own, &welcome, true);
        let fill = [0x11, 0x22, SECRET, SECRET];
        let regions = fill.map(|byte| victim.register_memory(vec![byte; REGION]).expect("room"));
        assert!(victim.allow(regions[0], hostile, Rights::ReadWrite));
        assert!(victim.allow(regions[1], hostile, Rights::Read));
        assert!(victim.allow(regions[2], friend, Rights::ReadWrite));
        World {
            now: 0,
            victim,
            honest,
            hostile,
            friend,
            own,
            sequences: told.lanes.map(|_| 0),
            tags: [told.tag, welcome.tag],
            told,
            grants: Vec::new(),
            theft: None,
            regions,
            next: 0,
            begun: [0; 2],
            arrived: [0; 2],
            burst: Burst::new(),
        }
    }

    fn act(&mut self, input: &mut Input<'_>) {
        match input.below(10) {
            0 => self.now += [1_000, 200_000, 1_000_000, 20_000_000][input.below(4)],
            1 => self.begin(0),
            2 => self.begin(1),
            3 => {
                let data = vec![0x33; input.below(256) * 300];
                // Too many may be open, or the connection may be closed.
                let _ = self.victim.send(self.now, self.hostile, Class::Message, 0, data);
                self.switch(input);
            }
            4 | 5 => self.access(input),
            6 => self.any_send(input),
            7 => self.any_write(input),
            8 => self.theft = Some(input.below(24)),
            _ => {
                let control = self.control(input);
                self.say(&control);
            }
        }
    }

    /// One end of a connection with both services may switch to the other one.
    fn switch(&mut self, input: &mut Input<'_>) {
        if self.told.service == Service::Both && input.chance(128) {
            let service = if input.chance(128) { Service::Rc } else { Service::Uc };
            let (host, connection) = match input.below(3) {
                0 => (&mut self.victim, self.hostile),
                1 => (&mut self.victim, self.friend),
                _ => (&mut self.honest, self.own),
            };
            host.switch(self.now, connection, service);
        }
    }

    /// A message from the victim to the honest peer, or back.
    fn begin(&mut self, from: usize) {
        let (host, connection) = if from == 0 { (&mut self.victim, self.friend) } else { (&mut self.honest, self.own) };
        if host.send(self.now, connection, Class::Message, 0, secret(self.begun[from])).is_ok() {
            self.begun[from] += 1;
        }
    }

    /// An access to one of the regions, in one or several units, with valid numbers.
    fn access(&mut self, input: &mut Input<'_>) {
        let class = if input.chance(128) { Class::Write } else { Class::Read };
        let key = input.pick(&self.regions) ^ if input.chance(16) { u64::from(input.u16()) << 24 } else { 0 };
        let offset = match input.below(4) {
            0 => input.u64(),
            1 => (REGION - 1) as u64,
            _ => u64::from(input.u8()),
        };
        let length = if input.chance(32) { input.u32() } else { u32::from(input.u8()) };
        let data = if class == Class::Write { length.min(600) } else { 0 };
        let mut message = Access { key, offset, length }.emit().to_vec();
        message.resize(message.len() + data as usize, 0x44);
        if input.chance(16) {
            message.truncate(input.below(message.len().min(256)));
        }
        let header = SendHeader {
            kind: SendKind::Eager,
            hint: input.chance(128),
            class,
            message: MessageId(self.next),
            global: u64::from(self.next),
            length: message.len() as u32,
            offset: 0,
            call: u32::from(input.u8()),
        };
        self.next += 1;
        let lane = input.below(self.told.service.lanes());
        self.carry(lane, None, None, &[&header.emit()[..], &message].concat());
    }

    /// A SEND with an arbitrary header.
    fn any_send(&mut self, input: &mut Input<'_>) {
        let kind = [SendKind::Eager, SendKind::Announce, SendKind::Repair][input.below(3)];
        let eager = kind == SendKind::Eager && !input.chance(16);
        let length = (u32::from(input.u16()) * 5) % if eager { MAX_EAGER + 1 } else { 1 << 18 };
        let header = SendHeader {
            kind,
            hint: input.chance(128),
            class: [Class::Message, Class::Request, Class::Response, Class::Write][input.below(4)],
            message: MessageId(self.near(input)),
            global: u64::from(input.u16()),
            length,
            offset: input.below(1 + (length / UNIT) as usize) as u32 * UNIT,
            call: u32::from(input.u8()),
        };
        self.next += u32::from(header.message == MessageId(self.next));
        let payload = if kind == SendKind::Announce { 0 } else { header.payload_len() as usize };
        let payload = if input.chance(16) { input.below(200) } else { payload };
        let lane = input.below(self.told.service.lanes());
        self.carry(lane, None, None, &[&header.emit()[..], &vec![0x55; payload]].concat());
    }

    /// A WRITE to a granted address, of either peer, or to any other address.
    fn any_write(&mut self, input: &mut Input<'_>) {
        let known = self.grants.len();
        let grant = (known > 0).then(|| self.grants[known - 1 - input.below(known.min(8))]);
        let (address, key, length) = grant.map_or((0, 0, UNIT), |grant| (grant.address, grant.key, grant.length));
        let offset = u64::from(input.u8() & 15) * u64::from(UNIT) + u64::from(input.chance(16)) * 3;
        let key = if input.chance(24) { key ^ 1 << input.below(32) } else { key };
        let address = if input.chance(24) { u64::from(key) << 32 } else { address };
        let rest = length.saturating_sub(offset as u32);
        let len = if input.chance(32) { u32::from(input.u16()) } else { rest.min(UNIT * (1 + input.u32() % 3)) };
        let claimed = if input.chance(16) { input.u32() } else { len };
        let reth = Reth { address: address.wrapping_add(offset), key, length: claimed };
        let message = grant.filter(|_| !input.chance(32)).map_or_else(|| self.near(input), |grant| grant.message.0);
        let immediate = Immediate::new(MessageId(message), offset as u32 / UNIT * UNIT, input.chance(128)).bits();
        let lane = input.below(self.told.service.lanes());
        self.carry(lane, Some(reth), Some(immediate), &vec![0x66; len as usize]);
    }

    /// A WRITE to where the latest grant is, whichever peer it is for, while a message is arriving there.
    fn steal(&mut self) {
        self.theft = None;
        if let Some(&Grant { address, key, length, .. }) = self.grants.last() {
            let length = length.min(u32::from(MTU));
            self.carry(0, Some(Reth { address, key, length }), None, &vec![0x66; length as usize]);
        }
    }

    /// The number of a message that could arrive now.
    fn near(&self, input: &mut Input<'_>) -> u32 {
        match input.below(6) {
            0 => self.next.wrapping_sub(1),
            1 => self.next + u32::from(input.u8()),
            2 => input.u32(),
            _ => self.next,
        }
    }

    /// A control datagram.
    fn control(&self, input: &mut Input<'_>) -> Control {
        let tag = self.tags[usize::from(input.chance(32))];
        match input.below(6) {
            0..=2 => {
                let mut numbers = Numbers::new();
                for _ in 0..input.below(Numbers::MAX) {
                    let (number, message) = (u64::from(input.u8() & 63), MessageId(u32::from(input.u8() & 7)));
                    numbers.push(match input.chance(128) {
                        true => Number::Send(number),
                        false => {
                            Number::Write(Immediate::new(message, u32::from(input.u8() & 15) * UNIT, false).name())
                        }
                    });
                }
                Control::Ack(Ack {
                    tag,
                    sequence: u16::from(input.u8()),
                    fresh: (numbers.as_slice().len() as u8).min(input.u8()),
                    held_ns: (!numbers.as_slice().is_empty() && input.chance(200)).then(|| input.u32() >> 8),
                    base: MessageId(u32::from(input.u8() & 15)),
                    limit: MessageId(u32::from(input.u16())),
                    numbers,
                })
            }
            3 => {
                let length = 1 + input.below(256) as u32 * 300;
                let (address, key) = (input.u64() >> 1, input.u32());
                Control::Grant(Grant { tag, message: MessageId(u32::from(input.u8() & 15)), address, key, length })
            }
            4 => Control::Lane(Lane {
                tag,
                index: input.below(self.told.service.lanes()) as u8,
                phase: if input.chance(128) { LanePhase::Request } else { LanePhase::Response },
                generation: u16::from(input.u8() & 7),
                sequence: input.u32() & 0xff_ffff,
            }),
            _ if input.chance(16) => Control::Close(Close { tag, reason: CloseReason::Protocol }),
            _ => Control::Probe(tag),
        }
    }

    /// Packets of a message from the hostile peer on one of its lanes.
    fn carry(&mut self, lane: usize, write: Option<Reth>, immediate: Option<u32>, bytes: &[u8]) {
        let count = bytes.len().div_ceil(usize::from(MTU)).max(1);
        let reliable = self.told.service.is_reliable(lane as u8);
        let transport = if reliable { Transport::Rc } else { Transport::Uc };
        for index in 0..count {
            let start = index * usize::from(MTU);
            let payload = &bytes[start..bytes.len().min(start + usize::from(MTU))];
            let (first, last) = (index == 0, index + 1 == count);
            let immediate = immediate.filter(|_| last);
            let operation = Operation::of(write.is_some(), first, last, immediate.is_some());
            let header = Header {
                bth: Bth {
                    opcode: Opcode { transport, operation }.byte(),
                    destination: Qpn::new(self.told.lanes[lane].queue_pair),
                    sequence: Sequence::new(self.sequences[lane]),
                    ..Bth::default()
                },
                reth: write.filter(|_| first),
                immediate,
                ..Header::default()
            };
            self.sequences[lane] = (self.sequences[lane] + 1) & 0xff_ffff;
            self.emit(header, payload);
        }
    }

    /// A control datagram from the hostile peer.
    fn say(&mut self, control: &Control) {
        let mut bytes = [0; Control::MAX_LEN];
        let len = control.emit_into(&mut bytes);
        let operation = Operation::of(false, true, true, false);
        let header = Header {
            bth: Bth {
                opcode: Opcode { transport: Transport::Ud, operation }.byte(),
                destination: Qpn::new(self.told.control),
                ..Bth::default()
            },
            deth: Some(Deth { queue_key: self.told.queue_key, source: Qpn::new(CONTROL) }),
            ..Header::default()
        };
        self.emit(header, &bytes[..len]);
    }

    fn emit(&mut self, mut header: Header, payload: &[u8]) {
        let pad = payload.len().wrapping_neg() & 3;
        header.bth.pad = pad as u8;
        let mut head = [0; Header::MAX_LEN];
        let len = header.emit_into(&mut head);
        let mut packet = [&head[..len], payload, &[0; 3][..pad]].concat();
        let route = Route { source: address(2), destination: address(1), source_port: PORT, destination_port: PORT };
        let mut icrc = Icrc::new(&route, packet.len() + 4);
        icrc.header(&packet);
        packet.extend_from_slice(&icrc.finish());
        self.victim.provider_mut().receive(self.now, &route, &packet);
    }

    /// Processes everything that is due now.
    fn pump(&mut self) {
        for _ in 0..64 {
            let mut busy = self.victim.turn(self.now);
            busy |= self.honest.turn(self.now);
            for from in 0..2 {
                let host = if from == 0 { &mut self.victim } else { &mut self.honest };
                self.burst.clear();
                busy |= host.provider_mut().transmit(self.now, 256, &mut self.burst) > 0;
                let packets = self.burst.packets().iter();
                let packets: Vec<_> = packets.map(|p| (p.route, self.burst.payload(p).to_vec())).collect();
                for (route, payload) in &packets {
                    if from == 0 {
                        self.grants.extend(grant(payload));
                    }
                    if route.destination == address(2) {
                        assert!(
                            !payload.windows(ROW.len()).any(|row| row == ROW),
                            "sent to a peer that may not read it"
                        );
                    } else {
                        let host = if from == 0 { &mut self.honest } else { &mut self.victim };
                        host.provider_mut().receive(self.now, route, payload);
                    }
                    if from == 1 && self.theft.is_some_and(|left| left == 0) {
                        self.steal();
                    }
                    self.theft = self.theft.map(|left| left.saturating_sub(from));
                }
            }
            busy |= self.deliver();
            if !busy {
                break;
            }
        }
        // The oldest are used up.
        let old = self.grants.len().saturating_sub(32);
        self.grants.drain(..old);
    }

    /// Handles arrivals for the applications; returns whether there were any.
    fn deliver(&mut self) -> bool {
        let mut any = false;
        while let Some(event) = self.victim.next_event() {
            any = true;
            match event {
                HostEvent::Message { connection, data, .. } => {
                    if connection == self.friend {
                        assert!(data == secret(self.arrived[1]), "a message of the honest peer arrived changed");
                        self.arrived[1] += 1;
                    }
                    self.victim.consumed(self.now, connection, data);
                }
                HostEvent::Closed { connection, .. } => {
                    assert_ne!(connection, self.friend, "closed by another peer");
                    self.victim.close(connection, CloseReason::Protocol);
                }
                HostEvent::Sent { .. } => {}
            }
        }
        while let Some(event) = self.honest.next_event() {
            any = true;
            match event {
                HostEvent::Message { connection, data, .. } => {
                    assert_eq!(data, secret(self.arrived[0]), "for the honest peer");
                    self.arrived[0] += 1;
                    self.honest.consumed(self.now, connection, data);
                }
                HostEvent::Closed { reason, .. } => panic!("the honest peer is left: {reason:?}"),
                HostEvent::Sent { .. } => {}
            }
        }
        any
    }

    fn check(&self) {
        for (key, byte) in self.regions.iter().zip([0x11, 0x22, SECRET, SECRET]).skip(1) {
            let memory = self.victim.memory(*key).expect("it is registered");
            assert!(memory.iter().all(|held| *held == byte), "written by a peer without permission");
        }
        assert_eq!(self.victim.memory(self.regions[0]).map(<[u8]>::len), Some(REGION));
        let bound = 2 * 1024 + 2 * usize::from(WINDOW);
        assert!(self.victim.registered_buffers() <= bound, "{} buffers", self.victim.registered_buffers());
    }

    /// The hostile peer is disconnected: all messages between the others arrive, and no state of it is left.
    fn end(&mut self) {
        self.victim.close(self.hostile, CloseReason::Protocol);
        for _ in 0..2000 {
            self.pump();
            if self.arrived == self.begun {
                break;
            }
            self.now += 1_000_000;
        }
        assert_eq!(self.arrived, self.begun, "messages between others do not arrive");
        self.check();
        self.victim.close(self.friend, CloseReason::Done);
        assert_eq!(self.victim.registered_buffers(), 0, "buffers are left behind");
    }
}

/// The grant in a packet, if it is one.
fn grant(packet: &[u8]) -> Option<Grant> {
    let packet = Packet::parse(packet).ok().filter(|packet| packet.opcode.transport == Transport::Ud)?;
    match Control::parse(packet.payload) {
        Ok(Control::Grant(grant)) => Some(grant),
        _ => None,
    }
}
