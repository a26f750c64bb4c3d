//! Traces: the decisions about a frame that is only described.

use bifrost_tables::Stage;

use crate::{Class, Flow, Mode, Pipeline, Place, look};

/// The decision of a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explained {
    /// Name of the stage: `parse`, `pod`, `class`, `limiter`, `order`, `core`.
    pub stage: &'static str,
    /// Whether the frame continues.
    pub passes: bool,
    /// The decision, in words.
    pub what: String,
}

impl Pipeline {
    /// The decisions of the stages about a frame that arrives now, in their order; the last one may drop it. `has_room`
    /// tells which cores of an interface have room. Nothing changes.
    pub fn explain(&self, now: u64, frame: &[u8], has_room: impl Fn(Place, u16) -> bool) -> Vec<Explained> {
        let mut steps = Vec::new();
        let mut note = |stage, passes, what: String| {
            steps.push(Explained { stage, passes, what });
            passes
        };
        let Some(arrival) = look(frame) else {
            note("parse", false, "its outer headers are malformed".to_owned());
            return steps;
        };
        let tunnel = arrival.vni.map_or_else(|| "not VXLAN".to_owned(), |vni| format!("VXLAN, VNI {vni}"));
        note("parse", true, format!("{} to {}, {tunnel}", arrival.outer.src_ip, arrival.outer.dst_ip));
        let vlan = arrival.vlan.map_or_else(|| "untagged".to_owned(), |vlan| format!("VLAN {vlan}"));
        let Some(place) = self.place(&arrival) else {
            note("pod", false, format!("{vlan}: no pod has it"));
            return steps;
        };
        let pod = &self.pods()[place.pod];
        let is_up = pod.is_up(place.interface);
        let state = if is_up { "connected" } else { "not connected" };
        if !note("pod", is_up, format!("{vlan}: interface {} of {}, {state}", place.interface, pod.name())) {
            return steps;
        }
        let class = pod.config.rules.class(&arrival, frame);
        let text = match class {
            Class::Priority => "control traffic: the priority ring, without an entry in an order queue",
            Class::Rss => "by a rule: to the core of its flow, without an entry in an order queue",
            Class::Plb => "sprayed over the cores",
        };
        note("class", true, text.to_owned());
        if class == Class::Priority {
            return steps;
        }
        let (stage, tokens) = pod.limiter().foresee(now, arrival.tenant(self.seed));
        let text = match stage {
            Stage::Bypass => "the tenant is exempted".to_owned(),
            Stage::PreMeter => format!("the tenant's own meter, as a heavy tenant: {tokens} packets may pass now"),
            Stage::Color => format!("first stage: {tokens} packets may pass now"),
            Stage::Meter => format!("second stage, because the first is used up: {tokens} packets may pass now"),
        };
        if !note("limiter", tokens > 0, text) {
            return steps;
        }
        let Flow { hash, fragment, .. } = arrival.flow(frame, self.seed);
        let (mode, settled) = pod.mode(now);
        let class = if fragment { Class::Rss } else { class };
        let by_flow = class == Class::Rss || mode == Mode::Rss;
        if class == Class::Plb && !(mode == Mode::Rss && settled) {
            let queue = pod.order_queue(hash);
            let (entries, in_use, _) = pod.queues().nth(usize::from(queue)).unwrap_or_default();
            if !note("order", in_use < entries, format!("order queue {queue}: {in_use} of {entries} entries in use")) {
                return steps;
            }
        }
        let cores = pod.config.balancer.cores;
        let with_room = |cores: std::ops::Range<u16>| cores.filter(|core| has_room(place, *core)).count();
        let (passes, text) = if by_flow {
            let core = pod.core_of_flow(hash);
            (with_room(core..core + 1) == 1, format!("core {core}, by its flow"))
        } else {
            let count = with_room(0..cores);
            (count > 0, format!("round robin over {cores} cores, {count} of which have room"))
        };
        note("core", passes, text);
        steps
    }
}
