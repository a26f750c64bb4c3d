//! What would become of a packet that is only described.

use bifrost_tables::TokenBucket;

use crate::decision::{Context, Decision, State};
use crate::fragments::Fragments;
use crate::nat::Nat;
use crate::tables::Tables;
use crate::{Counters, DropReason, Packet, Service, Verdict};

/// What a stage decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Which stage: `outer`, `sender`, `inner`, `service`, `route`, `acl`, `translation`, `meter`, `size`, `egress`, `link`.
    pub stage: &'static str,
    /// Whether the packet goes on.
    pub passes: bool,
    /// What was decided, in words.
    pub what: String,
}

/// Decides about a packet as a [`Core`](crate::Core) would, by the same code, and says why. Nothing changes: no session begins or is told, and the meters
/// of the cores, which are full here, are not asked.
pub fn trace(tables: &Tables, nat: &Nat, context: Context<'_>, packet: &mut Packet<'_>) -> (Verdict, Vec<Step>) {
    let mut steps = Vec::new();
    let mut state = State {
        meters: Box::default(),
        cores: 1,
        answers: TokenBucket::new(1, 1),
        errors: TokenBucket::new(1, 1),
        missing: None,
        fragments: Fragments::new(0),
        more: Vec::new(),
        counters: Counters::default(),
    };
    let mut decision = Decision { tables, nat, state: &mut state, context, steps: Some(&mut steps) };
    let verdict = match decision.decide(packet) {
        Ok(Service::Answer) => Verdict::Answer,
        Ok(service) => Verdict::Forward(service),
        Err(reason) => {
            let what = reason.name().replace('_', " ");
            steps.push(Step { stage: stage(reason), passes: false, what });
            Verdict::Drop(reason)
        }
    };
    (verdict, steps)
}

/// Where a packet is dropped for a reason.
fn stage(reason: DropReason) -> &'static str {
    match reason {
        DropReason::OuterMalformed | DropReason::NotForUs => "outer",
        DropReason::UnknownSender | DropReason::UnknownVni => "sender",
        DropReason::FragmentWithoutFirst
        | DropReason::FragmentMismatch
        | DropReason::InnerMalformed
        | DropReason::InnerKind
        | DropReason::NotEcnCapable => "inner",
        DropReason::NoBackend => "service",
        DropReason::NoRoute | DropReason::NoHost => "route",
        DropReason::Acl => "acl",
        DropReason::NoTranslation
        | DropReason::NatNoSession
        | DropReason::NatFull
        | DropReason::NatProtocol
        | DropReason::ErrorRate => "translation",
        DropReason::Meter => "meter",
        DropReason::HopLimit
        | DropReason::TooLarge
        | DropReason::AnswerRate
        | DropReason::NoRoom
        | DropReason::NoHeadroom => "size",
        DropReason::NoNeighbour => "link",
    }
}
