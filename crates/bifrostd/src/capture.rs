//! A packet capture: started on every worker, fetched from them periodically, written as pcapng.
//!
//! In an upgrade, the workers of the new daemon capture from their first packet on, with buffers of their own. The old
//! daemon writes what its workers have captured until they stopped, and hands over the client's connection and the
//! position in the file (`upgrade/captures.rs`).

pub(crate) mod one;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bifrost_control::api::{ApiError, CaptureSpec};
use bifrost_control::capture::{CaptureFile, CapturePosition, Packet, bad_filter, now_ns, stages};
use bifrost_control::server::CaptureStream;
use bifrost_datapath::Remote;
use bifrost_datapath::capture::{CaptureConfig, Chunk, Direction, Filter, Note, Seen, Stage};
use bifrost_port::HostUnderlay;
use bifrost_wire::pcapng::{Flow, Notes};

use crate::daemon::{Daemon, State};

pub(crate) use one::{Capturing, Left};

/// Interval at which captured packets are fetched.
const FETCH_EVERY: Duration = Duration::from_millis(20);
/// Buffer of each worker, bytes. There are two: one is filled while the other one is written.
const CHUNK_BYTES: usize = 4 << 20;

fn describe_stage(stage: Stage) -> (&'static str, &'static str) {
    (stage.name(), description(stage))
}

/// Description of a stage for readers of the file.
fn description(stage: Stage) -> &'static str {
    match stage {
        Stage::UnderlayRx => "datagrams as received from the underlay; synthetic outer headers",
        Stage::Pre => "parsed frames; from the underlay: decapsulated, checksum verified",
        Stage::Avs => "frames after the decision of the virtual switch",
        Stage::Rte => "frames that the reliable transport accepted or passed on; from the underlay: without duplicates",
        Stage::Post => "finished packets: segmented, rewritten, checksums complete",
        Stage::GuestRx => "frames as delivered to a guest",
        Stage::GuestTx => "frames as fetched from a guest: not segmented, checksums possibly incomplete",
        Stage::UnderlayTx => "datagrams to the underlay; synthetic outer headers",
        Stage::Drop => "packets dropped at any stage; the comment gives the reason",
    }
}

/// A running capture; it ends when dropped.
pub(crate) struct Running {
    workers: Vec<OneWorker>,
    file: CaptureFile<Stage>,
    ports: BTreeMap<u32, String>,
    peers: BTreeMap<u32, String>,
    started: bool,
    /// Written before the next packets.
    pending: Vec<u8>,
    /// Added to the comment of the next packet.
    remark: Option<String>,
    /// What the workers have captured is written, and another daemon continues.
    is_leaving: bool,
    one: Arc<Capturing>,
}

struct OneWorker {
    remote: Remote<HostUnderlay>,
    spare: Chunk,
}

impl Daemon {
    /// Starts a capture.
    pub(crate) fn start_capture(&self, spec: &CaptureSpec) -> Result<Box<dyn CaptureStream>, ApiError> {
        Ok(Box::new(self.state().begin_capture(spec, &self.capturing)?))
    }
}

impl State {
    /// Starts a capture on all workers.
    pub(crate) fn begin_capture(&self, spec: &CaptureSpec, one: &Arc<Capturing>) -> Result<Running, ApiError> {
        let stages = stages(&spec.at, &Stage::ALL, Stage::name)?;
        let filter = Filter::parse(&spec.filter).map_err(|e| bad_filter(&spec.filter, e.at, &e.to_string()))?;
        let port = spec.port.as_ref().map(|name| self.names.port(name).ok_or_else(|| unknown_port(self, name)));
        let port = port.transpose()?;
        // Another release may have other stages: the numbers of interfaces depend on them.
        let at = stages.iter().map(|stage| stage.name().to_owned()).collect();
        if !one.begin(CaptureSpec { at, ..spec.clone() }) {
            return Err(ApiError::conflict("another capture is running").hint("wait until it ends, or stop it"));
        }
        let workers =
            self.workers.iter().map(|handle| OneWorker { remote: handle.remote(), spare: Chunk::new(CHUNK_BYTES) });
        // If a later step fails, dropping this ends the capture on all workers.
        let running = Running {
            workers: workers.collect(),
            file: CaptureFile::new(spec, stages.clone(), (0..self.workers.len()).map(|n| format!("worker-{n}"))),
            ports: self.config.ports.iter().filter_map(|p| Some((self.names.port(&p.name)?, p.name.clone()))).collect(),
            peers: self.config.peers.iter().filter_map(|p| Some((self.names.peer(&p.name)?, p.name.clone()))).collect(),
            started: false,
            pending: Vec::new(),
            remark: None,
            is_leaving: false,
            one: Arc::clone(one),
        };
        let snaplen = spec.snaplen_bytes;
        let config = CaptureConfig { stages, filter, port, snaplen, bytes: CHUNK_BYTES, clock: now_ns };
        self.on_all(move |worker| worker.core_mut().start_capture(config.clone()))
            .map_err(|e| ApiError::internal(e.to_string()))?;
        Ok(running)
    }
}

