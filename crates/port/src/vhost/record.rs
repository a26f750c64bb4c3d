//! The record of receive buffers in flight for front-ends that keep none themselves (QEMU's network devices): a file beside
//! the socket for each queue pair. It outlives a daemon that was killed, as the guest does, and the next one goes on from it.
//!
//! A record belongs to one run of one front-end and to its rings where they are now; any other finds it empty.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::memory::{Memory, RegionSpec};

/// Bytes in front of the rings' records: whose they are.
const HEADER: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"bfrec  1");

/// A process, by number and start time: numbers come again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrontEnd {
    pid: u32,
    /// Since the machine started, in the kernel's ticks.
    started: u64,
}

impl FrontEnd {
    /// Whoever is at the other end; `None` if the kernel does not say.
    pub(super) fn of(socket: &impl AsFd) -> Option<FrontEnd> {
        let pid = rustix::net::sockopt::socket_peercred(socket).ok()?.pid.as_raw_nonzero().get() as u32;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in parentheses, may contain anything; the start time is the twentieth field behind it.
        let (_, fields) = stat.rsplit_once(") ")?;
        Some(FrontEnd { pid, started: fields.split(' ').nth(19)?.parse().ok()? })
    }
}

/// The record of one queue pair of a device: that of the first one is at `path`.
pub(super) fn path(path: &Path, pair: usize) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    if pair > 0 {
        name.push(format!(".{pair}"));
    }
    name.into()
}

/// Removes the records of all pairs that a device may have.
pub(super) fn remove(of: &Path, pairs: u16) {
    for pair in 0..usize::from(pairs) {
        let _ = std::fs::remove_file(path(of, pair));
    }
}

/// Opens the record at `path` for the rings that `rings` describe, `bytes` long: as an earlier daemon has left it if it
/// is theirs, new otherwise.
pub(super) fn open(path: &Path, front_end: FrontEnd, rings: &[u64], bytes: usize) -> io::Result<Arc<Memory>> {
    let mut header: Vec<u8> = Vec::with_capacity(HEADER);
    for word in [MAGIC, u64::from(front_end.pid), front_end.started, rings.len() as u64].iter().chain(rings) {
        header.extend(word.to_le_bytes());
    }
    header.resize(HEADER, 0);
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    let mut there = [0; HEADER];
    let size = (HEADER + bytes) as u64;
    let is_theirs =
        file.metadata()?.len() == size && file.read_exact_at(&mut there, 0).is_ok() && there[..] == header[..];
    if !is_theirs {
        file.set_len(0)?;
        file.set_len(size)?;
        // Last: a header says that all behind it is as it should be.
        file.write_all_at(&header, 0)?;
    }
    map(file, bytes)
}

fn map(file: File, bytes: usize) -> io::Result<Arc<Memory>> {
    let mut memory = Memory::default();
    memory
        .add(RegionSpec { guest: 0, user: 0, size: bytes as u64, offset: HEADER as u64, file })
        .map_err(io::Error::other)?;
    Ok(Arc::new(memory))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn a_record_is_found_by_its_owner_only() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("record");
        let (one, other) = UnixStream::pair().expect("sockets");
        let me = FrontEnd::of(&one).expect("this process");
        assert_eq!((me.pid, Some(me)), (std::process::id(), FrontEnd::of(&other)));
        let value = |front_end, rings: &[u64], bytes| {
            let memory = open(&path, front_end, rings, bytes).expect("a record");
            let area = Memory::area(&memory, 64, 64, 8).expect("its area");
            let before: u64 = area.load(0, Ordering::Acquire);
            area.store(0, 7u64, Ordering::Release);
            before
        };
        assert_eq!(value(me, &[1, 2], 128), 0);
        assert_eq!(value(me, &[1, 2], 128), 7, "as it was left");
        assert_eq!(value(FrontEnd { started: me.started + 1, ..me }, &[1, 2], 128), 0, "the number came again");
        assert_eq!(value(me, &[1, 3], 128), 0, "rings elsewhere");
        assert_eq!(value(me, &[1, 3], 192), 0, "larger rings");
        assert_eq!(value(me, &[1, 3], 192), 7);
    }
}
