//! A list as a response body: serialized page by page as it is read, so that a long list is never in memory as a whole.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use hyper::body::Frame;
use serde::Serialize;
use tokio::task::JoinHandle;

use super::Pages;
use super::failure::failure;
use crate::api::ApiError;

/// Minimum size of a chunk, bytes of JSON: a chunk ends with the page that reaches it.
const CHUNK: usize = 64 << 10;

/// The rest of a list, and whether an entry was already written.
struct Rest<T> {
    pages: Pages<T>,
    is_begun: bool,
}

/// A chunk of the body, and the rest of the list, if there is more.
type Made<T> = Result<(Bytes, Option<Rest<T>>), ApiError>;

/// Calls `f`, and responds with its list as a JSON array. An error in the first chunk becomes an error response; a
/// later one aborts the connection.
pub(super) async fn list<T, F>(f: F) -> Response
where
    T: Serialize + Send + 'static,
    F: FnOnce() -> Result<Pages<T>, ApiError> + Send + 'static,
{
    let first = tokio::task::spawn_blocking(move || make(Rest { pages: f()?, is_begun: false }));
    match first.await {
        Ok(Ok((bytes, None))) => ([(CONTENT_TYPE, "application/json")], bytes).into_response(),
        Ok(Ok((bytes, Some(rest)))) => {
            let body = ListBody { ready: Some(bytes), next: Next::Wanted(rest) };
            ([(CONTENT_TYPE, "application/json")], Body::new(body)).into_response()
        }
        Ok(Err(error)) => failure(error),
        Err(e) => {
            failure(ApiError::internal(format!("the request's handler failed: {e}")).hint("see the daemon's log"))
        }
    }
}

/// Serializes the next chunk.
fn make<T: Serialize>(mut rest: Rest<T>) -> Made<T> {
    let mut bytes = Vec::with_capacity(CHUNK + CHUNK / 4);
    while bytes.len() < CHUNK {
        let Some(page) = rest.pages.next() else {
            bytes.extend_from_slice(if rest.is_begun { b"]" } else { b"[]" });
            return Ok((bytes.into(), None));
        };
        for entry in page? {
            bytes.push(if std::mem::replace(&mut rest.is_begun, true) { b',' } else { b'[' });
            serde_json::to_writer(&mut bytes, &entry)
                .map_err(|e| ApiError::internal(format!("cannot serialize an entry: {e}")))?;
        }
    }
    Ok((bytes.into(), Some(rest)))
}

struct ListBody<T> {
    ready: Option<Bytes>,
    next: Next<T>,
}

/// Chunks are made on a thread that may block, each after the previous one was taken: a slow reader occupies no thread.
enum Next<T> {
    Wanted(Rest<T>),
    Making(JoinHandle<Made<T>>),
    Nothing,
}

impl<T: Serialize + Send + 'static> hyper::body::Body for ListBody<T> {
    type Data = Bytes;
    type Error = ApiError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Some(bytes) = self.ready.take() {
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        let mut making = match std::mem::replace(&mut self.next, Next::Nothing) {
            Next::Wanted(rest) => tokio::task::spawn_blocking(move || make(rest)),
            Next::Making(making) => making,
            Next::Nothing => return Poll::Ready(None),
        };
        let made = match Pin::new(&mut making).poll(context) {
            Poll::Ready(made) => made,
            Poll::Pending => {
                self.next = Next::Making(making);
                return Poll::Pending;
            }
        };
        match made.unwrap_or_else(|e| Err(ApiError::internal(format!("cannot serialize a list: {e}")))) {
            Ok((bytes, rest)) => {
                self.next = rest.map_or(Next::Nothing, Next::Wanted);
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Err(error) => {
                tracing::warn!(%error, "a list was truncated");
                Poll::Ready(Some(Err(error)))
            }
        }
    }
}

// It is not self-referential.
impl<T> Unpin for ListBody<T> {}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::http::StatusCode;
    use http_body_util::BodyExt;

    use super::*;

    fn run<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
    }

    /// Pages of 100 numbers, and a count of those made. Page `fails_at` is an error.
    fn pages(count: u64, fails_at: u64) -> (Pages<u64>, Arc<AtomicUsize>) {
        let made = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&made);
        let page = move |page| {
            counted.fetch_add(1, Ordering::Relaxed);
            if page == fails_at {
                Err(ApiError::unavailable("gone"))
            } else {
                Ok((page * 100..page * 100 + 100).collect())
            }
        };
        (Box::new((0..count).map(page)), made)
    }

    #[test]
    fn a_list_of_any_number_of_pages_is_one_array() {
        for count in [0, 1, 2, 2000] {
            let (pages, _) = pages(count, u64::MAX);
            let body = run(async { list(move || Ok(pages)).await.into_body().collect().await.unwrap().to_bytes() });
            let numbers: Vec<u64> = serde_json::from_slice(&body).unwrap();
            assert!(numbers.into_iter().eq(0..count * 100), "{count}");
        }
        let nothing: Pages<u64> = Box::new([Ok(vec![]), Ok(vec![])].into_iter());
        let body = run(async { list(move || Ok(nothing)).await.into_body().collect().await.unwrap().to_bytes() });
        assert_eq!(&body[..], b"[]");
    }

    #[test]
    fn pages_are_made_on_demand_and_not_after_the_reader_has_gone() {
        let (pages, made) = pages(1_000_000, u64::MAX);
        run(async {
            let mut body = list(move || Ok(pages)).await.into_body();
            let mut last = made.load(Ordering::Relaxed);
            for _ in 0..5 {
                let chunk = body.frame().await.unwrap().unwrap().into_data().unwrap();
                assert!((CHUNK..2 * CHUNK).contains(&chunk.len()), "{}", chunk.len());
                let now = made.load(Ordering::Relaxed);
                assert!(now - last <= 400, "{now} pages after {last}");
                last = now;
            }
            drop(body);
            tokio::task::spawn_blocking(|| ()).await.unwrap();
            assert_eq!(made.load(Ordering::Relaxed), last);
        });
    }

    #[test]
    fn an_early_error_is_a_response_and_a_late_one_aborts_the_body() {
        let (first, made) = pages(10, 0);
        let refused = run(list(move || Ok(first)));
        assert_eq!((refused.status(), made.load(Ordering::Relaxed)), (StatusCode::SERVICE_UNAVAILABLE, 1));
        let (later, made) = pages(1_000_000, 1000);
        run(async {
            let response = list(move || Ok(later)).await;
            assert_eq!(response.status(), StatusCode::OK);
            assert!(response.into_body().collect().await.is_err(), "a truncated array must not look complete");
        });
        assert_eq!(made.load(Ordering::Relaxed), 1001);
    }
}
