//! What to capture: `POST /v1/capture`.

use serde::{Deserialize, Serialize};

use super::ApiError;

/// The most bytes kept of a packet.
pub const MAX_SNAPLEN: u32 = 262_144;
/// The longest capture, seconds.
pub const MAX_CAPTURE_SECONDS: u64 = 86_400;

/// What to capture, and when to stop. The answer is a file in the format pcapng, as it comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CaptureSpec {
    /// Where: names of stages; none: all of them.
    pub at: Vec<String>,
    /// Which packets, as `bifrostctl capture --help` says; empty: all.
    pub filter: String,
    /// Only packets from and to this port.
    pub port: Option<String>,
    /// Bytes kept of each packet, 1 to [`MAX_SNAPLEN`].
    pub snaplen_bytes: u32,
    /// Ends after so many packets, at least 1.
    pub packets: u64,
    /// Ends after so many bytes of packets, at least 1.
    pub bytes: u64,
    /// Ends after so long, 1 to [`MAX_CAPTURE_SECONDS`].
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
    /// Whether all values are in range. Names and the filter are for the daemon to look at.
    ///
    /// # Errors
    /// The first value that is not.
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
