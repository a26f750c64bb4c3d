//! `bifrost-nicd` and `bifrost-gw`, as the lab runs them.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::interrupt;
use crate::lab::Lab;
use crate::netns::Namespace;
use crate::process::Program;

/// Time limit for a program to answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// A running program of a gateway, with its control socket.
#[derive(Debug)]
pub struct Daemon {
    program: Program,
    socket: PathBuf,
}

impl Daemon {
    /// Starts `name` (`bifrost-nicd` or `bifrost-gw`) in a namespace, with a configuration whose control socket is
    /// `socket`, and waits until it answers.
    ///
    /// # Errors
    /// The program is missing, ends, or does not answer.
    pub fn start(
        lab: &Lab,
        namespace: &Namespace,
        name: &str,
        configuration: &str,
        socket: PathBuf,
        logs: &Path,
    ) -> Result<Self> {
        let mut daemon = Self::launch(lab, namespace, name, configuration, socket, logs)?;
        daemon.wait_until_it_answers()?;
        Ok(daemon)
    }

    /// Like [`Daemon::start`], without waiting.
    ///
    /// # Errors
    /// The program is missing.
    pub fn launch(
        lab: &Lab,
        namespace: &Namespace,
        name: &str,
        configuration: &str,
        socket: PathBuf,
        logs: &Path,
    ) -> Result<Self> {
        std::fs::create_dir_all(logs).with_context(|| format!("creating {}", logs.display()))?;
        let file = logs.join(format!("{name}.toml"));
        std::fs::write(&file, configuration).with_context(|| format!("writing {}", file.display()))?;
        let mut command = namespace.command(lab.binaries.gateway(name)?);
        command.arg("--config").arg(&file).env("NO_COLOR", "1");
        let program = Program::start(command, name, &logs.join(format!("{name}.log")))?;
        Ok(Self { program, socket })
    }

    /// Waits until it answers.
    ///
    /// # Errors
    /// It ends, or does not answer in time.
    pub fn wait_until_it_answers(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.status().is_err() {
            self.program.check_alive()?;
            if Instant::now() > deadline {
                bail!("no answer on {}: {}", self.socket.display(), self.program.output()?);
            }
            interrupt::sleep(Duration::from_millis(10))?;
        }
        Ok(())
    }

    /// Its state.
    ///
    /// # Errors
    /// It does not answer.
    pub fn status(&self) -> Result<Value> {
        state(&self.socket)
    }

    /// Sends a command to the program.
    ///
    /// # Errors
    /// The program refuses the command.
    pub fn command(&self, command: &Value) -> Result<Value> {
        let body = command.to_string();
        self.request(&format!(
            "POST /v1/command HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        ))
    }

    /// Returns an error if the program has ended.
    ///
    /// # Errors
    /// The program has ended; the error contains its output.
    pub fn check_alive(&mut self) -> Result<()> {
        self.program.check_alive()
    }

    fn request(&self, request: &str) -> Result<Value> {
        self::request(&self.socket, request)
    }
}

/// The state of the program behind a control socket.
///
/// # Errors
/// It does not answer.
pub fn state(socket: &Path) -> Result<Value> {
    request(socket, "GET /v1/status HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
}

fn request(socket: &Path, request: &str) -> Result<Value> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("an answer without a body")?;
    if !head.starts_with("HTTP/1.1 200") {
        bail!("refused: {body}");
    }
    Ok(serde_json::from_str(body)?)
}

/// A number in a state, by its path, such as `/pods/0/counters/sent_packets`.
///
/// # Errors
/// There is no such number.
pub fn number(state: &Value, path: &str) -> Result<u64> {
    state.pointer(path).and_then(Value::as_u64).with_context(|| format!("the gateway does not tell {path}"))
}

/// A counter, summed over all workers of a pod.
///
/// # Errors
/// There is no such counter.
pub fn of_workers(state: &Value, name: &str) -> Result<u64> {
    let workers = state["workers"].as_array().context("a pod tells of its workers")?;
    workers.iter().map(|worker| number(worker, &format!("/{name}"))).sum()
}
