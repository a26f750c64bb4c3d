//! The record of receive buffers in flight for front-ends that keep none themselves (QEMU's network devices): a file
//! beside the socket for each queue pair. It outlives a killed daemon, as the guest does, and the next daemon continues
//! from it.
//!
//! A record belongs to one run of one front-end and to its rings at their current addresses; for any other it is empty.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::memory::{Memory, RegionSpec};
use super::mutation::mutated;
use super::socket::Entry;

/// Length of the header before the rings' records, bytes: it identifies their owner.
const HEADER: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"bfrec  1");

/// A process, by PID and start time: PIDs are reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrontEnd {
    pid: u32,
    /// Since boot, in the kernel's clock ticks.
    started: u64,
}

impl FrontEnd {
    /// The process at the other end; `None` if the kernel does not report it.
    pub(super) fn of(socket: &impl AsFd) -> Option<FrontEnd> {
        let pid = rustix::net::sockopt::socket_peercred(socket).ok()?.pid.as_raw_nonzero().get() as u32;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in parentheses, may contain anything; the start time is the twentieth field after it.
        let (_, fields) = stat.rsplit_once(") ")?;
        Some(FrontEnd { pid, started: fields.split(' ').nth(19)?.parse().ok()? })
    }
}

/// Path of a queue pair's record; that of the first one is `path`.
pub(super) fn path(path: &Path, pair: usize) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    if pair > 0 {
        name.push(format!(".{pair}"));
    }
    name.into()
}

/// Removes the records of all possible pairs of a device.
pub(super) fn remove(of: &Path, pairs: u16) {
    for pair in 0..usize::from(pairs) {
        let _ = Entry::of(&path(of, pair)).map(|entry| entry.remove());
    }
}

/// Opens the record at `path` for the rings described by `rings`, `bytes` long: as an earlier daemon left it if it
/// belongs to them, new otherwise.
///
/// Other users may be able to write its directory. So an existing file is written only if it is a record of this daemon
/// for exactly these rings; any other is removed, and a new one created.
pub(super) fn open(path: &Path, front_end: FrontEnd, rings: &[u64], bytes: usize) -> io::Result<Arc<Memory>> {
    let mut header: Vec<u8> = Vec::with_capacity(HEADER);
    for word in [MAGIC, u64::from(front_end.pid), front_end.started, rings.len() as u64].iter().chain(rings) {
        header.extend(word.to_le_bytes());
    }
    header.resize(HEADER, 0);
    if mutated!(RecordNotChecked) {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
        file.set_len((HEADER + bytes) as u64)?;
        return map(file, bytes);
    }
    let entry = Entry::of(path)?;
    if let Some(file) = existing(&entry, &header, HEADER + bytes) {
        return map(file, bytes);
    }
    match entry.remove() {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let mode = Mode::RUSR | Mode::WUSR;
    let file = File::from(entry.open(OFlags::RDWR | OFlags::CREATE | OFlags::EXCL, mode)?);
    file.set_len((HEADER + bytes) as u64)?;
    // Last: a header means that everything after it is valid.
    file.write_all_at(&header, 0)?;
    map(file, bytes)
}

/// The existing record, if it begins with `header` and no other user can have written it.
fn existing(entry: &Entry, header: &[u8], bytes: usize) -> Option<File> {
    // Non-blocking, in case it is not a regular file.
    let file = File::from(entry.open(OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY, Mode::empty()).ok()?);
    let metadata = file.metadata().ok()?;
    let is_ours = metadata.is_file()
        && metadata.nlink() == 1
        && metadata.uid() == rustix::process::geteuid().as_raw()
        && metadata.mode() & 0o077 == 0
        && metadata.len() == bytes as u64;
    let mut there = [0; HEADER];
    (is_ours && file.read_exact_at(&mut there, 0).is_ok() && there[..] == *header).then_some(file)
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
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn foreign_files_at_the_records_path_are_left_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let (path, precious) = (directory.path().join("record"), directory.path().join("precious"));
        let me = FrontEnd { pid: 1, started: 2 };
        let open = || open(&path, me, &[1, 2], 128);
        let put = |mode: u32| {
            std::fs::write(&precious, "precious").expect("a file");
            std::fs::set_permissions(&precious, std::fs::Permissions::from_mode(mode)).expect("its mode");
        };
        for (name, plant) in [
            ("symbolic link", &(|| std::os::unix::fs::symlink(&precious, &path)) as &dyn Fn() -> io::Result<()>),
            ("other name", &|| std::fs::hard_link(&precious, &path)),
            ("pipe", &|| Ok(rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RWXU, 0)?)),
        ] {
            put(0o600);
            let _ = std::fs::remove_file(&path);
            plant().expect(name);
            open().expect(name);
            assert_eq!(std::fs::read(&precious).expect("there"), b"precious", "{name}");
            assert!(std::fs::symlink_metadata(&path).expect("a record").is_file(), "{name}");
        }
        // A record that others can write is rejected.
        let memory = open().expect("a record");
        Memory::area(&memory, 0, 64, 8).expect("its area").store(0, 7u64, Ordering::Release);
        let first =
            || Memory::area(&open().expect("a record"), 0, 64, 8).expect("its area").load::<u64>(0, Ordering::Acquire);
        assert_eq!(first(), 7);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o660)).expect("its mode");
        assert_eq!(first(), 0);
        std::fs::remove_file(&path).expect("the record");
        std::fs::create_dir(&path).expect("a directory");
        assert!(open().is_err(), "there is no record");
    }

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
        assert_eq!(value(FrontEnd { started: me.started + 1, ..me }, &[1, 2], 128), 0, "the PID was reused");
        assert_eq!(value(me, &[1, 3], 128), 0, "rings elsewhere");
        assert_eq!(value(me, &[1, 3], 192), 0, "larger rings");
        assert_eq!(value(me, &[1, 3], 192), 7);
    }
}
