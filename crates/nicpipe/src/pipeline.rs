//! All pods.

use std::net::IpAddr;

use bifrost_nic::L3;
use bifrost_tables::{ExactMap, exact_map};
use bifrost_wire::Mac;
use bifrost_wire::icmp::v6::solicited_node;

use crate::mutation::mutated;
use crate::pod::{Charged, Entry, Times};
use crate::{Arrival, ConfigError, PipelineConfig, Pod, PodConfig, Refusal, Ring, Rings, look};

/// Number of VLAN identifiers.
const VLANS: usize = 4096;
/// The first interface.
const FIRST: Option<Place> = Some(Place { pod: 0, interface: 0 });

/// The owner of a VLAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The pod, by its index in the configuration.
    pub pod: usize,
    /// The pod's interface.
    pub interface: usize,
}

/// The rings of all interfaces.
pub trait Links {
    /// Those of an interface.
    fn rings(&mut self, place: Place) -> impl Rings;
}

/// The pipeline. See the [crate].
#[derive(Debug)]
pub struct Pipeline {
    pods: Vec<Pod>,
    by_vlan: Box<[Option<Place>]>,
    untagged: Option<Place>,
    /// Pods with MAC addresses, which share VLANs.
    by_mac: ExactMap<(Option<u16>, Mac), Place>,
    longest: usize,
    pub(crate) seed: u64,
    malformed: u64,
    no_pod: u64,
}

impl Pipeline {
    /// Allocates all memory.
    ///
    /// # Errors
    /// Invalid settings.
    pub fn new(config: PipelineConfig) -> Result<Self, ConfigError> {
        let mut pipeline = Pipeline {
            pods: Vec::with_capacity(config.pods.len()),
            by_vlan: vec![None; VLANS].into(),
            untagged: None,
            by_mac: exact_map(config.seed),
            longest: config.longest,
            seed: config.seed,
            malformed: 0,
            no_pod: 0,
        };
        for settings in config.pods {
            pipeline.check(&settings)?;
            let pod = Pod::new(settings, config.longest)?;
            pipeline.add(pod)?;
        }
        Ok(pipeline)
    }

    /// Maximum length of a frame, bytes.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Whether a pod with these settings can be added now.
    ///
    /// # Errors
    /// Another pod has its number, one of its VLANs, or its MAC address.
    pub fn check(&self, settings: &PodConfig) -> Result<(), ConfigError> {
        let PodConfig { name, interfaces, mac, balancer, .. } = settings;
        for (number, vlan) in interfaces.iter().enumerate() {
            if let Some(vlan) = vlan.filter(|vlan| !(1..4095).contains(vlan)) {
                return Err(ConfigError::NoVlan(name.clone(), vlan));
            }
            let shared = self.by_mac.keys().find(|(of, other)| of == vlan && mac.is_none_or(|mac| mac == *other));
            if let (Some((_, other)), Some(_)) = (shared, mac) {
                return Err(ConfigError::Mac { pod: name.clone(), mac: *other });
            }
            if shared.is_some() || self.sole(*vlan).is_some() || interfaces[..number].contains(vlan) {
                return Err(ConfigError::Vlan { pod: name.clone(), vlan: *vlan });
            }
        }
        let number = balancer.pod;
        if self.pods.iter().any(|other| !other.is_vacant() && other.config.balancer.pod == number) {
            return Err(ConfigError::Number(name.clone(), number));
        }
        Ok(())
    }

    /// Adds a pod, and returns its number here. Its memory was allocated when it was made; the other pods continue.
    ///
    /// # Errors
    /// See [`check`](Self::check).
    pub fn add(&mut self, pod: Pod) -> Result<usize, ConfigError> {
        self.check(&pod.config)?;
        let number = self.pods.iter().position(Pod::is_vacant).unwrap_or(self.pods.len());
        for (interface, vlan) in pod.config.interfaces.iter().enumerate() {
            let place = Place { pod: number, interface };
            match (pod.config.mac, *vlan) {
                (Some(mac), vlan) => drop(self.by_mac.insert((vlan, mac), place)),
                (None, None) => self.untagged = Some(place),
                (None, Some(vlan)) => self.by_vlan[usize::from(vlan)] = Some(place),
            }
        }
        match self.pods.get_mut(number) {
            Some(vacant) => *vacant = pod,
            None => self.pods.push(pod),
        }
        Ok(number)
    }

