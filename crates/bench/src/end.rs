//! One end: an engine, and the work that its caller does around it on every turn.

use bifrost_rte::{
    Admission, Arrival, Config, Control, DataOut, Destination, Engine, LocalVnic, Ordering, Outbound, Output, PeerId,
    Time, Verdict,
};
use bifrost_wire::bifrost::{self, DataHeader, Packet};
use bifrost_wire::{Mac, Vni, vxlan};

/// A buffer that a guest sends, and its destination according to the switch.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    to: Destination,
    flow: u32,
    segments: u8,
}

/// A datagram in flight: the bytes after the UDP header, with a frame without content.
#[derive(Clone, Copy, Debug)]
pub struct Datagram {
    /// Arrival time.
    pub at: Time,
    /// The peer: source or destination.
    pub peer: PeerId,
    /// Its path.
    pub path: u8,
    len: u8,
    bytes: [u8; Self::ROOM],
}

impl Datagram {
    /// Size of the largest control packet, with its VXLAN header, and with an Ethernet header after a data packet's
    /// header.
    const ROOM: usize = 72;

    /// The bytes after the UDP header.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// Outgoing headers, back to back.
#[derive(Debug, Default)]
pub struct Batch {
    bytes: Vec<u8>,
    ends: Vec<Leaving>,
}

#[derive(Clone, Copy, Debug)]
struct Leaving {
    end: u32,
    peer: PeerId,
    path: u8,
    frame: bool,
}

impl Batch {
    /// Number of datagrams.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Reserves space for `count` more.
    pub fn reserve(&mut self, count: usize) {
        self.bytes.reserve(count * Datagram::ROOM);
        self.ends.reserve(count);
    }

    /// Removes everything, as datagrams that leave at `now`.
    pub fn drain(&mut self, now: Time, mut to: impl FnMut(Datagram)) {
        let mut start = 0;
        for leaving in self.ends.drain(..) {
            let header = &self.bytes[start..leaving.end as usize];
            start = leaving.end as usize;
            let len = header.len() + if leaving.frame { 14 } else { 0 };
            let mut bytes = [0; Datagram::ROOM];
            bytes[..header.len()].copy_from_slice(header);
            to(Datagram { at: now, peer: leaving.peer, path: leaving.path, len: len as u8, bytes });
        }
        self.bytes.clear();
    }

    #[inline(always)]
    fn push_data(&mut self, data: &DataOut) {
        let Some(vni) = Vni::new(data.vni) else { return };
        let mut headers = [0; vxlan::HEADER_LEN + DataHeader::LEN];
        headers[..vxlan::HEADER_LEN].copy_from_slice(&vxlan::emit(vni));
        headers[vxlan::HEADER_LEN..].copy_from_slice(&data.header.emit());
        self.bytes.extend_from_slice(&headers);
        let end = self.bytes.len() as u32;
        self.ends.push(Leaving { end, peer: data.peer, path: data.header.path.get(), frame: true });
    }

    fn push(&mut self, vni: u32, peer: PeerId, path: u8, write: impl FnOnce(&mut Vec<u8>)) {
        let Some(vni) = Vni::new(vni) else { return };
        self.bytes.extend_from_slice(&vxlan::emit(vni));
        write(&mut self.bytes);
        self.ends.push(Leaving { end: self.bytes.len() as u32, peer, path, frame: false });
    }
}

/// An engine and its caller.
#[derive(Debug)]
pub struct End {
    /// The engine.
    pub engine: Engine,
    /// How received packets become visible.
    pub ordering: Ordering,
    side: u8,
    peers: u16,
    out: Output,
    next_handle: u32,
    /// Packets delivered to guests.
    pub published_packets: u64,
    /// Acknowledged segments returned to guests.
    pub released_packets: u64,
    /// Offers refused because of a closed window.
    pub blocked_packets: u64,
    /// Number of counted turns.
    pub measured_turns: u64,
}

/// VNI of all connections.
const VNI: u32 = 100;
/// Port of all vNICs.
const OWNER: u32 = 1;

impl End {
    /// End `side` (0 or 1), with `peers` peer hosts of four paths each.
    pub fn new(side: u8, config: Config, ordering: Ordering, peers: u16) -> Self {
        let mut engine = Engine::new(config, 0, 1_000 + u64::from(side), 0x5a5a * u32::from(side));
        for _ in 0..peers {
            engine.add_peer(4);
        }
        End {
            engine,
            ordering,
            side,
            peers,
            out: Output::default(),
            next_handle: 0,
            published_packets: 0,
            released_packets: 0,
            blocked_packets: 0,
            measured_turns: 0,
        }
    }

    /// One turn of a worker: arrived datagrams, timers, delivery, acknowledgements, and the guests' packets.
    #[inline(always)]
    pub fn turn(&mut self, now: Time, arrived: &[Datagram], offers: &[Offer], leaving: &mut Batch) {
        self.receive(now, arrived);
        self.tick(now);
        self.acknowledge(now);
        self.send(now, offers);
        self.emit(leaving);
    }

