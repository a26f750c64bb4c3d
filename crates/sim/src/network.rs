//! Links and switches, and their topology.
//!
//! Switches choose among equal-cost paths by a salted hash of the outer addresses and ports (ECMP), so a transport path
//! is a source port. In the `parallel` topology the source port is the path.

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use crate::link::{Link, LinkConfig, LinkPatch};
use crate::packet::Packet;
use crate::rng::{Rng, mix};
use crate::scenario::Topology;

/// The end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    /// A host, by number.
    Host(u32),
    /// A switch, by number.
    Switch(u32),
}

const NONE: u32 = u32::MAX;

/// A switch: hosts below it are reached by one link, all others by any of the uplinks.
#[derive(Clone, Debug)]
struct Switch {
    name: String,
    salt: u64,
    /// By host: the link down to it; `NONE`: the host is not below.
    down: Vec<u32>,
    up: Vec<u32>,
}

/// The physical network.
#[derive(Clone, Debug)]
pub struct Network {
    /// All links, one direction each.
    pub links: Vec<Link>,
    names: Vec<String>,
    to: Vec<Node>,
    /// Links that routing avoids because it knows that they are down.
    withdrawn: Vec<bool>,
    withdrawn_count: u32,
    switches: Vec<Switch>,
    hosts: u32,
    /// By host: its link to the network; in the parallel topology its first link to host 0.
    uplink: Vec<u32>,
    /// Parallel topology: number of paths between two hosts; otherwise 0.
    parallel: u32,
    source_port_base: u16,
    /// Additional salt for hashing packets with this sender, receiver and source port.
    rehashed: HashMap<(u32, u32, u16), u64, FixedState>,
}

impl Network {
    /// Builds the topology. `rng` generates the switches' salts.
    pub fn build(topology: &Topology, source_port_base: u16, rng: &mut Rng) -> Network {
        let mut net = Network {
            links: Vec::new(),
            names: Vec::new(),
            to: Vec::new(),
            withdrawn: Vec::new(),
            withdrawn_count: 0,
            switches: Vec::new(),
            hosts: topology.hosts(),
            uplink: Vec::new(),
            parallel: 0,
            source_port_base,
            rehashed: HashMap::default(),
        };
        match topology {
            Topology::Parallel { hosts, paths, link, path } => {
                net.parallel = u32::from(*paths);
                for from in 0..*hosts {
                    net.uplink.push(net.links.len() as u32);
                    for to in 0..*hosts {
                        for i in 0..*paths {
                            let own = path.get(usize::from(i)).cloned().unwrap_or_default();
                            let config = own.on(link.on(LinkConfig::default()));
                            net.add(format!("h{from}>h{to}/{i}"), Node::Host(to), config);
                        }
                    }
                }
            }
            Topology::Star { hosts, link } => {
                let switch = net.switch("s0".into(), rng);
                net.attach(switch, 0..*hosts, link);
            }
            Topology::Clos2 { leaves, spines, hosts_per_leaf, host_link, fabric_link } => {
                let leaf: Vec<u32> = (0..*leaves).map(|i| net.switch(format!("leaf{i}"), rng)).collect();
                let spine: Vec<u32> = (0..*spines).map(|i| net.switch(format!("spine{i}"), rng)).collect();
                for (i, &l) in (0..).zip(&leaf) {
                    let below = i * hosts_per_leaf..(i + 1) * hosts_per_leaf;
                    net.attach(l, below.clone(), host_link);
                    for &s in &spine {
                        net.join(l, s, below.clone(), fabric_link);
                    }
                }
            }
            Topology::Clos3 {
                pods,
                tors_per_pod,
                aggs_per_pod,
                cores_per_agg,
                hosts_per_tor,
                host_link,
                fabric_link,
            } => {
                let core: Vec<u32> =
                    (0..aggs_per_pod * cores_per_agg).map(|i| net.switch(format!("core{i}"), rng)).collect();
                for pod in 0..*pods {
                    let agg: Vec<u32> = (0..*aggs_per_pod).map(|i| net.switch(format!("agg{pod}.{i}"), rng)).collect();
                    let in_pod = tors_per_pod * hosts_per_tor;
                    let first = pod * in_pod;
                    for tor in 0..*tors_per_pod {
                        let t = net.switch(format!("tor{pod}.{tor}"), rng);
                        let below = first + tor * hosts_per_tor..first + (tor + 1) * hosts_per_tor;
                        net.attach(t, below.clone(), host_link);
                        for &a in &agg {
                            net.join(t, a, below.clone(), fabric_link);
                        }
                    }
                    for (i, &a) in agg.iter().enumerate() {
                        for &c in &core[i * *cores_per_agg as usize..(i + 1) * *cores_per_agg as usize] {
                            net.join(a, c, first..first + in_pod, fabric_link);
                        }
                    }
                }
            }
        }
        net
    }

