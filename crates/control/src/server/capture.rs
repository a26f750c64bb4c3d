//! A capture as the body of an answer: packets as they come, for as long as somebody reads.

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

/// Pieces that wait for the reader.
const PIECES: usize = 16;
/// How long a reader may take nothing.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often a full channel is tried again.
const PAUSE: Duration = Duration::from_millis(5);

/// The server is about to stop.
pub(super) type Stopping = Arc<AtomicBool>;

/// An answer whose body is what the stream gives, until it is over, nobody reads any more, or `stopping` is set.
pub fn capture_response(stream: Box<dyn CaptureStream>, stopping: Arc<AtomicBool>) -> Response {
    let (pieces, receiver) = mpsc::channel(PIECES);
    // A thread of its own: the few threads of other calls are not to wait for it.
    let thread = std::thread::Builder::new().name("capture".to_owned());
    match thread.spawn(move || pump(stream, &pieces, &stopping)) {
        Ok(_) => ([(CONTENT_TYPE, "application/x-pcapng")], Body::new(Pieces(receiver))).into_response(),
        Err(e) => super::failure::failure(ApiError::internal(format!("cannot start a thread: {e}"))),
    }
}

/// Until the capture is over, nobody reads any more, or the server stops.
fn pump(mut stream: Box<dyn CaptureStream>, pieces: &mpsc::Sender<Bytes>, stopping: &AtomicBool) {
    while let Some(piece) = stream.next() {
        if pieces.is_closed() || stopping.load(Ordering::Relaxed) {
            return;
        }
        if piece.is_empty() {
            continue;
        }
        let mut piece = Bytes::from(piece);
        let since = Instant::now();
        while let Err(error) = pieces.try_send(piece) {
            match error {
                TrySendError::Full(again) if since.elapsed() < PATIENCE && !stopping.load(Ordering::Relaxed) => {
                    piece = again;
                    std::thread::sleep(PAUSE);
                }
                TrySendError::Full(_) | TrySendError::Closed(_) => return,
            }
        }
    }
}

struct Pieces(mpsc::Receiver<Bytes>);

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(context).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}
