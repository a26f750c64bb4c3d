//! Packet captures: `POST /v1/capture`.

use serde::{Deserialize, Serialize};

use super::ApiError;

/// Largest snapshot length of a packet, bytes.
pub const MAX_SNAPLEN: u32 = 262_144;
/// Longest capture, s.
pub const MAX_CAPTURE_SECONDS: u64 = 86_400;

/// What to capture, and when to stop. The response streams a pcapng file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CaptureSpec {
    /// Names of stages; empty: all of them.
    pub at: Vec<String>,
    /// Filter expression, see `bifrostctl capture --help`; empty: all packets.
    pub filter: String,
    /// Only packets from and to this port.
    pub port: Option<String>,
    /// Snapshot length: bytes captured of each packet, 1 to [`MAX_SNAPLEN`].
    pub snaplen_bytes: u32,
    /// Maximum number of packets, from 1.
    pub packets: u64,
    /// Maximum number of captured bytes, from 1.
    pub bytes: u64,
    /// Maximum duration, s, 1 to [`MAX_CAPTURE_SECONDS`].
    pub seconds: u64,
}

impl Default for CaptureSpec {
    fn default() -> Self {
        Self {
            at: Vec::new(),
            filter: String::new(),
            port: None,
            snaplen_bytes: MAX_SNAPLEN,
            packets: 100_000,
            bytes: 256 << 20,
            seconds: 60,
        }
    }
}

impl CaptureSpec {
    /// Checks that all values are in range. The daemon checks names and the filter.
    ///
    /// # Errors
    /// The first value out of range.
    pub fn check(&self) -> Result<(), ApiError> {
        let ranges = [
            ("snaplen_bytes", u64::from(self.snaplen_bytes), u64::from(MAX_SNAPLEN)),
            ("packets", self.packets, u64::MAX),
            ("bytes", self.bytes, u64::MAX),
            ("seconds", self.seconds, MAX_CAPTURE_SECONDS),
        ];
        match ranges.iter().find(|(_, value, most)| *value == 0 || value > most) {
            Some((name, value, most)) => Err(ApiError::bad_request(format!("{value} is not in 1 to {most}")).at(*name)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        assert_eq!(CaptureSpec::default().check(), Ok(()));
        let wrong = [
            (CaptureSpec { snaplen_bytes: 0, ..CaptureSpec::default() }, "snaplen_bytes"),
            (CaptureSpec { snaplen_bytes: MAX_SNAPLEN + 1, ..CaptureSpec::default() }, "snaplen_bytes"),
            (CaptureSpec { packets: 0, ..CaptureSpec::default() }, "packets"),
            (CaptureSpec { bytes: 0, ..CaptureSpec::default() }, "bytes"),
            (CaptureSpec { seconds: 86_401, ..CaptureSpec::default() }, "seconds"),
        ];
        for (spec, name) in wrong {
            assert_eq!(spec.check().unwrap_err().location, name);
        }
    }
}
