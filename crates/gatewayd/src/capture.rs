//! Packet captures: each thread of a pod copies the packets that it sees; they are collected periodically and written
//! as pcapng.
//!
//! A running capture never makes a thread wait. The thread copies packets into a [`Chunk`] of fixed size. On request,
//! between two turns, it exchanges the chunk for an empty one. Packets that do not fit are counted.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::time::Duration;

use bifrost_control::api::{ApiError, CaptureSpec};
use bifrost_control::capture::{CaptureFile, Packet, bad_filter, now_ns, stages};
use bifrost_control::server::CaptureStream;
use bifrost_gateway::Verdict;
use bifrost_nic::capture::{Chunk, Filter, Subject};
use bifrost_nic::{MAX_FRAME_LEN, parse};
use bifrost_wire::pcapng::{Flow, Notes};
use bifrost_wire::protocol::UDP;
use bifrost_wire::vxlan;

/// Interval at which captured packets are collected.
const FETCH_EVERY: Duration = Duration::from_millis(20);
/// How long a thread may take to hand over its chunk.
const PATIENCE: Duration = Duration::from_secs(5);
/// Size of a chunk, bytes. Each thread has two: one is filled while the other one is written out.
const CHUNK_BYTES: usize = 4 << 20;

/// The stage at which a packet is captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Rx,
    Tx,
    Drop,
}

impl Stage {
    const ALL: [Self; 3] = [Self::Rx, Self::Tx, Self::Drop];

    const fn name(self) -> &'static str {
        match self {
            Self::Rx => "rx",
            Self::Tx => "tx",
            Self::Drop => "drop",
        }
    }

    /// What the stage shows, for readers of the capture file.
    const fn description(self) -> &'static str {
        match self {
            Self::Rx => "packets as the pipeline gave them to the pod, without the trailer",
            Self::Tx => "packets as the pod returned them",
            Self::Drop => "packets that were dropped, as they came; the comment has the reason",
        }
    }
}

/// What is recorded with a packet.
#[derive(Clone, Copy, Debug)]
struct Seen {
    stage: Stage,
    what: &'static str,
    vni: Option<u32>,
}

/// Requests to a thread.
enum Order {
    Begin(Wanted),
    /// Exchange the chunk.
    Fetch(Chunk<Seen>, SyncSender<Chunk<Seen>>),
    End,
}

/// What to capture.
#[derive(Clone)]
struct Wanted {
    stages: Vec<Stage>,
    filter: Filter,
    snaplen: usize,
}

/// A thread's side of captures.
pub(crate) struct Tap {
    orders: Receiver<Order>,
    running: Option<Box<Running>>,
}

struct Running {
    wanted: Wanted,
    chunk: Chunk<Seen>,
    /// The packet that is being processed, as it arrived: the bytes that are kept, and its length.
    came: Vec<u8>,
    came_len: usize,
}

/// The result for a packet.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Outcome<'a> {
    /// The frame is sent.
    Sent(&'static str, &'a [u8]),
    /// Nothing is sent, for this reason.
    Dropped(&'static str),
    /// It was for the pod itself.
    Taken,
}

impl<'a> Outcome<'a> {
    /// The outcome of a verdict, with the frame as it is now.
    pub(crate) fn of(verdict: Verdict, frame: &'a [u8]) -> Self {
        match verdict {
            Verdict::Forward(service) => Outcome::Sent(service.name(), frame),
            Verdict::Answer => Outcome::Sent("answer", frame),
            Verdict::Drop(reason) => Outcome::Dropped(reason.name()),
        }
    }
}

impl Tap {
    /// Whether a capture runs.
    pub(crate) fn is_on(&self) -> bool {
        self.running.is_some()
    }