    fn add(&mut self, name: String, to: Node, config: LinkConfig) -> u32 {
        self.names.push(name);
        self.to.push(to);
        self.withdrawn.push(false);
        self.links.push(Link::new(config));
        self.links.len() as u32 - 1
    }

    fn switch(&mut self, name: String, rng: &mut Rng) -> u32 {
        self.switches.push(Switch {
            name,
            salt: rng.next_u64(),
            down: vec![NONE; self.hosts as usize],
            up: Vec::new(),
        });
        self.switches.len() as u32 - 1
    }

    /// Attaches hosts to a switch.
    fn attach(&mut self, switch: u32, hosts: std::ops::Range<u32>, link: &LinkPatch) {
        let config = link.on(LinkConfig::default());
        for host in hosts {
            let name = self.switches[switch as usize].name.clone();
            let up = self.add(format!("h{host}>{name}"), Node::Switch(switch), config.clone());
            let down = self.add(format!("{name}>h{host}"), Node::Host(host), config.clone());
            self.uplink.push(up);
            self.switches[switch as usize].down[host as usize] = down;
        }
    }

    /// Connects a switch to another one above it, which reaches `hosts` by this link.
    fn join(&mut self, below: u32, above: u32, hosts: std::ops::Range<u32>, link: &LinkPatch) {
        let config = link.on(LinkConfig::default());
        let (b, a) = (self.switches[below as usize].name.clone(), self.switches[above as usize].name.clone());
        let up = self.add(format!("{b}>{a}"), Node::Switch(above), config.clone());
        let down = self.add(format!("{a}>{b}"), Node::Switch(below), config);
        self.switches[below as usize].up.push(up);
        for host in hosts {
            self.switches[above as usize].down[host as usize] = down;
        }
    }

    /// Number of hosts.
    pub fn hosts(&self) -> u32 {
        self.hosts
    }

    /// The name of a link: "h0>h1/2", "h3>leaf0", "leaf0>spine1", "agg0.1>core2".
    pub fn name(&self, link: u32) -> &str {
        &self.names[link as usize]
    }

    /// The end of a link.
    pub fn end(&self, link: u32) -> Node {
        self.to[link as usize]
    }

    /// The first link of a packet's route.
    pub fn first_link(&self, packet: &Packet) -> Option<u32> {
        let uplink = *self.uplink.get(packet.src as usize)?;
        if self.parallel == 0 {
            return Some(uplink);
        }
        let path = u32::from(packet.source_port.wrapping_sub(self.source_port_base)) % self.parallel;
        (packet.dst < self.hosts).then_some(uplink + packet.dst * self.parallel + path)
    }

    /// The next link from a switch.
    pub fn next_link(&self, switch: u32, packet: &Packet) -> Option<u32> {
        let switch = &self.switches[switch as usize];
        let down = *switch.down.get(packet.dst as usize)?;
        if down != NONE {
            return (!self.withdrawn[down as usize]).then_some(down);
        }
        let ports = u64::from(packet.source_port) << 16 | u64::from(packet.dest_port);
        let hosts = u64::from(packet.src) << 32 | u64::from(packet.dst);
        let mut hash = mix(mix(hosts ^ switch.salt) ^ ports);
        if !self.rehashed.is_empty()
            && let Some(salt) = self.rehashed.get(&(packet.src, packet.dst, packet.source_port))
        {
            hash = mix(hash ^ salt);
        }
        let pick = |ways: usize| ((u128::from(hash) * ways as u128) >> 64) as usize;
        if self.withdrawn_count == 0 {
            return switch.up.get(pick(switch.up.len())).copied();
        }
        let good = || switch.up.iter().copied().filter(|&link| self.leads(link, packet.dst));
        good().nth(pick(good().count()))
    }

