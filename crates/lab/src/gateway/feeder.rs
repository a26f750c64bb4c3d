//! Feeds a pod without its pipeline: the lab is the memif server that sends it packets and counts what it returns.
//!
//! The pod has one worker. Packets go to its ring as fast as there is room, the flows in turn. This measures the
//! worker, not a NIC: the feeder, on another processor, only copies.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use bifrost_plb::{TRAILER_LEN, Trailer};
use bifrost_port::memif::{FromClient, Server, ServerConfig, ToClient};

use super::frames::{self, HEADERS};

/// Packets sent, and received, per batch.
const BATCH: u16 = 32;
/// Largest packet that is received, bytes.
const LONGEST: usize = 2048;

/// The traffic to send.
#[derive(Debug, Clone)]
pub struct Flows {
    /// The headers of each flow's packets, in the order of sending.
    pub headers: Vec<[u8; HEADERS]>,
    /// Payload bytes after the headers.
    pub payload: usize,
}

/// Packets returned during a measurement.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Fed {
    /// Packets returned for transmission.
    pub forwarded: u64,
    /// Packets returned with the drop flag.
    pub dropped: u64,
    /// Duration of the measurement, s.
    pub seconds: f64,
}

/// The memif server for one pod.
#[derive(Debug)]
pub struct Feeder {
    rings: Receiver<Result<(Vec<ToClient>, Vec<FromClient>)>>,
    /// Ends when the client disconnects.
    _thread: JoinHandle<()>,
}

impl Feeder {
    /// Listens for a client with `rings` rings in each direction.
    ///
    /// # Errors
    /// The socket cannot be created.
    pub fn listen(path: PathBuf, rings: u16) -> Result<Self> {
        let server = Server::bind(ServerConfig { path, name: "bifrost-lab".to_owned(), id: 0, rings })
            .context("listening for a memif client")?;
        let (to, from) = channel();
        let work = move || match server.accept() {
            Ok(mut attached) => {
                if to.send(Ok(attached.take_rings())).is_ok() {
                    attached.wait();
                }
            }
            Err(error) => {
                let _ = to.send(Err(anyhow!("a memif client failed: {error}")));
            }
        };
        let thread = std::thread::Builder::new().name("lab-memif".to_owned()).spawn(work)?;
        Ok(Feeder { rings: from, _thread: thread })
    }

    /// Waits until the client has connected, and returns its rings.
    ///
    /// # Errors
    /// The client fails, or does not connect in time.
    pub fn rings(&self, patience: Duration) -> Result<(Vec<ToClient>, Vec<FromClient>)> {
        match self.rings.recv_timeout(patience) {
            Ok(rings) => rings,
            Err(RecvTimeoutError::Timeout) => bail!("no memif client within {patience:?}"),
            Err(RecvTimeoutError::Disconnected) => bail!("the memif client has disconnected"),
        }
    }
}

