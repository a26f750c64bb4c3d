//! Functions shared by all captures: parsing the request's stages, and writing the pcapng file within its limits.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bifrost_wire::pcapng::{self, Notes};
use serde::{Deserialize, Serialize};

use crate::api::{ApiError, CaptureSpec, MAX_CAPTURE_SECONDS};

/// The stages that a request names, without duplicates, in its order; all stages if it names none.
///
/// # Errors
/// A stage does not exist.
pub fn stages<S: Copy + PartialEq>(
    names: &[String],
    all: &[S],
    name_of: impl Fn(S) -> &'static str,
) -> Result<Vec<S>, ApiError> {
    let mut stages = Vec::new();
    for name in names {
        let stage = all.iter().copied().find(|stage| name_of(*stage) == name).ok_or_else(|| {
            let known: Vec<&str> = all.iter().map(|stage| name_of(*stage)).collect();
            let error = ApiError::bad_request(format!("unknown stage {name:?}")).at("at");
            error.hint(format!("known stages: {}", known.join(", ")))
        })?;
        if !stages.contains(&stage) {
            stages.push(stage);
        }
    }
    Ok(if stages.is_empty() { all.to_vec() } else { stages })
}

/// An error of a filter, with a mark below its byte `at`.
pub fn bad_filter(filter: &str, at: usize, what: &str) -> ApiError {
    let before = filter.get(..at).unwrap_or(filter).chars().count();
    ApiError::bad_request(what).at("filter").hint(format!("{filter}\n{}^", " ".repeat(before)))
}

/// Nanoseconds since 1970, as used in capture files.
pub fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// A pcapng file being written: one interface for each stage of each source, until a limit of the request is reached.
#[derive(Debug)]
pub struct CaptureFile<S> {
    stages: Vec<S>,
    sources: Vec<Source>,
    until: Instant,
    packets_left: u64,
    bytes_left: u64,
    snaplen: u32,
    ended: bool,
}

/// A thread from which packets come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Source {
    name: String,
    /// Packets by stage.
    seen: Vec<u64>,
    /// Packets dropped because the queue was full.
    missed: u64,
}

/// How far a file has been written, for another process that continues it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CapturePosition {
    /// What is left of the limits.
    left_us: u64,
    packets_left: u64,
    bytes_left: u64,
    sources: Vec<Source>,
}

/// Most sources of a file that another process continues.
const MAX_SOURCES: usize = 256;

/// One packet for the file.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// When it was seen, in nanoseconds since 1970.
    pub at_ns: u64,
    /// Its length on the wire, in bytes.
    pub len: u32,
    /// The captured bytes, at most `snaplen_bytes`.
    pub bytes: &'a [u8],
}

impl<S: Copy + PartialEq> CaptureFile<S> {
    /// A file within the request's limits. Its time limit starts now.
    pub fn new(spec: &CaptureSpec, stages: Vec<S>, sources: impl IntoIterator<Item = String>) -> Self {
        let source = |name| Source { name, seen: vec![0; stages.len()], missed: 0 };
        Self {
            sources: sources.into_iter().map(source).collect(),
            until: Instant::now() + Duration::from_secs(spec.seconds),
            packets_left: spec.packets,
            bytes_left: spec.bytes,
            snaplen: spec.snaplen_bytes,
            ended: false,
            stages,
        }
    }

    /// Writes the section header with the capturing program, and the interfaces, named `STAGE/SOURCE`.
    pub fn head(&self, out: &mut Vec<u8>, program: &str, describe: impl Fn(S) -> (&'static str, &'static str)) {
        pcapng::section(out, program);
        self.sources.iter().for_each(|source| self.interfaces(out, source, &describe));
    }

    /// How far it has been written.
    pub fn position(&self) -> CapturePosition {
        CapturePosition {
            left_us: u64::try_from(self.time_left().as_micros()).unwrap_or(u64::MAX),
            packets_left: self.packets_left,
            bytes_left: self.bytes_left,
            sources: self.sources.clone(),
        }
    }

