//! Next hops: the device and the MAC address that the kernel would choose. A thread polls the kernel's tables, so that
//! the data path only reads a word.
//!
//! Datagrams to unresolved next hops use the UDP sockets, which makes the kernel resolve them. The kernel does not see
//! frames that bypass it. When its neighbour entry becomes stale, one datagram goes through the sockets so that the
//! kernel probes the neighbour.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use futures_util::TryStreamExt;
use rtnetlink::Handle;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourState};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteVia};

use crate::panics;

/// Poll interval while all next hops are resolved: the maximum age of the data in use.
const SETTLED: Duration = Duration::from_secs(2);
/// First poll interval while a next hop is unresolved; doubles up to [`SETTLED`].
const MISSING: Duration = Duration::from_millis(50);
/// Time limit of one poll.
const PATIENCE: Duration = Duration::from_secs(5);

/// Bits of the word that the data path reads: these two flags, the device's index, and the MAC address in the low 48
/// bits.
const KNOWN: u64 = 1 << 63;
const ASK: u64 = 1 << 62;
const DEVICE_SHIFT: u32 = 48;

/// The next hop of one lane.
#[derive(Debug)]
pub(crate) struct NextHop {
    local: SocketAddr,
    remote: SocketAddr,
    state: AtomicU64,
}

/// A resolved next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resolved {
    /// Index of the device in the resolver's list.
    pub(crate) device: usize,
    pub(crate) mac: [u8; 6],
}

impl NextHop {
    /// The address and device, if resolved and if the kernel does not need a datagram to confirm it.
    pub(crate) fn resolved(&self) -> Option<Resolved> {
        let state = self.state.load(Ordering::Relaxed);
        if state & (KNOWN | ASK) != KNOWN {
            self.state.fetch_and(!ASK, Ordering::Relaxed);
            return None;
        }
        let [_, device, mac @ ..] = state.to_be_bytes();
        Some(Resolved { device: usize::from(device), mac })
    }

    fn set(&self, way: Option<(u8, [u8; 6], bool)>) {
        let state = way.map_or(0, |(device, [a, b, c, d, e, f], doubted)| {
            let mac = u64::from_be_bytes([0, 0, a, b, c, d, e, f]);
            KNOWN | if doubted { ASK } else { 0 } | u64::from(device) << DEVICE_SHIFT | mac
        });
        self.state.store(state, Ordering::Relaxed);
    }
}

/// Keeps next hops up to date, from the network namespace of the thread that started it, until it is dropped.
#[derive(Debug)]
pub(crate) struct Resolver {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// Interface indexes, in the order of [`Resolved::device`].
    devices: Vec<u32>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    hops: Vec<Weak<NextHop>>,
    news: bool,
    stop: bool,
}

