//! memcached, and a client that alternates between `set` and `get`.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::process::Program;
use crate::programs::application::{Application, Load, Measurement, READY_TIMEOUT, Server};
use crate::programs::key_value_client::{self, Report};
use crate::programs::key_value_protocol::Protocol;
use crate::topology::Guest;

/// The port it listens on.
const PORT: u16 = 11211;
/// Number of connections, one request in flight on each.
const CLIENTS: u32 = 50;
/// Request rate for latencies, over all connections, 1/s. It is low enough that each connection is mostly idle, even
/// if TCP needs 200 ms for one request in fifty.
const PACED_PER_S: f64 = 2000.0;
/// Longer than TCP needs to recover from any fault that the lab injects.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Warm-up, during which connections open.
const WARM_UP: Duration = Duration::from_millis(500);

/// memcached.
#[derive(Debug, Clone, Copy)]
pub struct Memcached;

impl Application for Memcached {
    fn serve(&self, guest: &Guest, _files: &Path, logs: &Path) -> Result<Box<dyn Server>> {
        let address = SocketAddr::from((guest.address, PORT));
        let mut command = guest.namespace.command("memcached");
        command.args(["-u", "nobody", "-l", &guest.address.to_string(), "-p", &PORT.to_string(), "-U", "0"]);
        command.args(["-t", "1", "-m", "64", "-c", "2000"]);
        let mut program = Program::start(command, "memcached", &logs.join("memcached.log"))?;
        program.wait_until_ready(&guest.namespace, READY_TIMEOUT, move || ask(address))?;
        Ok(Box::new(program))
    }

    fn load(&self, load: &Load<'_>) -> Result<Measurement> {
        let closed = run(load, None)?;
        let requests_per_s = closed.latency_us.len() as f64 / load.duration.as_secs_f64();
        let open = run(load, Some(PACED_PER_S))?;
        Ok(Measurement {
            requests_per_s,
            paced_requests_per_s: Some(PACED_PER_S),
            latency_us: open.latency_us,
            lost_requests: 0,
        })
    }
}

fn run(load: &Load<'_>, requests_per_s: Option<f64>) -> Result<Report> {
    let client = load.client;
    let load = key_value_client::Load {
        server: (load.server.address, PORT).into(),
        transport: client.namespace.stream_protocol(),
        protocol: Protocol::Memcached,
        clients: CLIENTS,
        keep_alive: true,
        duration: WARM_UP + load.duration,
        warm_up: WARM_UP,
        timeout: TIMEOUT,
        patience: TIMEOUT,
        op: None,
        requests_per_s,
        record: false,
        stop: Arc::default(),
    };
    let report = client.namespace.enter(move || key_value_client::run(&load))?;
    let (failed, wrong) = (report.failed(), report.wrong_answers);
    ensure!(
        failed == 0 && wrong == 0 && !report.latency_us.is_empty(),
        "memcached: {} requests answered, {failed} failed, {wrong} of them by a wrong answer",
        report.answered()
    );
    Ok(report)
}

fn ask(address: SocketAddr) -> Result<()> {
    let timeout = Duration::from_secs(1);
    let mut stream = TcpStream::connect_timeout(&address, timeout).context("connecting to memcached")?;
    stream.set_read_timeout(Some(timeout))?;
    stream.write_all(b"version\r\n")?;
    let mut answer = [0; 8];
    stream.read_exact(&mut answer)?;
    ensure!(answer == *b"VERSION ", "memcached answers {:?}", String::from_utf8_lossy(&answer));
    Ok(())
}
