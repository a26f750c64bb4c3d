//! BGP peers of a switch, each a process of GoBGP with a separate address, router ID and session.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context as _, Result, anyhow};
use ipnet::IpNet;
use rustix::process::{Pid, Signal, kill_process};

use super::until::until;
use crate::command;
use crate::netns::Namespace;
use crate::process::Program;

/// A peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its address, which is also its router ID and the next hop of its routes.
    pub address: Ipv4Addr,
    /// The routes that it announces.
    pub routes: Vec<IpNet>,
}

/// The other end of all sessions.
#[derive(Debug, Clone, Copy)]
pub struct Site {
    /// The AS of the peers.
    pub asn: u32,
    /// The AS of the switch.
    pub switch_asn: u32,
    /// The switch, which opens the connections.
    pub switch: Ipv4Addr,
}

/// Running peers. Dropping this ends them.
#[derive(Debug)]
pub struct Peers(Vec<Program>);

impl Peers {
    /// Starts a process for each of `peers` in a namespace that has their addresses, and waits until each has its
    /// routes. Their configurations and sockets are in `directory`.
    ///
    /// A process takes about 18 MiB, of which 5 MiB are not shared with the others.
    ///
    /// # Errors
    /// GoBGP is missing, or does not start.
    pub fn start(namespace: &Namespace, directory: &Path, site: Site, peers: &[Peer], logs: &Path) -> Result<Self> {
        fs::create_dir(directory).with_context(|| format!("creating {}", directory.display()))?;
        let start = |peer: &Peer| {
            let file = directory.join(format!("{}.toml", peer.address));
            fs::write(&file, configuration(site, peer.address))?;
            let mut command = namespace.command("gobgpd");
            command.arg("--config-file").arg(&file).arg("--pprof-disable");
            command.args(["--api-hosts", &api(directory, peer)]);
            Program::start(command, "gobgpd", &logs.join(format!("gobgp-{}.log", peer.address)))
        };
        let mut started = Peers(peers.iter().map(start).collect::<Result<_>>()?);
        announce(directory, peers)?;
        started.0.iter_mut().try_for_each(Program::check_alive)?;
        Ok(started)
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        // Signals all processes first, because dropping each program waits for its end.
        for pid in self.0.iter().filter_map(|program| Pid::from_raw(program.pid() as i32)) {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}

/// Announces the routes of all peers, on all processors: each route needs a process of GoBGP's client.
fn announce(directory: &Path, peers: &[Peer]) -> Result<()> {
    let threads = thread::available_parallelism()?.get();
    let share = peers.len().div_ceil(threads).max(1);
    thread::scope(|scope| {
        let told = |peers: &[Peer]| peers.iter().try_for_each(|peer| announce_one(directory, peer));
        let threads: Vec<_> = peers.chunks(share).map(|peers| scope.spawn(move || told(peers))).collect();
        let ends = threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?);
        ends.collect()
    })
}

fn announce_one(directory: &Path, peer: &Peer) -> Result<()> {
    let client = |words: &[&str]| command::run("gobgp", &[&["--target", &api(directory, peer)], words].concat());
    until("GoBGP answers", || Ok(client(&["global"]).ok()))?;
    peer.routes.iter().try_for_each(|route| client(&["global", "rib", "add", &route.to_string()]).map(drop))
}

/// The address of a peer's API socket, in GoBGP's format.
fn api(directory: &Path, peer: &Peer) -> String {
    let socket: PathBuf = directory.join(format!("{}.sock", peer.address));
    format!("unix://{}", socket.display())
}

/// A peer's configuration. After the end of a session, GoBGP accepts no connection for 5 s, whatever its configuration
/// (its FSM's Idle state).
fn configuration(site: Site, address: Ipv4Addr) -> String {
    let Site { asn, switch_asn, switch } = site;
    format!(
        "[global.config]\nas = {asn}\nrouter-id = \"{address}\"\nport = 179\nlocal-address-list = [\"{address}\"]\n\
         [[neighbors]]\n\
         [neighbors.config]\nneighbor-address = \"{switch}\"\npeer-as = {switch_asn}\n\
         [neighbors.timers.config]\nhold-time = 3\nkeepalive-interval = 1\n\
         [neighbors.transport.config]\nlocal-address = \"{address}\"\npassive-mode = true\n"
    )
}
