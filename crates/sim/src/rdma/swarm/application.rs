//! A host whose application sends the planned messages, and checks all that it receives.

use std::collections::{HashMap, VecDeque};

use anyhow::{Result, anyhow};
use bifrost_endpoint::{
    Adaptive, Class, CloseReason, ConnectionConfig, ConnectionId, Counters, Host, HostConfig, HostEvent, Limits,
    MessageId, Order, SendError, Service, Swift, SwiftConfig,
};
use bifrost_rnic::Nic;
use bifrost_wire::rdm::SetupKind;

use super::draw::{ConnectionPlan, Description, Sends};
use crate::rdma::Node;
use crate::violation::{Kind, Violations};

/// Maximum number of changes of an end's service.
const SWITCHES_MAX: u32 = 1000;

/// One end of a connection.
#[derive(Debug)]
struct End {
    id: ConnectionId,
    /// The connection's number in the world, and the index of this end.
    number: u32,
    way: u32,
    sends: Sends,
    /// Lengths of the other end's messages.
    expects: Vec<u32>,
    order: Order,
    credits: u32,
    /// Interval between changes of its service, ns, if any; and when the next one is due.
    switch_every_ns: u64,
    switch_at_ns: u64,
    switches: u32,
    sent: usize,
    open: HashMap<MessageId, usize>,
    reported: usize,
    got: Vec<bool>,
    /// Messages that arrived.
    received: usize,
    closed: bool,
}

impl End {
    fn is_done(&self) -> bool {
        self.closed || (self.reported == self.sends.lens.len() && self.received == self.expects.len())
    }

    /// Whether it changes its service again. The number of changes is limited, because the peer may be gone.
    fn switches(&self) -> bool {
        self.switch_every_ns > 0 && self.switches < SWITCHES_MAX && !self.is_done()
    }

    /// Whether a message is left to send, or the other end owes a response.
    fn waits(&self) -> bool {
        !self.closed && self.reported < self.sends.lens.len()
    }
}

/// A message that the application keeps for a while.
#[derive(Debug)]
struct Kept {
    until_ns: u64,
    end: usize,
    index: usize,
    data: Vec<u8>,
}

/// The host.
#[derive(Debug)]
pub(super) struct Application {
    host: Host<Nic>,
    ends: Vec<End>,
    by_id: HashMap<ConnectionId, usize>,
    keep_ns: u64,
    kept: VecDeque<Kept>,
    /// Violations.
    pub(super) violations: Violations,
    /// A hash of all events.
    pub(super) hash: u64,
    pub(super) closed: u64,
}

impl Application {
    pub(super) fn new(nic: Nic, description: &Description, seed: u64) -> Result<Self> {
        let connections = description.connections.len() as u32;
        let host = Host::new(nic, HostConfig { connections, inbound: description.inbound, seed })?;
        Ok(Application {
            host,
            ends: Vec::new(),
            by_id: HashMap::new(),
            keep_ns: description.keep_ns,
            kept: VecDeque::new(),
            violations: Violations::default(),
            hash: 0,
            closed: 0,
        })
    }

    /// Everything is sent, reported and received, except on connections that have ended.
    pub(super) fn is_done(&self) -> bool {
        self.kept.is_empty() && self.ends.iter().all(End::is_done)
    }

    /// As [`Self::is_done`], if the peers of some connections are gone.
    pub(super) fn is_done_without(&self, gone: impl Fn(u32) -> bool) -> bool {
        let done = |end: &End| if gone(end.number) { !end.waits() } else { end.is_done() };
        self.kept.is_empty() && self.ends.iter().all(done)
    }

    /// What is not finished, as text.
    pub(super) fn undone(&self) -> String {
        let end = |end: &End| {
            format!(
                "connection {} end {}: {} of {} reported, {} of {} received",
                end.number,
                end.way,
                end.reported,
                end.sends.lens.len(),
                end.received,
                end.expects.len()
            )
        };
        let list: Vec<String> = self.ends.iter().filter(|end| !end.is_done()).map(end).collect();
        format!("{}; {:?}", list.join("; "), self.host.counters())
    }

    pub(super) fn counters(&self) -> &Counters {
        self.host.counters()
    }

    pub(super) fn nic_counters(&self) -> &bifrost_rnic::Counters {
        self.host.provider().counters()
    }

    /// Number of buffers registered for messages.
    pub(super) fn registered_buffers(&self) -> usize {
        self.host.registered_buffers()
    }

