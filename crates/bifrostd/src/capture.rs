//! A capture: begun on every worker, fetched from them now and then, written as pcapng.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bifrost_control::api::{ApiError, CaptureSpec};
use bifrost_control::server::CaptureStream;
use bifrost_datapath::Remote;
use bifrost_datapath::capture::{CaptureConfig, Chunk, Filter, Note, Seen, Stage, Way};
use bifrost_port::HostUnderlay;
use bifrost_wire::pcapng::{self, Flow, Notes};

use crate::daemon::{Daemon, State};

/// How often what was captured is fetched.
const FETCH_EVERY: Duration = Duration::from_millis(20);
/// Room for what comes in between, bytes, for each worker: twice, for one is filled while the other one is written.
const CHUNK_BYTES: usize = 4 << 20;

/// What a stage shows, for who opens the file.
fn description(stage: Stage) -> &'static str {
    match stage {
        Stage::UnderlayRx => "datagrams as they came from the underlay; outer headers made up",
        Stage::Pre => "parsed frames; from the underlay: decapsulated, checksum verified",
        Stage::Avs => "frames for which the virtual switch has decided",
        Stage::Rte => "frames that the reliable transport took or let pass; from the underlay: new ones",
        Stage::Post => "finished segments: cut, rewritten, checksums complete",
        Stage::GuestRx => "frames that a guest is shown",
        Stage::GuestTx => "frames as fetched from a guest: not segmented, checksums perhaps incomplete",
        Stage::UnderlayTx => "datagrams on their way to the underlay; outer headers made up",
        Stage::Drop => "what is dropped, wherever; the comment has the reason",
    }
}

/// A capture that runs. Dropped, it ends.
struct Running {
    workers: Vec<OneWorker>,
    stages: Vec<Stage>,
    ports: BTreeMap<u16, String>,
    peers: BTreeMap<u16, String>,
    until: Instant,
    packets_left: u64,
    bytes_left: u64,
    snaplen: u32,
    begun: bool,
    ended: bool,
    /// Makes room for the next capture.
    running: Arc<AtomicBool>,
}

struct OneWorker {
    remote: Remote<HostUnderlay>,
    spare: Chunk,
    /// Packets by stage.
    seen: Vec<u64>,
    missed: u64,
}

impl Daemon {
    /// Begins a capture.
    pub(crate) fn begin_capture(&self, spec: &CaptureSpec) -> Result<Box<dyn CaptureStream>, ApiError> {
        let stages = stages(&spec.at)?;
        let filter = Filter::parse(&spec.filter).map_err(|e| {
            let mark =
                format!("{}\n{}^", spec.filter, " ".repeat(spec.filter[..e.at.min(spec.filter.len())].chars().count()));
            ApiError::bad_request(e.to_string()).at("filter").hint(mark)
        })?;
        let state = self.state();
        let port = spec.port.as_ref().map(|name| state.names.port(name).ok_or_else(|| unknown_port(&state, name)));
        let port = port.transpose()?;
        if self.capturing.swap(true, Ordering::Relaxed) {
            return Err(ApiError::conflict("another capture is running").hint("wait for its end, or end it"));
        }
        let worker =
            |remote| OneWorker { remote, spare: Chunk::new(CHUNK_BYTES), seen: vec![0; stages.len()], missed: 0 };
        // Whatever fails from here on, dropping this ends it everywhere.
        let running = Running {
            workers: state.workers.iter().map(|handle| worker(handle.remote())).collect(),
            ports: state
                .config
                .ports
                .iter()
                .filter_map(|p| Some((state.names.port(&p.name)?, p.name.clone())))
                .collect(),
            peers: state
                .config
                .peers
                .iter()
                .filter_map(|p| Some((state.names.peer(&p.name)?, p.name.clone())))
                .collect(),
            until: Instant::now() + Duration::from_secs(spec.seconds),
            packets_left: spec.packets,
            bytes_left: spec.bytes,
            snaplen: spec.snaplen_bytes,
            begun: false,
            ended: false,
            running: Arc::clone(&self.capturing),
            stages: stages.clone(),
        };
        let snaplen = spec.snaplen_bytes;
        let config = CaptureConfig { stages, filter, port, snaplen, bytes: CHUNK_BYTES, clock: now_ns };
        state
            .on_all(move |worker| worker.core_mut().start_capture(config.clone()))
            .map_err(|e| ApiError::internal(e.to_string()))?;
        Ok(Box::new(running))
    }
}

