//! Counters of the daemon from which this one took over, so that counters continue where they were.

use std::collections::BTreeMap;

use bifrost_control::api::{Place, Sample};
use bifrost_control::counters::{self, Kind};

/// Counters by name and by where they were counted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Carried(pub(crate) BTreeMap<(String, Place), u64>);

/// Gauges of packets in queues, and the counters to which these packets are added at a takeover: they are handed over,
/// or lost.
const ENDS: [(&str, &str); 5] = [
    ("port.unswitched_packets", "port.gone_unswitched_packets"),
    ("port.blocked_packets", "port.gone_switched_packets"),
    ("port.learning_packets", "port.learn_gone_packets"),
    ("tap.rx_held_frames", "tap.rx_refused_frames"),
    ("fault.waiting_packets", "fault.overflow_packets"),
];
/// Gauges of objects that are handed over, and the counters in which the next daemon counts them again.
const BEGINS: [(&str, &str); 3] = [
    ("avs.current_sessions", "avs.created_sessions"),
    ("avs.balanced_current_sessions", "avs.balanced_created_sessions"),
    ("avs.nat_current_mappings", "avs.nat_created_mappings"),
];
/// Counted by the kernel while the device exists.
const KERNELS: [&str; 1] = ["tap.tx_overrun_packets"];

impl Carried {
    pub(crate) fn of_samples(samples: Vec<Sample>) -> Carried {
        let mut carried: BTreeMap<(String, Place), u64> = BTreeMap::new();
        let mut begin_again: Vec<(String, Place, u64)> = Vec::new();
        for Sample { counter, at, value } in samples {
            if let Some((_, becomes)) = ENDS.iter().find(|(gauge, _)| *gauge == counter) {
                *carried.entry(((*becomes).to_owned(), at)).or_default() += value;
            } else if let Some((_, counted)) = BEGINS.iter().find(|(gauge, _)| *gauge == counter) {
                begin_again.push(((*counted).to_owned(), at, value));
            } else if counters::meaning(&counter).is_some_and(|meaning| meaning.kind != Kind::Gauge)
                && !KERNELS.contains(&&*counter)
            {
                *carried.entry((counter, at)).or_default() += value;
            }
        }
        for (counter, at, value) in begin_again {
            if let Some(counted) = carried.get_mut(&(counter, at)) {
                *counted = counted.saturating_sub(value);
            }
        }
        carried.retain(|_, value| *value > 0);
        Carried(carried)
    }

    /// Counters that another daemon has handed over. Unknown names are left out.
    pub(crate) fn from_handed(samples: Vec<Sample>) -> Carried {
        let known = samples.into_iter().filter(|sample| counters::meaning(&sample.counter).is_some());
        Carried(known.map(|Sample { counter, at, value }| ((counter, at), value)).collect())
    }

    /// Forgets the counters of a port that has a new device.
    pub(crate) fn forget(&mut self, port: &str) {
        self.0.retain(|(_, at), _| at.port.as_deref() != Some(port));
    }

    /// Adds the carried values to `samples`, and removes them here.
    pub(crate) fn add_to(&mut self, samples: &mut [Sample]) {
        if self.0.is_empty() {
            return;
        }
        for sample in samples {
            let key = (std::mem::take(&mut sample.counter), std::mem::take(&mut sample.at));
            sample.value += self.0.remove(&key).unwrap_or(0);
            (sample.counter, sample.at) = key;
        }
    }

    /// Carried values that were not added to any sample.
    pub(crate) fn rest(self) -> Vec<Sample> {
        self.0.into_iter().map(|((counter, at), value)| Sample { counter, at, value }).collect()
    }

    /// Counters of workers and their ports, by name only.
    pub(crate) fn sums(&self) -> Vec<(String, u64)> {
        let of_workers = self.0.iter().filter(|((_, at), _)| at.worker.is_some() && at.peer.is_none());
        of_workers.map(|((counter, _), value)| (counter.clone(), *value)).collect()
    }

    /// A counter of a port, summed over all workers.
    pub(crate) fn of_port(&self, port: &str, counter: &str) -> u64 {
        let of_it = |((name, at), _): &(&(String, Place), &u64)| name == counter && at.port.as_deref() == Some(port);
        self.0.iter().filter(of_it).map(|(_, value)| value).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(counter: &str, port: Option<&str>, value: u64) -> Sample {
        let at = Place { worker: Some(0), port: port.map(str::to_owned), ..Place::default() };
        Sample { counter: counter.to_owned(), at, value }
    }

    #[test]
    fn counters_are_carried_and_gauges_are_not() {
        let carried = Carried::of_samples(vec![
            sample("port.tx_packets", Some("a"), 10),
            sample("port.blocked_packets", Some("a"), 3),
            sample("port.gone_switched_packets", Some("a"), 1),
            sample("port.held_packets", Some("a"), 5),
            sample("tap.tx_overrun_packets", Some("a"), 6),
            sample("avs.current_sessions", None, 7),
            sample("avs.created_sessions", None, 20),
            sample("unknown.test_packets", None, 1),
        ]);
        assert_eq!(carried.of_port("a", "port.tx_packets"), 10);
        assert_eq!(carried.of_port("a", "port.gone_switched_packets"), 4);
        assert_eq!(carried.sums().iter().map(|(_, value)| value).sum::<u64>(), 10 + 4 + 13);
        let mut next = Carried::from_handed(carried.clone().rest());
        let mut page = [sample("port.tx_packets", Some("a"), 2), sample("port.tx_packets", Some("b"), 2)];
        next.add_to(&mut page);
        assert_eq!(page.map(|sample| sample.value), [12, 2]);
        let rest: Vec<String> = next.rest().into_iter().map(|sample| sample.counter).collect();
        assert_eq!(rest, ["avs.created_sessions", "port.gone_switched_packets"]);
        let mut gone = carried;
        gone.forget("a");
        assert_eq!(gone.sums(), [("avs.created_sessions".to_owned(), 13)]);
    }
}
