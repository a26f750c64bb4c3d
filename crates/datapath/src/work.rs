//! The step that a core is executing, and for which port. It is recorded before each step, for the cost of one store,
//! and read after a panic.

use std::sync::Arc;

use bifrost_port::TxHandle;
use bifrost_wire::bifrost::Cid;
use bifrost_wire::{Mac, Vni};

use crate::pulse::Pulse;
use crate::stage::Stage;

/// No port.
const NOBODY: u32 = Pulse::NOBODY;

/// Measures the duration of the steps of a turn.
#[derive(Debug)]
struct Look {
    clock: fn() -> u64,
    /// When the current step began.
    since: u64,
    /// By port.
    spent: Vec<Spent>,
}

/// Time spent for a port in a turn.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spent {
    pub(crate) total_ns: u64,
    /// Duration of the longest step.
    pub(crate) longest_ns: u64,
    /// The longest step.
    pub(crate) stage: Stage,
}

/// An effect injected at steps of one kind, for tests. Only in debug builds, and not available to operators.
#[cfg(debug_assertions)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injection {
    /// The step.
    pub stage: Stage,
    /// To which steps it applies.
    pub of: Of,
    /// The effect.
    pub effect: Effect,
}

/// What happens at a step.
#[cfg(debug_assertions)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The next step panics.
    Panic,
    /// Each step takes this long, ns.
    Busy(u64),
}

/// To which steps an injection applies.
#[cfg(debug_assertions)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// All steps.
    Anybody,
    /// Those of a port.
    Port(u32),
    /// Those of packets addressed to a connection.
    Connection(Cid),
}

/// The work in progress.
#[derive(Debug)]
pub(crate) struct Work {
    /// The current step, visible to other threads.
    pub(crate) pulse: Arc<Pulse>,
    /// The connection to which the last data or control packet is addressed; valid only at [`Stage::Data`],
    /// [`Stage::Judge`] and [`Stage::Control`].
    pub(crate) cid: Cid,
    /// The vNIC to which the last plain VXLAN frame is addressed; valid only at [`Stage::Judge`] without a port.
    pub(crate) to: Option<(Vni, Mac)>,
    /// A packet of a guest that is being delivered to others on this host.
    pub(crate) local: Option<(u32, TxHandle)>,
    /// Present while steps are timed.
    look: Option<Box<Look>>,
    #[cfg(debug_assertions)]
    injected: Option<Injection>,
}

impl Default for Work {
    fn default() -> Self {
        Work {
            pulse: Arc::default(),
            cid: Cid::NONE,
            to: None,
            local: None,
            look: None,
            #[cfg(debug_assertions)]
            injected: None,
        }
    }
}

impl Work {
    /// The next step is for port `owner`.
    #[inline(always)]
    pub(crate) fn at(&mut self, stage: Stage, owner: u32) {
        if self.look.is_some() {
            self.time_step();
        }
        self.pulse.at(stage, owner);
        #[cfg(debug_assertions)]
        self.fire(stage, owner);
    }

    /// The next step is for no port, or for one that is not known yet.
    #[inline(always)]
    pub(crate) fn at_shared(&mut self, stage: Stage) {
        self.at(stage, NOBODY);
    }

    /// Starts timing the steps; there are `ports` ports.
    pub(crate) fn look_closely(&mut self, clock: fn() -> u64, ports: usize) {
        let spent = vec![Spent::default(); ports];
        self.look = Some(Box::new(Look { clock, since: clock(), spent }));
    }

    /// Stops timing the steps. Returns the time spent for each port.
    pub(crate) fn look_away(&mut self) -> Option<Vec<Spent>> {
        self.look.as_ref()?;
        self.time_step();
        self.look.take().map(|look| look.spent)
    }

    /// Ends the timing of the current step.
    #[cold]
    fn time_step(&mut self) {
        let Some(look) = &mut self.look else { return };
        let now = (look.clock)();
        let took = now.saturating_sub(std::mem::replace(&mut look.since, now));
        let (stage, owner) = self.pulse.step();
        let Some(spent) = look.spent.get_mut(owner as usize) else { return };
        spent.total_ns += took;
        if took > spent.longest_ns {
            (spent.longest_ns, spent.stage) = (took, stage);
        }
    }

    pub(crate) fn stage(&self) -> Stage {
        self.pulse.step().0
    }

    /// The port for which the step is done, if known.
    pub(crate) fn owner(&self) -> Option<u32> {
        Some(self.pulse.step().1).filter(|owner| *owner != NOBODY)
    }

    /// Returns the work that was in progress, and resets it.
    pub(crate) fn take(&mut self) -> Work {
        let (stage, owner) = self.pulse.step();
        let mut before = std::mem::take(self);
        // Keep the same pulse, because other threads hold it.
        std::mem::swap(&mut self.pulse, &mut before.pulse);
        self.pulse.at(Stage::Loop, NOBODY);
        before.pulse.at(stage, owner);
        #[cfg(debug_assertions)]
        {
            self.injected = before.injected;
        }
        before
    }

    #[cfg(debug_assertions)]
    pub(crate) fn inject(&mut self, injection: Option<Injection>) {
        self.injected = injection;
    }

    /// Whether the injected effect has not happened yet.
    #[cfg(debug_assertions)]
    pub(crate) fn is_armed(&self) -> bool {
        self.injected.is_some()
    }

    #[cfg(debug_assertions)]
    #[inline(always)]
    fn fire(&mut self, stage: Stage, owner: u32) {
        if let Some(Injection { stage: wanted, of, effect }) = self.injected
            && wanted == stage
            && match of {
                Of::Anybody => true,
                Of::Port(wanted) => wanted == owner,
                Of::Connection(cid) => cid == self.cid,
            }
        {
            match effect {
                Effect::Panic => {
                    self.injected = None;
                    panic!("injected at stage {}", stage.name());
                }
                Effect::Busy(ns) => {
                    let began = std::time::Instant::now();
                    while began.elapsed().as_nanos() < u128::from(ns) {
                        std::hint::spin_loop();
                    }
                }
            }
        }
    }
}
