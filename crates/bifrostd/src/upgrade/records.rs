//! Flow logs in an upgrade. No packet waits for them: they follow when the new daemon carries packets.
//!
//! The body of a [`Kind::Records`] is a description in JSON, preceded by its length (32 bits), and then the
//! conversations of each worker. The socket to the collector follows as a descriptor.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use super::channel::{Channel, Message};
use super::format::Kind;
use crate::daemon::State;
use crate::flow_log::handed::{Description, Handed};

/// Timeout of the old daemon for sending.
const SENDING: Duration = Duration::from_secs(2);
/// Timeout of the new daemon: the old one may wait a second until records are written.
const PATIENCE: Duration = Duration::from_secs(5);

/// The part in JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Head {
    description: Description,
    /// Bytes of each worker.
    workers: Vec<usize>,
}

fn emit(description: Description, flows: &[Vec<u8>]) -> Result<Vec<u8>> {
    let head = Head { description, workers: flows.iter().map(Vec::len).collect() };
    let head = serde_json::to_vec(&head)?;
    let mut out = Vec::with_capacity(4 + head.len() + flows.iter().map(Vec::len).sum::<usize>());
    out.extend(u32::try_from(head.len())?.to_le_bytes());
    out.extend(head);
    flows.iter().for_each(|flows| out.extend_from_slice(flows));
    Ok(out)
}

fn parse(body: &[u8]) -> Result<(Description, Vec<Vec<u8>>)> {
    let truncated = "the flow records of the old daemon are truncated";
    let (len, rest) = body.split_first_chunk().context(truncated)?;
    let (head, mut rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize).context(truncated)?;
    let Head { description, workers } =
        serde_json::from_slice(head).context("reading the old daemon's flow records")?;
    let mut flows = Vec::new();
    for len in workers {
        let (of_worker, behind) = rest.split_at_checked(len).context(truncated)?;
        flows.push(of_worker.to_vec());
        rest = behind;
    }
    Ok((description, flows))
}

/// Sends what [`State::hand_over_flow_logs`] has returned.
pub(super) fn send(channel: &Channel, handed: Handed) -> Result<()> {
    let Handed { description, flows, socket } = handed;
    let socket: Vec<_> = socket.iter().map(std::os::fd::AsFd::as_fd).collect();
    channel.send(Kind::Records, &emit(description, &flows)?, &socket, SENDING)
}

/// Receives flow logs, and continues them.
pub(super) fn receive(channel: &Channel, state: &State) -> Result<()> {
    let Message { kind, body, mut descriptors } = channel.receive(PATIENCE)?;
    ensure!(kind == Kind::Records, "expected the flow records of the old daemon, got {kind:?}");
    ensure!(descriptors.len() <= 1, "{} descriptors with flow records", descriptors.len());
    let (description, flows) = parse(&body)?;
    let left_out = state.continue_flow_logs(Handed { description, flows, socket: descriptors.pop() })?;
    if left_out > 0 {
        tracing::warn!("{left_out} conversations of the old daemon's flow log were left out");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_back_and_damaged_ones_do_no_harm() {
        let text = "{\"names\": {\"3\": \"web1\"}, \"collector\": {\"sequence\": 7, \"later\": 1}, \"later\": []}";
        let description: Description = serde_json::from_str(text).unwrap();
        let mut random = fastrand::Rng::with_seed(3);
        for workers in 0..4 {
            let flows: Vec<Vec<u8>> = (0..workers).map(|_| vec![7; random.usize(..300)]).collect();
            let bytes = emit(description.clone(), &flows).unwrap();
            assert_eq!(parse(&bytes).unwrap(), (description.clone(), flows.clone()));
            if flows.iter().any(|flows| !flows.is_empty()) {
                assert!(parse(&bytes[..bytes.len() - 1]).is_err());
            }
            for _ in 0..500 {
                let mut damaged = bytes.clone();
                let at = random.usize(..damaged.len());
                damaged[at] = random.u8(..);
                let _ = parse(&damaged);
            }
        }
        // An absurd number is an error, without an allocation of that size.
        let absurd = Head { workers: vec![usize::MAX], ..Head::default() };
        let head = serde_json::to_vec(&absurd).unwrap();
        assert!(parse(&[&(head.len() as u32).to_le_bytes()[..], &head].concat()).is_err());
    }
}
