//! The choice of a core for a packet that is sprayed.

use crate::Config;
use crate::mutation::mutated;

/// Spreads packets over cores, so that all of them get the same number.
///
/// Without [`Config::affinity`], cores take turns (Albatross, SIGCOMM'25, 4.1). With it, a packet goes to the core of
/// its flow, which may have the flow's entries in its private cache, unless that core was given as many packets more
/// than the one whose turn it is: then it goes to the latter. So a flow of any rate is spread over all cores.
#[derive(Clone, Debug)]
pub struct Cores {
    /// By core: packets that it was given, wrapping. A core without room counts as having been given as many as the
    /// core that was chosen instead.
    given: [u32; MOST],
    /// Number of cores, at most `MOST`.
    cores: u32,
    /// The core whose turn is next.
    next: u32,
    /// The least lead at which a flow's core is not used.
    lead: i32,
}

/// Most cores of a pod: a power of two, so that an index needs no check.
const MOST: usize = 1024;

impl Cores {
    /// The cores of a valid `config`.
    pub fn new(config: &Config) -> Self {
        // No lead is below the least number: cores take turns.
        let lead = if config.affinity == 0 { i32::MIN } else { i32::from(config.affinity) };
        Cores { given: [0; MOST], cores: config.cores.into(), next: 0, lead }
    }

    /// The core of a flow.
    #[inline]
    pub fn of_flow(&self, flow_hash: u32) -> u16 {
        ((u64::from(flow_hash) * u64::from(self.cores)) >> 32) as u16
    }

    /// The core of the next packet, which `has_room`; `None` if none has.
    #[inline]
    pub fn choose(&mut self, flow_hash: u32, config: &Config, mut has_room: impl FnMut(u16) -> bool) -> Option<u16> {
        let (own, turn) = (index(self.of_flow(flow_hash)), index(self.turn(config)));
        let lead = self.given[own].wrapping_sub(self.given[turn]).cast_signed();
        let at = if lead < self.lead { own } else { turn };
        let preferred = at as u16;
        if has_room(preferred) {
            self.given[at] = self.given[at].wrapping_add(1);
            return Some(preferred);
        }
        self.other_than(preferred, config, &mut has_room)
    }

    /// The next core in turn that has room, because `full` has none.
    #[cold]
    fn other_than(&mut self, full: u16, config: &Config, has_room: &mut impl FnMut(u16) -> bool) -> Option<u16> {
        let core = (0..self.cores).map(|_| self.turn(config)).find(|core| *core != full && has_room(*core))?;
        let given = self.given[index(core)].wrapping_add(1);
        self.given[index(core)] = given;
        self.given[index(full)] = given;
        Some(core)
    }

    #[inline]
    fn turn(&mut self, config: &Config) -> u16 {
        let core = self.next;
        let cores = self.cores - u32::from(mutated!(config, CoreLeftOut) && self.cores > 1);
        self.next = if core + 1 >= cores { 0 } else { core + 1 };
        core as u16
    }
}

/// The index of a core, which the compiler knows to be below [`MOST`].
#[inline]
fn index(core: u16) -> usize {
    usize::from(core) % MOST
}