fn unknown_port(state: &State, name: &str) -> ApiError {
    let known: Vec<&str> = state.config.ports.iter().map(|p| p.name.as_str()).collect();
    ApiError::not_found(format!("no port named {name:?}")).at("port").hint(format!("known ports: {}", known.join(", ")))
}

impl CaptureStream for Running {
    fn next(&mut self) -> Option<Vec<u8>> {
        if self.file.has_ended() {
            return None;
        }
        let mut out = std::mem::take(&mut self.pending);
        if !self.started {
            self.started = true;
            let program = concat!("bifrostd ", env!("CARGO_PKG_VERSION"));
            self.file.head(&mut out, program, describe_stage);
            return Some(out);
        }
        let pause = if out.is_empty() { FETCH_EVERY } else { Duration::ZERO };
        let is_wanted = self.one.rest(pause.min(self.file.time_left()));
        if self.file.time_left().is_zero() {
            self.file.end();
        }
        for index in 0..self.workers.len() {
            self.fetch(index, &mut out);
        }
        if self.file.has_ended() {
            self.file.tail(&mut out);
        } else {
            self.is_leaving = is_wanted;
        }
        Some(out)
    }

    fn is_leaving(&self) -> bool {
        self.is_leaving
    }

    fn leave(&mut self, connection: Option<OwnedFd>) {
        let position = self.file.position();
        self.one.leave(connection.map(|connection| Left { connection, position }));
    }
}

impl Running {
    /// Continues the file of another daemon with the same request. `comment` is written into the file and into the
    /// comment of the first packet.
    ///
    /// # Errors
    /// The position does not fit the request.
    pub(crate) fn resume(&mut self, position: CapturePosition, comment: &str) -> Result<(), String> {
        self.file.resume(&mut self.pending, position, describe_stage, comment)?;
        self.started = true;
        self.remark = Some(comment.to_owned());
        Ok(())
    }

    /// Writes the packets that a worker has captured.
    fn fetch(&mut self, index: usize, out: &mut Vec<u8>) {
        let worker = &mut self.workers[index];
        let spare = std::mem::take(&mut worker.spare);
        let Ok(Some(chunk)) = worker.remote.run(move |w| w.core_mut().fetch_capture(spare)) else {
            self.file.end();
            return;
        };
        self.file.missed(index, chunk.missed());
        let mut comment = String::new();
        for (record, bytes) in chunk.iter() {
            let Seen { stage, note } = record.what;
            let flow = if note.direction == Direction::In { Flow::Inbound } else { Flow::Outbound };
            comment.clear();
            describe(&mut comment, stage, &note, &self.ports, &self.peers);
            if let Some(remark) = self.remark.take() {
                let _ = write!(comment, "; {remark}");
            }
            let notes = Notes { flow: Some(flow), comment: Some(&comment) };
            self.file.packet(out, index, stage, Packet { at_ns: record.at_ns, len: record.len, bytes }, notes);
        }
        worker.spare = chunk;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for worker in &self.workers {
            // A worker that has ended no longer captures.
            let _ = worker.remote.run(|w| w.core_mut().stop_capture());
        }
        self.one.end();
    }
}

/// A packet's comment.
fn describe(out: &mut String, stage: Stage, note: &Note, ports: &BTreeMap<u32, String>, peers: &BTreeMap<u32, String>) {
    let what = note.what.trim_end_matches("_packets");
    out.push_str(if stage == Stage::Drop { "dropped: " } else { "" });
    out.push_str(if what.is_empty() { "sent" } else { what });
    if let Some(port) = note.port.and_then(|port| ports.get(&port)) {
        let _ = write!(out, "; port {port}");
    }
    if let Some(peer) = note.peer.and_then(|peer| peers.get(&peer)) {
        let _ = write!(out, "; peer {peer}");
    }
    for (name, value) in [("vni", note.vni), ("path", note.path.map(u32::from)), ("PSN", note.psn)] {
        if let Some(value) = value {
            let _ = write!(out, "; {name} {value}");
        }
    }
    for (name, value) in [("CID", note.cid), ("flow", note.flow)] {
        if let Some(value) = value {
            let _ = write!(out, "; {name} {value:#010x}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_have_what_is_known() {
        let note = Note {
            what: "spoofed_ip",
            port: Some(1),
            peer: Some(2),
            vni: Some(100),
            flow: Some(0x1234),
            cid: Some(0x0100_0001),
            psn: Some(7),
            path: Some(3),
            ..Note::default()
        };
        let (ports, peers) = ([(1, "web1".to_string())].into(), [(2, "host-b".to_string())].into());
        let mut text = String::new();
        describe(&mut text, Stage::Drop, &note, &ports, &peers);
        assert_eq!(
            text,
            "dropped: spoofed_ip; port web1; peer host-b; vni 100; path 3; PSN 7; CID 0x01000001; flow 0x00001234"
        );
        text.clear();
        describe(&mut text, Stage::UnderlayTx, &Note::default(), &ports, &peers);
        assert_eq!(text, "sent");
    }
}