    fn send(&mut self, now_ns: u64) -> bool {
        let mut any = false;
        for end in &mut self.ends {
            while let Some(&len) = end.sends.lens.get(end.sent) {
                if end.closed || now_ns < end.sends.begin_ns + end.sends.every_ns * end.sent as u64 {
                    break;
                }
                let mut data = self.host.vector(end.id, len as usize);
                fill(&mut data, end.number, end.way, end.sent);
                match self.host.send(now_ns, end.id, class(end.sent), end.sent as u32, data) {
                    Ok(message) => drop(end.open.insert(message, end.sent)),
                    Err((SendError::Full, _)) => break,
                    Err((error, _)) => {
                        self.violations.add(now_ns, Kind::Connection, || format!("message is not accepted: {error}"));
                        break;
                    }
                }
                end.sent += 1;
                any = true;
            }
            let open = self.host.open_requests(end.id);
            if open > end.credits {
                let credits = end.credits;
                self.violations.add(now_ns, Kind::Other("credits"), || format!("{open} open, {credits} allowed"));
            }
        }
        any
    }

    fn on_event(&mut self, now_ns: u64, event: HostEvent) {
        match event {
            HostEvent::Message { connection, class, call, data } => {
                let Some(&at) = self.by_id.get(&connection) else { return };
                let index = call as usize;
                self.note(now_ns, u64::from(call));
                self.check_message(now_ns, at, index, class, &data);
                if self.keep_ns == 0 {
                    self.host.consumed(now_ns, connection, data);
                } else {
                    self.kept.push_back(Kept { until_ns: now_ns + self.keep_ns, end: at, index, data });
                }
            }
            HostEvent::Sent { connection, message } => {
                let Some(&at) = self.by_id.get(&connection) else { return };
                let end = &mut self.ends[at];
                match end.open.remove(&message) {
                    Some(_) => end.reported += 1,
                    None => self.violations.add(now_ns, Kind::Duplicate, || format!("{message:?} is reported again")),
                }
                self.note(now_ns, u64::from(message.0) << 32);
            }
            HostEvent::Closed { connection, reason, by_peer } => {
                let Some(&at) = self.by_id.get(&connection) else { return };
                if self.ends[at].closed {
                    return;
                }
                self.ends[at].closed = true;
                self.closed += 1;
                self.host.close(connection, CloseReason::Done);
                self.note(now_ns, 1 << 63 | u64::from(by_peer) << 1 | u64::from(reason == CloseReason::Silence));
            }
        }
    }

    fn check_message(&mut self, now_ns: u64, at: usize, index: usize, class_is: Class, data: &[u8]) {
        let end = &mut self.ends[at];
        let name = format!("connection {} to end {}: message {index}", end.number, end.way);
        let mut violation = |kind, what: &str| self.violations.add(now_ns, kind, || format!("{name} {what}"));
        let Some(&len) = end.expects.get(index) else {
            return violation(Kind::Corrupted, "was never sent");
        };
        if std::mem::replace(&mut end.got[index], true) {
            return violation(Kind::Duplicate, "arrives again");
        }
        if end.order == Order::Sent && index != end.received {
            violation(Kind::Reordered, "is out of sequence");
        }
        end.received += 1;
        if data.len() != len as usize || class_is != class(index) {
            violation(Kind::Corrupted, "has another length or class");
        } else if !is_filled(data, end.number, 1 - end.way, index) {
            violation(Kind::Corrupted, "has other bytes");
        }
    }

    /// Releases messages that were kept long enough.
    fn release(&mut self, now_ns: u64) -> bool {
        let mut any = false;
        while self.kept.front().is_some_and(|kept| kept.until_ns <= now_ns) {
            let Some(Kept { end, index, data, .. }) = self.kept.pop_front() else { break };
            let end = &self.ends[end];
            if !is_filled(&data, end.number, 1 - end.way, index) {
                self.violations.add(now_ns, Kind::Corrupted, || format!("message {index} changed after delivery"));
            }
            self.host.consumed(now_ns, end.id, data);
            any = true;
        }
        any
    }

    /// Changes the services of ends with pending work when a change is due.
    fn switch(&mut self, now_ns: u64) -> bool {
        let mut any = false;
        for end in &mut self.ends {
            if !end.switches() || now_ns < end.switch_at_ns {
                continue;
            }
            end.switches += 1;
            end.switch_at_ns = now_ns + end.switch_every_ns;
            let other = if self.host.service_in_use(end.id) == Some(Service::Uc) { Service::Rc } else { Service::Uc };
            if !self.host.switch(now_ns, end.id, other) {
                self.violations.add(now_ns, Kind::Connection, || "it does not have both services".to_owned());
            }
            any = true;
        }
        any
    }

