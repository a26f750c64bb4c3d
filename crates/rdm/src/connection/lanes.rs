//! Lanes: failure, and repair in the background (RDM §7).

use bifrost_transport::time::MS;
use bifrost_wire::rdm::{Control, Lane as LaneMessage, LanePhase, MessageId};
use bifrost_wire::udp::ephemeral_port;

use super::{Connection, Context};
use crate::flight::State;
use crate::lane::LaneState;
use crate::mutation::mutated;
use crate::output::Work;

/// Lane repairs: initial interval of requests, and how often it doubles.
const REPAIR_EVERY_NS: u64 = 5 * MS;
const REPAIR_DOUBLINGS: u8 = 6;

/// Why a lane has failed (RDM §7.2, §7.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaneFailure {
    /// Its queue pair is in error.
    Error,
    /// Several timeouts in a row.
    Timeouts,
    /// It delivers nothing while other lanes do.
    Silence,
}

impl Connection {
    /// Handles a failed lane: its requests are lost, another lane is used, and this one is repaired.
    pub(crate) fn fail_lane(&mut self, context: &mut Context<'_>, lane: u8, why: LaneFailure) {
        let Some(state) = self.lanes.get_mut(usize::from(lane)) else { return };
        if !state.is_up() {
            return;
        }
        *match why {
            LaneFailure::Error => &mut context.counters.lane_errors,
            LaneFailure::Timeouts => &mut context.counters.lane_timeouts,
            LaneFailure::Silence => &mut context.counters.lane_silences,
        } += 1;
        let sequence = context.random.u32(..1 << 24);
        if !mutated!(self.config, LaneGenerationKept) {
            state.generation = state.next_generation(self.config.initiator);
        }
        state.answered = None;
        state.state = LaneState::Down { sequence, next_try: context.now, tries: 0 };
        context.out.work.push(Work::Reset { connection: self.id, lane });
        context.out.work.push(Work::Repath { connection: self.id });
        self.abandon(context, lane);
    }

    /// Loses all requests that were posted on a lane, because it is reset.
    fn abandon(&mut self, context: &mut Context<'_>, lane: u8) {
        let numbers = self.flights.first_number()..self.flights.next_number();
        for number in numbers {
            let Some(flight) = self.flights.get(number).filter(|flight| flight.lane == lane).copied() else { continue };
            let message = MessageId(flight.message);
            if self.flights.left_nic(number)
                && !mutated!(self.config, LaneKeepsBuffers)
                && let Some(outgoing) = self.outbox.get_mut(message)
            {
                outgoing.in_nic -= 1;
            }
            if flight.state == State::Open && !mutated!(self.config, FailedLaneForgotten) {
                self.lose(context, number, None);
            }
            self.report(context, message);
        }
        self.flights.trim();
        if self.primary == lane {
            self.leave_lane(context);
        }
    }

    pub(crate) fn on_lane(&mut self, context: &mut Context<'_>, message: &LaneMessage) {
        self.heard(context.now);
        let (index, connection) = (message.index, self.id);
        let count = self.config.service.lanes();
        let Some(lane) = self.lanes[..count].get_mut(usize::from(index)) else {
            context.counters.refused += 1;
            return;
        };
        let newer = (message.generation.wrapping_sub(lane.generation) as i16) > 0;
        let source_port = ephemeral_port(context.random.u16(..0x4000));
        let receive_sequence = message.sequence;
        match message.phase {
            LanePhase::Request if newer => {
                let send_sequence = context.random.u32(..1 << 24);
                lane.generation = message.generation;
                lane.answered = Some(send_sequence);
                lane.state = LaneState::Up;
                context.out.work.push(Work::Reset { connection, lane: index });
                // Retransmissions must avoid this lane until the peer has connected it, so it is the last choice.
                self.abandon(context, index);
                let connect = Work::Connect { connection, lane: index, send_sequence, receive_sequence, source_port };
                context.out.work.push(connect);
                context.counters.lane_repairs += 1;
                self.send_lane_response(context, index, message.generation, send_sequence);
                self.return_to(index);
            }
            LanePhase::Request if message.generation == lane.generation => {
                if let Some(sequence) = lane.answered {
                    self.send_lane_response(context, index, message.generation, sequence);
                }
            }
            LanePhase::Response if message.generation == lane.generation => {
                if let LaneState::Down { sequence: send_sequence, .. } = lane.state {
                    lane.state = LaneState::Up;
                    let connect =
                        Work::Connect { connection, lane: index, send_sequence, receive_sequence, source_port };
                    context.out.work.push(connect);
                    context.counters.lane_repairs += 1;
                    self.return_to(index);
                }
            }
            _ => {}
        }
    }

    fn send_lane_response(&mut self, context: &mut Context<'_>, index: u8, generation: u16, sequence: u32) {
        // The peer does not receive our responses: perhaps their path failed.
        context.out.work.push(Work::Repath { connection: self.id });
        let phase = LanePhase::Response;
        let lane = LaneMessage { tag: self.peer.tag, index, phase, generation, sequence };
        context.out.work.push(Work::Control { connection: self.id, control: Control::Lane(lane) });
    }

    pub(super) fn retry_lane(&mut self, context: &mut Context<'_>, index: u8) {
        let lane = &mut self.lanes[usize::from(index)];
        let LaneState::Down { sequence, next_try, tries } = lane.state else { return };
        if next_try > context.now {
            return;
        }
        let next_try = context.now + (REPAIR_EVERY_NS << tries.min(REPAIR_DOUBLINGS));
        lane.state = LaneState::Down { sequence, next_try, tries: tries.saturating_add(1) };
        let generation = lane.generation;
        if mutated!(self.config, LanesNotRepaired) {
            return;
        }
        let request = LaneMessage { tag: self.peer.tag, index, phase: LanePhase::Request, generation, sequence };
        context.out.work.push(Work::Control { connection: self.id, control: Control::Lane(request) });
    }
}
