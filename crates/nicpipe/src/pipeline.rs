//! All pods.

use crate::pod::{Charged, Entry, Times};
use crate::{Arrival, ConfigError, PipelineConfig, Pod, Refusal, Ring, Rings, look};

/// VLAN identifiers.
const VLANS: usize = 4096;

/// Whose a VLAN is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The pod, by its place in the configuration.
    pub pod: usize,
    /// The pod's interface.
    pub interface: usize,
}

/// The rings of all places.
pub trait Links {
    /// Those of a place.
    fn rings(&mut self, place: Place) -> impl Rings;
}

/// The pipeline. See the [crate].
#[derive(Debug)]
pub struct Pipeline {
    pods: Vec<Pod>,
    by_vlan: Box<[Option<Place>]>,
    untagged: Option<Place>,
    pub(crate) seed: u64,
    malformed: u64,
    no_pod: u64,
}

impl Pipeline {
    /// With all memory that it ever needs.
    ///
    /// # Errors
    /// Settings that do not fit together.
    pub fn new(config: PipelineConfig) -> Result<Self, ConfigError> {
        let mut by_vlan = vec![None; VLANS];
        let mut untagged = None;
        let mut pods: Vec<Pod> = Vec::with_capacity(config.pods.len());
        for (pod, settings) in config.pods.into_iter().enumerate() {
            let name = settings.name.clone();
            for (interface, vlan) in settings.interfaces.iter().enumerate() {
                let slot = match *vlan {
                    None => &mut untagged,
                    Some(vlan) if !(1..4095).contains(&vlan) => return Err(ConfigError::NoVlan(name, vlan)),
                    Some(vlan) => &mut by_vlan[usize::from(vlan)],
                };
                if slot.replace(Place { pod, interface }).is_some() {
                    return Err(ConfigError::Vlan { pod: name, vlan: *vlan });
                }
            }
            let number = settings.balancer.pod;
            if pods.iter().any(|other| other.config.balancer.pod == number) {
                return Err(ConfigError::Number(name, number));
            }
            pods.push(Pod::new(settings, config.longest)?);
        }
        Ok(Pipeline { pods, by_vlan: by_vlan.into(), untagged, seed: config.seed, malformed: 0, no_pod: 0 })
    }

    /// The pods, in the order of the configuration.
    pub fn pods(&self) -> &[Pod] {
        &self.pods
    }

    /// The same, to be changed.
    pub fn pods_mut(&mut self) -> &mut [Pod] {
        &mut self.pods
    }

    /// Frames dropped: malformed, and for no pod.
    pub fn strays(&self) -> (u64, u64) {
        (self.malformed, self.no_pod)
    }

    /// Takes a frame from the wire, where it arrived `at`, which is not later than `now`: rates are those of the wire. `rings` gives the rings of a
    /// place.
    ///
    /// A packet of the reliable transport with hosts is for no ring yet: see [`settle`](Self::settle).
    ///
    /// # Errors
    /// It is dropped.
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

    /// Has the transports do what is due, puts what they have brought into rings, and acknowledges it. To be called after all that arrived at a
    /// time, and when the [`deadline`](Self::deadline) has come.
    pub fn settle(&mut self, now: u64, links: &mut impl Links) {
        let seed = self.seed;
        for (number, pod) in self.pods.iter_mut().enumerate().filter(|(_, pod)| pod.reliable().is_some()) {
            pod.settle(now, seed, number, links);
        }
    }

    /// Hands `sink` what the transports send, each frame in parts. To be called after all that pods returned at a time.
    pub fn emit(&mut self, mut sink: impl FnMut(&[&[u8]])) {
        self.pods.iter_mut().for_each(|pod| pod.emit(&mut sink));
    }

    /// Whose a frame is.
    pub(crate) fn place(&self, arrival: &Arrival) -> Option<Place> {
        match arrival.vlan {
            None => self.untagged,
            Some(vlan) => self.by_vlan.get(usize::from(vlan)).copied().flatten(),
        }
    }

    /// The first time at which a pod's packets must be released, or a transport has something to do.
    pub fn deadline(&self) -> Option<u64> {
        self.pods.iter().filter_map(Pod::deadline).min()
    }
}
