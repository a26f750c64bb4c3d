//! Memory of ports' buffers in an upgrade. The kernel provides a page when it is touched first, and clears it before. If
//! the new daemon touched its buffers while it takes over, guests would wait for all that the old one ever used.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::daemon::State;

/// By port: numbers of buffers of each kind that were ever in use in a queue.
pub(crate) type Buffers = BTreeMap<String, Vec<u32>>;

impl State {
    /// The buffers whose memory this daemon has touched.
    pub(super) fn touched_buffers(&self) -> Result<Buffers> {
        let mut all = Buffers::new();
        for port in &self.config.ports {
            let Some(owner) = self.names.port(&port.name) else { continue };
            let most = all.entry(port.name.clone()).or_default();
            for worker in self.serving(port, owner) {
                let of_queue = worker.run(move |w| w.core_mut().device(owner).map(|device| device.touched()))?;
                for (kind, count) in of_queue.unwrap_or_default().into_iter().enumerate() {
                    most.resize(most.len().max(kind + 1), 0);
                    most[kind] = most[kind].max(count);
                }
            }
        }
        Ok(all)
    }

    /// Touches as many buffers of each queue.
    pub(super) fn touch_buffers(&self, all: &Buffers) -> Result<()> {
        for port in &self.config.ports {
            let (Some(owner), Some(buffers)) = (self.names.port(&port.name), all.get(&port.name)) else { continue };
            for worker in self.serving(port, owner) {
                let buffers = buffers.clone();
                worker.run(move |w| {
                    if let Some(device) = w.core_mut().device_mut(owner) {
                        device.touch(&buffers);
                    }
                })?;
            }
        }
        Ok(())
    }
}
