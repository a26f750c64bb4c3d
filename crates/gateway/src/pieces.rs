//! Fragments, of which the first is processed like the whole packet and the others follow it; and packets that must be
//! fragmented.

use bifrost_nic::{Offload, Parsed, Segments};
use bifrost_wire::ethernet;

use crate::decision::{Decision, Origin, Plan};
use crate::fragments::{Decided, Piece};
use crate::nat::INTERNET;
use crate::quoted;
use crate::tables::Vpc;
use crate::{DropReason, HEADROOM, Packet, Service};

impl Decision<'_> {
    /// A fragment from the Internet.
    #[cold]
    pub(crate) fn piece_from_internet(
        &mut self,
        packet: &mut Packet<'_>,
        parsed: &Parsed,
    ) -> Result<Service, DropReason> {
        let is_nat = self.tables.nat_addresses.contains_key(&(INTERNET, parsed.dst_ip));
        let (seen, Decided { vni, plan }) = self.piece(packet, parsed, INTERNET, |decision, packet, seen| {
            // An error whose checksum cannot be verified; its later fragments then have no record.
            if is_nat && quoted::is_error(packet.bytes(), seen) {
                return Err(DropReason::NatProtocol);
            }
            let (vni, _, plan) = decision.plan_from_internet(packet, seen)?;
            Ok(Decided { vni, plan })
        })?;
        let vpc = self.tables.vpcs.get(&vni).ok_or(DropReason::UnknownVni)?;
        self.carry_out(packet, &seen, Origin::Internet, vpc, plan)
    }

    /// A fragment of a VPC.
    #[cold]
    pub(crate) fn piece_inside(
        &mut self,
        packet: &mut Packet<'_>,
        inner: &Parsed,
        vni: u32,
        vpc: &Vpc,
        origin: Origin,
    ) -> Result<Service, DropReason> {
        let (seen, Decided { plan, .. }) = self.piece(packet, inner, vni, |decision, packet, seen| {
            let plan = decision.plan(packet, seen, vni, vpc, origin)?;
            Ok(Decided { vni, plan })
        })?;
        self.carry_out(packet, &seen, origin, vpc, plan)
    }

    /// The decision about a fragment's packet, and the fragment's headers. Those of the first fragment include ports.
    fn piece(
        &mut self,
        packet: &mut Packet<'_>,
        parsed: &Parsed,
        network: u32,
        decide: impl FnOnce(&mut Self, &mut Packet<'_>, &Parsed) -> Result<Decided, DropReason>,
    ) -> Result<(Parsed, Decided), DropReason> {
        let now = self.context.now;
        let fragment = parsed.fragment.ok_or(DropReason::FragmentMismatch)?;
        let piece = Piece::of(parsed, fragment, network);
        if fragment.offset == 0 {
            let whole = parsed.as_whole(packet.bytes()).ok_or(DropReason::FragmentMismatch)?;
            let decided = decide(self, packet, &whole.parsed)?;
            if by_ports(&decided.plan) {
                self.state.fragments.begin(now, &piece, decided, whole.least_len);
            }
            return Ok((whole.parsed, decided));
        }
        let Some(decided) = self.state.fragments.follow(now, &piece)? else {
            return Ok((*parsed, decide(self, packet, parsed)?));
        };
        if decided.plan.service == Service::Internet {
            let vpc = self.tables.vpcs.get(&decided.vni).ok_or(DropReason::UnknownVni)?;
            self.meter(vpc, parsed)?;
        }
        Ok((*parsed, decided))
    }

    /// Fragments an IPv4 packet (after its Ethernet header) into packets of at most `room` bytes; `emit` prepends
    /// headers to each. The first one stays in `packet`, the others go to [`State::more`](crate::decision::State).
    /// False if it must not be fragmented, or its payload is elsewhere.
    #[cold]
    pub(crate) fn fragment(
        &mut self,
        packet: &mut Packet<'_>,
        parsed: &Parsed,
        room: u16,
        mut emit: impl FnMut(&mut Self, &mut Packet<'_>) -> Result<(), DropReason>,
    ) -> Result<bool, DropReason> {
        if packet.is_header_only() {
            return Ok(false);
        }
        let offload = Offload::default();
        let whole = packet.bytes().to_vec();
        let Ok(plan) = Segments::plan_within(&whole, whole.len(), offload, room) else { return Ok(false) };
        let l3 = usize::from(parsed.l3);
        let copy = |from: usize, to: usize, out: &mut Vec<u8>| {
            out.extend_from_slice(whole.get(from..to).unwrap_or_default());
        };
        for index in (0..plan.count()).rev() {
            let mut piece = Vec::with_capacity(HEADROOM + plan.len(index));
            piece.resize(HEADROOM, 0);
            plan.write(index, copy, &mut piece);
            if index == 0 {
                packet.replace(|out| {
                    let bytes = &piece[HEADROOM..];
                    let Some(room) = out.get_mut(..bytes.len()) else { return 0 };
                    room.copy_from_slice(bytes);
                    bytes.len()
                })?;
                packet.pull(l3);
                emit(self, packet)?;
                continue;
            }
            let end = piece.len();
            let mut piece = Packet::new(&mut piece, HEADROOM, end);
            piece.pull(l3);
            emit(self, &mut piece)?;
            self.state.more.push(piece.bytes().to_vec());
        }
        // From the second to the last.
        self.state.more.reverse();
        self.state.counters.count_fragmented(self.state.more.len());
        Ok(true)
    }
}

/// Whether the decision depends on ports.
fn by_ports(plan: &Plan) -> bool {
    matches!(plan.service, Service::Internet | Service::CloudService)
}

const _: () = assert!(HEADROOM > 4 * ethernet::HEADER_LEN);