    /// Continues at the position of another process's file with the same request and stages: writes the interfaces of
    /// sources that it has not had, and `comment` into the file. Packets may come from this process's sources only.
    ///
    /// # Errors
    /// The position is not one of such a file.
    pub fn resume(
        &mut self,
        out: &mut Vec<u8>,
        position: CapturePosition,
        describe: impl Fn(S) -> (&'static str, &'static str),
        comment: &str,
    ) -> Result<(), String> {
        let CapturePosition { left_us, packets_left, bytes_left, mut sources } = position;
        if sources.is_empty() || sources.len() > MAX_SOURCES {
            return Err(format!("a capture from {} threads; 1 to {MAX_SOURCES} are possible", sources.len()));
        }
        if let Some(wrong) = sources.iter().find(|source| source.seen.len() != self.stages.len()) {
            return Err(format!("a capture at {} stages instead of {}", wrong.seen.len(), self.stages.len()));
        }
        let own = std::mem::take(&mut self.sources);
        sources.extend(own.into_iter().skip(sources.len()).inspect(|source| self.interfaces(out, source, &describe)));
        self.sources = sources;
        // A hostile value cannot make it run for longer than requests may ask for.
        let left = Duration::from_micros(left_us).min(Duration::from_secs(MAX_CAPTURE_SECONDS));
        self.until = Instant::now() + left;
        (self.packets_left, self.bytes_left) = (packets_left, bytes_left);
        pcapng::note(out, 0, now_ns(), comment);
        Ok(())
    }

    fn interfaces(&self, out: &mut Vec<u8>, source: &Source, describe: &impl Fn(S) -> (&'static str, &'static str)) {
        for stage in &self.stages {
            let (name, description) = describe(*stage);
            pcapng::interface(out, &format!("{name}/{}", source.name), description, self.snaplen);
        }
    }

    /// Time until the capture's time limit.
    pub fn time_left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Ends the capture.
    pub fn end(&mut self) {
        self.ended = true;
    }

    /// Whether the capture has ended.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Counts packets of a source that were dropped because the queue was full.
    pub fn missed(&mut self, source: usize, packets: u64) {
        let missed = &mut self.sources[source].missed;
        *missed = missed.saturating_add(packets);
    }

    /// Writes a packet if its stage was requested. Ends the capture instead if a limit is reached.
    pub fn packet(&mut self, out: &mut Vec<u8>, source: usize, stage: S, packet: Packet<'_>, notes: Notes<'_>) {
        if self.packets_left == 0 || self.bytes_left == 0 {
            self.ended = true;
            return;
        }
        let Some(at) = self.stages.iter().position(|known| *known == stage) else { return };
        let seen = &mut self.sources[source].seen[at];
        *seen = seen.saturating_add(1);
        self.packets_left -= 1;
        self.bytes_left = self.bytes_left.saturating_sub(packet.bytes.len() as u64);
        pcapng::packet(out, self.interface(source, at), packet.at_ns, packet.len, packet.bytes, notes);
    }

    /// Writes the statistics of every interface. Packets that did not fit count at their source's first interface.
    pub fn tail(&self, out: &mut Vec<u8>) {
        let now = now_ns();
        for (number, source) in self.sources.iter().enumerate() {
            for (at, seen) in source.seen.iter().enumerate() {
                let missed = if at == 0 { source.missed } else { 0 };
                pcapng::statistics(out, self.interface(number, at), now, seen.saturating_add(missed), missed);
            }
        }
    }

    fn interface(&self, source: usize, stage: usize) -> u32 {
        (source * self.stages.len() + stage) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Stage {
        In,
        Out,
    }
    const ALL: [Stage; 2] = [Stage::In, Stage::Out];
    fn name(stage: Stage) -> &'static str {
        if stage == Stage::In { "in" } else { "out" }
    }

    #[test]
    fn stages_by_name() {
        let named = |names: &[&str]| stages(&names.iter().map(ToString::to_string).collect::<Vec<_>>(), &ALL, name);
        assert_eq!(named(&[]).unwrap(), ALL);
        assert_eq!(named(&["out", "out"]).unwrap(), [Stage::Out]);
        assert_eq!(named(&["out", "in"]).unwrap(), [Stage::Out, Stage::In]);
        let error = named(&["nowhere"]).unwrap_err();
        assert_eq!((error.location.as_str(), error.hint.as_str()), ("at", "known stages: in, out"));
    }