    /// Executes pending requests. The thread calls it periodically.
    pub(crate) fn poll(&mut self) {
        for order in self.orders.try_iter() {
            match order {
                Order::Begin(wanted) => {
                    let chunk = Chunk::new(CHUNK_BYTES);
                    self.running = Some(Box::new(Running { wanted, chunk, came: Vec::new(), came_len: 0 }));
                }
                Order::Fetch(mut spare, answer) => {
                    spare.clear();
                    let full = self.running.as_mut().map(|running| std::mem::replace(&mut running.chunk, spare));
                    let _ = answer.try_send(full.unwrap_or_default());
                }
                Order::End => self.running = None,
            }
        }
    }

    /// A frame has arrived. `header_only`: its payload is elsewhere.
    pub(crate) fn begin(&mut self, frame: &[u8], header_only: bool) {
        let Some(running) = &mut self.running else { return };
        running.came.clear();
        // Keeps all headers, for the filter.
        running.came.extend_from_slice(&frame[..frame.len().min(running.wanted.snaplen.max(HEADERS))]);
        running.came_len = whole_len(frame, header_only);
    }

    /// The thread has processed the same frame. It is captured at all requested stages if the filter accepts it as it
    /// arrived or as it is sent.
    pub(crate) fn end(&mut self, outcome: Outcome<'_>, header_only: bool) {
        let Some(running) = &mut self.running else { return };
        let came = running.wanted.judge(&running.came, running.came_len);
        let left = match outcome {
            Outcome::Sent(what, frame) => Some((what, frame, whole_len(frame, header_only))),
            _ => None,
        };
        let leaves = left.map(|(_, frame, len)| running.wanted.judge(frame, len));
        if !came.passes && !leaves.is_some_and(|leaves| leaves.passes) {
            return;
        }
        let Running { wanted, chunk, came: bytes, came_len } = &mut **running;
        let what = match outcome {
            Outcome::Sent(what, _) => what,
            Outcome::Dropped(reason) => reason,
            Outcome::Taken => "for the gateway itself",
        };
        keep(wanted, chunk, Seen { stage: Stage::Rx, what, vni: came.vni }, bytes, *came_len);
        if let Outcome::Dropped(reason) = outcome {
            keep(wanted, chunk, Seen { stage: Stage::Drop, what: reason, vni: came.vni }, bytes, *came_len);
        }
        if let (Some((what, frame, len)), Some(leaves)) = (left, leaves) {
            keep(wanted, chunk, Seen { stage: Stage::Tx, what, vni: leaves.vni }, frame, len);
        }
    }

    /// The pod sends a frame of its own.
    pub(crate) fn originated(&mut self, frame: &[u8]) {
        let Some(running) = &mut self.running else { return };
        let judged = running.wanted.judge(frame, frame.len());
        if judged.passes {
            let seen = Seen { stage: Stage::Tx, what: "its own", vni: judged.vni };
            keep(&running.wanted, &mut running.chunk, seen, frame, frame.len());
        }
    }
}

/// Bytes that hold the headers of a tunnelled packet: twice what the parser looks at.
const HEADERS: usize = 2 * bifrost_nic::HEAD_LEN;

/// Length of a frame, bytes, including a payload that may be elsewhere.
fn whole_len(frame: &[u8], header_only: bool) -> usize {
    if !header_only {
        return frame.len();
    }
    parse(frame, MAX_FRAME_LEN).map_or(frame.len(), |parsed| (parsed.end as usize).max(frame.len()))
}

fn keep(wanted: &Wanted, chunk: &mut Chunk<Seen>, seen: Seen, frame: &[u8], len: usize) {
    if wanted.stages.contains(&seen.stage) {
        let kept = &frame[..frame.len().min(wanted.snaplen)];
        chunk.push(now_ns(), seen, len as u32, [kept, &[]]);
    }
}

/// The filter's result for a frame.
#[derive(Clone, Copy, Debug)]
struct Judged {
    passes: bool,
    vni: Option<u32>,
}

