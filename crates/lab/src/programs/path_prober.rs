//! Probe and switch in software: the scheme that NSDI'26 (section 6.1.1) compares with as "PS".
//!
//! Once a second an agent on each host sends small datagrams over every path to every other host, which echoes them.
//! It drains (`bifrostctl path drain`) a path that lost probes or is much slower than the others, and restores it
//! after a later clean round. It does not drain a path that the hosts themselves fill, because the traffic would only
//! fill other paths. Nothing else is repaired, and the agent learns nothing from the guests' packets.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write as _;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use crate::daemon::{Daemon, Remote};
use crate::options::Cabling;
use crate::topology::{Host, Topology, link_name};

/// Interval of rounds.
const PERIOD: Duration = Duration::from_secs(1);
/// Probes per round and path, and their interval.
const PROBES: u32 = 10;
const SPACING: Duration = Duration::from_millis(10);
/// A probe is lost if it has not returned this long after the last one of its round was sent.
const PATIENCE: Duration = Duration::from_millis(200);
/// Interval at which a waiting thread checks whether it must stop.
const TICK: Duration = Duration::from_millis(50);
/// UDP port of echoes; unused otherwise on the underlay.
const ECHO_PORT: u16 = 4788;
/// Length of a probe, bytes: its round, and its number within the round.
const PROBE_LEN: usize = 12;

/// A path is much slower than others if its fastest probe took more than this many times as long as that of the
/// median path ...
const SLOW_FACTOR: u32 = 3;
/// ... and longer by more than this: software hosts are noisy.
const SLOW_MARGIN: Duration = Duration::from_millis(1);

/// Hosts fill a path if this many frames have crossed it since the last round, in both directions, and even the
/// fastest probe was delayed. A round's own probes and echoes are 40 frames.
const MANY_FRAMES: u64 = 100;

/// The result of a round for one path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// Probes that did not return.
    pub lost: u32,
    /// The round-trip time of the fastest probe, if any returned.
    pub fastest: Option<Duration>,
    /// Whether the two hosts fill the path: its probes are then lost or late in the hosts' own queues.
    pub full: bool,
}

/// Whether `fastest` is much longer than `usual`.
fn is_slow(fastest: Duration, usual: Duration) -> bool {
    fastest > usual * SLOW_FACTOR && fastest > usual + SLOW_MARGIN
}

/// The indexes of the paths to a host that must not be used, given the results of a round.
///
/// It never contains all paths: if every path is bad, those with the fewest losses stay in use.
pub fn judge(seen: &[Seen]) -> BTreeSet<usize> {
    let mut fastest: Vec<Duration> = seen.iter().filter_map(|path| path.fastest).collect();
    fastest.sort_unstable();
    // For an even number the lower median: half of the paths may be slow.
    let median = fastest.get(fastest.len().saturating_sub(1) / 2).copied().unwrap_or_default();
    let slow = |path: &Seen| path.fastest.is_some_and(|fastest| is_slow(fastest, median));
    let is_bad = |path: &Seen| !path.full && (path.lost > 0 || slow(path));
    let all = || seen.iter().enumerate();
    let bad: BTreeSet<usize> = all().filter(|(_, path)| is_bad(path)).map(|(i, _)| i).collect();
    if bad.len() < seen.len() {
        return bad;
    }
    let least = seen.iter().map(|path| path.lost).min().unwrap_or(0);
    all().filter(|(_, path)| path.lost > least).map(|(i, _)| i).collect()
}

/// The agents of all hosts. Dropping it ends them; drained paths stay drained.
#[derive(Debug)]
pub struct PathProbers {
    stop: Arc<AtomicBool>,
    threads: Vec<(String, JoinHandle<Result<()>>)>,
}

impl PathProbers {
    /// Starts an agent on every host, next to its daemon (one per host, in the hosts' order). It logs the paths that
    /// it drains and restores to `<host>.path_prober.log` in `logs`.
    ///
    /// # Errors
    /// The paths do not have separate addresses, or a socket or thread cannot be created.
    pub fn start(topology: &Topology, daemons: &[Daemon], logs: &Path) -> Result<Self> {
        ensure!(
            topology.plan.cabling == Cabling::Paths,
            "probe_switch needs --cabling paths: it probes each path by its own pair of addresses, but a fabric has \
             only one pair"
        );
        let mut probers = Self { stop: Arc::default(), threads: Vec::new() };
        // Start all echoes first: a probe without an answer counts as lost.
        for host in &topology.hosts {
            for &address in &host.underlay {
                let stop = Arc::clone(&probers.stop);
                let socket = host.namespace.enter(move || bind(address, ECHO_PORT))?;
                let thread = host.namespace.spawn(move || echo(&socket, &stop))?;
                probers.threads.push((format!("the echo of {} at {address}", host.name), thread));
            }
        }
        for (host, daemon) in topology.hosts.iter().zip(daemons) {
            let file = logs.join(format!("{}.path_prober.log", host.name));
            let log = File::create(&file).with_context(|| format!("creating {}", file.display()))?;
            let others = topology.hosts.iter().filter(|other| other.name != host.name);
            let peers = others.map(|other| Peer::of(host, other)).collect();
            let agent = Agent { peers, daemon: daemon.remote(), log, stop: Arc::clone(&probers.stop) };
            let thread = host.namespace.spawn(move || agent.run())?;
            probers.threads.push((format!("the path prober of {}", host.name), thread));
        }
        Ok(probers)
    }

