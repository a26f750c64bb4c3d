//! Records on disk of the TAP devices that outlive this daemon: the next daemon finds them, and takes no devices of
//! others.
//!
//! There is one file for each port, in a directory beside the control socket. It is written before a device is made
//! persistent, and removed after the device no longer is: whenever the daemon ends, a device that remains has its file.
//! Files are not synced to disk, because devices do not survive a reboot either.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use bifrost_port::tap::{DeviceId, TapConfig};
use serde::{Deserialize, Serialize};

/// Suffix of records' file names, after the port's name.
const ENDING: &str = ".json";
/// Suffix of files that are being written.
const UNFINISHED: &str = ".new";
const LOCK: &str = "lock";
/// Maximum size of a record, bytes: a port has at most some dozens of addresses.
const MAX_BYTES: u64 = 64 << 10;
/// Maximum number of records: that of ports.
const MAX_RECORDS: usize = 1 << 16;
/// How long a killed daemon may take to release the lock.
const PATIENCE: Duration = Duration::from_secs(2);
/// Version of the format. Records of other versions are ignored.
const VERSION: u32 = 1;

/// The records of a daemon. No other process can open them while this exists.
#[derive(Debug)]
pub(crate) struct Devices {
    directory: PathBuf,
    records: BTreeMap<String, Record>,
    boot: String,
    /// The process that holds this lock owns the records.
    lock: File,
}

/// A device that outlives the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    version: u32,
    /// Boot ID of the host: devices do not survive a reboot.
    boot: String,
    port: String,
    /// `SO_NETNS_COOKIE`
    namespace: u64,
    index: u32,
    // Parameters of the device.
    device: String,
    netns: Option<String>,
    mac: [u8; 6],
    addresses: Vec<(IpAddr, u8)>,
    mtu: u16,
    default_gateway: Option<IpAddr>,
    queues: u16,
    tx_queue_packets: u32,
}

/// The directory of the records of the daemon with this control socket.
pub(crate) fn directory(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".devices");
    PathBuf::from(name)
}

impl Record {
    pub(crate) fn id(&self) -> DeviceId {
        DeviceId { namespace: self.namespace, index: self.index }
    }

    /// The device's parameters.
    pub(crate) fn config(&self) -> TapConfig {
        TapConfig {
            device: self.device.clone(),
            netns: self.netns.clone(),
            mac: self.mac,
            addresses: self.addresses.clone(),
            mtu: self.mtu,
            default_gateway: self.default_gateway,
            queues: self.queues,
            tx_queue_packets: self.tx_queue_packets,
            ..TapConfig::default()
        }
    }

    fn of(boot: &str, port: &str, id: DeviceId, config: &TapConfig) -> Record {
        let TapConfig { device, netns, mac, addresses, mtu, default_gateway, queues, tx_queue_packets, pools: _ } =
            config.clone();
        let (version, boot, port) = (VERSION, boot.to_owned(), port.to_owned());
        let DeviceId { namespace, index } = id;
        Record {
            version,
            boot,
            port,
            namespace,
            index,
            device,
            netns,
            mac,
            addresses,
            mtu,
            default_gateway,
            queues,
            tx_queue_packets,
        }
    }

    /// The record in a file of this name; `None` if it is of an earlier boot, or not a complete record.
    fn read(name: &str, text: &[u8], boot: &str) -> Option<Record> {
        let record: Record = serde_json::from_slice(text).ok()?;
        let is_it = record.version == VERSION && record.boot == boot && record.port == name;
        is_it.then_some(record)
    }
}

impl Devices {
    /// Locks and reads the records in a directory, which is created if it does not exist.
    ///
    /// # Errors
    /// Another daemon holds the lock, or the records cannot be read or written.
    pub(crate) fn open(directory: &Path) -> Result<Devices> {
        let doing = |what: &str| format!("{what} {}", directory.display());
        if let Some(parent) = directory.parent() {
            DirBuilder::new().recursive(true).mode(0o755).create(parent).with_context(|| doing("creating"))?;
        }
        DirBuilder::new().recursive(true).mode(0o700).create(directory).with_context(|| doing("creating"))?;
        // Records decide which devices are removed: nobody else may write them.
        let found = std::fs::symlink_metadata(directory).with_context(|| doing("checking"))?;
        let ours = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw() && found.mode() & 0o022 == 0;
        ensure!(ours, "{} must be a directory that only this user can write to", directory.display());
        let lock = lock(&directory.join(LOCK)).with_context(|| doing("locking"))?;
        Devices::open_locked(directory, lock)
    }