    /// [`turn`](Self::turn), the only function in which instructions are counted.
    #[inline(never)]
    pub fn measured(&mut self, now: Time, arrived: &[Datagram], offers: &[Offer], leaving: &mut Batch) {
        self.measured_turns += 1;
        self.turn(now, arrived, offers, leaving);
    }

    /// Parses the headers of arrived datagrams, passes them to the engine, and publishes the packets that this
    /// releases.
    #[inline(always)]
    pub fn receive(&mut self, now: Time, arrived: &[Datagram]) {
        for datagram in arrived {
            self.accept(now, datagram);
        }
        self.publish();
    }

    /// Runs timers that are due.
    #[inline(always)]
    pub fn tick(&mut self, now: Time) {
        if self.engine.next_timeout().is_some_and(|at| at <= now) {
            self.engine.on_timeout(now, &mut self.out);
            self.publish();
        }
    }

    /// Sends acknowledgements that are due.
    #[inline(always)]
    pub fn acknowledge(&mut self, now: Time) {
        self.engine.flush_acks(now, &mut self.out);
    }

    /// Sends the guests' packets.
    #[inline(always)]
    pub fn send(&mut self, now: Time, offers: &[Offer]) {
        for offer in offers {
            let packet = Outbound { handle: self.next_handle, segments: offer.segments, flow: offer.flow };
            match self.engine.transmit(now, &offer.to, packet, &mut self.out) {
                Admission::Accepted => self.next_handle = self.next_handle.wrapping_add(1),
                Admission::Plain | Admission::Blocked => self.blocked_packets += 1,
            }
        }
    }

    /// Writes the headers of outgoing datagrams, and releases acknowledged packets.
    #[inline(always)]
    pub fn emit(&mut self, leaving: &mut Batch) {
        if self.out.is_empty() {
            return;
        }
        for data in &self.out.data {
            leaving.push_data(data);
        }
        for control in &self.out.control {
            leaving.push(control.vni, control.peer, control.path.get(), |buffer| match &control.packet {
                Control::Ack(ack) => ack.emit(buffer),
                Control::Probe(header) => buffer.extend_from_slice(&header.emit()),
                Control::Skip(header) => buffer.extend_from_slice(&header.emit_skip()),
                Control::Setup(setup) => buffer.extend_from_slice(&setup.emit()),
                Control::Reset(reset) => buffer.extend_from_slice(&reset.emit()),
            });
        }
        self.released_packets += self.out.release.len() as u64;
        self.out.clear();
    }

    #[inline(never)]
    fn accept(&mut self, now: Time, datagram: &Datagram) {
        let Ok((vni, payload)) = vxlan::parse(datagram.bytes()) else { return };
        let arrival = Arrival { peer: datagram.peer, vni: vni.get(), nic_rx: datagram.at, hops: 3, marked: false };
        if let Some((header, _frame)) = bifrost::parse_data_packet(payload) {
            return self.on_data(now, &arrival, &header);
        }
        let Ok(packet) = bifrost::parse(payload) else { return };
        let out = &mut self.out;
        match packet {
            Packet::Data(header, _frame) => self.on_data(now, &arrival, &header),
            Packet::Ack(ack) => self.engine.on_ack(now, &arrival, &ack, out),
            Packet::Probe(header) => self.engine.on_probe(now, &arrival, &header, out),
            Packet::Skip(header) => self.engine.on_skip(now, &arrival, &header, out),
            Packet::Setup(setup) => {
                let vnic = LocalVnic { owner: OWNER, ordering: self.ordering, reliable: true };
                self.engine.on_setup(now, &arrival, &setup, Some(vnic), out);
            }
            Packet::Reset(reset) => self.engine.on_reset(now, &arrival, &reset, out),
            // Each packet is a separate datagram here.
            Packet::Bundle(_) => {}
        }
    }

    #[inline]
    fn on_data(&mut self, now: Time, arrival: &Arrival, header: &DataHeader) {
        if let Verdict::Place { slot, .. } = self.engine.on_data(now, arrival, header, &mut self.out) {
            // The port places packets in buffers; any handle will do.
            self.engine.placed(now, slot, header.psn.0, &mut self.out);
        }
    }

    fn publish(&mut self) {
        self.published_packets += self.out.publish.len() as u64;
        self.out.publish.clear();
    }

    /// A buffer of `segments` packets of flow `flow`, for connection number `conn`.
    pub fn offer(&self, conn: u32, flow: u32, segments: u8) -> Offer {
        let [a, b, c, d] = conn.to_be_bytes();
        let mac = |side: u8| Mac([2, side, a, b, c, d]);
        let to = Destination {
            vni: VNI,
            owner: OWNER,
            local: mac(self.side),
            remote: mac(1 - self.side),
            peer: PeerId(conn % u32::from(self.peers)),
            ordering: self.ordering,
        };
        // Real hashes are distributed over all bits; so are these.
        Offer { to, flow: flow.wrapping_mul(0x9e37_79b9), segments }
    }
}
