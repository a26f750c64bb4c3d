//! Traces: the decisions about a packet that exists only as a description.

use bifrost_tables::TokenBucket;

use crate::decision::{Context, Decision, State};
use crate::fragments::Fragments;
use crate::nat::Nat;
use crate::tables::Tables;
use crate::{Counters, DropReason, Packet, Service, Verdict};

/// The decision of a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Name of the stage: `outer`, `sender`, `inner`, `service`, `route`, `acl`, `translation`, `meter`, `size`,
    /// `egress`, `link`.
    pub stage: &'static str,
    /// Whether the packet continues.
    pub passes: bool,
    /// The decision, in words.
    pub what: String,
}

/// Decides about a packet like a [`Core`](crate::Core), with the same code, and records why. It has no side effects: it
/// creates and changes no session, and uses its own meters, which are full.
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

/// The stage that drops packets for a reason.
fn stage(reason: DropReason) -> &'static str {
    match reason {
        DropReason::OuterMalformed | DropReason::NotForUs => "outer",
        DropReason::UnknownSender | DropReason::UnknownVni => "sender",
        DropReason::FragmentWithoutFirst
        | DropReason::FragmentMismatch
        | DropReason::InnerMalformed
        | DropReason::InnerKind
        | DropReason::TunnelKeepalive
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
        DropReason::TunnelDown => "egress",
        DropReason::NoNeighbour => "link",
    }
}
