//! A capture as a response body: streams packets until the capture ends or the reader goes away.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use hyper::body::Frame;
use tokio::sync::mpsc::{self, error::TrySendError};

use super::CaptureStream;
use crate::api::ApiError;

/// Chunks queued for the reader.
const CHUNKS: usize = 16;
/// How long a reader may stall.
const STALL_TIME: Duration = Duration::from_secs(10);
/// Retry interval of a full channel.
const PAUSE: Duration = Duration::from_millis(5);

/// The server is about to stop.
pub(super) type Stopping = Arc<AtomicBool>;

/// A response that streams a capture until it ends, the reader goes away, or `stopping` is set.
pub fn capture_response(stream: Box<dyn CaptureStream>, stopping: Arc<AtomicBool>) -> Response {
    let (chunks, receiver) = mpsc::channel(CHUNKS);
    // Its own thread: a capture must not occupy one of the few threads for other calls.
    let thread = std::thread::Builder::new().name("capture".to_owned());
    match thread.spawn(move || pump(stream, &chunks, &stopping)) {
        Ok(_) => ([(CONTENT_TYPE, "application/x-pcapng")], Body::new(Chunks(receiver))).into_response(),
        Err(e) => super::failure::failure(ApiError::internal(format!("cannot start a thread: {e}"))),
    }
}

/// Forwards chunks until the capture ends, the reader goes away or stalls, or the server stops.
fn pump(mut stream: Box<dyn CaptureStream>, chunks: &mpsc::Sender<Bytes>, stopping: &AtomicBool) {
    while let Some(chunk) = stream.next() {
        if chunks.is_closed() || stopping.load(Ordering::Relaxed) {
            return;
        }
        if chunk.is_empty() {
            continue;
        }
        let mut chunk = Bytes::from(chunk);
        let since = Instant::now();
        while let Err(error) = chunks.try_send(chunk) {
            match error {
                TrySendError::Full(unsent) if since.elapsed() < STALL_TIME && !stopping.load(Ordering::Relaxed) => {
                    chunk = unsent;
                    std::thread::sleep(PAUSE);
                }
                TrySendError::Full(_) | TrySendError::Closed(_) => return,
            }
        }
    }
}

struct Chunks(mpsc::Receiver<Bytes>);

impl hyper::body::Body for Chunks {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(context).map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
    }
}
