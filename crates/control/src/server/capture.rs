//! A capture as a response body: streams packets until the capture ends or the reader goes away, or until another
//! process continues it.
//!
//! In an upgrade, the response continues on the same connection. The old process writes whole chunks
//! (RFC 9112, section 7.1) until then, and neither ends the body nor closes the connection; the new process writes
//! further chunks to the socket ([`continue_capture`]). The client does not notice.

use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::Version;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use hyper::body::Frame;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::mpsc::{self, error::TrySendError};

use super::CaptureStream;
use super::connections::Lasting;
use crate::api::ApiError;

/// Chunks queued for the reader.
const CHUNKS: usize = 16;
/// How long a reader may stall.
const STALL_TIME: Duration = Duration::from_secs(10);
/// The same while another process waits for the connection.
const LEAVE_TIME: Duration = Duration::from_millis(500);
/// Retry interval of a full channel.
const PAUSE: Duration = Duration::from_millis(5);
/// The end of a body in chunks.
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// The server is about to stop.
pub(super) type Stopping = Arc<AtomicBool>;

/// A response that streams a capture until it ends, the reader goes away, or `stopping` is set. No other process can
/// continue it.
pub fn capture_response(stream: Box<dyn CaptureStream>, stopping: Arc<AtomicBool>) -> Response {
    respond(stream, stopping, None)
}

/// [`capture_response`] on a `connection` that another process can continue.
pub(super) fn lasting_response(
    stream: Box<dyn CaptureStream>,
    stopping: Stopping,
    connection: Lasting,
    version: Version,
) -> Response {
    connection.set();
    // Earlier versions have no chunks.
    respond(stream, stopping, (version == Version::HTTP_11).then_some(connection))
}

fn respond(stream: Box<dyn CaptureStream>, stopping: Stopping, connection: Option<Lasting>) -> Response {
    let (chunks, receiver) = mpsc::channel(CHUNKS);
    let body = Chunks { receiver, connection: connection.clone() };
    // Its own thread: a capture must not occupy one of the few threads for other calls.
    let thread = std::thread::Builder::new().name("capture".to_owned());
    match thread.spawn(move || pump(stream, chunks, &stopping, connection)) {
        Ok(_) => ([(CONTENT_TYPE, "application/x-pcapng")], Body::new(body)).into_response(),
        Err(e) => super::failure::failure(ApiError::internal(format!("cannot start a thread: {e}"))),
    }
}

/// Forwards chunks until the capture ends, the reader goes away or stalls, the server stops, or another process
/// continues.
fn pump(
    stream: Box<dyn CaptureStream>,
    chunks: mpsc::Sender<Bytes>,
    stopping: &AtomicBool,
    connection: Option<Lasting>,
) {
    // Dropped before the channel: when the client sees the end of the body, the next capture can start.
    let mut stream = stream;
    let mut sent = 0;
    while let Some(chunk) = stream.next() {
        if chunks.is_closed() || stopping.load(Ordering::Relaxed) {
            return;
        }
        let since = Instant::now();
        let patience = if stream.is_leaving() { LEAVE_TIME } else { STALL_TIME };
        if !chunk.is_empty() {
            let mut chunk = Bytes::from(chunk);
            while let Err(error) = chunks.try_send(chunk) {
                match error {
                    TrySendError::Full(unsent) if since.elapsed() < patience && !stopping.load(Ordering::Relaxed) => {
                        chunk = unsent;
                        std::thread::sleep(PAUSE);
                    }
                    TrySendError::Full(_) | TrySendError::Closed(_) => return,
                }
            }
            sent += 1;
        }
        if stream.is_leaving() {
            let socket = connection.and_then(|connection| connection.leave(sent, since + patience));
            if socket.is_some() {
                // The other process ends the body, so it must not end here. This process is about to exit.
                std::mem::forget(chunks);
            }
            stream.leave(socket);
            return;
        }
    }
}

struct Chunks {
    receiver: mpsc::Receiver<Bytes>,
    connection: Option<Lasting>,
}

impl hyper::body::Body for Chunks {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let next = self.receiver.poll_recv(context);
        if let (Poll::Ready(Some(_)), Some(connection)) = (&next, &self.connection) {
            connection.taken();
        }
        next.map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
    }
}

/// A capture whose response another process has begun. Dropping it ends the capture.
#[derive(Debug)]
pub struct Continued {
    thread: Option<JoinHandle<()>>,
    stopping: Stopping,
}

impl Drop for Continued {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a capture panicked");
        }
    }
}

/// Continues the response of another process on its `connection`, as it was [left](CaptureStream::leave), with a thread
/// of its own: until the capture ends, the reader goes away or stalls, or the result is dropped.
///
/// # Errors
/// The thread cannot be started; the connection is closed.
pub fn continue_capture(stream: Box<dyn CaptureStream>, connection: OwnedFd) -> io::Result<Continued> {
    let stopping = Stopping::default();
    let is_stopping = Arc::clone(&stopping);
    let thread = std::thread::Builder::new().name("capture".to_owned());
    // An error means that the reader is gone.
    let thread = thread.spawn(move || drop(write_on(stream, connection.into(), &is_stopping)))?;
    Ok(Continued { thread: Some(thread), stopping })
}

fn write_on(mut stream: Box<dyn CaptureStream>, connection: UnixStream, stopping: &AtomicBool) -> io::Result<()> {
    // The other process may still hold the descriptor, and must not block either.
    connection.set_nonblocking(true)?;
    while let Some(chunk) = stream.next() {
        if stopping.load(Ordering::Relaxed) {
            break;
        }
        if ready(&connection, PollFlags::RDHUP, Duration::ZERO)? {
            return Ok(());
        }
        let is_leaving = stream.is_leaving();
        if !chunk.is_empty() {
            let patience = if is_leaving { LEAVE_TIME } else { STALL_TIME };
            let framed = [format!("{:x}\r\n", chunk.len()).as_bytes(), &chunk, b"\r\n"].concat();
            write_all(&connection, &framed, patience, stopping)?;
        }
        if is_leaving {
            stream.leave(Some(connection.into()));
            return Ok(());
        }
    }
    write_all(&connection, LAST_CHUNK, LEAVE_TIME, &AtomicBool::new(false))?;
    // Another process may still hold the descriptor.
    connection.shutdown(std::net::Shutdown::Both)
}

/// Writes all bytes; fails if the reader stalls for `patience`, or if `stopping` is set meanwhile.
fn write_all(
    mut connection: &UnixStream,
    mut rest: &[u8],
    patience: Duration,
    stopping: &AtomicBool,
) -> io::Result<()> {
    let mut since = Instant::now();
    while !rest.is_empty() {
        match connection.write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => {
                rest = &rest[written..];
                since = Instant::now();
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e),
            Err(_) if since.elapsed() >= patience || stopping.load(Ordering::Relaxed) => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(_) => drop(ready(connection, PollFlags::OUT, PAUSE)?),
        }
    }
    Ok(())
}

/// Waits at most `patience` until one of `events`, an error or a hang-up is there.
fn ready(connection: &UnixStream, events: PollFlags, patience: Duration) -> io::Result<bool> {
    let wait = Timespec::try_from(patience).unwrap_or(Timespec { tv_sec: 0, tv_nsec: 0 });
    match poll(&mut [PollFd::from_borrowed_fd(connection.as_fd(), events)], Some(&wait)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}
