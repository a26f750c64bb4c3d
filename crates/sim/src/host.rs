//! A host: the daemon's data path with a simulated underlay and simulated vNICs.

use bifrost_avs as avs;
use bifrost_datapath::{Core, CoreConfig, Limits, PeerConfig, PlainPaths, PortConfig, Rate, Weight};
use bifrost_rte::Config;

use crate::packet::{BIFROST_PORT, VXLAN_PORT};
use crate::port::SimPort;
use crate::underlay::{SimUnderlay, address};

/// No time: the event is not scheduled.
pub(crate) const NEVER: u64 = u64::MAX;

/// Maximum length of a datagram with several packets: the daemon's default.
const BUNDLE_BYTES: u16 = 1452;

/// A vNIC, as seen by its host.
#[derive(Clone, Debug)]
pub(crate) struct Vnic {
    /// The guest behind it.
    pub(crate) guest: u32,
    pub(crate) vni: bifrost_wire::Vni,
    pub(crate) mac: bifrost_wire::Mac,
    pub(crate) ordering: bifrost_rte::Ordering,
    pub(crate) reliable: bool,
    /// Limits of its sending and receiving rates.
    pub(crate) rates: (Rate, Rate),
    /// Weights when paths are full: of its network, and of the guest within it.
    pub(crate) weights: (u8, u8),
}

/// A host.
pub struct Host {
    /// Its number.
    pub(crate) id: u32,
    /// `None` while its daemon is down.
    pub(crate) core: Option<Core<SimPort>>,
    pub(crate) underlay: SimUnderlay,
    /// vNICs of a daemon that is down.
    parked: Vec<SimPort>,
    pub(crate) vnics: Vec<Vnic>,
    tables: avs::Tables,
    /// Other hosts by peer number.
    peers: Vec<u32>,
    paths: u8,
    source_port_base: u16,
    config: Config,
    control_dscp: u8,
    /// End of its last turn, ns.
    pub(crate) busy_until: u64,
    /// Time of its next turn, ns.
    pub(crate) turn_at: u64,
    /// It gets no CPU until this time, ns.
    pub(crate) paused_until: u64,
    /// Turns of its loop.
    pub turns: u64,
    /// CPU time of these turns, ns.
    pub busy_ns: u64,
}

/// Inputs for creating a host.
pub(crate) struct HostParts {
    pub(crate) id: u32,
    pub(crate) underlay: SimUnderlay,
    pub(crate) vnics: Vec<(Vnic, SimPort)>,
    pub(crate) tables: avs::Tables,
    pub(crate) peers: Vec<u32>,
    pub(crate) paths: u8,
    pub(crate) source_port_base: u16,
    pub(crate) config: Config,
    pub(crate) control_dscp: u8,
}

impl Host {
    pub(crate) fn new(parts: HostParts) -> Self {
        let (vnics, parked) = parts.vnics.into_iter().unzip();
        Host {
            id: parts.id,
            core: None,
            underlay: parts.underlay,
            parked,
            vnics,
            tables: parts.tables,
            peers: parts.peers,
            paths: parts.paths,
            source_port_base: parts.source_port_base,
            config: parts.config,
            control_dscp: parts.control_dscp,
            busy_until: 0,
            turn_at: NEVER,
            paused_until: 0,
            turns: 0,
            busy_ns: 0,
        }
    }

    /// Starts the daemon. `instance`: us since the epoch.
    ///
    /// # Panics
    /// If the scenario describes contradictory switch tables, which its checks exclude.
    pub(crate) fn start(&mut self, instance: u64, salt: u32) {
        let switch = avs::Switch::build(&self.tables, 0).expect("a switch without contradictions");
        let (transport, plain_paths) = (self.config.clone(), PlainPaths::default());
        let mut core = Core::new(
            CoreConfig {
                index: 0,
                transport,
                instance,
                salt,
                plain_paths,
                bundle_bytes: BUNDLE_BYTES,
                control_dscp: self.control_dscp,
                slow_port_percent: 0,
                answer_us: 0,
            },
            switch,
        );
        for ((owner, vnic), port) in (0..).zip(&self.vnics).zip(self.parked.drain(..)) {
            let Vnic { vni, mac, ordering, reliable, rates: (tx, rx), weights, .. } = *vnic;
            let config = PortConfig { owner, vni, mac, ordering, reliable, port };
            core.add_port(config).expect("numbers of ports are different");
            core.set_limits(owner, Limits::new(tx, rx));
            core.set_weights(owner, Weight::new(weights.0), Weight::new(weights.1));
        }
        for (id, &host) in (0..).zip(&self.peers) {
            let paths = vec![(address(self.id), address(host)); usize::from(self.paths)];
            let peer = PeerConfig {
                id,
                addresses: vec![address(host)],
                paths,
                source_port_base: self.source_port_base,
                bifrost_port: BIFROST_PORT,
                vxlan_port: VXLAN_PORT,
                plain: false,
            };
            core.set_peer(peer, &mut self.underlay).expect("a lane is always available");
        }
        self.core = Some(core);
    }

