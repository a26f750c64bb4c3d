//! Requests and answers over QUIC (RFC 9000, with the crate `quinn`): a stream for each request, over persistent
//! connections.
//!
//! QUIC recovers losses itself, above UDP. The network treats it like any UDP traffic.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use hdrhistogram::Histogram;
use quinn::rustls::RootCertStore;
use quinn::rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use quinn::{ClientConfig, Connection, Endpoint, RecvStream, SendStream, ServerConfig};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::programs::application::{
    Application, CONNECTIONS, Load, Measurement, Server, ServerThread, latencies, pace,
};
use crate::topology::Guest;

/// The port of the server.
const PORT: u16 = 4433;
/// The name in its certificate.
const NAME: &str = "bifrost-lab";
/// Concurrent requests on each connection, in a closed loop.
const STREAMS: u32 = 4;
/// Request rate for latencies, over all connections, 1/s.
const PACED_PER_S: f64 = 1000.0;
/// Length of an answer, bytes; a request has 4 bytes.
const ANSWER: usize = 1024;
/// How long requests in flight may take after the load ends.
const PATIENCE: Duration = Duration::from_secs(10);

/// QUIC.
#[derive(Debug, Clone, Copy)]
pub struct Quic;

impl Application for Quic {
    fn serve(&self, guest: &Guest, _files: &Path, _logs: &Path) -> Result<Box<dyn Server>> {
        let address = SocketAddr::from((guest.address, PORT));
        let mut server = ServerThread::start(guest, move |stop| runtime()?.block_on(serve(address, stop)))?;
        // A client retransmits its Initial packet until the server is up.
        let asked =
            guest.namespace.enter(move || runtime()?.block_on(async { ask(&connect(address).await?, 0).await }));
        server.check_alive()?;
        asked?;
        Ok(Box::new(server))
    }

    fn load(&self, load: &Load<'_>) -> Result<Measurement> {
        let (address, duration) = (SocketAddr::from((load.server.address, PORT)), load.duration);
        load.client.namespace.enter(move || {
            runtime()?.block_on(async {
                let mut connections = Vec::new();
                for _ in 0..CONNECTIONS {
                    connections.push(connect(address).await?);
                }
                let requests_per_s = closed_loop(&connections, duration).await?;
                let latency_us = open_loop(&connections, duration).await?;
                connections.iter().for_each(|connection| connection.close(0_u32.into(), b""));
                let paced_requests_per_s = Some(PACED_PER_S);
                Ok(Measurement { requests_per_s, paced_requests_per_s, latency_us, lost_requests: 0 })
            })
        })
    }
}

/// The server's certificate and its key, valid while this process lives.
static IDENTITY: LazyLock<Result<(CertificateDer<'static>, Vec<u8>), rcgen::Error>> = LazyLock::new(|| {
    let made = rcgen::generate_simple_self_signed([NAME.to_owned()])?;
    Ok((made.cert.der().clone(), made.signing_key.serialize_der()))
});

fn identity() -> Result<&'static (CertificateDer<'static>, Vec<u8>)> {
    IDENTITY.as_ref().map_err(|error| anyhow!("creating a certificate: {error}"))
}

/// A single-threaded runtime, in the guest's namespace and on its processor.
fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting a runtime")
}

/// Answers until `stop` is set.
async fn serve(address: SocketAddr, stop: &AtomicBool) -> Result<()> {
    let (certificate, key) = identity()?;
    let config =
        ServerConfig::with_single_cert(vec![certificate.clone()], PrivatePkcs8KeyDer::from(key.clone()).into())?;
    let endpoint = Endpoint::server(config, address).with_context(|| format!("listening to UDP {address}"))?;
    while !stop.load(Ordering::Relaxed) {
        tokio::select! {
            incoming = endpoint.accept() => {
                let incoming = incoming.context("the QUIC endpoint is closed")?;
                // The client reports an error if its connection fails.
                tokio::spawn(async move {
                    if let Ok(connection) = incoming.await {
                        while let Ok((send, receive)) = connection.accept_bi().await {
                            tokio::spawn(answer(send, receive));
                        }
                    }
                });
            }
            () = sleep(Duration::from_millis(100)) => {}
        }
    }
    Ok(())
}