impl Wanted {
    /// Applies the filter to the tenant's packet: in VXLAN, to the inner one.
    fn judge(&self, frame: &[u8], len: usize) -> Judged {
        let outer = parse(frame, len).ok();
        if let Some(outer) = outer.filter(|o| o.protocol == UDP && o.dst_port == vxlan::UDP_PORT)
            && let Some(payload) = frame.get(usize::from(outer.payload)..)
            && let Ok((vni, inner)) = vxlan::parse(payload)
        {
            let absent = len.saturating_sub(frame.len());
            let parsed = parse(inner, inner.len() + absent).ok();
            let vni = Some(vni.get());
            return Judged { passes: self.filter.passes(Subject { frame: parsed.as_ref(), vni }), vni };
        }
        Judged { passes: self.filter.passes(Subject { frame: outer.as_ref(), vni: None }), vni: None }
    }
}

/// The other side of all taps.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    /// The threads' names and request channels.
    threads: Vec<(String, Sender<Order>)>,
    running: Arc<AtomicBool>,
}

impl Captures {
    /// The tap of another thread.
    pub(crate) fn tap(&mut self, thread: &str) -> Tap {
        let (sender, orders) = channel();
        self.threads.push((thread.to_owned(), sender));
        Tap { orders, running: None }
    }

    /// Starts a capture, which ends when the stream is dropped.
    ///
    /// # Errors
    /// The request is invalid, or another capture is running.
    pub(crate) fn begin(&self, spec: &CaptureSpec) -> Result<Box<dyn CaptureStream>, ApiError> {
        spec.check()?;
        if spec.port.is_some() {
            return Err(ApiError::bad_request("a pod has no ports").at("port").hint("filter by addresses"));
        }
        let stages = stages(&spec.at, &Stage::ALL, Stage::name)?;
        let filter = Filter::parse(&spec.filter).map_err(|e| bad_filter(&spec.filter, e.at, &e.to_string()))?;
        if self.running.swap(true, Ordering::Relaxed) {
            return Err(ApiError::conflict("another capture is running").hint("wait for its end, or end it"));
        }
        let wanted = Wanted { stages, filter, snaplen: spec.snaplen_bytes as usize };
        let thread =
            |(_, orders): &(String, Sender<Order>)| Thread { orders: orders.clone(), spare: Chunk::new(CHUNK_BYTES) };
        let names = self.threads.iter().map(|(name, _)| name.clone());
        // From here on, dropping the stream ends the capture in all threads.
        let stream = Stream {
            file: CaptureFile::new(spec, wanted.stages.clone(), names),
            threads: self.threads.iter().map(thread).collect(),
            begun: false,
            running: Arc::clone(&self.running),
        };
        for thread in &stream.threads {
            let begun = thread.orders.send(Order::Begin(wanted.clone()));
            begun.map_err(|_| ApiError::unavailable("a thread of the pod has ended"))?;
        }
        Ok(Box::new(stream))
    }
}

/// A running capture. It ends when this is dropped.
struct Stream {
    file: CaptureFile<Stage>,
    threads: Vec<Thread>,
    begun: bool,
    /// Cleared at the end, so that another capture can start.
    running: Arc<AtomicBool>,
}

struct Thread {
    orders: Sender<Order>,
    spare: Chunk<Seen>,
}

impl CaptureStream for Stream {
    fn next(&mut self) -> Option<Vec<u8>> {
        if self.file.has_ended() {
            return None;
        }
        let mut out = Vec::new();
        if !self.begun {
            self.begun = true;
            let program = concat!("bifrost-gw ", env!("CARGO_PKG_VERSION"));
            self.file.head(&mut out, program, |stage| (stage.name(), stage.description()));
            return Some(out);
        }
        std::thread::sleep(FETCH_EVERY.min(self.file.time_left()));
        if self.file.time_left().is_zero() {
            self.file.end();
        }
        // Asks all threads before waiting for the first answer.
        let answers: Vec<_> = self.threads.iter_mut().map(Thread::ask).collect();
        for (number, answer) in answers.into_iter().enumerate() {
            match answer.recv_timeout(PATIENCE) {
                Ok(chunk) => self.write(number, chunk, &mut out),
                Err(_) => self.file.end(),
            }
        }
        if self.file.has_ended() {
            self.file.tail(&mut out);
        }
        Some(out)
    }
}