    /// The daemon crashes and loses all its state; the vNICs stay.
    pub(crate) fn crash(&mut self) {
        let Some(mut core) = self.core.take() else { return };
        for owner in 0..self.vnics.len() as u32 {
            if let Some(mut port) = core.remove_port(owner) {
                port.detach();
                self.parked.push(port);
            }
        }
        (self.busy_until, self.turn_at) = (0, NEVER);
    }

    /// A vNIC, whether or not the daemon runs.
    pub(crate) fn port_mut(&mut self, owner: u32) -> &mut SimPort {
        match self.core.as_mut() {
            Some(core) => core.device_mut(owner).expect("a port of every vNIC"),
            None => &mut self.parked[owner as usize],
        }
    }

    /// A vNIC, whether or not the daemon runs.
    pub fn port(&self, owner: u32) -> &SimPort {
        match self.core.as_ref() {
            Some(core) => core.device(owner).expect("a port of every vNIC"),
            None => &self.parked[owner as usize],
        }
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The data path, unless the daemon is down.
    pub fn core(&self) -> Option<&Core<SimPort>> {
        self.core.as_ref()
    }

    /// The underlay.
    pub fn underlay(&self) -> &SimUnderlay {
        &self.underlay
    }

    /// Other hosts that its guests talk to, by peer number.
    pub fn peers(&self) -> &[u32] {
        &self.peers
    }

    /// Guests behind its vNICs, by port number.
    pub fn guests(&self) -> impl Iterator<Item = u32> {
        self.vnics.iter().map(|v| v.guest)
    }

    /// Whether the data path holds no buffer of any vNIC.
    pub(crate) fn is_drained(&self) -> bool {
        (0..self.vnics.len() as u32).all(|owner| self.port(owner).outstanding() == (0, 0))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use bifrost_nic::Offload;
    use bifrost_rte::{Ordering, Time};
    use bifrost_wire::{Mac, Vni};

    use super::*;

    #[test]
    fn large_packets_of_one_guest_do_not_fill_a_turn() {
        const PACKETS: u64 = 100;
        let switch = avs::Switch::build(&avs::Tables::default(), 0).unwrap();
        let (transport, plain_paths) = (Config::default(), PlainPaths::default());
        let mut core = Core::new(
            CoreConfig {
                index: 0,
                transport,
                instance: 1,
                salt: 1,
                plain_paths,
                bundle_bytes: BUNDLE_BYTES,
                control_dscp: 0,
                slow_port_percent: 0,
                answer_us: 0,
            },
            switch,
        );
        let mut port = SimPort::new(256, 256, 65_535);
        for _ in 0..PACKETS {
            // Not an Ethernet frame of a known protocol, so the host drops it early.
            assert!(port.send(Offload::default(), |bytes| bytes.resize(60_000, 0xff)));
        }
        let (vni, mac) = (Vni::new(100).unwrap(), Mac([2, 0, 0, 0, 0, 1]));
        core.add_port(PortConfig { owner: 0, vni, mac, ordering: Ordering::Flow, reliable: true, port }).unwrap();
        let mut underlay = SimUnderlay::new(0, 1 << 20, 0);
        let decided = |core: &Core<SimPort>| {
            let port = core.port_views().next().unwrap();
            port.outbound.fetched_packets - port.waiting_packets.0
        };
        let mut before = 0;
        for turn in 1.. {
            core.turn(Time(turn * 1000), &mut underlay, |_| {});
            let after = decided(&core);
            assert!((after - before) * 60_000 <= (512 << 10) + 60_000, "{} packets in turn {turn}", after - before);
            before = after;
            if after == PACKETS {
                break;
            }
            assert!(core.has_more(), "only the rest waits for another turn");
            assert!(turn < 2 * PACKETS, "{after} of {PACKETS}");
        }
    }
}