    /// Whether, as far as routing knows, a link leads to a host.
    fn leads(&self, link: u32, host: u32) -> bool {
        if self.withdrawn[link as usize] {
            return false;
        }
        match self.to[link as usize] {
            Node::Host(end) => end == host,
            Node::Switch(switch) => {
                let switch = &self.switches[switch as usize];
                match switch.down[host as usize] {
                    NONE => switch.up.iter().any(|&up| self.leads(up, host)),
                    down => self.leads(down, host),
                }
            }
        }
    }

    /// Tells routing whether a link is down. All switches learn it at the same time.
    pub fn withdraw(&mut self, link: u32, down: bool) {
        let known = &mut self.withdrawn[link as usize];
        if *known != down {
            *known = down;
            self.withdrawn_count = if down { self.withdrawn_count + 1 } else { self.withdrawn_count - 1 };
        }
    }

    /// The other direction of a link.
    pub fn reverse(&self, link: u32) -> u32 {
        if self.parallel == 0 {
            // Directions are added in pairs.
            return link ^ 1;
        }
        let (pair, path) = (link / self.parallel, link % self.parallel);
        let (from, to) = (pair / self.hosts, pair % self.hosts);
        (to * self.hosts + from) * self.parallel + path
    }

    /// From now on, switches mix `salt` into the hash of packets from `src` to `dst` with this source port. This models
    /// a sender that moves its flow to another path by using another source port.
    pub(crate) fn rehash(&mut self, src: u32, dst: u32, source_port: u16, salt: u64) {
        self.rehashed.insert((src, dst, source_port), salt);
    }

    /// The links of a packet's route.
    pub(crate) fn way(&self, packet: &Packet) -> Vec<u32> {
        let mut links: Vec<u32> = self.first_link(packet).into_iter().collect();
        // No topology has longer routes.
        while let Some(&last) = links.last().filter(|_| links.len() < 16) {
            let Node::Switch(switch) = self.end(last) else { break };
            let Some(next) = self.next_link(switch, packet) else { break };
            links.push(next);
        }
        links
    }

    /// Links whose name matches `pattern`, in which `*` stands for any characters.
    pub fn matching<'a>(&'a self, pattern: &'a str) -> impl Iterator<Item = u32> + 'a {
        (0..self.links.len() as u32).filter(move |&l| matches(pattern.as_bytes(), self.name(l).as_bytes()))
    }
}