    #[test]
    fn the_mark_is_below_the_error() {
        assert_eq!(bad_filter("é prot", 3, "what?").hint, "é prot\n  ^");
        assert_eq!(bad_filter("tcp", 9, "what?").hint, "tcp\n   ^");
    }

    #[test]
    fn another_process_continues_within_the_same_limits() {
        let describe = |stage| (name(stage), "");
        let packet = Packet { at_ns: 1, len: 60, bytes: &[0; 10] };
        let spec = CaptureSpec { packets: 5, seconds: 10, ..CaptureSpec::default() };
        let mut file = CaptureFile::new(&spec, ALL.to_vec(), ["a".to_owned()]);
        let mut out = Vec::new();
        (0..3).for_each(|_| file.packet(&mut out, 0, Stage::Out, packet, Notes::default()));
        file.missed(0, 4);
        let position = serde_json::to_string(&file.position()).unwrap();
        let read = || serde_json::from_str::<CapturePosition>(&position).unwrap();
        for sources in [vec!["a"], vec!["a", "b"]] {
            let longer = CaptureSpec { seconds: 1000, ..spec.clone() };
            let mut next = CaptureFile::new(&longer, ALL.to_vec(), sources.iter().map(ToString::to_string));
            let mut out = Vec::new();
            next.resume(&mut out, read(), describe, "went on").unwrap();
            let text = String::from_utf8_lossy(&out);
            assert_eq!(
                (text.contains("out/b"), text.contains("out/a"), text.contains("went on")),
                (sources.len() > 1, false, true)
            );
            assert!(next.time_left() <= Duration::from_secs(10) && next.time_left() > Duration::from_secs(5));
            next.missed(0, 1);
            (0..5).for_each(|_| next.packet(&mut out, sources.len() - 1, Stage::Out, packet, Notes::default()));
            assert!(next.has_ended());
            let counted: u64 = next.sources.iter().map(|source| source.seen[1]).sum();
            assert_eq!((counted, next.sources[0].missed), (5, 5));
        }
        // Fewer sources: the statistics of all are written at the end.
        let two = CaptureFile::new(&spec, ALL.to_vec(), ["a".to_owned(), "b".to_owned()]).position();
        file.resume(&mut Vec::new(), two, describe, "").unwrap();
        assert_eq!(file.sources.len(), 2);
        // Positions of other files.
        let other = CaptureFile::new(&spec, vec![Stage::In], ["a".to_owned()]).position();
        assert!(file.resume(&mut Vec::new(), other, describe, "").unwrap_err().contains("1 stages instead of 2"));
        assert!(file.resume(&mut Vec::new(), CapturePosition::default(), describe, "").is_err());
        let endless = CapturePosition { left_us: u64::MAX, ..read() };
        file.resume(&mut Vec::new(), endless, describe, "").unwrap();
        assert!(file.time_left() <= Duration::from_secs(MAX_CAPTURE_SECONDS));
    }

    #[test]
    fn limits_end_the_capture() {
        for (packets, bytes, passes) in [(2, 1_000, 2), (1_000, 15, 2), (1_000, 10, 1)] {
            let spec = CaptureSpec { packets, bytes, ..CaptureSpec::default() };
            let mut file = CaptureFile::new(&spec, vec![Stage::Out], ["a".to_owned()]);
            let mut out = Vec::new();
            for _ in 0..3 {
                let packet = Packet { at_ns: 1, len: 60, bytes: &[0; 10] };
                file.packet(&mut out, 0, Stage::In, packet, Notes::default());
                file.packet(&mut out, 0, Stage::Out, packet, Notes::default());
            }
            assert!(file.has_ended());
            assert_eq!(file.sources[0].seen, [passes], "{packets} packets, {bytes} bytes");
        }
    }
}