async fn answer(mut send: SendStream, mut receive: RecvStream) -> Result<()> {
    let request = receive.read_to_end(4).await?;
    let number = u32::from_be_bytes(*request.first_chunk().context("a request has 4 bytes")?);
    send.write_all(&answer_to(number)).await?;
    Ok(send.finish()?)
}

/// The request's number, repeated.
fn answer_to(number: u32) -> Vec<u8> {
    number.to_be_bytes().repeat(ANSWER / 4)
}

async fn connect(address: SocketAddr) -> Result<Connection> {
    let mut roots = RootCertStore::empty();
    roots.add(identity()?.0.clone())?;
    let config = ClientConfig::with_root_certificates(Arc::new(roots))?;
    let endpoint = Endpoint::client(SocketAddr::from(([0; 4], 0))).context("opening a UDP socket")?;
    endpoint.connect_with(config, address, NAME)?.await.with_context(|| format!("connecting to {address} by QUIC"))
}

async fn ask(connection: &Connection, number: u32) -> Result<()> {
    let (mut send, mut receive) = connection.open_bi().await?;
    send.write_all(&number.to_be_bytes()).await?;
    send.finish()?;
    let answer = receive.read_to_end(2 * ANSWER).await?;
    ensure!(answer == answer_to(number), "a wrong answer of {} bytes", answer.len());
    Ok(())
}

/// Requests per second in a closed loop.
async fn closed_loop(connections: &[Connection], duration: Duration) -> Result<f64> {
    let end = Instant::now() + duration;
    let mut tasks = JoinSet::new();
    for connection in connections {
        for stream in 0..STREAMS {
            let connection = connection.clone();
            tasks.spawn(async move {
                let mut answered = 0;
                loop {
                    ask(&connection, stream << 24 | answered).await?;
                    if Instant::now() > end {
                        return anyhow::Ok(answered);
                    }
                    answered += 1;
                }
            });
        }
    }
    let mut answered = 0;
    while let Some(ended) = timeout(duration + PATIENCE, tasks.join_next()).await.context("no answer by QUIC")? {
        answered += ended??;
    }
    Ok(f64::from(answered) / duration.as_secs_f64())
}

/// Latencies of requests at a fixed rate, each from the time when it was due, µs.
async fn open_loop(connections: &[Connection], duration: Duration) -> Result<Histogram<u64>> {
    let (sender, mut receiver) = mpsc::unbounded_channel();
    let start = Instant::now();
    // A separate thread on the same processor, because the runtime's timers have a resolution of milliseconds.
    let pacing =
        std::thread::spawn(move || pace(start, PACED_PER_S, duration, |number, due| Ok(sender.send((number, due))?)));
    let mut tasks = JoinSet::new();
    while let Some((number, due)) = receiver.recv().await {
        let connection = connections[number as usize % connections.len()].clone();
        tasks.spawn(async move { ask(&connection, number).await.map(|()| due.elapsed()) });
    }
    pacing.join().map_err(|_| anyhow!("the thread that paces panicked"))??;
    let mut latency_us = latencies()?;
    while let Some(ended) = timeout(PATIENCE, tasks.join_next()).await.context("no answer by QUIC")? {
        latency_us.saturating_record((ended??.as_micros() as u64).max(1));
    }
    Ok(latency_us)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_is_answered_and_timed() {
        // A free port that the lab does not use.
        let address = std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let server = {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || runtime().unwrap().block_on(serve(address, &stop)))
        };
        runtime().unwrap().block_on(async {
            let connections = [connect(address).await.unwrap(), connect(address).await.unwrap()];
            let rate = closed_loop(&connections, Duration::from_millis(200)).await.unwrap();
            assert!(rate > 50.0, "{rate}");
            let latency_us = open_loop(&connections, Duration::from_millis(200)).await.unwrap();
            assert_eq!(latency_us.len(), 200);
        });
        stop.store(true, Ordering::Relaxed);
        server.join().unwrap().unwrap();
    }
}
