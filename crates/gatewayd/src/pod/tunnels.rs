//! Keepalives of tunnels: when they are sent, which tunnels are up, and how that is reported.

use std::net::IpAddr;
use std::sync::Arc;

use bifrost_control::api::GatewayTunnel;
use bifrost_gateway::{Keepalives, Tables};
use bifrost_wire::Mac;

use crate::status::Sample;

/// The tunnels of a pod.
#[derive(Debug)]
pub(super) struct Tunnels {
    tables: Arc<Tables>,
    keepalives: Keepalives,
    names: Vec<String>,
    /// States as logged last.
    up: Vec<bool>,
}

impl Tunnels {
    /// `names`: those of the tunnels, by index.
    pub(super) fn new(tables: Arc<Tables>, names: Vec<String>) -> Self {
        let up = vec![true; names.len()];
        Tunnels { keepalives: Keepalives::new(Arc::clone(&tables)), tables, names, up }
    }

    /// Frames to send now; `mac` gives the link-layer address of a next hop. Logs tunnels that have gone down or come
    /// back.
    pub(super) fn poll(&mut self, now: u64, mac: impl Fn(IpAddr) -> Option<Mac>) -> Vec<Vec<u8>> {
        if self.keepalives.deadline().is_none_or(|at| at > now) {
            return Vec::new();
        }
        let frames = self.keepalives.frames(now, mac);
        for ((up, name), index) in self.up.iter_mut().zip(&self.names).zip(0..) {
            let is_up = self.tables.tunnel_state(index, now).up;
            if is_up && !*up {
                tracing::info!(tunnel = name, "its keepalives come back again");
            } else if !is_up && *up {
                tracing::warn!(tunnel = name, "its keepalives do not come back; packets to it are dropped");
            }
            *up = is_up;
        }
        frames
    }

    /// When [`poll`](Self::poll) has something to do, ns.
    pub(super) fn deadline(&self) -> Option<u64> {
        self.keepalives.deadline()
    }
}

/// The state of all tunnels.
pub(super) fn states(tables: &Tables, names: &[String], now: u64) -> Vec<GatewayTunnel> {
    let state = |(tunnel, (index, name)): (&bifrost_gateway::Tunnel, (u32, &String))| {
        let state = tables.tunnel_state(index, now);
        GatewayTunnel {
            name: name.clone(),
            vni: tunnel.vni,
            remote: tunnel.remote.to_string(),
            up: state.up,
            silence_ms: state.silence_ns.map(|ns| ns / 1_000_000),
        }
    };
    tables.tunnels.iter().zip((0..).zip(names)).map(state).collect()
}

/// The states as metrics.
pub(super) fn samples(tunnels: &[GatewayTunnel]) -> Vec<Sample> {
    let of = |tunnel: &GatewayTunnel, name: &str, value| Sample {
        name: name.to_owned(),
        labels: vec![("tunnel", tunnel.name.clone())],
        value,
        gauge: true,
    };
    let each = |tunnel: &GatewayTunnel| {
        let GatewayTunnel { up, silence_ms, .. } = tunnel;
        let silence = silence_ms.map(|ms| of(tunnel, "gw_tunnel_silence_ms", ms));
        [Some(of(tunnel, "gw_tunnel_up", u64::from(*up))), silence]
    };
    tunnels.iter().flat_map(each).flatten().collect()
}