    /// [`open`](Self::open) with the lock of a running daemon, which shares the records.
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) fn open_locked(directory: &Path, lock: File) -> Result<Devices> {
        let doing = |what: &str| format!("{what} {}", directory.display());
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").context("reading the boot ID")?;
        let boot = boot.trim().to_owned();
        let mut records = BTreeMap::new();
        for entry in std::fs::read_dir(directory).with_context(|| doing("reading"))? {
            let path = entry.with_context(|| doing("reading"))?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            if let Some(port) = name.strip_suffix(ENDING).filter(|_| records.len() < MAX_RECORDS) {
                match read(&path).map(|text| Record::read(port, &text, &boot)) {
                    Ok(Some(record)) => {
                        records.insert(port.to_owned(), record);
                    }
                    // Its device, if any, cannot be identified.
                    Ok(None) => remove(&path),
                    Err(error) => tracing::warn!(%error, "cannot read {}", path.display()),
                }
            } else if name.ends_with(UNFINISHED) {
                remove(&path);
            }
        }
        Ok(Devices { directory: directory.to_owned(), records, boot, lock })
    }

    /// A duplicate of the lock's descriptor; the lock is held until both are closed.
    ///
    /// # Errors
    /// The process has no more descriptors.
    pub(crate) fn lock(&self) -> io::Result<OwnedFd> {
        self.lock.try_clone().map(OwnedFd::from)
    }

    pub(crate) fn get(&self, port: &str) -> Option<&Record> {
        self.records.get(port)
    }

    /// The ports that have a record.
    pub(crate) fn ports(&self) -> Vec<String> {
        self.records.keys().cloned().collect()
    }

    /// Records the device of a port, created from `config`. When this returns, the next daemon will find it.
    ///
    /// # Errors
    /// The file cannot be written; the former record stays.
    pub(crate) fn set(&mut self, port: &str, id: DeviceId, config: &TapConfig) -> Result<()> {
        let record = Record::of(&self.boot, port, id, config);
        if self.records.get(port) == Some(&record) {
            return Ok(());
        }
        let path = self.path(port);
        let unfinished = path.with_extension(format!("{}{UNFINISHED}", ENDING.trim_start_matches('.')));
        let write = || -> io::Result<()> {
            let text = serde_json::to_vec(&record)?;
            let mut options = OpenOptions::new();
            let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
            file.write_all(&text)?;
            std::fs::rename(&unfinished, &path)
        };
        write().with_context(|| format!("writing {}", path.display()))?;
        self.records.insert(port.to_owned(), record);
        Ok(())
    }

    /// Removes the record of a port's device.
    pub(crate) fn forget(&mut self, port: &str) {
        if self.records.remove(port).is_some() {
            remove(&self.path(port));
        }
    }

    /// Removes the directory if it has no records.
    pub(crate) fn remove_directory(self) {
        if self.records.is_empty() {
            remove(&self.directory.join(LOCK));
            let _ = std::fs::remove_dir(&self.directory);
        }
    }

    fn path(&self, port: &str) -> PathBuf {
        self.directory.join(format!("{port}{ENDING}"))
    }
}

fn lock(path: &Path) -> Result<File> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            Err(TryLockError::WouldBlock) => bail!("another bifrostd uses it; stop that one first"),
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?.take(MAX_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        tracing::warn!(%error, "cannot remove {}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An empty directory.
    fn empty(name: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("bifrostd-devices-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        directory
    }

    fn config() -> TapConfig {
        TapConfig {
            device: "eth0".into(),
            netns: Some("guest".into()),
            mac: [2, 0, 0, 0, 0, 1],
            addresses: vec![(IpAddr::from([10, 0, 0, 1]), 24), ("fd00::1".parse().unwrap(), 64)],
            default_gateway: Some(IpAddr::from([10, 0, 0, 254])),
            queues: 2,
            ..TapConfig::default()
        }
    }

    const ID: DeviceId = DeviceId { namespace: u64::MAX, index: 7 };

    #[test]
    fn the_next_daemon_reads_what_this_one_wrote() {
        let directory = empty("next");
        let mut devices = Devices::open(&directory).unwrap();
        for port in ["a", "b", "lock", "a.json", "..", "x.json.new"] {
            devices.set(port, ID, &config()).unwrap();
        }
        let other = TapConfig { mtu: 1400, ..config() };
        devices.set("b", DeviceId { index: 8, ..ID }, &other).unwrap();
        devices.forget("a");
        devices.forget("unknown");
        drop(devices);
        let mut devices = Devices::open(&directory).unwrap();
        assert_eq!(devices.ports(), ["..", "a.json", "b", "lock", "x.json.new"]);
        let record = devices.get("b").unwrap();
        assert_eq!((record.id().index, record.config().mtu, record.config().netns), (8, 1400, Some("guest".into())));
        assert_eq!(devices.get("lock").unwrap().config().addresses, config().addresses);
        for port in devices.ports() {
            devices.forget(&port);
        }
        devices.remove_directory();
        assert!(!directory.exists());
    }

    #[test]
    fn invalid_records_and_those_of_another_boot_are_removed() {
        let directory = empty("damaged");
        let mut devices = Devices::open(&directory).unwrap();
        devices.set("good", ID, &config()).unwrap();
        let text = std::fs::read_to_string(directory.join("good.json")).unwrap();
        let boot = devices.boot.clone();
        drop(devices);
        let cases = [
            ("empty", String::new()),
            ("half", text[..text.len() / 2].to_owned()),
            ("anothers", text.clone()),
            ("boot", text.replace("\"good\"", "\"boot\"").replace(&boot, "00000000-0000-0000-0000-000000000000")),
            ("version", text.replace("\"good\"", "\"version\"").replace("\"version\":1", "\"version\":2")),
            ("range", text.replace("\"good\"", "\"range\"").replace("\"index\":7", "\"index\":-1")),
            ("long", " ".repeat(MAX_BYTES as usize) + &text.replace("\"good\"", "\"long\"")),
            ("nothing", "\0".repeat(100)),
        ];
        for (name, text) in &cases {
            std::fs::write(directory.join(format!("{name}.json")), text).unwrap();
        }
        std::fs::write(directory.join("c.json.new"), "{").unwrap();
        std::fs::write(directory.join("other file"), "").unwrap();
        let devices = Devices::open(&directory).unwrap();
        assert_eq!(devices.ports(), ["good"]);
        let mut left: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["good.json", "lock", "other file"]);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_second_daemon_cannot_open_the_records() {
        let directory = empty("second");
        let first = Devices::open(&directory).unwrap();
        let error = format!("{:#}", Devices::open(&directory).unwrap_err());
        assert!(error.contains("another bifrostd") && error.contains("bifrostd-devices"), "{error}");
        drop(first);
        let second = std::thread::spawn({
            let directory = directory.clone();
            move || Devices::open(&directory).map(drop)
        });
        second.join().unwrap().unwrap();
        std::fs::remove_dir_all(directory).unwrap();
    }
}
