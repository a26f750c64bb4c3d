//! A pod with one worker, fed over memif.

use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};

use super::{FEEDS, FLOWS, Measured, PAYLOAD, Service, WORKS};
use crate::gateway::feeder::{self, Feeder, Flows};
use crate::gateway::frames::{self, GATEWAY, GATEWAY_MAC, HEADERS, Inner, PROVIDER, SENDER};
use crate::gateway::programs::{Daemon, of_workers};
use crate::lab::Lab;
use crate::netns::Namespace;
use crate::processor;

/// Number of VPCs, and of vNICs in each.
const VPCS: u32 = 200;
const HOSTS: u32 = 250;
const FIRST_VNI: u32 = 1000;
/// The network of the backends of cloud services.
const BACKENDS_VNI: u32 = 900;
/// Tunnel addresses of the tenants' hosts.
const VTEPS: [Ipv4Addr; 4] =
    [SENDER, Ipv4Addr::new(10, 0, 0, 12), Ipv4Addr::new(10, 0, 0, 13), Ipv4Addr::new(10, 0, 0, 14)];
const CUSTOMER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 20);
/// The services that take turns.
const SERVICES: [Service; 4] = [Service::Vpc, Service::Internet, Service::Idc, Service::CloudService];
/// Duration of a turn, and of the rest before and after it: an idle worker reports how long it was busy.
const TURN: Duration = Duration::from_millis(400);
const REST: Duration = Duration::from_millis(30);
const PATIENCE: Duration = Duration::from_secs(20);

/// The headers of all flows, in sending order: consecutive flows have nothing in common.
pub(super) fn flows(service: Service) -> Result<Vec<[u8; HEADERS]>> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut all: Vec<u32> = (0..FLOWS).collect();
    random.shuffle(&mut all);
    all.into_iter()
        .map(|flow| {
            let (vpc, rest) = (flow % VPCS, flow / VPCS);
            let (host, number) = (rest % HOSTS, rest / HOSTS);
            let (destination, port) = match service {
                Service::Vpc | Service::None => (address(random.u32(0..HOSTS)), 9),
                Service::Internet => (Ipv4Addr::from_bits(0xc600_0000 | random.u32(0..1 << 24)), 443),
                Service::Idc => (Ipv4Addr::new(172, 16, (rest >> 8) as u8, rest as u8), 9),
                Service::CloudService => (Ipv4Addr::new(192, 168, 9, 1), 80),
            };
            let inner =
                Inner { vni: FIRST_VNI + vpc, source: address(host), destination, ports: (2000 + number as u16, port) };
            frames::headers(&inner, PAYLOAD)
        })
        .collect()
}

/// The address of a VPC's vNIC.
fn address(host: u32) -> Ipv4Addr {
    Ipv4Addr::new(192, 168, 1, host as u8)
}

/// The services, in short turns.
pub(super) fn measure(lab: &Lab, time: Duration, logs: &Path) -> Result<Vec<(Service, f64, Measured)>> {
    let (control, memif) = (lab.run.directory().join("gw.sock"), lab.run.directory().join("memif.sock"));
    let feeder = Feeder::listen(memif.clone(), 2)?;
    let namespace = Namespace::create(format!("{}-pod", lab.run.id()))?;
    let text = configuration(&control, &memif);
    let mut pod = Daemon::launch(lab, &namespace, "bifrost-gw", &text, control, logs)?;
    let (mut to, mut from) = feeder.rings(PATIENCE)?;
    pod.wait_until_it_answers()?;
    let ([priority_to, to], [priority_from, from]) = (&mut to[..], &mut from[..]) else {
        bail!("a pod of one core has two rings");
    };
    let wanted: Vec<String> = VTEPS.iter().chain([&CUSTOMER, &PROVIDER]).map(ToString::to_string).collect();
    feeder::answer_arp(priority_to, priority_from, PATIENCE, || {
        let state = pod.status().unwrap_or_default();
        wanted.iter().all(|address| state["neighbours"][address].is_string())
    })?;
    let kinds = SERVICES
        .into_iter()
        .map(|service| Ok(Flows { headers: flows(service)?, payload: PAYLOAD }))
        .collect::<Result<Vec<_>>>()?;
    let mark = || Ok((of_workers(&pod.status()?, "busy_ns")?, processor::transfer_ns(FEEDS, WORKS)?));
    let rounds = (time.as_secs_f64() / TURN.as_secs_f64()).ceil() as u32;
    let turns = processor::on(FEEDS, || feeder::feed_in_turns((to, from), &kinds, (rounds, TURN, REST), mark))?;
    pod.check_alive()?;
    let measured = |(kind, fed, [before, after]): (usize, feeder::Fed, [(u64, f64); 2])| {
        let busy_s = ((after.0 - before.0) as f64 / 1e9).min(fed.seconds);
        // The larger latency: the processors may have moved in between.
        let transfer_ns = before.1.max(after.1);
        let (forwarded, dropped, seconds) = (fed.forwarded, fed.dropped, fed.seconds);
        (SERVICES[kind], transfer_ns, Measured { forwarded, dropped, seconds, busy_s })
    };
    Ok(turns.into_iter().map(measured).collect())
}

