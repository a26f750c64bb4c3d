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

    /// The client's rings, once it has connected.
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
/// which packets are counted. `mark` is called when counting begins and ends.
///
/// # Errors
/// The client stops returning packets.
pub fn feed(
    (to, from): (&mut ToClient, &mut FromClient),
    flows: &Flows,
    (warm_up, time): (Duration, Duration),
    mut mark: impl FnMut() -> Result<()>,
) -> Result<Fed> {
    let payload = vec![0u8; flows.payload];
    let mut buffer = [0; LONGEST];
    let mut psn = 0u32;
    let mut fed = Fed::default();
    let mut flow = flows.headers.iter().cycle();
    let first_round = flows.headers.len() as u64;
    let (mut warm_until, mut counting): (Option<Instant>, Option<Instant>) = (None, None);
    let mut heard = Instant::now();
    loop {
        let room = to.room().min(BATCH);
        for headers in flow.by_ref().take(usize::from(room)) {
            let trailer = Trailer { psn, payload: None, pod: 1, queue: 0, drop: false, unordered: false }.emit();
            psn = psn.wrapping_add(1);
            to.push(&[headers, &payload, &trailer]).map_err(|_| anyhow!("the pod's buffers are too small"))?;
        }
        to.publish();
        let mut count = 0;
        while count < 2 * BATCH {
            let Some(popped) = from.pop(&mut buffer) else { break };
            count += 1;
            let trailer = popped.ok().and_then(|len| buffer.get(len.checked_sub(TRAILER_LEN)?..len)?.first_chunk());
            match trailer.map(|bytes| Trailer::parse(*bytes)) {
                Some(Ok(trailer)) if trailer.drop => fed.dropped += 1,
                Some(Ok(_)) => fed.forwarded += 1,
                _ => bail!("the pod returned a packet without a trailer"),
            }
        }
        from.release();
        let now = Instant::now();
        if count > 0 {
            heard = now;
        } else if now.duration_since(heard) > Duration::from_secs(5) {
            bail!("the pod has stopped returning packets");
        }
        match (warm_until, counting) {
            (None, _) if fed.forwarded + fed.dropped >= first_round => warm_until = Some(now + warm_up),
            (Some(until), None) if now >= until => {
                mark()?;
                fed = Fed::default();
                counting = Some(Instant::now());
            }
            (_, Some(since)) if now.duration_since(since) >= time => {
                fed.seconds = now.duration_since(since).as_secs_f64();
                mark()?;
                return Ok(fed);
            }
            _ => {}
        }
    }
}
