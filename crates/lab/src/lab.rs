//! The resources of a run: networks of two hosts, with the user's options.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::daemon::{Binaries, Settings, machine_socket};
use crate::machine::Machine;
use crate::options::{Guests, Mode, Options};
use crate::state::Run;
use crate::topology::overlay::Overlay;
use crate::topology::{GUEST_MTU, Plan, Topology, multipath_tcp};

/// The resources of a run.
#[derive(Debug)]
pub struct Lab {
    /// The claim on namespace names.
    pub run: Run,
    /// The user's options.
    pub options: Options,
    /// The daemon and its tools.
    pub binaries: Binaries,
    /// Where results go; logs go to its subdirectory `logs`.
    pub out: PathBuf,
}

/// Hosts and the network that joins their guests.
#[derive(Debug)]
pub struct Network {
    // The order matters: machines end before daemons, and daemons before their namespaces are deleted.
    /// The guests' virtual machines, if that is what guests are, in the hosts' order.
    pub machines: Vec<Machine>,
    /// The overlay.
    pub overlay: Overlay,
    /// The hosts.
    pub topology: Topology,
    /// The directory of its logs.
    logs: PathBuf,
    /// Its claim on names and files.
    part: Run,
}

impl Network {
    /// A directory for temporary files of programs in the network; removed at the end.
    pub fn directory(&self) -> &Path {
        self.part.directory()
    }

    /// Returns an error if a switch has ended, or if guests do not use Multipath TCP although they should.
    pub fn check(&mut self) -> Result<()> {
        self.overlay.check_alive()?;
        if self.topology.plan.multipath_tcp {
            multipath_tcp::check(&self.topology, &self.logs)?;
        }
        Ok(())
    }
}

impl Lab {
    /// Builds two hosts whose guests are joined by `mode`. Log files have the name `label`.
    pub fn network(&self, mode: Mode, label: &str) -> Result<Network> {
        self.network_with(mode, label, self.settings())
    }

    /// Like [`Lab::network`], but a kernel VXLAN device hashes every flow onto its own link, so that it uses all
    /// paths as far as it can. That costs it a route lookup for every packet.
    pub fn network_with_spread_flows(&self, mode: Mode, label: &str) -> Result<Network> {
        self.network_with(mode, label, Settings { spread_flows: true, ..self.settings() })
    }

    /// The daemons' settings from the user's options.
    pub fn settings(&self) -> Settings {
        Settings { guests: self.options.guests.unwrap_or_default(), ..Settings::default() }
    }

    /// Two hosts, with the user's options.
    pub fn plan(&self) -> Plan {
        Plan {
            hosts: 2,
            paths: self.options.paths,
            cabling: self.options.cabling,
            wire_packets: !self.options.wire_offload,
            own_processors: !self.options.share_processors,
            spread_flows: false,
            multipath_tcp: false,
            guest_mtu: GUEST_MTU,
        }
    }

    /// Like [`Lab::network`], with other settings.
    pub fn network_with(&self, mode: Mode, label: &str, settings: Settings) -> Result<Network> {
        let plan = Plan {
            // A subflow for each path.
            spread_flows: settings.spread_flows || mode == Mode::Mptcp,
            multipath_tcp: mode == Mode::Mptcp,
            guest_mtu: settings.guest_mtu.unwrap_or(GUEST_MTU),
            wire_packets: !(settings.wire_offload || self.options.wire_offload),
            ..self.plan()
        };
        let part = self.run.part()?;
        let topology = Topology::build(&part, plan)?;
        let overlay = Overlay::start(&part, &topology, mode, &settings, &self.binaries, &self.logs(label))?;
        let mut machines = Vec::new();
        if settings.guests == Guests::Vm {
            for host in &topology.hosts {
                let (guest, directory) = (&host.guest, part.directory().join(&host.guest.name));
                let (socket, dpdk) = (machine_socket(&part, guest), mode == Mode::OpenVswitch);
                machines.push(Machine::start(guest, &socket, dpdk, directory, &self.logs(label))?);
            }
            machines.iter_mut().try_for_each(Machine::wait_until_ready)?;
        }
        Ok(Network { machines, overlay, topology, logs: self.logs(label), part })
    }

    /// The directory for logs of the part `label`.
    pub fn logs(&self, label: &str) -> PathBuf {
        self.out.join("logs").join(label)
    }

    /// Repetitions of every point, unless the user chose another number.
    pub fn repetitions(&self, full: u32) -> u32 {
        self.options.repetitions.unwrap_or(if self.options.quick { 1 } else { full })
    }

    /// Loss rates, percent, unless the user chose others.
    pub fn losses(&self, full: &[f64], quick: &[f64]) -> Vec<f64> {
        self.options.losses.clone().unwrap_or_else(|| if self.options.quick { quick } else { full }.to_vec())
    }

    /// Duration of a point, seconds, unless the user chose another one.
    pub fn seconds(&self, full: f64, quick: f64) -> f64 {
        self.options.seconds.unwrap_or(if self.options.quick { quick } else { full })
    }
}
