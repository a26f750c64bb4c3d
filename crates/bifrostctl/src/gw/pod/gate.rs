//! The health gate: what a new pod has to do before an old one goes.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bifrost_control::api::{GatewayPeer, GatewayPod};
use clap::Args;

use super::{PATIENCE, PAUSE, Site};

/// Between two probes.
const PROBES: Duration = Duration::from_secs(1);
/// How long one may take; one that takes longer fails.
const PROBE_SECONDS: &str = "10";
/// Of what a probe that fails has printed, bytes.
const TOLD: usize = 200;

#[derive(Clone, Debug, Args)]
pub(crate) struct Gate {
    /// How long the new pod is watched before the old one withdraws
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u16).range(0..=3600))]
    watch_seconds: u16,
    /// Run this command (by sh) every second while the new pod is watched: it sends probes through the gateway, and fails if they do not come, or after ten seconds. BIFROST_GW_POD and BIFROST_GW_LINK
    /// are the new pod's name and address on the link. Both pods announce the service's addresses by then: use as many flows as it takes to reach both
    #[arg(long, value_name = "COMMAND")]
    probe: Option<String>,
    /// Packets that the new pod must have forwarded while it was watched: tenants' packets, of which it gets its share as soon as it announces their address
    #[arg(long, value_name = "N", default_value_t = 0)]
    least_packets: u64,
}

impl Gate {
    /// The pod has a while to begin to announce what is wanted, and may not stop then until the time is over.
    ///
    /// # Errors
    /// Why the pod does not pass.
    pub(super) fn watch(&self, site: &Site, name: &str, wanted: &BTreeSet<String>) -> Result<(), String> {
        let watch = Duration::from_secs(self.watch_seconds.into());
        let (began, mut since) = (Instant::now(), None);
        let mut probe_at = Instant::now();
        loop {
            let (missing, forwarded) = match site.pod(name) {
                Ok(pod) => (missing(wanted, &pod), forwarded(&pod)),
                Err(error) => (Some(error.to_string()), 0),
            };
            match (missing, since) {
                (Some(why), Some(_)) => return Err(format!("while it was watched: {why}")),
                (Some(why), None) if began.elapsed() > PATIENCE => return Err(why),
                (None, None) => since = Some((Instant::now(), forwarded)),
                (None, Some((since, before))) => {
                    if Instant::now() >= probe_at {
                        self.send_probe(site, name)?;
                        probe_at = Instant::now() + PROBES;
                    }
                    if Instant::elapsed(&since) >= watch {
                        return enough(forwarded.saturating_sub(before), self.least_packets);
                    }
                    std::thread::sleep(PAUSE);
                }
                (Some(_), None) => std::thread::sleep(PAUSE),
            }
        }
    }

    fn send_probe(&self, site: &Site, name: &str) -> Result<(), String> {
        let Some(command) = &self.probe else { return Ok(()) };
        let pods = site.pods().map_err(|error| error.to_string())?;
        let link = pods.iter().find(|pod| pod.name == name).and_then(|pod| pod.own.first());
        let mut probe = Command::new("timeout");
        probe.args([PROBE_SECONDS, "sh", "-c", command]).stdin(Stdio::null()).env("BIFROST_GW_POD", name);
        probe.env("BIFROST_GW_LINK", link.map_or("", String::as_str));
        let output = probe.output().map_err(|error| format!("the probe cannot be run: {error}"))?;
        if output.status.success() {
            return Ok(());
        }
        let text = [output.stdout, output.stderr].concat();
        let told = String::from_utf8_lossy(text.get(..TOLD).unwrap_or(&text)).trim().to_owned();
        Err(format!("the probe failed ({}): {told}", output.status))
    }
}

fn enough(forwarded: u64, least: u64) -> Result<(), String> {
    if forwarded >= least {
        return Ok(());
    }
    Err(format!("it forwarded {forwarded} packets while it was watched, and {least} are wanted"))
}

/// Packets that a pod has forwarded: BGP and BFD are not among them.
fn forwarded(pod: &GatewayPod) -> u64 {
    let all = pod.workers.iter().flatten();
    all.filter(|(name, _)| name.starts_with("forwarded_")).map(|(_, count)| count).sum()
}

/// What a pod's proxies were told, any of them.
pub(super) fn announced(pod: &GatewayPod) -> BTreeSet<String> {
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
            ..GatewayPeer::default()
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

    #[test]
    fn a_pod_that_forwards_nothing_does_not_pass() {
        assert_eq!((enough(0, 0), enough(10, 10)), (Ok(()), Ok(())));
        assert!(enough(9, 10).unwrap_err().contains("forwarded 9 packets"));
        let worker = |name: &'static str, count| [("packets".into(), 100), (name.into(), count)].into_iter().collect();
        let workers = vec![worker("forwarded_vpc_packets", 3), worker("forwarded_internet_packets", 4)];
        assert_eq!(forwarded(&GatewayPod { workers, ..GatewayPod::default() }), 7);
    }
}
