//! Routes that the host learns when a packet needs them (docs/FLEET.md 6): `bifrostd`'s questions go to the relay, and the relay's answers
//! to `bifrostd`.
//!
//! Questions and answers go past [`Core`](crate::Core), which may be waiting for a batch of objects: a packet waits for them. Two threads
//! ask `bifrostd`, since its client blocks: one waits for questions, the other brings answers.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bifrost_control::Client;
use bifrost_control::api::{ErrorKind, LearnSpec, MAX_ANSWERS, RouteAnswer, RouteTo};
use bifrost_control::client::ClientError;
use bifrost_control::config::Mac;
use bifrost_relay_api::{Answer, Answered, Question};
use tokio::sync::mpsc::error::{TryRecvError, TrySendError};
use tokio::sync::mpsc::{self, Receiver, Sender};

use crate::metrics::Metrics;
use crate::switch::SwitchError;

/// Batches of questions that wait for the relay, and messages of the relay that wait for `bifrostd`.
const WAITING: usize = 16;
/// How long `bifrostd` may wait for a question before it says that there is none.
const WAIT: Duration = Duration::from_millis(500);
/// The pause after `bifrostd` did not answer: an upgrade takes less than packets wait.
const PAUSE: Duration = Duration::from_millis(50);
/// The pause if it does not know such questions: it is of an earlier release.
const LONG_PAUSE: Duration = Duration::from_secs(60);
/// How often, and how many times, an answer is repeated whose peer `bifrostd` does not have yet: objects come beside answers.
const AGAIN: (Duration, u32) = (Duration::from_millis(10), 100);

/// The stream's end.
#[derive(Debug)]
pub struct Learning {
    /// Questions for the relay, each batch within the limits of a message.
    pub(crate) questions: Receiver<Vec<Question>>,
    /// What the relay says.
    pub(crate) heard: Sender<Heard>,
    metrics: Arc<Metrics>,
}

/// What comes from a relay.
#[derive(Debug)]
pub(crate) enum Heard {
    /// A stream begins, on which routes can be asked for. What was learned before may be wrong.
    Connected,
    /// Answers, in order.
    Answers(Vec<Answer>),
}

impl Learning {
    /// Begins to wait for questions of the `bifrostd` on that socket. The threads end when this is dropped.
    ///
    /// # Errors
    /// There is no thread or runtime to be had.
    pub fn start(socket: &Path, metrics: Arc<Metrics>) -> Result<Learning, SwitchError> {
        let (ask, questions) = mpsc::channel(WAITING);
        let (heard, hears) = mpsc::channel(WAITING);
        let asking = Asking { client: Client::new(socket)?, ask: ask.clone(), metrics: Arc::clone(&metrics) };
        thread::Builder::new().name("questions".into()).spawn(move || asking.run())?;
        let answering =
            Answering { client: Client::new(socket)?, ask, hears, check: VecDeque::new(), again: Vec::new() };
        thread::Builder::new().name("answers".into()).spawn(move || answering.run())?;
        Ok(Learning { questions, heard, metrics })
    }

    /// Whether the relay that is followed answers questions about routes.
    pub(crate) fn can_learn(&self, can: bool) {
        self.metrics.learning(can);
    }

    /// Questions were sent to the relay, or cannot be.
    pub(crate) fn asked(&self, count: usize, is_sent: bool) {
        self.metrics.asked(count as u64, is_sent);
    }

    /// Answers of the relay have come.
    pub(crate) async fn answers(&self, answers: Vec<Answer>) {
        self.metrics.answered(answers.len() as u64);
        // The thread ends only with this.
        let _ = self.heard.send(Heard::Answers(answers)).await;
    }
}

/// Waits for questions.
struct Asking {
    client: Client,
    ask: Sender<Vec<Question>>,
    metrics: Arc<Metrics>,
}

impl Asking {
    fn run(self) {
        while !self.ask.is_closed() {
            match self.client.route_questions(WAIT) {
                Ok(questions) if questions.is_empty() => {}
                Ok(questions) => {
                    let questions = questions.into_iter().map(|q| Question { vni: q.vni, address: q.address });
                    // What is not asked in time is not asked at all: its packets give up.
                    if let Err(TrySendError::Full(batch)) = self.ask.try_send(questions.collect()) {
                        self.metrics.asked(batch.len() as u64, false);
                    }
                }
                Err(ClientError::Api(error)) if error.kind == ErrorKind::NotFound => self.pause(LONG_PAUSE),
                Err(_) => self.pause(PAUSE),
            }
        }
    }