fn stages(names: &[String]) -> Result<Vec<Stage>, ApiError> {
    let mut stages: Vec<Stage> = Vec::new();
    for name in names {
        let stage = Stage::named(name).ok_or_else(|| {
            let known = Stage::ALL.map(Stage::name).join(", ");
            ApiError::bad_request(format!("there is no stage {name:?}")).at("at").hint(format!("there are {known}"))
        })?;
        if !stages.contains(&stage) {
            stages.push(stage);
        }
    }
    Ok(if stages.is_empty() { Stage::ALL.to_vec() } else { stages })
}

fn unknown_port(state: &State, name: &str) -> ApiError {
    let known: Vec<&str> = state.config.ports.iter().map(|p| p.name.as_str()).collect();
    ApiError::not_found(format!("no port named {name:?}")).at("port").hint(format!("there are {}", known.join(", ")))
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

impl CaptureStream for Running {
    fn next(&mut self) -> Option<Vec<u8>> {
        if self.ended {
            return None;
        }
        let mut out = Vec::new();
        if !self.begun {
            self.begun = true;
            self.head(&mut out);
            return Some(out);
        }
        let left = self.until.saturating_duration_since(Instant::now());
        std::thread::sleep(FETCH_EVERY.min(left));
        self.ended = self.until <= Instant::now();
        for index in 0..self.workers.len() {
            self.fetch(index, &mut out);
        }
        if self.ended {
            self.tail(&mut out);
        }
        Some(out)
    }
}

impl Running {
    /// An interface for each stage of each worker.
    fn head(&self, out: &mut Vec<u8>) {
        pcapng::section(out, concat!("bifrostd ", env!("CARGO_PKG_VERSION")));
        for worker in 0..self.workers.len() {
            for stage in &self.stages {
                let name = format!("{}/worker-{worker}", stage.name());
                pcapng::interface(out, &name, description(*stage), self.snaplen);
            }
        }
    }

    /// Writes what a worker has captured.
    fn fetch(&mut self, index: usize, out: &mut Vec<u8>) {
        let worker = &mut self.workers[index];
        let spare = std::mem::take(&mut worker.spare);
        let Ok(Some(chunk)) = worker.remote.run(move |w| w.core_mut().fetch_capture(spare)) else {
            self.ended = true;
            return;
        };
        worker.missed += chunk.missed();
        let mut comment = String::new();
        for (record, bytes) in chunk.iter() {
            if self.packets_left == 0 || self.bytes_left == 0 {
                self.ended = true;
                break;
            }
            let Seen { stage, note } = record.what;
            let Some(at) = self.stages.iter().position(|known| *known == stage) else { continue };
            worker.seen[at] += 1;
            self.packets_left -= 1;
            self.bytes_left = self.bytes_left.saturating_sub(bytes.len() as u64);
            let interface = (index * self.stages.len() + at) as u32;
            let flow = if note.way == Way::In { Flow::Inbound } else { Flow::Outbound };
            comment.clear();
            describe(&mut comment, stage, &note, &self.ports, &self.peers);
            let notes = Notes { flow: Some(flow), comment: Some(&comment) };
            pcapng::packet(out, interface, record.at_ns, record.len, bytes, notes);
        }
        worker.spare = chunk;
    }

    /// What every interface has seen. Packets that found no room are told once for a worker, at its first interface.
    fn tail(&self, out: &mut Vec<u8>) {
        let now = now_ns();
        for (index, worker) in self.workers.iter().enumerate() {
            for (at, seen) in worker.seen.iter().enumerate() {
                let missed = if at == 0 { worker.missed } else { 0 };
                pcapng::statistics(out, (index * self.stages.len() + at) as u32, now, seen + missed, missed);
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for worker in &self.workers {
            // A worker that has ended captures nothing.
            let _ = worker.remote.run(|w| w.core_mut().stop_capture());
        }
        self.running.store(false, Ordering::Relaxed);
    }
}

/// A packet's comment.
fn describe(out: &mut String, stage: Stage, note: &Note, ports: &BTreeMap<u16, String>, peers: &BTreeMap<u16, String>) {
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

    #[test]
    fn stages_by_name() {
        assert_eq!(stages(&[]).unwrap(), Stage::ALL);
        let names = ["avs".to_string(), "drop".to_string(), "avs".to_string()];
        assert_eq!(stages(&names).unwrap(), [Stage::Avs, Stage::Drop]);
        let error = stages(&["nowhere".to_string()]).unwrap_err();
        assert!(error.hint.contains("underlay-rx, pre, avs, rte, post"), "{error:?}");
    }
}