fn matches(pattern: &[u8], text: &[u8]) -> bool {
    match pattern.split_first() {
        None => text.is_empty(),
        Some((b'*', rest)) => (0..=text.len()).any(|i| matches(rest, &text[i..])),
        Some((c, rest)) => text.first() == Some(c) && matches(rest, &text[1..]),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn packet(src: u32, dst: u32, source_port: u16) -> Packet {
        Packet { src, dst, source_port, dest_port: 4794, ..Packet::default() }
    }

    /// Follows a packet and returns the links of its route.
    fn way(net: &Network, packet: &Packet) -> Vec<u32> {
        let mut links = vec![net.first_link(packet).expect("a first link")];
        for _ in 0..16 {
            match net.end(links[links.len() - 1]) {
                Node::Host(host) => {
                    assert_eq!(host, packet.dst);
                    return links;
                }
                Node::Switch(s) => links.push(net.next_link(s, packet).expect("a next link")),
            }
        }
        panic!("a loop: {links:?}");
    }

    #[test]
    fn names_and_patterns() {
        for (pattern, text, want) in [
            ("h0>h1/2", "h0>h1/2", true),
            ("*", "anything", true),
            ("*/2", "h0>h1/2", true),
            ("*/2", "h0>h1/12", false),
            ("leaf*>spine1", "leaf0>spine1", true),
            ("leaf*>spine1", "spine1>leaf0", false),
            ("", "x", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), want, "{pattern} {text}");
        }
    }

    #[test]
    fn routing_avoids_links_that_it_knows_to_be_down() {
        let link = LinkPatch::default;
        let topology = Topology::Clos3 {
            pods: 2,
            tors_per_pod: 2,
            aggs_per_pod: 2,
            cores_per_agg: 2,
            hosts_per_tor: 2,
            host_link: link(),
            fabric_link: link(),
        };
        let mut net = Network::build(&topology, 49_152, &mut Rng::new(1));
        let ways =
            |net: &Network| -> BTreeSet<Vec<u32>> { (0..64).map(|i| way(net, &packet(0, 7, 49_152 + i))).collect() };
        assert_eq!(ways(&net).len(), 4);
        // The last links of one route are down. Switches further up must not use it.
        let last = net.matching("agg1.0>tor1.1").next().expect("a link");
        assert!(ways(&net).iter().any(|w| w.contains(&last)));
        assert_eq!(net.name(net.reverse(last)), "tor1.1>agg1.0");
        net.withdraw(last, true);
        assert_eq!(ways(&net).len(), 2);
        assert!(ways(&net).iter().all(|w| !w.contains(&last)));
        let core = net.matching("core2>agg1.1").next().expect("a link");
        net.withdraw(core, true);
        assert_eq!(ways(&net).len(), 1);
        let last = net.matching("tor1.1>h7").next().expect("a link");
        net.withdraw(last, true);
        let Node::Switch(tor) = net.end(net.first_link(&packet(0, 7, 0)).expect("a first link")) else { panic!() };
        assert_eq!(net.next_link(tor, &packet(0, 7, 49_152)), None, "partitioned");
        for link in 0..net.links.len() as u32 {
            net.withdraw(link, false);
        }
        assert_eq!(ways(&net).len(), 4);
        let topology = Topology::Parallel { hosts: 3, paths: 4, link: LinkPatch::default(), path: Vec::new() };
        let net = Network::build(&topology, 49_152, &mut Rng::new(1));
        let there = net.matching("h0>h2/3").next().expect("a link");
        assert_eq!(net.name(net.reverse(there)), "h2>h0/3");
    }

    #[test]
    fn parallel_paths_are_source_ports_and_disjoint() {
        let topology = Topology::Parallel { hosts: 3, paths: 4, link: LinkPatch::default(), path: Vec::new() };
        let net = Network::build(&topology, 49_152, &mut Rng::new(1));
        assert_eq!(net.name(way(&net, &packet(2, 1, 49_155))[0]), "h2>h1/3");
        assert_eq!(net.matching("h0>h1/*").count(), 4);
        let all: BTreeSet<u32> = (0..4).flat_map(|i| way(&net, &packet(0, 2, 49_152 + i))).collect();
        assert_eq!(all.len(), 4);
    }

    #[test]
    fn every_host_reaches_every_other_and_source_ports_spread() {
        let link = LinkPatch::default;
        let clos2 = Topology::Clos2 { leaves: 4, spines: 4, hosts_per_leaf: 3, host_link: link(), fabric_link: link() };
        let clos3 = Topology::Clos3 {
            pods: 3,
            tors_per_pod: 2,
            aggs_per_pod: 2,
            cores_per_agg: 2,
            hosts_per_tor: 2,
            host_link: link(),
            fabric_link: link(),
        };
        let star = Topology::Star { hosts: 12, link: link() };
        for (topology, longest, ways) in [(clos2, 4, 4), (clos3, 6, 4), (star, 2, 1)] {
            let net = Network::build(&topology, 49_152, &mut Rng::new(1));
            assert_eq!(net.hosts(), 12);
            let mut lengths = BTreeSet::new();
            for (src, dst) in (0..12).flat_map(|a| (0..12).map(move |b| (a, b))).filter(|(a, b)| a != b) {
                lengths.insert(way(&net, &packet(src, dst, 49_152)).len());
            }
            assert_eq!(lengths.last(), Some(&longest));
            let seen: BTreeSet<Vec<u32>> = (0..64).map(|i| way(&net, &packet(0, 11, 49_152 + i))).collect();
            assert_eq!(seen.len(), ways, "{topology:?}");
            assert_eq!(way(&net, &packet(0, 11, 50_000)), way(&net, &packet(0, 11, 50_000)));
        }
    }
}
