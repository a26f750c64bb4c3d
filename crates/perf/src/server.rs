//! The server: reads messages, and answers calls with their requests' data.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use bifrost_endpoint::{Endpoint, Error, Worker};

use crate::{numbered, stats, tcp};

/// Serves clients until `clients` have left, or forever. Writes statistics when one leaves.
pub(crate) fn run(worker: &Worker, at: SocketAddr, clients: u32, statistics: Option<&Path>) -> Result<()> {
    let mut listener = worker.listen(at)?;
    let plain = SocketAddr::new(at.ip(), at.port().wrapping_add(1));
    let plain = TcpListener::bind(plain).with_context(|| format!("cannot bind {plain} for --tcp"))?;
    std::thread::Builder::new().name("tcp".to_owned()).spawn(move || tcp::serve(&plain))?;
    eprintln!("listening on {at}");
    // With the number of numbered calls of each client.
    let mut endpoints: Vec<(Endpoint, u64)> = Vec::new();
    let mut followed = worker.followed();
    let (mut gone, mut written) = (0, 0);
    loop {
        if let Some(endpoint) = worker.try_accept(&mut listener)? {
            eprintln!("{} connected", endpoint.peer());
            endpoints.push((endpoint, 0));
        }
        endpoints.retain_mut(|(endpoint, counted)| match serve(endpoint, counted) {
            Ok(()) => true,
            Err(error) => {
                eprintln!("{error}");
                gone += 1;
                false
            }
        });
        let now = worker.followed();
        if now != followed {
            followed = now;
            match &followed {
                Some((_, Some(problem))) => eprintln!("--follow: {problem}; the service is unchanged"),
                Some((service, None)) => eprintln!("sending with {service:?}"),
                None => {}
            }
        }
        if gone > written {
            written = gone;
            stats::write(worker, statistics)?;
        }
        if clients > 0 && gone >= clients {
            return Ok(());
        }
        worker.wait(Duration::from_millis(10))?;
    }
}

fn serve(endpoint: &Endpoint, counted: &mut u64) -> Result<(), Error> {
    while endpoint.try_recv()?.is_some() {}
    while let Some(request) = endpoint.try_request()? {
        let mut response = endpoint.buffer(request.message.len());
        response.copy_from_slice(&request.message);
        numbered::answer(&mut response, counted);
        match endpoint.respond(&request, response) {
            Ok(_) => {}
            // The client exceeds the limit of open calls: it gets no response, and reports a timeout.
            Err(error) if error.is_full() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