    /// Returns an error if an agent or an echo has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        let Some(at) = self.threads.iter().position(|(_, thread)| thread.is_finished()) else { return Ok(()) };
        let (name, thread) = self.threads.swap_remove(at);
        thread.join().map_err(|_| anyhow!("{name} panicked"))?.with_context(|| format!("{name} failed"))?;
        Err(anyhow!("{name} has ended"))
    }
}

impl Drop for PathProbers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for (name, thread) in self.threads.drain(..) {
            if !matches!(thread.join(), Ok(Ok(()))) {
                eprintln!("warning: {name} failed");
            }
        }
    }
}

/// Another host, and the state of the paths to it.
struct Peer {
    name: String,
    /// (local, remote) address of each path.
    paths: Vec<(Ipv4Addr, Ipv4Addr)>,
    drained: BTreeSet<usize>,
    /// The fastest probe of all rounds, for each path.
    fastest: Vec<Option<Duration>>,
}

impl Peer {
    fn of(host: &Host, other: &Host) -> Self {
        let paths: Vec<_> = host.underlay.iter().copied().zip(other.underlay.iter().copied()).collect();
        let fastest = vec![None; paths.len()];
        Peer { name: other.name.clone(), paths, drained: BTreeSet::new(), fastest }
    }

    /// Marks full paths. `carried`: frames over each path since the last round, in both directions.
    fn mark_full(&mut self, seen: &mut [Seen], carried: &[u64]) {
        for ((path, ever), carried) in seen.iter_mut().zip(&mut self.fastest).zip(carried) {
            let usual = ever.or(path.fastest);
            path.full =
                *carried >= MANY_FRAMES && path.fastest.zip(usual).is_some_and(|(now, usual)| is_slow(now, usual));
            *ever = usual.into_iter().chain(path.fastest).min();
        }
    }
}

/// Frames that the links of this thread's namespace have sent and received, in the order of paths.
fn frames_carried(paths: usize) -> Result<Vec<u64>> {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").context("reading what the links have carried")?;
    (0..paths).map(|path| frames_of(&text, &link_name(path as u8))).collect()
}

fn frames_of(text: &str, link: &str) -> Result<u64> {
    let is = |line: &&str| line.split(':').next().is_some_and(|name| name.trim() == link);
    let line = text.lines().find(is).with_context(|| format!("the kernel counts nothing for {link}"))?;
    // Eight columns for received traffic, then those for sent traffic; the second of each is packets.
    let counts: Vec<&str> =
        line.split_once(':').map(|(_, counts)| counts.split_whitespace().collect()).unwrap_or_default();
    let count = |column: usize| counts.get(column).and_then(|count| count.parse::<u64>().ok());
    let both = count(1).zip(count(9)).map(|(received, sent)| received + sent);
    both.with_context(|| format!("no counts of frames in `{line}`"))
}

struct Agent {
    peers: Vec<Peer>,
    daemon: Remote,
    log: File,
    stop: Arc<AtomicBool>,
}

