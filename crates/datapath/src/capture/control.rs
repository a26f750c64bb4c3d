//! Starts and ends captures and mirrors of a core.

use bifrost_port::GuestPort;

use super::mirror::Mirrors;
use super::{Capture, CaptureConfig, Chunk, Copies, MirrorSpec};
use crate::core::Core;

impl<P: GuestPort> Core<P> {
    /// Starts a capture, replacing a running one. From now on [`turn_captured`](Self::turn_captured) must be called
    /// instead of [`turn`](Self::turn).
    pub fn start_capture(&mut self, config: CaptureConfig) {
        let vnic = config.port.and_then(|owner| {
            let port = self.ports.get(owner as usize)?.as_ref()?;
            Some((owner, port.vni, port.mac))
        });
        let mirrors = self.capture.take().and_then(|capture| capture.mirrors);
        self.capture = Some(Box::new(Capture { vnic, is_on: true, ..Capture::new(config, mirrors) }));
    }

    /// Sets the mirrors, at most [`MAX_MIRRORS`](super::MAX_MIRRORS), with room for `bytes` bytes until they are fetched; nothing is
    /// mirrored if `specs` is empty. While there are mirrors, [`turn_captured`](Self::turn_captured) must be called.
    pub fn set_mirrors(&mut self, specs: Vec<MirrorSpec>, bytes: usize) {
        let mirrors = if specs.is_empty() { None } else { Some(Box::new(Mirrors::new(specs, bytes))) };
        match &mut self.capture {
            Some(capture) if capture.is_on => capture.mirrors = mirrors,
            _ => self.capture = mirrors.map(|mirrors| Box::new(Capture::new(CaptureConfig::nothing(), Some(mirrors)))),
        }
    }

    /// Returns what was mirrored since the last call; `spare` is filled next. `None`: nothing is mirrored.
    pub fn fetch_mirrored(&mut self, mut spare: Copies) -> Option<Copies> {
        let mirrors = self.capture.as_mut()?.mirrors.as_mut()?;
        spare.clear();
        Some(std::mem::replace(&mut mirrors.copies, spare))
    }

    /// Returns what was captured since the last call; `spare` is filled next. `None`: no capture is running.
    pub fn fetch_capture(&mut self, mut spare: Chunk) -> Option<Chunk> {
        let capture = self.capture.as_mut().filter(|capture| capture.is_on)?;
        spare.clear();
        Some(std::mem::replace(&mut capture.chunk, spare))
    }

    /// Ends a capture; returns what was captured since the last fetch.
    pub fn stop_capture(&mut self) -> Option<Chunk> {
        let Capture { chunk, mirrors, .. } = *self.capture.take_if(|capture| capture.is_on)?;
        self.capture = mirrors.map(|mirrors| Box::new(Capture::new(CaptureConfig::nothing(), Some(mirrors))));
        Some(chunk)
    }

    /// Whether a capture is running, or something is mirrored.
    pub fn is_captured(&self) -> bool {
        self.capture.is_some()
    }
}
