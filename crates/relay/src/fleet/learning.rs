//! Routes that hosts learn: what they ask, and what they are told when an answer becomes wrong.

use std::collections::BTreeMap;
use std::sync::Arc;

use bifrost_intent::Resolved;
use bifrost_relay_api::{Answer, Answered, Question};

use super::Fleet;
use crate::learned::{Connection, Learned, Wrong};

/// What was asked and answered about routes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resolutions {
    /// Questions.
    pub(crate) asked: u64,
    /// Of these: about VPCs that the host has nothing to do with, or about routes that are not learned.
    pub(crate) refused: u64,
    /// Answers that nobody has the address.
    pub(crate) negative: u64,
    /// Answers that were given and have changed.
    pub(crate) corrected: u64,
    /// Answers that were forgotten because an agent has too many.
    pub(crate) forgotten: u64,
    /// Answers that are remembered.
    pub(crate) remembered: u64,
    /// Routes that hosts learn.
    pub(crate) routes: u64,
    /// Agents that are to learn routes, and cannot.
    pub(crate) unable: u64,
}

impl Resolutions {
    /// Gives an agent an answer, and remembers it.
    fn give(
        &mut self,
        learned: &mut Learned,
        connection: Connection,
        vni: u32,
        Resolved { range, hop }: Resolved,
        to: &mut Vec<Answer>,
    ) {
        for (vni, range) in learned.give(connection, vni, range) {
            self.forgotten += 1;
            to.push(Answer { vni, range, what: Answered::Withdrawn });
        }
        self.negative += u64::from(hop.is_none());
        let what = hop.map_or(Answered::Nothing, |hop| Answered::Hop { peer: hop.host.to_string(), mac: hop.mac.0 });
        to.push(Answer { vni, range, what });
    }
}

impl Fleet {
    /// An agent asks where addresses are. Whether it may.
    pub(crate) fn resolve(&mut self, host: &str, number: Connection, questions: &[Question]) -> bool {
        let Fleet { spans, model, hosts, resolved, learned, .. } = self;
        let Some((known, feed)) = hosts.get(host).and_then(|entry| entry.connection.as_ref()) else { return true };
        if *known != number {
            return true;
        }
        if learned.host(number).is_none() {
            return false;
        }
        let mut answers = Vec::with_capacity(questions.len());
        for Question { vni, address } in questions {
            resolved.asked += 1;
            match spans.resolve(model, host, *vni, *address) {
                Some(answer) => resolved.give(learned, number, *vni, answer, &mut answers),
                None => resolved.refused += 1,
            }
        }
        feed.answer(answers);
        true
    }

    /// What was asked and answered about routes.
    pub(crate) fn resolved(&self) -> Resolutions {
        let connected = self.hosts.iter().filter_map(|(name, host)| Some((name, host.connection.as_ref()?.0)));
        let unable = connected
            .filter(|(name, number)| self.learned.host(*number).is_none() && self.spans.learns(&self.model, name));
        Resolutions {
            remembered: self.learned.len() as u64,
            routes: self.spans.learned_routes() as u64,
            unable: unable.count() as u64,
            ..self.resolved
        }
    }

    /// Notes which answers are wrong now; [`correct`](Self::correct) tells the agents that have them.
    pub(super) fn note_rerouted(&mut self) {
        for (vni, prefix) in self.spans.take_rerouted() {
            self.learned.change(vni, prefix);
        }
    }

    /// Tells agents which of their learned routes are wrong now. Each call corrects a limited number of answers, so that
    /// others do not wait long for the lock. Returns whether there are more.
    pub(crate) fn correct(&mut self, most: usize) -> bool {
        let all = self.learned.take_wrong(most);
        let Fleet { spans, model, hosts, resolved, learned, .. } = self;
        let mut answers: BTreeMap<Connection, (Arc<str>, Vec<Answer>)> = BTreeMap::new();
        // What a wider answer said of other addresses holds, but how much of it is not known.
        let place = |wrong: &Wrong| if wrong.changed.contains(&wrong.range) { wrong.range } else { wrong.changed };
        // Most often many hosts have the same answer.
        for same in all.chunk_by(|a, b| (a.vni, place(a)) == (b.vni, place(b))) {
            let Some(vni) = same.first().map(|wrong| wrong.vni) else { continue };
            let located = same.first().and_then(|wrong| spans.locate(model, vni, place(wrong).addr()));
            for Wrong { connection, range, .. } in same {
                let Some(host) = learned.host(*connection).map(Arc::clone) else { continue };
                let (host, to) = answers.entry(*connection).or_insert_with(|| (host, Vec::new()));
                resolved.corrected += 1;
                to.push(Answer { vni, range: *range, what: Answered::Withdrawn });
                if let Some(answer) = located.as_ref().and_then(|located| located.for_host(spans, host)) {
                    resolved.give(learned, *connection, vni, answer, to);
                }
            }
        }
        for (connection, (host, answers)) in answers {
            if let Some((known, feed)) = hosts.get(&host).and_then(|entry| entry.connection.as_ref())
                && *known == connection
            {
                feed.answer(answers);
            }
        }
        !self.learned.is_corrected()
    }
}