    /// Removes a pod, with the packets that it holds. The others keep their numbers; the next pod that is added gets
    /// this number. `None` if there is no pod with this number.
    pub fn remove(&mut self, number: usize) -> Option<Pod> {
        let pod = self.pods.get_mut(number).filter(|pod| !pod.is_vacant())?;
        let removed = std::mem::replace(pod, Pod::vacant().ok()?);
        let others = |place: &Option<Place>| place.is_some_and(|place| place.pod != number);
        self.by_vlan.iter_mut().for_each(|place| *place = place.filter(|_| others(place)));
        self.untagged = self.untagged.filter(|place| place.pod != number);
        self.by_mac.retain(|_, place| place.pod != number);
        Some(removed)
    }

    /// The pods by their numbers: those of the configuration in order, then those that were added. A removed one is
    /// [vacant](Pod::is_vacant).
    pub fn pods(&self) -> &[Pod] {
        &self.pods
    }

    /// The same, mutable.
    pub fn pods_mut(&mut self) -> &mut [Pod] {
        &mut self.pods
    }

    /// Frames dropped because they were malformed or belong to no pod.
    pub fn strays(&self) -> (u64, u64) {
        (self.malformed, self.no_pod)
    }

    /// Takes a frame from the wire that arrived `at`, which is not later than `now`: rates are those of the wire.
    /// `rings` returns the rings of an interface.
    ///
    /// A packet of the reliable transport does not go to a ring yet: see [`settle`](Self::settle).
    ///
    /// # Errors
    /// The frame was dropped.
    #[inline]
    pub fn arrive<R: Rings>(
        &mut self,
        now: u64,
        at: u64,
        frame: &[u8],
        rings: impl FnOnce(Place) -> R,
    ) -> Result<(Place, Option<Ring>), Refusal> {
        let Some(arrival) = look(frame) else {
            self.malformed += 1;
            return Err(Refusal::Malformed);
        };
        let Some(place) = self.place(&arrival) else {
            self.no_pod += 1;
            return Err(Refusal::NoPod);
        };
        let pod = &mut self.pods[place.pod];
        let times = Times { now, at };
        if pod.arrive_reliable(times, self.seed, place.interface, &arrival, frame) {
            return Ok((place, None));
        }
        let rings = &mut rings(place);
        let entry = Entry { times, interface: place.interface, charged: Charged::No };
        let ring = pod.arrive(entry, self.seed, &arrival, frame, rings)?;
        Ok((place, Some(ring)))
    }

    /// Runs the transports: does what is due, moves received frames into rings, and acknowledges them. Call it after
    /// all frames that arrived at a time, and at the [`deadline`](Self::deadline).
    pub fn settle(&mut self, now: u64, links: &mut impl Links) {
        let seed = self.seed;
        for (number, pod) in self.pods.iter_mut().enumerate().filter(|(_, pod)| pod.reliable().is_some()) {
            pod.settle(now, seed, number, links);
        }
    }

    /// Passes `sink` the frames that the transports send, each in parts. Call it after all frames that pods returned at
    /// a time.
    pub fn emit(&mut self, mut sink: impl FnMut(&[&[u8]])) {
        self.pods.iter_mut().for_each(|pod| pod.emit(&mut sink));
    }

    /// The owner of a frame.
    #[inline]
    pub(crate) fn place(&self, arrival: &Arrival) -> Option<Place> {
        let sole = if mutated!(VlanIgnored) { FIRST } else { self.sole(arrival.vlan) };
        if sole.is_some() || self.by_mac.is_empty() {
            return sole;
        }
        self.by_mac.get(&(arrival.vlan, arrival.outer.dst_mac)).copied().or_else(|| self.asked(arrival))
    }

    /// The owner of all frames of a VLAN.
    #[inline]
    fn sole(&self, vlan: Option<u16>) -> Option<Place> {
        match vlan {
            None => self.untagged,
            Some(vlan) => self.by_vlan.get(usize::from(vlan)).copied().flatten(),
        }
    }

    /// The owner of the address that a broadcast ARP request or a neighbour solicitation asks for.
    #[cold]
    fn asked(&self, arrival: &Arrival) -> Option<Place> {
        if arrival.outer.dst_mac.is_unicast() {
            return None;
        }
        let asked = |own: &IpAddr| match (own, arrival.outer.dst_ip) {
            (IpAddr::V6(own), IpAddr::V6(group)) => group == solicited_node(*own),
            (IpAddr::V4(own), IpAddr::V4(target)) => arrival.outer.kind == L3::Arp && *own == target,
            _ => false,
        };
        let found = self.by_mac.iter().filter(|((vlan, _), place)| {
            *vlan == arrival.vlan && self.pods[place.pod].config.rules.own.iter().any(asked)
        });
        // If pods share an address, always the same one answers.
        found.map(|(_, place)| *place).min_by_key(|place| (place.pod, place.interface))
    }

    /// The first time at which a pod's packets must be released, or a transport must act.
    pub fn deadline(&self) -> Option<u64> {
        self.pods.iter().filter_map(Pod::deadline).min()
    }
}
