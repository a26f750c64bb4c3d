//! Make before break: a pod withdraws what it announces, and another one takes its place.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use bifrost_control::Client;
use bifrost_control::api::{GatewayPeer, GatewayPod, PodCommand};

use super::super::{get, known};
use super::{Created, PATIENCE, PAUSE, Site, check_name, failure};
use crate::failure::Failure;
use crate::gw::template::Template;

/// How long nothing may have come to a pod that is drained, and how long that may take.
const STILL: Duration = Duration::from_secs(1);
const STILL_WITHIN: Duration = Duration::from_secs(30);

impl Site {
    /// Has a new pod work beside the old one, for `watch` at least, before that goes.
    pub(super) fn migrate(
        &self,
        from: &str,
        to: &str,
        template: &Template,
        cpus: Option<&str>,
        watch: Duration,
    ) -> Result<Created, Failure> {
        self.check_exists(from)?;
        let wanted = announced(&self.pod(from)?);
        if wanted.is_empty() {
            let hint = "`bifrost-gw --json` shows its BGP sessions; without BGP nothing can be moved".to_owned();
            return Err(failure(from, "it announces nothing that could be moved", hint));
        }
        let created = self.create(to, template, cpus)?;
        if let Err(why) = self.watch(to, &wanted, watch) {
            let _ = self.remove(to);
            return Err(failure(to, why, format!("it is deleted, and {from} is as it was")));
        }
        self.drain(from)?;
        self.remove(from)?;
        Ok(created)
    }

    /// The pod has a while to begin to announce what is wanted, and may not stop then until `watch` is over.
    fn watch(&self, name: &str, wanted: &BTreeSet<String>, watch: Duration) -> Result<(), String> {
        let (began, mut since) = (Instant::now(), None);
        loop {
            let missing = match self.pod(name) {
                Ok(pod) => missing(wanted, &pod),
                Err(error) => Some(error.to_string()),
            };
            match (missing, since) {
                (Some(why), Some(_)) => return Err(format!("while it was watched: {why}")),
                (Some(why), None) if began.elapsed() > PATIENCE => return Err(why),
                (None, Some(since)) if Instant::elapsed(&since) >= watch => return Ok(()),
                (None, None) => since = Some(Instant::now()),
                _ => std::thread::sleep(PAUSE),
            }
        }
    }

    /// Has a pod announce its addresses again.
    pub(super) fn announce(&self, name: &str) -> Result<(), Failure> {
        self.check_exists(name)?;
        self.tell(name, &PodCommand::Drain { drain: false })
    }

    /// Has a pod withdraw its addresses, and waits until its proxies know that, and nothing has come for a while.
    pub(super) fn drain(&self, name: &str) -> Result<(), Failure> {
        self.check_exists(name)?;
        self.tell(name, &PodCommand::Drain { drain: true })?;
        let (began, mut last, mut since) = (Instant::now(), None, Instant::now());
        while began.elapsed() < STILL_WITHIN {
            let told = announced(&self.pod(name)?).is_empty();
            let pods = self.pipeline()?.pods;
            let delivered = pods.iter().find(|pod| pod.name == name).map(|pod| get(&pod.counters, "delivered_packets"));
            if !told || delivered != last {
                (last, since) = (delivered, Instant::now());
            } else if since.elapsed() >= STILL {
                return Ok(());
            }
            std::thread::sleep(PAUSE);
        }
        let hint = format!("it goes on forwarding; `bifrostctl gw pod delete {name}` ends it all the same");
        Err(failure(name, format!("packets still come after {STILL_WITHIN:?}"), hint))
    }

    pub(super) fn check_exists(&self, name: &str) -> Result<(), Failure> {
        check_name(name)?;
        if self.rows()?.iter().any(|row| row.name == name) {
            return Ok(());
        }
        Err(failure(name, "there is no such pod", "`bifrostctl gw pod list` shows those that there are".to_owned()))
    }

    fn pod(&self, name: &str) -> Result<GatewayPod, Failure> {
        let socket = self.directory.join(name).join("gw.sock");
        Client::new(&socket)?.gateway_pod().map_err(|error| known("bifrost-gw", &socket, error))
    }

    fn tell(&self, name: &str, command: &PodCommand) -> Result<(), Failure> {
        let socket = self.directory.join(name).join("gw.sock");
        let told = Client::new(&socket)?.command_pod(command);
        told.map(drop).map_err(|error| known("bifrost-gw", &socket, error))
    }
}

/// What a pod's proxies were told, any of them.
fn announced(pod: &GatewayPod) -> BTreeSet<String> {
    pod.bgp.iter().flat_map(|peer| peer.announced.iter().cloned()).collect()
}

/// What a new pod lacks to take an old one's place, if it lacks something.
fn missing(wanted: &BTreeSet<String>, pod: &GatewayPod) -> Option<String> {
    if !pod.connected {
        return Some("it is not connected with the pipeline".to_owned());
    }
    if let Some(peer) = pod.bgp.iter().find(|peer| peer.state != "established") {
        return Some(format!("its session with {} is {}", peer.address, peer.state));
    }
    let lacks = |peer: &&GatewayPeer| wanted.iter().any(|net| !peer.announced.contains(net));
    match pod.bgp.iter().find(lacks) {
        Some(peer) => Some(format!("it has not announced all of the old pod's addresses to {}", peer.address)),
        None if pod.bgp.is_empty() => Some("it has no BGP sessions".to_owned()),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_pod_takes_an_old_ones_place_when_it_announces_as_much() {
        let peer = |address: &str, state: &'static str, nets: &[&str]| GatewayPeer {
            address: address.to_owned(),
            state: state.into(),
            bfd: None,
            announced: nets.iter().map(|net| (*net).to_owned()).collect(),
        };
        let pod = |bgp| GatewayPod { connected: true, bgp, ..GatewayPod::default() };
        let up = "established";
        let old = pod(vec![peer("a", up, &["x"]), peer("b", up, &["x", "y"])]);
        let wanted = announced(&old);
        assert_eq!(wanted.len(), 2);
        assert_eq!(missing(&wanted, &pod(vec![peer("a", up, &["x", "y", "z"]), peer("b", up, &["x", "y"])])), None);
        for (new, why) in [
            (GatewayPod { connected: false, ..old.clone() }, "not connected"),
            (pod(vec![peer("a", up, &["x", "y"]), peer("b", "idle", &[])]), "session with b is idle"),
            (old.clone(), "not announced all of the old pod's addresses to a"),
            (pod(vec![]), "no BGP sessions"),
        ] {
            assert!(missing(&wanted, &new).is_some_and(|text| text.contains(why)), "{why}");
        }
    }
}
