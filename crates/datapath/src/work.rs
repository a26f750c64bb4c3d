//! The step that a core is executing, and for which port. It is recorded before each step, for the cost of one store,
//! and read after a panic.

use std::sync::Arc;

use bifrost_port::TxHandle;
use bifrost_wire::bifrost::Cid;
use bifrost_wire::{Mac, Vni};

use crate::pulse::Pulse;

/// No port.
const NOBODY: u32 = Pulse::NOBODY;

/// A step of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Stage {
    /// The loop itself.
    #[default]
    Loop,
    /// A command of another thread.
    Command,
    /// A datagram from the underlay: its headers.
    Arrival,
    /// A packet of the transport without a frame: ACK, probe, SKIP, set-up, RESET.
    Control,
    /// A data packet in the transport.
    Data,
    /// The switch decides about a frame for a guest.
    Judge,
    /// A frame is placed in the guest's ring or queue.
    Place,
    /// The transport's timers.
    Timer,
    /// Placed frames are made visible.
    Publish,
    /// The guest is notified.
    Notify,
    /// The transport builds acknowledgements.
    Acknowledge,
    /// Packets are fetched from the guest's ring or queue.
    Fetch,
    /// A packet of the guest in parser and switch.
    Switch,
    /// A packet of the guest in the transport.
    Transport,
    /// A packet of the guest is copied for another guest of this host.
    Copy,
    /// A packet of the guest is segmented and encapsulated.
    Emit,
    /// A packet of the transport without a frame is encapsulated.
    EmitControl,
    /// A buffer goes back to the guest.
    Release,
    /// The guest is told which buffers it has back.
    Flush,
    /// A batch of datagrams is handed to the underlay.
    Send,
    /// A message of a front-end is processed; not on a worker.
    Message,
}

impl Stage {
    /// All stages.
    pub const ALL: [Stage; 21] = [
        Stage::Loop,
        Stage::Command,
        Stage::Arrival,
        Stage::Control,
        Stage::Data,
        Stage::Judge,
        Stage::Place,
        Stage::Timer,
        Stage::Publish,
        Stage::Notify,
        Stage::Acknowledge,
        Stage::Fetch,
        Stage::Switch,
        Stage::Transport,
        Stage::Copy,
        Stage::Emit,
        Stage::EmitControl,
        Stage::Release,
        Stage::Flush,
        Stage::Send,
        Stage::Message,
    ];

    /// Its name, for messages.
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Loop => "loop",
            Stage::Command => "command",
            Stage::Arrival => "arrival",
            Stage::Control => "control",
            Stage::Data => "data",
            Stage::Judge => "judge",
            Stage::Place => "place",
            Stage::Timer => "timer",
            Stage::Publish => "publish",
            Stage::Notify => "notify",
            Stage::Acknowledge => "acknowledge",
            Stage::Fetch => "fetch",
            Stage::Switch => "switch",
            Stage::Transport => "transport",
            Stage::Copy => "copy",
            Stage::Emit => "emit",
            Stage::EmitControl => "emit control",
            Stage::Release => "release",
            Stage::Flush => "flush",
            Stage::Send => "send",
            Stage::Message => "message",
        }
    }

    /// Whether there is a packet for a guest in progress that is not counted yet.
    pub(crate) fn has_packet_for_guest(self) -> bool {
        matches!(self, Stage::Arrival | Stage::Data | Stage::Judge | Stage::Place)
    }

    /// Whether there is a packet for the underlay in progress that is not counted yet.
    pub(crate) fn has_packet_for_underlay(self) -> bool {
        matches!(self, Stage::Emit | Stage::EmitControl)
    }

    /// Whether the step belongs to a port, so that its guest or its device causes whatever happens in it.
    pub fn is_of_port(self) -> bool {
        matches!(
            self,
            Stage::Place
                | Stage::Publish
                | Stage::Notify
                | Stage::Fetch
                | Stage::Switch
                | Stage::Transport
                | Stage::Copy
                | Stage::Emit
                | Stage::Release
                | Stage::Flush
        )
    }
}

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