impl Agent {
    fn run(mut self) -> Result<()> {
        let started = Instant::now();
        let sockets: Vec<Vec<UdpSocket>> = self.peers.iter().map(connect_all).collect::<Result<_>>()?;
        let paths = self.peers.iter().map(|peer| peer.paths.len()).max().unwrap_or(0);
        let mut before = frames_carried(paths)?;
        for round in 0.. {
            let due = started + PERIOD * round;
            while Instant::now() < due {
                if self.stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                std::thread::sleep(TICK.min(due.saturating_duration_since(Instant::now())));
            }
            let mut seen: Vec<Vec<Seen>> = std::thread::scope(|scope| {
                let probing = |socket| scope.spawn(move || probe(socket, round));
                let threads: Vec<Vec<_>> =
                    sockets.iter().map(|of_peer| of_peer.iter().map(probing).collect()).collect();
                let join = |thread: std::thread::ScopedJoinHandle<'_, Result<Seen>>| {
                    thread.join().map_err(|_| anyhow!("a probe panicked"))?
                };
                threads.into_iter().map(|of_peer| of_peer.into_iter().map(join).collect()).collect::<Result<_>>()
            })?;
            let now = frames_carried(paths)?;
            let carried: Vec<u64> = now.iter().zip(&before).map(|(now, before)| now - before).collect();
            before = now;
            for (peer, seen) in self.peers.iter_mut().zip(&mut seen) {
                peer.mark_full(seen, &carried);
                let bad = judge(seen);
                // Restore good paths first, because the last path in use cannot be drained.
                let restored = peer.drained.difference(&bad).map(|path| ("restore", *path));
                let drained = bad.difference(&peer.drained).map(|path| ("drain", *path));
                for (what, path) in restored.chain(drained) {
                    let Seen { lost, fastest, .. } = seen[path];
                    let at = started.elapsed().as_secs_f64();
                    let name = &peer.name;
                    writeln!(
                        self.log,
                        "{at:.3} s: {what} path {path} to {name}: {lost} of {PROBES} lost, fastest {fastest:?}"
                    )?;
                    self.daemon.control(&["path", what, "--peer", name, "--path", &path.to_string()])?;
                }
                peer.drained = bad;
            }
        }
        Ok(())
    }
}

fn bind(address: Ipv4Addr, port: u16) -> Result<UdpSocket> {
    UdpSocket::bind((address, port)).with_context(|| format!("binding a socket to {address}, UDP port {port}"))
}

fn connect_all(peer: &Peer) -> Result<Vec<UdpSocket>> {
    let connect = |&(local, remote): &(Ipv4Addr, Ipv4Addr)| {
        let socket = bind(local, 0)?;
        socket.connect((remote, ECHO_PORT)).with_context(|| format!("connecting {local} with {remote}"))?;
        Ok(socket)
    };
    peer.paths.iter().map(connect).collect()
}

/// Echoes datagrams until `stop` is set.
fn echo(socket: &UdpSocket, stop: &AtomicBool) -> Result<()> {
    socket.set_read_timeout(Some(TICK))?;
    let mut message = [0; PROBE_LEN];
    while !stop.load(Ordering::Relaxed) {
        // Timeouts, and ICMP errors about a path that is down, are not errors of the echo.
        if let Ok((len, from)) = socket.recv_from(&mut message) {
            let _ = socket.send_to(&message[..len], from);
        }
    }
    Ok(())
}

/// One round over one path. Probes that cannot be sent count as lost.
fn probe(socket: &UdpSocket, round: u32) -> Result<Seen> {
    let started = Instant::now();
    let mut sent = [None; PROBES as usize];
    let mut seen = Seen { lost: PROBES, fastest: None, full: false };
    for number in 0..PROBES {
        let message = message(round, number);
        sent[number as usize] = Some(Instant::now());
        let _ = socket.send(&message);
        let until = if number + 1 < PROBES { started + SPACING * (number + 1) } else { Instant::now() + PATIENCE };
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            if seen.lost == 0 {
                return Ok(seen);
            }
            socket.set_read_timeout(Some(left))?;
            let mut answer = [0; PROBE_LEN];
            // A timeout or an ICMP error: the loop's condition decides.
            let Ok(PROBE_LEN) = socket.recv(&mut answer) else { continue };
            let at = Instant::now();
            // Late answers of earlier rounds, and duplicates, are ignored.
            let answered = (0..PROBES).find(|n| answer == self::message(round, *n));
            let Some(left_at) = answered.and_then(|n| sent[n as usize].take()) else { continue };
            let rtt = at - left_at;
            seen.lost -= 1;
            seen.fastest = Some(seen.fastest.map_or(rtt, |fastest| fastest.min(rtt)));
        }
    }
    Ok(seen)
}

