//! Connections of which it is not known whose they are: those on which no agent has said its host, or on which its stream has ended. They
//! are bounded in number and in time, so that nobody keeps agents away by connecting and saying nothing.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

/// The most of them. The one that has been quiet for longest makes room: an agent is known within one exchange of messages. More than there
/// are hosts, for after a relay's start all agents come at once.
pub(crate) const MOST: usize = 8192;
/// The most connections of those who have no certificate yet: each is over after one request.
pub(crate) const MOST_STRANGERS: usize = 1024;
/// How long a connection may be quiet.
pub(crate) const QUIET_TIME: Duration = Duration::from_secs(20);
/// Between attempts to take a connection, when descriptors are short.
const PAUSE: Duration = Duration::from_millis(100);

/// All connections that are quiet.
#[derive(Debug)]
pub(crate) struct Quiet {
    most: usize,
    time: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// In the order in which they became quiet, and since when they are.
    waiting: BTreeMap<u64, (Instant, Arc<End>)>,
}

/// Whether a connection is to end, and who is told.
#[derive(Debug, Default)]
struct End {
    is_over: AtomicBool,
    reader: Mutex<Option<Waker>>,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    link: Link,
}

/// What streams have of their connection.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    quiet: Arc<Quiet>,
    end: Arc<End>,
    place: Arc<Mutex<Place>>,
}

/// Where a connection is.
#[derive(Debug, Default)]
struct Place {
    /// Its number among those that are quiet.
    number: Option<u64>,
    /// How many streams speak for hosts; with none it is quiet.
    streams: usize,
}

/// A stream speaks for a host; when this is dropped, it does not any more.
#[derive(Debug)]
pub(crate) struct Speaking(Link);

impl Quiet {
    /// Accepts at most `most` connections that have said nothing; each of them for at most `time`.
    pub(crate) fn new(most: usize, time: Duration) -> Arc<Quiet> {
        Arc::new(Quiet { most, time, state: Mutex::default() })
    }

    /// The connections that come, as long as somebody takes them.
    pub(crate) fn incoming(self: Arc<Self>, listener: TcpListener) -> ReceiverStream<io::Result<Connection>> {
        let (send, receive) = mpsc::channel(1);
        let (quiet, taken) = (Arc::clone(&self), send.clone());
        tokio::spawn(async move {
            loop {
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    () = send.closed() => return,
                };
                match accepted {
                    Ok((stream, _)) => {
                        // Where that is not possible it is only slower.
                        let _ = stream.set_nodelay(true);
                        if send.send(Ok(quiet.connection(stream, Instant::now()))).await.is_err() {
                            return;
                        }
                    }
                    Err(error) => {
                        tracing::warn!("a connection is not taken: {error}");
                        tokio::time::sleep(PAUSE).await;
                    }
                }
            }
        });
        tokio::spawn(async move {
            while !taken.is_closed() {
                tokio::time::sleep(self.time / 20).await;
                self.sweep(Instant::now());
            }
        });
        ReceiverStream::new(receive)
    }

    fn connection(self: &Arc<Self>, stream: TcpStream, now: Instant) -> Connection {
        let link = Link { quiet: Arc::clone(self), end: Arc::default(), place: Arc::default() };
        lock(&link.place).number = Some(self.add(&link.end, now));
        Connection { stream, link }
    }

    /// A connection is quiet from now on. Gives its number.
    fn add(&self, end: &Arc<End>, now: Instant) -> u64 {
        let mut state = lock(&self.state);
        let number = state.next;
        state.next += 1;
        state.waiting.insert(number, (now, Arc::clone(end)));
        if state.waiting.len() > self.most
            && let Some((_, (_, oldest))) = state.waiting.pop_first()
        {
            oldest.end();
        }
        number
    }

    fn remove(&self, number: u64) {
        lock(&self.state).waiting.remove(&number);
    }

    /// Ends those that have been quiet for too long.
    fn sweep(&self, now: Instant) {
        let mut state = lock(&self.state);
        while let Some(first) = state.waiting.first_entry()
            && now.saturating_duration_since(first.get().0) >= self.time
        {
            first.remove().1.end();
        }
    }
}

impl Link {
    /// A stream speaks for a host.
    pub(crate) fn speaks(&self) -> Speaking {
        let mut place = lock(&self.place);
        place.streams += 1;
        if let Some(number) = place.number.take() {
            self.quiet.remove(number);
        }
        Speaking(self.clone())
    }
}

impl Drop for Speaking {
    fn drop(&mut self) {
        let mut place = lock(&self.0.place);
        place.streams -= 1;
        if place.streams == 0 {
            place.number = Some(self.0.quiet.add(&self.0.end, Instant::now()));
        }
    }
}

impl End {
    fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        if let Some(reader) = lock(&self.reader).take() {
            reader.wake();
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(number) = lock(&self.link.place).number.take() {
            self.link.quiet.remove(number);
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = Link;

    fn connect_info(&self) -> Link {
        self.link.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let end = &self.link.end;
        // Noted before the look, so that an end in between is not missed.
        *lock(&end.reader) = Some(context.waker().clone());
        if end.is_over.load(Ordering::SeqCst) {
            let why = "no agent has said on this connection whose it is";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, why)));
        }
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio_stream::StreamExt as _;

    use super::*;

    /// Both ends of `count` connections to a listener that `quiet` guards.
    async fn connect(quiet: &Arc<Quiet>, count: usize) -> (Vec<(TcpStream, Connection)>, impl Sized) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut incoming = Arc::clone(quiet).incoming(listener);
        let mut both = Vec::new();
        for _ in 0..count {
            let near = TcpStream::connect(address).await.unwrap();
            both.push((near, incoming.next().await.unwrap().unwrap()));
        }
        (both, incoming)
    }

    async fn is_over(connection: &mut Connection) -> bool {
        let read = tokio::time::timeout(Duration::from_millis(20), connection.read_u8()).await;
        read.is_ok_and(|read| read.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut))
    }

    #[tokio::test]
    async fn those_that_say_nothing_make_room() {
        let quiet = Quiet::new(3, Duration::from_secs(60));
        let (mut all, _incoming) = connect(&quiet, 3).await;
        // The first speaks for a host, and is not counted.
        let speaking = all[0].1.link.speaks();
        all.extend(connect(&quiet, 2).await.0);
        let mut over = Vec::new();
        for (_, connection) in &mut all {
            over.push(is_over(connection).await);
        }
        assert_eq!(over, [false, true, false, false, false]);
        // When its stream ends it is the last that came.
        drop(speaking);
        assert!(is_over(&mut all[2].1).await && !is_over(&mut all[0].1).await);
        all.truncate(1);
        assert_eq!(lock(&quiet.state).waiting.len(), 1, "those that have ended are not counted");
    }

    #[tokio::test]
    async fn those_that_say_nothing_for_long_are_ended() {
        let quiet = Quiet::new(100, Duration::from_millis(100));
        let (mut all, _incoming) = connect(&quiet, 2).await;
        let _speaking = all[0].1.link.speaks();
        let also = all[0].1.link.speaks();
        drop(also);
        // Somebody who waits is told.
        let read = tokio::time::timeout(Duration::from_secs(10), all[1].1.read_u8()).await;
        assert_eq!(read.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(!is_over(&mut all[0].1).await);
    }
}