    /// Sleeps, but not long beyond the end.
    fn pause(&self, time: Duration) {
        let mut left = time;
        while !left.is_zero() && !self.ask.is_closed() {
            let piece = left.min(PAUSE);
            thread::sleep(piece);
            left -= piece;
        }
    }
}

/// Brings answers.
struct Answering {
    client: Client,
    ask: Sender<Vec<Question>>,
    hears: Receiver<Heard>,
    /// Questions about what was learned before, which wait for the stream. It may wait for this thread, so this never waits for it.
    check: VecDeque<Vec<Question>>,
    /// Answers whose peer was not there, and how often they are to be repeated.
    again: Vec<(Answer, u32)>,
}

impl Answering {
    fn run(mut self) {
        loop {
            let is_idle = self.again.is_empty() && self.check.is_empty();
            let heard = if is_idle {
                self.hears.blocking_recv().ok_or(TryRecvError::Disconnected)
            } else {
                self.hears.try_recv()
            };
            match heard {
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {
                    thread::sleep(AGAIN.0);
                    let again = std::mem::take(&mut self.again);
                    self.bring(again);
                }
                Ok(Heard::Connected) => self.list(),
                Ok(Heard::Answers(answers)) => {
                    let is_replaced = |old: &Answer| answers.iter().any(|new| overlap(old, new));
                    self.again.retain(|(old, _)| !is_replaced(old));
                    self.bring(answers.into_iter().map(|answer| (answer, AGAIN.1)).collect());
                }
            }
            while let Some(batch) = self.check.pop_front() {
                if let Err(TrySendError::Full(batch)) = self.ask.try_send(batch) {
                    self.check.push_front(batch);
                    break;
                }
            }
        }
    }

    /// Asks for everything again that was learned on earlier streams: answers that changed meanwhile are corrected.
    fn list(&mut self) {
        let Ok(learned) = self.client.learned() else { return };
        let questions = learned.iter().map(|route| Question { vni: route.vni, address: route.range.addr() });
        let questions: Vec<Question> = questions.collect();
        self.check = questions.chunks(MAX_ANSWERS).map(<[Question]>::to_vec).collect();
    }

    /// Gives `bifrostd` answers. If it is away, it has learned nothing when it comes back.
    fn bring(&mut self, answers: Vec<(Answer, u32)>) {
        for batch in answers.chunks(MAX_ANSWERS) {
            let answers = batch.iter().map(|(answer, _)| on_host(answer)).collect();
            let Ok(report) = self.client.learn(&LearnSpec { answers }) else { continue };
            let unknown = report.unknown_peers.iter().filter_map(|place| batch.get(usize::try_from(*place).ok()?));
            let again = unknown.filter(|(_, left)| *left > 0).map(|(answer, left)| (answer.clone(), left - 1));
            self.again.extend(again);
        }
    }
}

fn overlap(a: &Answer, b: &Answer) -> bool {
    a.vni == b.vni && (a.range.contains(&b.range) || b.range.contains(&a.range))
}

fn on_host(Answer { vni, range, what }: &Answer) -> RouteAnswer {
    let route = match what {
        Answered::Hop { peer, mac } => Some(RouteTo { peer: peer.clone(), mac: Mac(*mac) }),
        Answered::Nothing | Answered::Withdrawn => None,
    };
    RouteAnswer { vni: *vni, range: *range, route, withdrawn: *what == Answered::Withdrawn }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_keep_their_meaning() {
        let answer = |what| Answer { vni: 7, range: "10.0.0.0/31".parse().unwrap(), what };
        let hop = on_host(&answer(Answered::Hop { peer: "h2".into(), mac: [2, 0, 0, 0, 0, 1] }));
        assert_eq!(hop.route, Some(RouteTo { peer: "h2".into(), mac: Mac([2, 0, 0, 0, 0, 1]) }));
        assert!(!hop.withdrawn && !on_host(&answer(Answered::Nothing)).withdrawn);
        assert_eq!(on_host(&answer(Answered::Nothing)).route, None);
        assert!(on_host(&answer(Answered::Withdrawn)).withdrawn);
    }

    #[test]
    fn a_later_answer_replaces_one_that_is_to_be_repeated() {
        let answer = |vni, range: &str| Answer { vni, range: range.parse().unwrap(), what: Answered::Nothing };
        let old = answer(7, "10.0.0.2/32");
        assert!(overlap(&old, &answer(7, "10.0.0.0/24")) && overlap(&answer(7, "10.0.0.0/24"), &old));
        assert!(!overlap(&old, &answer(8, "10.0.0.2/32")) && !overlap(&old, &answer(7, "10.0.0.3/32")));
    }
}