    fn note(&mut self, now_ns: u64, what: u64) {
        self.hash = crate::mix(self.hash ^ crate::mix(now_ns) ^ what);
    }
}

impl Node for Application {
    fn nic(&mut self) -> &mut Nic {
        self.host.provider_mut()
    }

    fn turn(&mut self, now_ns: u64) -> bool {
        let busy = self.host.turn(now_ns);
        let mut any = self.release(now_ns);
        while let Some(event) = self.host.next_event() {
            self.on_event(now_ns, event);
            any = true;
        }
        let switched = self.switch(now_ns);
        self.send(now_ns) || busy || any || switched
    }

    fn next_deadline(&mut self, now_ns: u64) -> u64 {
        let next = |end: &End| {
            let due = end.sends.begin_ns + end.sends.every_ns * end.sent as u64;
            // A due message that was not accepted waits for a report.
            (end.sent < end.sends.lens.len() && !end.closed && due > now_ns).then_some(due)
        };
        let sends = self.ends.iter().filter_map(next).min().unwrap_or(u64::MAX);
        let switches = self.ends.iter().filter(|end| end.switches());
        let switches = switches.map(|end| end.switch_at_ns).min().unwrap_or(u64::MAX);
        let kept = self.kept.front().map_or(u64::MAX, |kept| kept.until_ns);
        self.host.next_deadline().min(sends).min(kept).min(switches)
    }
}

/// Opens connection `number` between two hosts.
pub(super) fn connect(
    ends: [&mut Application; 2],
    number: u32,
    plan: &ConnectionPlan,
    first_window: u32,
    adjust: &dyn Fn(&mut ConnectionConfig),
) -> Result<()> {
    let service = plan.service();
    let mut limits = Limits::new(service, plan.mtu);
    (limits.credits, limits.window) = (plan.credits, plan.window);
    let [a, b] = ends;
    let (id_a, hello) = a.host.prepare(SetupKind::Hello, limits)?;
    let (id_b, welcome) = b.host.prepare(SetupKind::Welcome, limits)?;
    for (way, application, id, peer) in [(0, a, id_a, &welcome), (1, b, id_b, &hello)] {
        let mut config = ConnectionConfig::new(service, plan.mtu);
        config.order = if plan.when_complete { Order::Complete } else { Order::Sent };
        config.initiator = way == 0;
        config.budget = plan.budget;
        adjust(&mut config);
        let order = config.order;
        let swift = Swift::new(SwiftConfig { initial: first_window, ..SwiftConfig::new(50_000) });
        application
            .host
            .complete(0, id, peer, config, Box::new(Adaptive::default()), Box::new(swift))
            .map_err(|error| anyhow!("setup: {error}"))?;
        let expects = plan.sends[1 - way].lens.clone();
        application.by_id.insert(id, application.ends.len());
        application.ends.push(End {
            id,
            number,
            way: way as u32,
            sends: plan.sends[way].clone(),
            got: vec![false; expects.len()],
            expects,
            order,
            credits: u32::from(plan.credits),
            switch_every_ns: plan.switch_every_ns,
            switch_at_ns: plan.switch_every_ns / (2 + way as u64),
            switches: 0,
            sent: 0,
            open: HashMap::new(),
            reported: 0,
            received: 0,
            closed: false,
        });
    }
    Ok(())
}

fn class(index: usize) -> Class {
    [Class::Message, Class::Request, Class::Response, Class::Failure][index % 4]
}

/// The words of a message's content.
fn words(number: u32, way: u32, index: usize) -> impl Iterator<Item = u64> {
    let seed = crate::mix(u64::from(number) << 33 | u64::from(way) << 32 | index as u64);
    (0u64..).map(move |at| crate::mix(seed ^ at))
}

fn fill(data: &mut [u8], number: u32, way: u32, index: usize) {
    for (bytes, word) in data.chunks_mut(8).zip(words(number, way, index)) {
        bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
    }
}

fn is_filled(data: &[u8], number: u32, way: u32, index: usize) -> bool {
    let mut pairs = data.chunks(8).zip(words(number, way, index));
    pairs.all(|(bytes, word)| bytes == &word.to_le_bytes()[..bytes.len()])
}
