//! Two NICs and the wire between them.

mod datagram;
mod hostile;
mod reliable;
mod unreliable;

use std::net::{IpAddr, Ipv6Addr};

use crate::{
    Access, Burst, Completion, Config, Connect, CqId, Domain, INLINE_MAX, Key, Nic, Operation, QpInit, Qpn,
    ReceiveRequest, Region, Route, SendRequest, Sequence, Slice, Transport,
};

const MTU: u16 = 1024;
const US: u64 = 1000;
const TIMEOUT_NS: u64 = 200 * US;

/// A NIC with one queue pair and one completion queue.
struct End {
    nic: Nic,
    queue: CqId,
    qp: Qpn,
    domain: Domain,
}

impl End {
    fn new(host: u16, transport: Transport) -> Self {
        let address = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host));
        let mut nic = Nic::new(Config { address, port: 4791, queue_pairs: 8, regions: 64, seed: u64::from(host) });
        let queue = nic.create_queue().unwrap();
        let domain = Domain(u32::from(host));
        let init = QpInit {
            transport,
            send_queue: queue,
            receive_queue: queue,
            send_depth: 64,
            receive_depth: 64,
            domain,
            queue_key: 77,
            urgent: false,
        };
        let qp = nic.create_queue_pair(init).unwrap();
        Self { nic, queue, qp, domain }
    }

    fn connect_to(&mut self, peer: &End, send: u32, receive: u32) {
        let connect = Connect {
            address: peer.nic.address(),
            port: 4791,
            queue_pair: peer.qp,
            source_port: 50_000,
            send_sequence: Sequence::new(send),
            receive_sequence: Sequence::new(receive),
            mtu: MTU,
            retries: 2,
            timeout_ns: TIMEOUT_NS,
        };
        self.nic.connect(self.qp, connect).unwrap();
    }

    fn memory(&mut self, access: Access, bytes: Vec<u8>) -> Region {
        self.nic.register(self.domain, access, bytes).unwrap()
    }

    fn post_receive(&mut self, token: u64, len: u32) -> Slice {
        let region = self.memory(Access::Local, vec![0xee; len as usize]);
        let slice = Slice { key: region.key, offset: 0, len };
        self.nic.post_receive(self.qp, ReceiveRequest { token, slice }).unwrap();
        slice
    }

    fn post(&mut self, token: u64, operation: Operation, immediate: Option<u32>, bytes: Vec<u8>) {
        let len = bytes.len() as u32;
        let region = self.memory(Access::Local, bytes);
        let slice = Some(Slice { key: region.key, offset: 0, len });
        self.nic.post_send(self.qp, request(token, operation, immediate, slice)).unwrap();
    }

    fn poll(&mut self) -> Vec<Completion> {
        let mut out = vec![];
        self.nic.poll(self.queue, usize::MAX, &mut out);
        out
    }

    fn bytes(&self, key: Key, offset: u32, len: u32) -> &[u8] {
        self.nic.bytes(Slice { key, offset, len }).unwrap()
    }
}

fn request(token: u64, operation: Operation, immediate: Option<u32>, slice: Option<Slice>) -> SendRequest {
    SendRequest { token, operation, immediate, inline: [0; INLINE_MAX], inline_len: 0, slice }
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed) ^ (i >> 8) as u8).collect()
}

/// Two connected ends; sequence numbers are about to wrap.
fn pair(transport: Transport) -> (End, End) {
    let (mut a, mut b) = (End::new(1, transport), End::new(2, transport));
    if transport != Transport::Ud {
        a.connect_to(&b, 0xff_fffe, 5);
        b.connect_to(&a, 5, 0xff_fffe);
    }
    (a, b)
}

/// Takes all packets that `from` sends, and passes `to` those that `passes` selects: packets are counted from 0.
fn carry(now_ns: u64, from: &mut Nic, to: &mut Nic, mut passes: impl FnMut(usize) -> bool) -> usize {
    let mut burst = Burst::new();
    let count = from.transmit(now_ns, usize::MAX, &mut burst);
    assert_eq!(count, burst.packets().len());
    for (n, packet) in burst.packets().iter().enumerate() {
        if passes(n) {
            to.receive(now_ns, &packet.route, burst.payload(packet));
        }
    }
    count
}

/// The packets that a NIC sends, as bytes.
fn packets(now_ns: u64, from: &mut Nic) -> Vec<(Route, Vec<u8>)> {
    let mut burst = Burst::new();
    from.transmit(now_ns, usize::MAX, &mut burst);
    burst.packets().iter().map(|packet| (packet.route, burst.payload(packet).to_vec())).collect()
}