fn configuration(control: &Path, memif: &Path) -> String {
    let pool = |network: u8| (1..=64).map(|n| format!("\"100.64.{network}.{n}\"")).collect::<Vec<_>>().join(", ");
    let mut text = format!(
        r#"control = {{ socket = {control:?} }}
[gateway]
pod = 1
cores = 1
processors = [{WORKS}]
interfaces = [{memif:?}]
addresses = ["{GATEWAY}"]
mac = "{GATEWAY_MAC}"
on_link = ["10.0.0.0/24"]
sessions = 2000000
[[pools]]
name = "nat"
addresses = [{}]
[[pools]]
name = "service"
vni = {BACKENDS_VNI}
addresses = [{}]
[[internet]]
prefix = "0.0.0.0/0"
next_hop = "{PROVIDER}"
"#,
        pool(1),
        pool(2),
    );
    // Internet routes that most packets do not use.
    for net in 0..1024 {
        let _ = write!(
            text,
            "[[internet]]\nprefix = \"198.{}.{}.0/22\"\nnext_hop = \"{PROVIDER}\"\n",
            net / 64,
            net % 64 * 4
        );
    }
    let backend = |n: u32| (Ipv4Addr::new(10, 90, 0, n as u8), VTEPS[n as usize % VTEPS.len()]);
    let hosts: String = (1..=16)
        .map(|n| {
            let (address, vtep) = backend(n);
            format!("{{ address = \"{address}\", mac = \"02:00:00:00:09:{n:02x}\", vtep = \"{vtep}\" }},\n")
        })
        .collect();
    let _ = write!(
        text,
        "[[vpcs]]\nvni = {BACKENDS_VNI}\nroutes = [{{ prefix = \"10.90.0.0/16\", to = \"local\" }}]\nhosts = \
         [\n{hosts}]\n"
    );
    let backends: Vec<String> = (1..=16).map(|n| format!("\"{}:8080\"", backend(n).0)).collect();
    for vpc in 0..VPCS {
        let vni = FIRST_VNI + vpc;
        let hosts: String = (0..HOSTS)
            .map(|host| {
                let vtep = VTEPS[(host + vpc) as usize % VTEPS.len()];
                format!(
                    "{{ address = \"{}\", mac = \"02:00:00:01:{:02x}:{host:02x}\", vtep = \"{vtep}\" }},\n",
                    address(host),
                    vpc
                )
            })
            .collect();
        let _ = write!(
            text,
            r#"[[tunnels]]
name = "customer-{vni}"
vni = {vni}
remote = "{CUSTOMER}"
kind = "gre"
key = {vni}
[[services]]
vni = {vni}
address = "192.168.9.1"
protocol = 17
port = 80
backend_vni = {BACKENDS_VNI}
pool = "service"
backends = [{}]
[[vpcs]]
vni = {vni}
snat = "nat"
routes = [
  {{ prefix = "192.168.1.0/24", to = "local" }},
  {{ prefix = "172.16.0.0/12", to = "idc:customer-{vni}" }},
  {{ prefix = "0.0.0.0/0", to = "internet" }},
]
acl = [
  {{ to_port = 25, protocol = 6, allow = false }},
  {{ to = "192.0.2.0/24", allow = false }},
  {{ allow = true }},
]
hosts = [
{hosts}]
"#,
            backends.join(", ")
        );
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn flows_are_distinct_and_cover_all_tenants() {
        for service in [Service::Vpc, Service::Internet, Service::Idc, Service::CloudService] {
            let flows = flows(service).unwrap();
            let different: BTreeSet<_> = flows.iter().collect();
            let tenants: BTreeSet<_> = flows.iter().map(|headers| headers[46..49].to_vec()).collect();
            assert_eq!((different.len(), tenants.len()), (FLOWS as usize, VPCS as usize), "{service}");
        }
    }
}