impl Thread {
    fn ask(&mut self) -> Receiver<Chunk<Seen>> {
        let (answer_to, answer) = sync_channel(1);
        // A thread that has ended does not answer.
        let _ = self.orders.send(Order::Fetch(std::mem::take(&mut self.spare), answer_to));
        answer
    }
}

impl Stream {
    fn write(&mut self, number: usize, chunk: Chunk<Seen>, out: &mut Vec<u8>) {
        self.file.missed(number, chunk.missed());
        let mut comment = String::new();
        for (record, bytes) in chunk.iter() {
            let Seen { stage, what, vni } = record.what;
            comment.clear();
            comment.push_str(if stage == Stage::Drop { "dropped: " } else { "" });
            comment.push_str(what);
            if let Some(vni) = vni {
                // Writing to a string cannot fail.
                let _ = write!(comment, "; vni {vni}");
            }
            let flow = if stage == Stage::Tx { Flow::Outbound } else { Flow::Inbound };
            let notes = Notes { flow: Some(flow), comment: Some(&comment) };
            self.file.packet(out, number, stage, Packet { at_ns: record.at_ns, len: record.len, bytes }, notes);
        }
        self.threads[number].spare = chunk;
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        for thread in &self.threads {
            // A thread that has ended captures nothing.
            let _ = thread.orders.send(Order::End);
        }
        self.running.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_requests_are_refused() {
        let mut captures = Captures::default();
        let _tap = captures.tap("worker-0");
        let spec = |at: &str, filter: &str, port: Option<&str>| CaptureSpec {
            at: vec![at.to_owned()],
            filter: filter.to_owned(),
            port: port.map(ToOwned::to_owned),
            ..CaptureSpec::default()
        };
        for (spec, location) in [
            (spec("avs", "", None), "at"),
            (spec("rx", "tcp prot", None), "filter"),
            (spec("rx", "", Some("web1")), "port"),
            (CaptureSpec { packets: 0, ..CaptureSpec::default() }, "packets"),
        ] {
            assert_eq!(captures.begin(&spec).err().map(|error| error.location).as_deref(), Some(location));
        }
        let first = captures.begin(&spec("rx", "tcp", None)).unwrap();
        assert!(captures.begin(&CaptureSpec::default()).is_err(), "one at a time");
        drop(first);
        assert!(captures.begin(&CaptureSpec::default()).is_ok());
    }

    #[test]
    fn a_translated_packet_is_found_by_its_addresses_on_either_side() {
        let mut captures = Captures::default();
        let mut tap = captures.tap("worker-0");
        let frame = |last: u8| {
            let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
            frame.extend_from_slice(&[0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, last, 10, 0, 0, 9]);
            frame.extend_from_slice(&[0, 53, 0, 53, 0, 8, 0, 0]);
            frame
        };
        for (filter, expected) in [("host 10.0.0.1", 2), ("host 10.0.0.2", 2), ("host 10.0.0.3", 0), ("not ip", 0)] {
            let spec = CaptureSpec { filter: filter.to_owned(), ..CaptureSpec::default() };
            let stream = captures.begin(&spec).unwrap();
            tap.poll();
            tap.begin(&frame(1), false);
            tap.end(Outcome::Sent("internet", &frame(2)), false);
            let running = tap.running.as_ref().unwrap();
            assert_eq!(running.chunk.iter().count(), expected, "{filter}");
            tap.begin(&frame(1), false);
            tap.end(Outcome::Dropped("acl"), false);
            let stages: Vec<Stage> = tap.running.as_ref().unwrap().chunk.iter().map(|(r, _)| r.what.stage).collect();
            let both = [Stage::Rx, Stage::Tx, Stage::Rx, Stage::Drop];
            assert_eq!(stages, if filter == "host 10.0.0.1" { &both[..] } else { &both[..expected] }, "{filter}");
            drop(stream);
            tap.poll();
            assert!(!tap.is_on());
        }
    }
}
