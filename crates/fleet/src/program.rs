//! Runs the relay as a program, and calls its API.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bifrost_control::Client;
use bifrost_intent::api::{Applied, Objects, Status};
use bifrost_intent::{Batch, Change, MAX_CHANGES};

const ANSWER: Duration = Duration::from_secs(60);

/// A relay that runs in a directory; it is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Relay {
    child: Option<Child>,
    directory: PathBuf,
    port: u16,
}

impl Relay {
    /// Starts the relay from the directory of this program, with its store in a directory.
    pub(crate) fn start(directory: &Path) -> Result<Relay> {
        // This port was free a moment ago; others take random ports, too.
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut relay = Relay { child: None, directory: directory.to_owned(), port };
        relay.restart()?;
        Ok(relay)
    }

    /// Starts it again after [`kill`](Self::kill).
    pub(crate) fn restart(&mut self) -> Result<()> {
        let program = std::env::current_exe()?.with_file_name("bifrost-relay");
        let log = std::fs::File::options().create(true).append(true).open(self.directory.join("relay.log"))?;
        let child = Command::new(&program)
            .arg("--store")
            .arg(format!("file:{}", self.directory.join("store").display()))
            .args(["--insecure", "--listen", &format!("127.0.0.1:{}", self.port)])
            .arg("--socket")
            .arg(self.socket())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| {
                format!("cannot run {}; build it with `cargo build --release -p bifrost-relay`", program.display())
            })?;
        self.child = Some(child);
        Ok(())
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Waits until it follows its store.
    pub(crate) async fn wait_ready(&mut self) -> Result<Status> {
        let deadline = Instant::now() + ANSWER;
        loop {
            let api = self.api();
            match tokio::task::spawn_blocking(move || api.get::<Status>("/v1/status")).await? {
                Ok(status) if status.in_sync => return Ok(status),
                Ok(_) => {}
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => {}
            }
            if let Some(ended) = self.child.as_mut().and_then(|child| child.try_wait().transpose()) {
                bail!("the relay has ended: {}; see {}", ended?, self.directory.join("relay.log").display());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Address for agents.
    pub(crate) fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub(crate) fn api(&self) -> Api {
        Api(self.socket().into())
    }

    /// Its resident memory, MB, and the processor time that it has used.
    pub(crate) fn usage(&self) -> Result<(u64, Duration)> {
        let pid = self.child.as_ref().map_or(0, Child::id);
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let kilobytes = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
        // utime and stime, hundredths of a second (proc(5)).
        let ticks: u64 = [11, 12].iter().filter_map(|at| fields.get(*at)?.parse::<u64>().ok()).sum();
        Ok((kilobytes.unwrap_or(0) / 1024, Duration::from_millis(ticks * 10)))
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("relay.sock")
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The API of a relay. Its calls block.
#[derive(Clone, Debug)]
pub(crate) struct Api(Arc<Path>);

impl Api {
    /// That of the relay with this socket.
    pub(crate) fn at(socket: &Path) -> Api {
        Api(socket.into())
    }

    pub(crate) fn get<T: serde::de::DeserializeOwned>(&self, target: &str) -> Result<T> {
        Ok(Client::new(&self.0)?.get(target, ANSWER)?)
    }

    /// Applies a batch.
    pub(crate) fn apply(&self, changes: Vec<Change>) -> Result<Applied> {
        Ok(Client::new(&self.0)?.post("/v1/apply", &Batch { changes }, ANSWER)?)
    }

    /// Applies all items in batches.
    pub(crate) fn apply_all(&self, changes: &[Change], progress: &indicatif::ProgressBar) -> Result<()> {
        progress.set_length(changes.len() as u64);
        for chunk in changes.chunks(MAX_CHANGES) {
            self.apply(chunk.to_vec())?;
            progress.inc(chunk.len() as u64);
        }
        Ok(())
    }

    /// Every object, with the revision of the last page.
    pub(crate) fn objects(&self) -> Result<Objects> {
        let mut all = Objects::default();
        let mut from = String::new();
        loop {
            let page: Objects = self.get(&format!("/v1/objects?{from}"))?;
            all.revision = page.revision;
            all.objects.extend(page.objects);
            match page.next {
                Some(next) => from = format!("from={next}"),
                None => return Ok(all),
            }
        }
    }
}