/// Answers ARP over the priority ring until `is_known`.
///
/// # Errors
/// It takes too long.
pub fn answer_arp(
    to: &mut ToClient,
    from: &mut FromClient,
    patience: Duration,
    mut is_known: impl FnMut() -> bool,
) -> Result<()> {
    let deadline = Instant::now() + patience;
    let trailer = Trailer { psn: 0, payload: None, pod: 1, queue: 0, drop: false, unordered: true }.emit();
    let mut buffer = [0; LONGEST];
    while !is_known() {
        while let Some(popped) = from.pop(&mut buffer) {
            let len = popped.map_err(|_| anyhow!("the pod returned a malformed descriptor"))?;
            if let Some(reply) = frames::arp_reply(&buffer[..len.saturating_sub(TRAILER_LEN)])
                && to.room() > 0
            {
                to.push(&[&reply, &trailer]).map_err(|_| anyhow!("the pod's buffers are too small"))?;
            }
        }
        from.release();
        to.publish();
        if Instant::now() > deadline {
            bail!("the pod does not resolve its next hops");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Feeds a ring with the flows in turn: first one packet of each, then traffic for `warm_up`, then for `time`, during
/// which packets are counted.
///
/// # Errors
/// The client stops returning packets.
pub fn feed(
    rings: (&mut ToClient, &mut FromClient),
    flows: &Flows,
    (warm_up, time): (Duration, Duration),
) -> Result<Fed> {
    let mut pump = Pump::new(rings);
    let mut flow = pump.first_round(flows)?;
    let began = Instant::now();
    while began.elapsed() < warm_up {
        pump.turn(Some(&mut flow))?;
    }
    pump.fed = Fed::default();
    let since = Instant::now();
    while since.elapsed() < time {
        pump.turn(Some(&mut flow))?;
    }
    Ok(Fed { seconds: since.elapsed().as_secs_f64(), ..pump.fed })
}

/// Feeds a ring with several kinds of traffic in short turns, so that drift of the machine affects all of them alike.
/// After one packet of each flow of each kind, each kind has `rounds` turns of `time`; every second round is in reverse
/// order. `mark` is called before and after each turn, when the client has returned all packets and has been idle for
/// `rest`. Returns the kind, the packets and both marks of each turn.
///
/// # Errors
/// The client stops returning packets, or an error of `mark`.
pub fn feed_in_turns<T>(
    rings: (&mut ToClient, &mut FromClient),
    kinds: &[Flows],
    (rounds, time, rest): (u32, Duration, Duration),
    mut mark: impl FnMut() -> Result<T>,
) -> Result<Vec<(usize, Fed, [T; 2])>> {
    let mut pump = Pump::new(rings);
    let mut flows = kinds.iter().map(|kind| pump.first_round(kind)).collect::<Result<Vec<_>>>()?;
    let mut turns = Vec::new();
    for round in 0..rounds {
        for place in 0..kinds.len() {
            let kind = if round % 2 == 0 { place } else { kinds.len() - 1 - place };
            pump.drain(rest)?;
            let before = mark()?;
            pump.fed = Fed::default();
            let since = Instant::now();
            while since.elapsed() < time {
                pump.turn(Some(&mut flows[kind]))?;
            }
            let seconds = since.elapsed().as_secs_f64();
            pump.drain(rest)?;
            turns.push((kind, Fed { seconds, ..pump.fed }, [before, mark()?]));
        }
    }
    Ok(turns)
}

/// Both rings of a client, and what has passed through them.
struct Pump<'a> {
    to: &'a mut ToClient,
    from: &'a mut FromClient,
    psn: u32,
    /// Packets that the client has not returned yet.
    outside: u64,
    fed: Fed,
    heard: Instant,
    buffer: [u8; LONGEST],
}

/// The headers of flows, again and again, and the payload.
struct Source<'f> {
    headers: std::iter::Cycle<std::slice::Iter<'f, [u8; HEADERS]>>,
    payload: Vec<u8>,
}

impl<'a> Pump<'a> {
    fn new((to, from): (&'a mut ToClient, &'a mut FromClient)) -> Self {
        let fed = Fed::default();
        Pump { to, from, psn: 0, outside: 0, fed, heard: Instant::now(), buffer: [0; LONGEST] }
    }

    /// Sends a packet of each flow, and takes as many back.
    fn first_round<'f>(&mut self, flows: &'f Flows) -> Result<Source<'f>> {
        let mut source = Source { headers: flows.headers.iter().cycle(), payload: vec![0; flows.payload] };
        self.fed = Fed::default();
        while self.fed.forwarded + self.fed.dropped < flows.headers.len() as u64 {
            self.turn(Some(&mut source))?;
        }
        Ok(source)
    }

    /// Takes back all packets, then waits.
    fn drain(&mut self, rest: Duration) -> Result<()> {
        while self.outside > 0 {
            self.turn(None)?;
        }
        std::thread::sleep(rest);
        self.heard = Instant::now();
        Ok(())
    }

    /// Sends as many packets as there is room for, up to a batch, and takes back what has been returned.
    fn turn(&mut self, source: Option<&mut Source<'_>>) -> Result<()> {
        if let Some(Source { headers, payload }) = source {
            let room = self.to.room().min(BATCH);
            for headers in headers.by_ref().take(usize::from(room)) {
                let trailer = Trailer { psn: self.psn, payload: None, pod: 1, queue: 0, drop: false, unordered: false };
                self.psn = self.psn.wrapping_add(1);
                self.to
                    .push(&[headers, payload, &trailer.emit()])
                    .map_err(|_| anyhow!("the pod's buffers are too small"))?;
                self.outside += 1;
            }
            self.to.publish();
        }
        let mut count = 0;
        while count < 2 * BATCH {
            let Some(popped) = self.from.pop(&mut self.buffer) else { break };
            count += 1;
            let bytes = popped.ok().and_then(|len| self.buffer.get(len.checked_sub(TRAILER_LEN)?..len)?.first_chunk());
            match bytes.map(|bytes| Trailer::parse(*bytes)) {
                Some(Ok(trailer)) if trailer.drop => self.fed.dropped += 1,
                Some(Ok(_)) => self.fed.forwarded += 1,
                _ => bail!("the pod returned a packet without a trailer"),
            }
        }
        self.from.release();
        self.outside = self.outside.saturating_sub(count.into());
        if count > 0 {
            self.heard = Instant::now();
        } else if self.heard.elapsed() > Duration::from_secs(5) {
            bail!("the pod has stopped returning packets");
        }
        Ok(())
    }
}
