//! The section `[pods.transport]`: the hosts that reach a pod over the reliable transport.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use bifrost_nicpipe::{ReliableConfig, ReliableError};
use bifrost_wire::{Mac, bifrost, vxlan};
use serde::Deserialize;
use toml::Spanned;

use crate::file::Checker;

const PATHS: u8 = 4;
const SOURCE_PORT_BASE: u16 = 49_152;
const MEMORY_MIB: u32 = 64;
const CONNECTIONS_PER_HOST: u32 = 256;
/// Memory for frames, MiB.
const MEMORY_RANGE: RangeInclusive<u64> = 1..=65_536;
/// Timeouts, us.
const RTO_RANGE: RangeInclusive<u64> = 100..=10_000_000;
const MAX_VNI: u32 = 0xff_ffff;

/// The section as it is in the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Section {
    addresses: Spanned<Vec<IpAddr>>,
    mac: Spanned<String>,
    vnis: Spanned<Vec<u32>>,
    hosts: Spanned<Vec<Vec<IpAddr>>>,
    port: Option<Spanned<u16>>,
    paths: Option<Spanned<u8>>,
    source_port_base: Option<Spanned<u16>>,
    memory_mib: Option<Spanned<u32>>,
    connections_per_host: Option<Spanned<u32>>,
    initial_rto_us: Option<Spanned<u64>>,
    rto_floor_us: Option<Spanned<u64>>,
}

impl Section {
    /// Returns the settings of the transport, and adds all errors to `checker`. `longest`: length of the longest frame,
    /// bytes.
    pub(super) fn check(&self, longest: usize, checker: &mut Checker<'_>) -> ReliableConfig {
        let mac = self.mac.get_ref().parse::<Mac>().map_err(|error| format!("mac: {error}"));
        let mac = checker.check(&self.mac, mac);
        if self.vnis.get_ref().is_empty() {
            checker.error(&self.vnis, "vnis: none; name the VNIs of the VPCs that the pod serves");
        }
        if let Some(vni) = self.vnis.get_ref().iter().find(|vni| **vni > MAX_VNI) {
            checker.error(&self.vnis, format!("vnis: {vni} is not a VNI; use 0 to {MAX_VNI}"));
        }
        if let Some(port) = self.port.as_ref().filter(|port| [0, vxlan::UDP_PORT].contains(port.get_ref())) {
            let text = match *port.get_ref() {
                0 => "port: 0 is not a UDP port; use 1 to 65535".to_owned(),
                port => format!("port: {port} is the port of plain VXLAN; use another"),
            };
            checker.error(port, text);
        }
        let is_memory_right = in_range("memory_mib", self.memory_mib.as_ref(), MEMORY_RANGE, checker);
        in_range("initial_rto_us", self.initial_rto_us.as_ref(), RTO_RANGE, checker);
        in_range("rto_floor_us", self.rto_floor_us.as_ref(), RTO_RANGE, checker);
        let mut engine = bifrost_rte::Config::default();
        if let Some(us) = &self.initial_rto_us {
            engine.initial_rto_ns = us.get_ref().saturating_mul(1000);
        }
        engine.rto_floor_ns = self.rto_floor_us.as_ref().map(|us| us.get_ref().saturating_mul(1000));
        let config = ReliableConfig {
            addresses: self.addresses.get_ref().clone(),
            // A valid placeholder. The error has been added.
            mac: mac.unwrap_or(Mac([2, 0, 0, 0, 0, 1])),
            vnis: self.vnis.get_ref().clone(),
            hosts: self.hosts.get_ref().clone(),
            port: get(self.port.as_ref(), bifrost::UDP_PORT),
            paths: get(self.paths.as_ref(), PATHS),
            source_port_base: get(self.source_port_base.as_ref(), SOURCE_PORT_BASE),
            memory_bytes: (get(self.memory_mib.as_ref(), MEMORY_MIB) as usize) << 20,
            connections_per_host: get(self.connections_per_host.as_ref(), CONNECTIONS_PER_HOST),
            engine,
            // Set when the program starts.
            instance: 0,
            salt: 0,
        };
        if is_memory_right && let Err(error) = config.check(longest) {
            self.note(&error, checker);
        }
        config
    }

    /// Adds an error of the transport, at the setting that it concerns.
    fn note(&self, error: &ReliableError, checker: &mut Checker<'_>) {
        let (name, at) = match error {
            ReliableError::NoHosts
            | ReliableError::Hosts(_)
            | ReliableError::Addresses(_)
            | ReliableError::Twice(_)
            | ReliableError::Family(_) => ("hosts", self.hosts.span()),
            ReliableError::Own => ("addresses", self.addresses.span()),
            ReliableError::Memory(..) => ("memory_mib", span(self.memory_mib.as_ref(), &self.hosts)),
            ReliableError::Paths(_) => ("paths", span(self.paths.as_ref(), &self.hosts)),
            ReliableError::SourcePort(_) => ("source_port_base", span(self.source_port_base.as_ref(), &self.hosts)),
            ReliableError::Mac(_) => ("mac", self.mac.span()),
            ReliableError::Connections(_) => {
                ("connections_per_host", span(self.connections_per_host.as_ref(), &self.hosts))
            }
        };
        checker.error(&Spanned::new(at, ()), format!("{name}: {error}"));
    }
}

fn get<T: Copy>(value: Option<&Spanned<T>>, default: T) -> T {
    value.map_or(default, |value| *value.get_ref())
}

/// The location of a setting. If it was omitted, that of the hosts, which determine the required values.
fn span<T, U>(value: Option<&Spanned<T>>, otherwise: &Spanned<U>) -> std::ops::Range<usize> {
    value.map_or_else(|| otherwise.span(), Spanned::span)
}

fn in_range<T: Copy + Into<u64>>(
    name: &str,
    value: Option<&Spanned<T>>,
    range: RangeInclusive<u64>,
    checker: &mut Checker<'_>,
) -> bool {
    let wrong = value.filter(|value| !range.contains(&(*value.get_ref()).into()));
    if let Some(value) = wrong {
        let (given, least): (u64, u64) = ((*value.get_ref()).into(), *range.start());
        checker.error(value, format!("{name}: {given}; use {least} to {}", range.end()));
    }
    wrong.is_none()
}