impl Resolver {
    /// Starts the thread. It resolves routes through `devices` only, at most 255.
    pub(crate) fn start(devices: Vec<u32>) -> io::Result<Self> {
        let shared = Arc::new(Shared { devices, state: Mutex::default(), changed: Condvar::new() });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let of_thread = Arc::clone(&shared);
        let run = move || {
            while let Err(panic) = panics::contain(|| of_thread.run(&runtime)) {
                tracing::error!(%panic, "the next-hop resolver failed; restarting it");
                std::thread::sleep(MISSING);
            }
        };
        let thread = std::thread::Builder::new().name("next-hops".into()).spawn(run)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// A next hop, unresolved at first; kept up to date while a caller holds it.
    pub(crate) fn next_hop(&self, local: SocketAddr, remote: SocketAddr) -> Arc<NextHop> {
        let mut state = self.shared.state();
        let same = |hop: &Arc<NextHop>| (hop.local, hop.remote) == (local, remote);
        if let Some(hop) = state.hops.iter().filter_map(Weak::upgrade).find(same) {
            return hop;
        }
        let hop = Arc::new(NextHop { local, remote, state: AtomicU64::new(0) });
        state.hops.push(Arc::downgrade(&hop));
        state.news = true;
        self.shared.changed.notify_one();
        hop
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        self.shared.state().stop = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, runtime: &tokio::runtime::Runtime) {
        let mut pause = MISSING;
        loop {
            let mut state = self.state();
            if !state.news && !state.stop {
                state = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.stop {
                return;
            }
            if std::mem::take(&mut state.news) {
                pause = MISSING;
            }
            state.hops.retain(|hop| hop.strong_count() > 0);
            let hops: Vec<_> = state.hops.iter().filter_map(Weak::upgrade).collect();
            drop(state);
            let look = async { tokio::time::timeout(PATIENCE, look(&hops, &self.devices)).await };
            let complete = match runtime.block_on(look) {
                Ok(Ok(complete)) => complete,
                // Next hops that are already resolved stay so.
                Ok(Err(error)) => {
                    tracing::debug!("cannot read the kernel's tables: {error}");
                    false
                }
                Err(_) => false,
            };
            pause = if complete { SETTLED } else { (pause * 2).min(SETTLED) };
        }
    }
}

/// Updates `hops`; returns whether all are resolved.
async fn look(hops: &[Arc<NextHop>], devices: &[u32]) -> io::Result<bool> {
    if hops.is_empty() {
        return Ok(true);
    }
    let (connection, handle, _) = rtnetlink::new_connection()?;
    let connection = tokio::spawn(connection);
    let result = neighbours(&handle).await;
    let mut complete = true;
    if let Ok(neighbours) = &result {
        for hop in hops {
            // No route: unresolved.
            let route = route(&handle, hop).await.ok().flatten();
            let way = route.and_then(|(device, next)| {
                let number = devices.iter().position(|d| *d == device)?;
                let (mac, doubted) = neighbours.get(&(device, next))?;
                Some((number as u8, *mac, *doubted))
            });
            complete &= way.is_some();
            hop.set(way);
        }
    }
    connection.abort();
    result.map(|_| complete)
}

/// Neighbours by device and address: MAC address, and whether the entry is stale.
async fn neighbours(handle: &Handle) -> io::Result<HashMap<(u32, IpAddr), ([u8; 6], bool)>> {
    let mut known = HashMap::new();
    let mut messages = std::pin::pin!(handle.neighbours().get().execute());
    while let Some(message) = messages.try_next().await.map_err(io::Error::other)? {
        let doubted = match message.header.state {
            NeighbourState::Reachable
            | NeighbourState::Delay
            | NeighbourState::Probe
            | NeighbourState::Permanent
            | NeighbourState::Noarp => false,
            NeighbourState::Stale => true,
            _ => continue,
        };
        let (mut address, mut mac) = (None, None);
        for attribute in &message.attributes {
            match attribute {
                NeighbourAttribute::Destination(NeighbourAddress::Inet(a)) => address = Some(IpAddr::V4(*a)),
                NeighbourAttribute::Destination(NeighbourAddress::Inet6(a)) => address = Some(IpAddr::V6(*a)),
                NeighbourAttribute::LinkLayerAddress(bytes) => mac = <[u8; 6]>::try_from(bytes.as_slice()).ok(),
                _ => {}
            }
        }
        if let (Some(address), Some(mac)) = (address, mac) {
            known.insert((message.header.ifindex, address), (mac, doubted));
        }
    }
    Ok(known)
}

/// The device and the next-hop address that the kernel would use.
async fn route(handle: &Handle, hop: &NextHop) -> io::Result<Option<(u32, IpAddr)>> {
    let mut message = RouteMessage::default();
    let (family, bits) = if hop.remote.is_ipv4() { (AddressFamily::Inet, 32) } else { (AddressFamily::Inet6, 128) };
    message.header.address_family = family;
    message.header.destination_prefix_length = bits;
    message.header.source_prefix_length = bits;
    message.attributes = vec![
        RouteAttribute::Destination(hop.remote.ip().into()),
        RouteAttribute::Source(hop.local.ip().into()),
        // With multipath routes, the ports select the route.
        RouteAttribute::IpProto(libc::IPPROTO_UDP as u8),
        RouteAttribute::Sport(hop.local.port()),
        RouteAttribute::Dport(hop.remote.port()),
    ];
    let mut answers = std::pin::pin!(handle.route().get(message).execute());
    let Some(answer) = answers.try_next().await.map_err(io::Error::other)? else { return Ok(None) };
    let (mut device, mut next) = (None, hop.remote.ip());
    for attribute in &answer.attributes {
        match attribute {
            RouteAttribute::Oif(index) => device = Some(*index),
            RouteAttribute::Gateway(RouteAddress::Inet(a)) => next = IpAddr::V4(*a),
            RouteAttribute::Gateway(RouteAddress::Inet6(a)) => next = IpAddr::V6(*a),
            RouteAttribute::Via(RouteVia::Inet(a)) => next = IpAddr::V4(*a),
            RouteAttribute::Via(RouteVia::Inet6(a)) => next = IpAddr::V6(*a),
            _ => {}
        }
    }
    Ok(device.map(|device| (device, next)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_neighbour_is_probed_once() {
        let address = SocketAddr::from(([192, 0, 2, 1], 1));
        let hop = NextHop { local: address, remote: address, state: AtomicU64::new(0) };
        assert_eq!(hop.resolved(), None);
        let mac = [0xfe, 1, 2, 3, 4, 5];
        hop.set(Some((7, mac, false)));
        assert_eq!(hop.resolved(), Some(Resolved { device: 7, mac }));
        hop.set(Some((7, mac, true)));
        assert_eq!(hop.resolved(), None, "this datagram goes through the kernel");
        assert_eq!(hop.resolved(), Some(Resolved { device: 7, mac }));
        hop.set(None);
        assert_eq!(hop.resolved(), None);
    }
}