fn message(round: u32, number: u32) -> [u8; PROBE_LEN] {
    let mut message = *b"PS..........";
    message[4..8].copy_from_slice(&round.to_be_bytes());
    message[8..].copy_from_slice(&number.to_be_bytes());
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name, lost probes and fastest probe of each path, and the bad paths.
    type Case = (&'static str, &'static [(u32, Option<Duration>)], &'static [usize]);

    #[test]
    fn paths_are_judged() {
        const fn us(us: u64) -> Option<Duration> {
            Some(Duration::from_micros(us))
        }
        const CASES: [Case; 11] = [
            ("nothing", &[], &[]),
            ("all well", &[(0, us(100)), (0, us(130)), (0, us(90)), (0, us(110))], &[]),
            ("one probe lost", &[(0, us(100)), (1, us(100)), (0, us(90)), (0, us(110))], &[1]),
            ("dead", &[(0, us(100)), (0, us(100)), (10, None), (0, us(110))], &[2]),
            ("two of them", &[(10, None), (0, us(100)), (3, us(100)), (0, us(110))], &[0, 2]),
            ("slow", &[(0, us(100)), (0, us(100)), (0, us(90)), (0, us(1200))], &[3]),
            ("several times slower, but fast", &[(0, us(100)), (0, us(100)), (0, us(90)), (0, us(900))], &[]),
            ("a little more on slow paths", &[(0, us(9_000)), (0, us(9_000)), (0, us(20_000))], &[]),
            ("half of them slow", &[(0, us(100)), (0, us(9_000))], &[1]),
            ("all bad: the best stay", &[(10, None), (2, us(100)), (5, us(100)), (2, us(100))], &[0, 2]),
            ("all dead: nothing is left", &[(10, None), (10, None)], &[]),
        ];
        for (name, paths, bad) in CASES {
            let seen: Vec<Seen> = paths.iter().map(|&(lost, fastest)| Seen { lost, fastest, full: false }).collect();
            assert_eq!(judge(&seen), bad.iter().copied().collect(), "{name}");
        }
    }

    #[test]
    fn a_path_that_this_host_fills_is_kept() {
        let ms = Duration::from_millis;
        let mut peer =
            Peer { name: String::new(), paths: Vec::new(), drained: BTreeSet::new(), fastest: vec![None; 4] };
        let mut round = |of: [(u32, Option<u64>, u64); 4]| {
            let mut seen = of.map(|(lost, fastest, _)| Seen { lost, fastest: fastest.map(ms), full: false });
            peer.mark_full(&mut seen, &of.map(|(_, _, carried)| carried));
            judge(&seen).into_iter().collect::<Vec<_>>()
        };
        let well = (0, Some(1), 10);
        assert_eq!(round([well; 4]), [] as [usize; 0]);
        // Full; slow without load; losses without a queue; dead.
        assert_eq!(round([(2, Some(9), 9000), well, well, well]), [] as [usize; 0]);
        assert_eq!(round([(0, Some(9), 40), well, well, well]), [0]);
        assert_eq!(round([(2, Some(1), 9000), well, well, well]), [0]);
        assert_eq!(round([(10, None, 9000), well, well, well]), [0]);
        // All paths are full: none is drained for losses in its own queue.
        assert_eq!(
            round([(1, Some(9), 900), (0, Some(9), 900), (3, Some(8), 900), (0, Some(9), 900)]),
            [] as [usize; 0]
        );
    }

    #[test]
    fn frames_are_read_from_the_kernel_s_table() {
        let text = "Inter-|   Receive    |  Transmit\n face |bytes packets\n    lo: 1 2 3 4 5 6 7 8 9 10 11\n   u0: 1 2 0 0 0 0 0 0 640 77 0 0\n";
        assert_eq!(frames_of(text, "u0").unwrap(), 79);
        assert!(frames_of(text, "u1").is_err() && frames_of("u0: 1 2", "u0").is_err());
        assert!(frames_carried(0).unwrap().is_empty());
    }

    #[test]
    fn lost_and_late_probes_are_counted() {
        let server = bind(Ipv4Addr::LOCALHOST, 0).unwrap();
        let client = bind(Ipv4Addr::LOCALHOST, 0).unwrap();
        client.connect(server.local_addr().unwrap()).unwrap();
        let echo = std::thread::spawn(move || {
            let mut seen = 0;
            while seen < PROBES {
                let mut message = [0; PROBE_LEN];
                let (_, from) = server.recv_from(&mut message).unwrap();
                let answer = match seen {
                    // Lost; the answer of another round; not a probe.
                    2 => None,
                    3 => Some(self::message(6, 3)),
                    4 => Some([0; PROBE_LEN]),
                    _ => Some(message),
                };
                if let Some(answer) = answer {
                    server.send_to(&answer, from).unwrap();
                    server.send_to(&answer, from).unwrap();
                }
                seen += 1;
            }
        });
        let seen = probe(&client, 7).unwrap();
        echo.join().unwrap();
        assert!(seen.lost == 3 && seen.fastest.is_some_and(|fastest| fastest < PATIENCE), "{seen:?}");
        // The echo has ended.
        assert_eq!(probe(&client, 8).unwrap(), Seen { lost: PROBES, fastest: None, full: false });
    }
}
