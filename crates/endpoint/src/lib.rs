//! Messages and calls between processes, with or without RDMA NICs.
//!
//! A [`Worker`], one per thread, has connections to peers. Each is an [`Endpoint`], with [`Endpoint::send`] and
//! [`Endpoint::recv`] for messages of up to 256 MiB, and [`Endpoint::call`] and [`Endpoint::next_request`] for calls.
//! No message is lost, duplicated or (by default) reordered, even if the network drops packets. The host's RDMA NIC is
//! used if it has the worker's address ([`Choice`]). Otherwise the same RoCEv2 packets are sent over UDP sockets.
//! [`Worker::provider`] reports which is used, and why.
//!
//! Calls of a worker and of its endpoints drive the connections. A thread that is busy with other work must call
//! [`Worker::poll`] or [`Worker::wait`] regularly.
//!
//! # Messages and calls
//!
//! ```
//! use std::time::Duration;
//!
//! use bifrost_endpoint::{Worker, WorkerConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let second = Duration::from_secs(1);
//! let local = std::net::IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]);
//! // Port 0, because several processes share the host: peers learn the port at setup.
//! let config = WorkerConfig { port: 0, ..WorkerConfig::new(local) };
//! let (sender, address) = std::sync::mpsc::channel();
//! let server = std::thread::spawn(move || -> Result<(), bifrost_endpoint::Error> {
//!     let worker = Worker::new(config)?;
//!     let mut listener = worker.listen((local, 0).into())?;
//!     let _ = sender.send(listener.local_addr()?);
//!     let endpoint = worker.accept(&mut listener, 10 * second)?;
//!     let request = endpoint.next_request(10 * second)?;
//!     let mut response = request.message.to_vec();
//!     response.reverse();
//!     endpoint.respond(&request, response)?;
//! #   // Do not wait for the acknowledgement: the peer ends when it has the response.
//! #   let _ = endpoint.recv(10 * second);
//!     Ok(())
//! });
//! let worker = Worker::new(config)?;
//! let endpoint = worker.connect(address.recv()?, 10 * second)?;
//! assert_eq!(*endpoint.call(b"tide".to_vec(), 10 * second)?, *b"edit");
//! # drop(endpoint);
//! # server.join().map_err(|_| "the server panicked")??;
//! # Ok(())
//! # }
//! ```
//!
//! # Memory that peers read and write
//!
//! [`Worker::register`] makes a [`Region`]. Peers permitted by [`Region::allow`] use [`Endpoint::write`] and
//! [`Endpoint::read`]. The application that owns the region is not involved: its worker checks and executes the
//! accesses when it is polled. A peer can access only what was permitted, whatever it sends.
//!
//! ```
//! # use std::time::Duration;
//! # use bifrost_endpoint::{RemoteRegion, Rights, Worker, WorkerConfig};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let second = Duration::from_secs(1);
//! # let local = std::net::IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]);
//! # let config = WorkerConfig { port: 0, ..WorkerConfig::new(local) };
//! # let (sender, address) = std::sync::mpsc::channel();
//! # let server = std::thread::spawn(move || -> Result<Vec<u8>, bifrost_endpoint::Error> {
//! #     let worker = Worker::new(config)?;
//! #     let mut listener = worker.listen((local, 0).into())?;
//! #     let _ = sender.send(listener.local_addr()?);
//! #     let endpoint = worker.accept(&mut listener, 10 * second)?;
//! // The end that has the memory:
//! let region = worker.register(vec![0; 4096])?;
//! let remote = region.allow(&endpoint, Rights::ReadWrite)?;
//! endpoint.send(remote.to_bytes().to_vec())?;
//! #     // Until the peer has ended.
//! #     let _ = endpoint.recv(10 * second);
//! #     Ok(region.into_vec())
//! # });
//! # let worker = Worker::new(config)?;
//! # let endpoint = worker.connect(address.recv()?, 10 * second)?;
//! // The other end:
//! let bytes = endpoint.recv(10 * second)?;
//! let remote = RemoteRegion::from_bytes(bytes.as_array().ok_or("wrong length")?);
//! endpoint.write(&remote, 100, b"some bytes", 10 * second)?;
//! assert_eq!(*endpoint.read(&remote, 105, 5, 10 * second)?, *b"bytes");
//! # drop(endpoint);
//! # let memory = server.join().map_err(|_| "the server panicked")??;
//! # assert_eq!(memory[100..110], *b"some bytes");
//! # Ok(())
//! # }
//! ```
//!
//! # Futures
//!
//! Each blocking operation also exists as a future: [`Endpoint::recv_async`], [`Endpoint::send_async`],
//! [`Endpoint::call_async`], [`Endpoint::write_async`], [`Worker::connect_async`] and so on. They need no particular
//! runtime: [`Worker::block_on`] is enough, and other runtimes poll the worker when its [`Worker::descriptor`] is
//! readable or [`Worker::due`] has passed.
//!
//! ```
//! # use std::time::Duration;
//! # use bifrost_endpoint::{Error, Worker, WorkerConfig};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let second = Duration::from_secs(1);
//! # let local = std::net::IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]);
//! # let config = WorkerConfig { port: 0, ..WorkerConfig::new(local) };
//! # let (sender, address) = std::sync::mpsc::channel();
//! # let server = std::thread::spawn(move || -> Result<(), Error> {
//! #     let worker = Worker::new(config)?;
//! #     let mut listener = worker.listen((local, 0).into())?;
//! #     let _ = sender.send(listener.local_addr()?);
//! worker.block_on(async {
//!     let endpoint = worker.accept_async(&mut listener).await?;
//!     let message = endpoint.recv_async().await?;
//!     endpoint.send_async(message.to_vec()).await
//! })??;
//! #     Ok(())
//! # });
//! # let worker = Worker::new(config)?;
//! # let endpoint = worker.connect(address.recv()?, 10 * second)?;
//! # endpoint.send(b"there and back".to_vec())?;
//! # assert_eq!(*endpoint.recv(10 * second)?, *b"there and back");
//! # endpoint.worker().wait(Duration::from_millis(50))?;
//! # drop(endpoint);
//! # match server.join().map_err(|_| "the server panicked")? {
//! #     // This end may go before the last acknowledgement has arrived.
//! #     Ok(()) | Err(Error::Closed { .. }) => Ok(()),
//! #     Err(error) => Err(error.into()),
//! # }
//! # }
//! ```
//!
//! The layer below is [`Host`], which joins the engine (`bifrost-rdm`) and a provider of verbs, and does no I/O itself.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod buffers;
mod config;
mod connecting;
mod control;
mod endpoint;
mod error;
mod flag;
mod future;
mod host;
mod inner;
mod region;
mod regions;
mod remote;
mod served;
mod setup;
mod slots;
mod statistics;
#[cfg(test)]
mod tests;
mod wakers;
mod worker;

#[cfg(feature = "mutations")]
pub use bifrost_rdm::Mutation;
pub use bifrost_rdm::{
    Adaptive, Chunking, Class, CloseReason, Config, Congestion, ConnectionConfig, ConnectionId, Counters, Fixed,
    MessageId, NEVER, Order, SendError, Service, Swift, SwiftConfig, Unlimited,
};
pub use bifrost_verbs::Choice;
pub use config::WorkerConfig;
pub use connecting::Connecting;
pub use endpoint::{Endpoint, Message, Request};
pub use error::Error;
pub use host::{Host, HostConfig, HostError, HostEvent, Limits, MAX_ACCESS};
pub use region::Region;
pub use regions::Rights;
pub use remote::RemoteRegion;
pub use served::AccessCounters;
pub use setup::Listener;
pub use statistics::{Statistic, exposition};
pub use worker::{SETUP_TIMEOUT, Worker};
