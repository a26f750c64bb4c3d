//! A datagram to the BIFROST port: an accepted packet survives emitting and parsing.

use bifrost_wire::bifrost::{Packet, bundle, parse};
use bifrost_wire::vxlan;

pub(crate) fn run(bytes: &[u8]) {
    if let Ok((vni, rest)) = vxlan::parse(bytes) {
        assert_eq!(vxlan::parse(&vxlan::emit(vni)).map(|(again, _)| again), Ok(vni));
        packet(rest);
    }
    // Also without the VXLAN header, so that a fuzzer need not learn it first.
    packet(bytes);
}

fn packet(bytes: &[u8]) {
    let Ok(packet) = parse(bytes) else { return };
    let again = emit(&packet);
    assert_eq!(again.len(), bytes.len());
    assert_eq!(parse(&again), Ok(packet));
    // Emitted packets have no reserved bits set: once is enough.
    assert_eq!(parse(&again).map(|p| emit(&p)).as_ref(), Ok(&again));
}

fn emit(packet: &Packet<'_>) -> Vec<u8> {
    match packet {
        Packet::Data(header, frame) => [&header.emit()[..], frame].concat(),
        Packet::Probe(header) => header.emit().to_vec(),
        Packet::Skip(header) => header.emit_skip().to_vec(),
        Packet::Ack(ack) => {
            let mut out = Vec::new();
            ack.emit(&mut out);
            out
        }
        Packet::Setup(setup) => setup.emit().to_vec(),
        Packet::Reset(reset) => reset.emit().to_vec(),
        Packet::Bundle(bundle) => {
            let mut packets = bundle.packets();
            let mut out = packets.next().expect("at least one packet").to_vec();
            bundle::begin(&mut out, 0);
            packets.for_each(|packet| bundle::append(&mut out, |out| out.extend_from_slice(packet)));
            out
        }
    }
}
