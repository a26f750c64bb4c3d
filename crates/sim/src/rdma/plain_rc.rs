//! A baseline: an application that writes over the reliable service (RC) of a go-back-N NIC.

use anyhow::{Context, Result};
use bifrost_rnic::{
    Access, Completion, Connect, CqId, Domain, INLINE_MAX, Nic, Operation, QpInit, Qpn, ReceiveRequest, Region,
    SendRequest, Sequence, Slice, Status, Transport,
};

use super::Node;

/// One end of a connection: the first end writes to the second one.
#[derive(Debug)]
pub struct PlainRc {
    nic: Nic,
    queue: CqId,
    queue_pair: Qpn,
    memory: Region,
    /// Address and key of the other end's memory, which this end writes.
    to: Option<(u64, u32)>,
    len: u32,
    depth: u32,
    open: u32,
    completions: Vec<Completion>,
    delivered_bytes: u64,
    errors: u64,
}

/// Retries without progress before a queue pair gives up: the maximum (IBTA 9.9.2.4.1; 7 does not mean "infinite"
/// here).
const RETRIES: u8 = 7;
/// Retransmission timeout of the requester, ns: 4.096 us times 2 to the 10th.
const TIMEOUT_NS: u64 = 4_194_304;

impl PlainRc {
    /// Two connected ends. The first one has `depth` messages of `len` bytes open at a time.
    ///
    /// # Errors
    /// If a NIC refuses a value.
    pub fn pair(nics: [Nic; 2], mtu: u16, len: u32, depth: u32) -> Result<[Self; 2]> {
        let mut ends = Vec::new();
        for mut nic in nics {
            let queue = nic.create_queue()?;
            let init = QpInit {
                transport: Transport::Rc,
                send_queue: queue,
                receive_queue: queue,
                send_depth: 1024,
                receive_depth: 1024,
                domain: Domain(1),
                queue_key: 0,
                urgent: false,
            };
            let queue_pair = nic.create_queue_pair(init)?;
            let memory =
                nic.register(Domain(1), Access::RemoteWrite, vec![0; len as usize]).map_err(|(error, _)| error)?;
            ends.push(PlainRc {
                nic,
                queue,
                queue_pair,
                memory,
                to: None,
                len,
                depth: 0,
                open: 0,
                completions: Vec::new(),
                delivered_bytes: 0,
                errors: 0,
            });
        }
        let ends: [PlainRc; 2] = ends.try_into().ok().context("two ends")?;
        let [mut a, mut b] = ends;
        a.connect(&b, mtu)?;
        b.connect(&a, mtu)?;
        a.depth = depth;
        a.to = Some((b.memory.address, b.memory.key.0));
        for _ in 0..1024 {
            b.post_receive()?;
        }
        Ok([a, b])
    }

    fn connect(&mut self, peer: &PlainRc, mtu: u16) -> Result<()> {
        let connect = Connect {
            address: peer.nic.address(),
            port: peer.nic.port(),
            queue_pair: peer.queue_pair,
            source_port: 0xc000,
            send_sequence: Sequence::new(0),
            receive_sequence: Sequence::new(0),
            mtu,
            retries: RETRIES,
            timeout_ns: TIMEOUT_NS,
        };
        Ok(self.nic.connect(self.queue_pair, connect)?)
    }

    fn post_receive(&mut self) -> Result<()> {
        // A WRITE with immediate data consumes a receive request, but none of its memory.
        let slice = Slice { key: self.memory.key, offset: 0, len: 0 };
        Ok(self.nic.post_receive(self.queue_pair, ReceiveRequest { token: 0, slice })?)
    }

    /// Bytes of messages that have arrived, and completions in error.
    pub fn delivered(&self) -> (u64, u64) {
        (self.delivered_bytes, self.errors)
    }
}

impl Node for PlainRc {
    fn nic(&mut self) -> &mut Nic {
        &mut self.nic
    }

    fn turn(&mut self, _: u64) -> bool {
        self.nic.poll(self.queue, 256, &mut self.completions);
        let busy = !self.completions.is_empty();
        for completion in std::mem::take(&mut self.completions) {
            if completion.status != Status::Success {
                self.errors += 1;
            } else if self.to.is_some() {
                self.open -= 1;
            } else {
                self.delivered_bytes += u64::from(completion.len);
                self.errors += u64::from(self.post_receive().is_err());
            }
        }
        if let Some((address, key)) = self.to {
            while self.open < self.depth {
                let slice = Slice { key: self.memory.key, offset: 0, len: self.len };
                let request = SendRequest {
                    token: 0,
                    operation: Operation::Write { address, key },
                    immediate: Some(0),
                    inline: [0; INLINE_MAX],
                    inline_len: 0,
                    slice: Some(slice),
                };
                if self.nic.post_send(self.queue_pair, request).is_err() {
                    break;
                }
                self.open += 1;
            }
        }
        busy
    }

    fn next_deadline(&mut self, _: u64) -> u64 {
        u64::MAX
    }
}
