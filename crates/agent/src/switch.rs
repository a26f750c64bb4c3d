//! `bifrostd`'s API, asked from a thread of its own: its client blocks.

use std::io;
use std::path::Path;
use std::thread;

use bifrost_control::Client;
use bifrost_control::client::ClientError;
use tokio::sync::{mpsc, oneshot};

use crate::state::{Answer, Ask};

/// What is asked, and who wants to know.
type Question = (Ask, oneshot::Sender<Result<Answer, ClientError>>);

/// Asks one daemon, one question after the other. The thread ends when this is dropped and the last question is answered.
#[derive(Clone, Debug)]
pub struct Switch {
    questions: mpsc::Sender<Question>,
}

impl Switch {
    /// A client of the daemon on that socket; nothing is sent yet.
    ///
    /// # Errors
    /// There is no thread or runtime to be had.
    pub fn new(socket: &Path) -> Result<Switch, SwitchError> {
        let client = Client::new(socket)?;
        let (questions, mut asked) = mpsc::channel::<Question>(1);
        let answer = move || {
            while let Some((question, answer)) = asked.blocking_recv() {
                // Who asked may be gone.
                let _ = answer.send(ask(&client, question));
            }
        };
        thread::Builder::new().name("bifrostd".into()).spawn(answer)?;
        Ok(Switch { questions })
    }

    /// The answer to a question.
    ///
    /// # Errors
    /// There is none: the daemon is away, or refuses. [`ClientError::Protocol`] if the thread is gone.
    pub async fn ask(&self, question: Ask) -> Result<Answer, ClientError> {
        let gone = || ClientError::Protocol("the thread that asks has ended".to_owned());
        let (answer, answered) = oneshot::channel();
        self.questions.send((question, answer)).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }
}

/// Why the daemon cannot be asked at all.
#[derive(Debug, thiserror::Error)]
pub enum SwitchError {
    /// No client.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// No thread.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] io::Error),
}

fn ask(client: &Client, question: Ask) -> Result<Answer, ClientError> {
    Ok(match question {
        Ask::Status => Answer::Status(Box::new(client.status()?)),
        Ask::List(query) => Answer::List(client.objects(&query)?),
        Ask::Digests(query) => Answer::Digests(client.object_digests(&query)?),
        Ask::Apply(spec) => Answer::Apply(Box::new(client.apply(&spec)?)),
    })
}
