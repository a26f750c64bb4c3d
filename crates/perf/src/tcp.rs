//! The same measurements over TCP: a header of 8 bytes with length and kind, then the message.

use std::io::{self, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hdrhistogram::Histogram;

use crate::plan::{Plan, Progress, Test};
use crate::report::{Latency, Report};

/// The longest message that a server accepts.
const LONGEST: u32 = 256 << 20;
/// Kinds: receive; echo; acknowledge that all earlier messages were received.
const TAKE: u32 = 0;
const ECHO: u32 = 1;
const SYNC: u32 = 2;

/// Serves clients, one thread each.
pub(crate) fn serve(listener: &TcpListener) {
    for stream in listener.incoming().flatten() {
        let served = std::thread::Builder::new().name("tcp-client".to_owned()).spawn(move || serve_one(&stream));
        if let Err(error) = served {
            eprintln!("cannot start a thread for a TCP client: {error}");
        }
    }
}

fn serve_one(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut input = BufReader::with_capacity(256 * 1024, stream);
    let mut output = stream;
    let mut message = Vec::new();
    loop {
        let mut header = [0; 8];
        input.read_exact(&mut header)?;
        let (len, kind) = read_header(header);
        if len > LONGEST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        message.resize(8 + len as usize, 0);
        message[..8].copy_from_slice(&header);
        input.read_exact(&mut message[8..])?;
        match kind {
            ECHO => output.write_all(&message)?,
            SYNC => output.write_all(&header)?,
            _ => {}
        }
    }
}

fn read_header(header: [u8; 8]) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = header;
    (u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([e, f, g, h]))
}

fn message(kind: u32, size: usize) -> Vec<u8> {
    let mut message = vec![0; 8 + size];
    message[..4].copy_from_slice(&(size as u32).to_be_bytes());
    message[4..8].copy_from_slice(&kind.to_be_bytes());
    message
}

pub(crate) fn run(server: SocketAddr, plan: &Plan) -> Result<Report> {
    let stream = TcpStream::connect_timeout(&server, Duration::from_secs(5))
        .with_context(|| format!("cannot connect to {server} over TCP"))?;
    stream.set_nodelay(true)?;
    // A call that takes longer than TCP's first retransmission timeouts has failed.
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let mut progress = Progress::begin(plan);
    let mut histogram = Histogram::<u64>::new_with_bounds(100, 60_000_000_000, 3)?;
    let mut done = 0u64;
    let (mut input, mut output) = (&stream, &stream);
    match plan.test {
        Test::Bandwidth => {
            let message = message(TAKE, plan.size);
            while progress.continues(done) {
                output.write_all(&message)?;
                done += 1;
            }
            output.write_all(&self::message(SYNC, 0))?;
            input.read_exact(&mut [0; 8])?;
        }
        Test::Latency => {
            let message = message(ECHO, plan.size);
            let mut answer = vec![0; message.len()];
            while progress.continues(done) {
                let begin = Instant::now();
                output.write_all(&message)?;
                input.read_exact(&mut answer)?;
                histogram.saturating_record(begin.elapsed().as_nanos() as u64);
                done += 1;
            }
        }
    }
    let seconds = progress.elapsed();
    drop(progress);
    Ok(Report {
        test: if plan.test == Test::Bandwidth { "bandwidth" } else { "latency" },
        transport: format!("TCP to {server}"),
        size_bytes: plan.size,
        messages: done,
        seconds,
        gbit_per_s: done as f64 * plan.size as f64 * 8.0 / seconds / 1e9,
        messages_per_s: done as f64 / seconds,
        latency_us: (plan.test == Test::Latency).then(|| Latency::of(&histogram)),
        engine: None,
    })
}
