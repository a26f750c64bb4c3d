//! What is still to be sent to a host's agent: a map by key, so that changes of one object that come faster than they leave
//! become one, and what waits is bounded by what there is.

use std::sync::Mutex;

use bifrost_intent::HostChanges;
use bifrost_relay_api::Answer;
use bifrost_relay_api::limits::MAX_ANSWERS;
use tokio::sync::Notify;

/// What an agent is to be told next.
#[derive(Debug)]
pub(crate) enum Next {
    /// Changes, which bring it to a revision.
    Changes(HostChanges, u64),
    /// Answers about routes.
    Answers(Vec<Answer>),
    /// Nothing more, and why.
    End(String),
}

/// The most answers that wait for one connection.
const MAX_WAITING_ANSWERS: usize = 20_000;

/// What waits for one connection of an agent.
#[derive(Debug, Default)]
pub(crate) struct Feed {
    waiting: Mutex<Waiting>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    changes: HostChanges,
    /// The revision with them; 0: nothing waits.
    revision: u64,
    /// In their order.
    answers: Vec<Answer>,
    end: Option<String>,
}

impl Feed {
    /// Adds changes, which bring the host to a revision.
    pub(crate) fn add(&self, changes: HostChanges, revision: u64) {
        self.update(|waiting| {
            waiting.changes.extend(changes);
            waiting.revision = revision;
        });
    }

    /// Adds answers. An agent that does not read them is ended: it must not miss one.
    pub(crate) fn answer(&self, answers: Vec<Answer>) {
        self.update(|waiting| {
            if waiting.answers.len() + answers.len() > MAX_WAITING_ANSWERS {
                waiting.end.get_or_insert_with(|| "too many answers wait to be read; connect again".to_owned());
            } else {
                waiting.answers.extend(answers);
            }
        });
    }

    /// Ends the connection, for a reason that the agent is told.
    pub(crate) fn end(&self, why: &str) {
        self.update(|waiting| waiting.end = Some(why.to_owned()));
    }

    /// Waits for what comes next.
    pub(crate) async fn next(&self) -> Next {
        loop {
            // Registered before the look, so that nothing is missed in between.
            let changed = self.changed.notified();
            if let Some(next) = self.take() {
                return next;
            }
            changed.await;
        }
    }

    /// How many changes wait.
    pub(crate) fn len(&self) -> usize {
        self.with(|waiting| waiting.changes.len())
    }

    fn take(&self) -> Option<Next> {
        self.with(|waiting| {
            if let Some(why) = &waiting.end {
                return Some(Next::End(why.clone()));
            }
            // A packet waits for an answer.
            if !waiting.answers.is_empty() {
                let rest = waiting.answers.split_off(waiting.answers.len().min(MAX_ANSWERS));
                return Some(Next::Answers(std::mem::replace(&mut waiting.answers, rest)));
            }
            if waiting.revision == 0 {
                return None;
            }
            let revision = std::mem::take(&mut waiting.revision);
            Some(Next::Changes(std::mem::take(&mut waiting.changes), revision))
        })
    }

    fn update(&self, change: impl FnOnce(&mut Waiting)) {
        self.with(change);
        self.changed.notify_one();
    }

    fn with<T>(&self, f: impl FnOnce(&mut Waiting) -> T) -> T {
        // A panic elsewhere leaves a map that is whole.
        f(&mut self.waiting.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}
