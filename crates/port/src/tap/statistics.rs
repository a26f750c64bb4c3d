//! The kernel's counters of a device in another namespace.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::guest::KernelCounters;

/// The namespace's device table, opened once; it stays that namespace's, whichever thread reads it.
#[derive(Debug)]
pub(crate) struct DeviceStatistics {
    table: File,
    device: String,
}

impl DeviceStatistics {
    /// Opens the table of the calling thread's namespace.
    pub(crate) fn open(device: &str) -> io::Result<Self> {
        Ok(Self { table: File::open("/proc/thread-self/net/dev")?, device: device.into() })
    }

    /// Packets from the guest that were dropped because they were not fetched in time.
    pub(crate) fn transmit_drops(&self) -> io::Result<u64> {
        let mut text = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let n = self.table.read_at(&mut buffer, text.len() as u64)?;
            if n == 0 {
                break;
            }
            text.extend_from_slice(&buffer[..n]);
        }
        transmit_drops(&String::from_utf8_lossy(&text), &self.device)
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("no device {} any more", self.device)))
    }
}

impl KernelCounters for DeviceStatistics {
    /// Packets from the guest, on any queue of the device, that the kernel dropped because they were not fetched in
    /// time.
    fn read(&self) -> Vec<(&'static str, u64)> {
        let dropped = self.transmit_drops().ok().filter(|packets| *packets > 0);
        dropped.map(|packets| ("tx_overrun_packets", packets)).into_iter().collect()
    }
}

/// `NAME: 8 columns of reception, 8 of transmission`; the fourth of each counts drops.
fn transmit_drops(table: &str, device: &str) -> Option<u64> {
    let columns = table.lines().find_map(|line| line.trim_start().strip_prefix(device)?.strip_prefix(':'))?;
    columns.split_whitespace().nth(11)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_are_read_from_the_devices_line() {
        let table = "Inter-|   Receive  |  Transmit\n face |bytes ...\n  eth01: 0 0 0 0 0 0 0 0 0 0 0 7 0 0 0 0\n  \
                     eth0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n";
        assert_eq!(transmit_drops(table, "eth0"), Some(12));
        assert_eq!(transmit_drops(table, "eth01"), Some(7));
        assert_eq!(transmit_drops(table, "eth"), None);
        assert_eq!(transmit_drops("eth0: 1 2", "eth0"), None);
    }
}
