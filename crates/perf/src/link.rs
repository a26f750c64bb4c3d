//! Calls over messages or over TCP, behind one type, for workloads that are measured with both. Over TCP a call is a
//! length of four bytes followed by the data, and responses are in the order of the requests. Only [`Net::wait`]
//! blocks.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bifrost_endpoint::{Endpoint, Error, Listener, Worker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The longest request and the longest response, bytes.
pub(crate) const LONGEST: usize = 1 << 20;
/// The server stops reading from a client that has this number of unread response bytes.
const UNSENT: usize = 4 << 20;
/// Time limit of connecting, including the server's start.
const SETUP: Duration = Duration::from_secs(10);

/// The transport of calls.
pub(crate) enum Net {
    Messages(Worker),
    Tcp,
}

/// A client's connection.
pub(crate) enum Link {
    /// With the open calls and their tickets.
    Messages(Endpoint, VecDeque<(u32, u64)>),
    /// With the tickets of open calls.
    Tcp(Box<Stream>, VecDeque<u64>),
}

impl Net {
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Messages(worker) => worker.provider(),
            Self::Tcp => "TCP".to_owned(),
        }
    }

    /// Connects to a server, retrying until it listens.
    pub(crate) fn connect(&self, peer: SocketAddr) -> Result<Link> {
        let until = Instant::now() + SETUP;
        loop {
            let link = match self {
                Self::Messages(worker) => worker
                    .connect(peer, SETUP)
                    .map(|endpoint| Link::Messages(endpoint, VecDeque::new()))
                    .map_err(Into::into),
                Self::Tcp => TcpStream::connect_timeout(&peer, SETUP)
                    .and_then(Stream::new)
                    .map(|stream| Link::Tcp(Box::new(stream), VecDeque::new()))
                    .with_context(|| format!("cannot connect to {peer} over TCP")),
            };
            match link {
                Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(20)),
                done => return done,
            }
        }
    }

    /// Waits until something may have arrived, for at most `timeout`.
    pub(crate) fn wait(&self, links: &[Link], timeout: Duration) -> Result<()> {
        match self {
            Self::Messages(worker) => {
                worker.wait(timeout)?;
            }
            Self::Tcp => {
                let streams = links
                    .iter()
                    .filter_map(|link| if let Link::Tcp(stream, _) = link { Some(&**stream) } else { None });
                wait_for(None, streams, timeout)?;
            }
        }
        Ok(())
    }
}

impl Link {
    /// Begins a call whose request is the concatenation of `parts`; its response is returned with `ticket`.
    pub(crate) fn begin(&mut self, ticket: u64, parts: &[&[u8]]) -> Result<()> {
        let len = parts.iter().map(|part| part.len()).sum();
        ensure!(len <= LONGEST, "a call has at most {LONGEST} bytes");
        match self {
            Self::Messages(endpoint, open) => {
                let mut request = endpoint.buffer(len);
                let mut at = 0;
                for part in parts {
                    request[at..at + part.len()].copy_from_slice(part);
                    at += part.len();
                }
                open.push_back((endpoint.begin_call(request)?, ticket));
            }
            Self::Tcp(stream, open) => {
                stream.put(parts)?;
                open.push_back(ticket);
            }
        }
        Ok(())
    }

    /// Number of open calls.
    pub(crate) fn open(&self) -> usize {
        match self {
            Self::Messages(_, open) => open.len(),
            Self::Tcp(_, open) => open.len(),
        }
    }

    /// Handles the responses that have arrived. Returns their number.
    pub(crate) fn take(&mut self, mut each: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<usize> {
        let mut taken = 0;
        match self {
            Self::Messages(endpoint, open) => {
                for _ in 0..open.len() {
                    let Some((call, ticket)) = open.pop_front() else { break };
                    match endpoint.try_response(call)? {
                        Some(response) => {
                            each(ticket, &response)?;
                            taken += 1;
                        }
                        None => open.push_back((call, ticket)),
                    }
                }
            }
            Self::Tcp(stream, open) => {
                stream.flush()?;
                ensure!(stream.fill()?, "the server has closed the connection");
                while let Some(response) = stream.frame()? {
                    let ticket = open.pop_front().context("a response without a request")?;
                    each(ticket, response)?;
                    taken += 1;
                }
            }
        }
        Ok(taken)
    }
}

/// Serves clients until `clients` have left; 0: forever. `answer` returns the response to a client's request, given the
/// client's number.
pub(crate) fn serve(
    net: &Net,
    at: SocketAddr,
    clients: u32,
    mut answer: impl FnMut(usize, &[u8]) -> Result<Vec<u8>>,
) -> Result<()> {
    let mut gone = 0;
    let mut next = 0;
    match net {
        Net::Messages(worker) => {
            let mut listener: Listener = worker.listen(at)?;
            let mut endpoints: Vec<(usize, Endpoint)> = Vec::new();
            while clients == 0 || gone < clients {
                if let Some(endpoint) = worker.try_accept(&mut listener)? {
                    endpoints.push((next, endpoint));
                    next += 1;
                }
                let mut failed = None;
                endpoints.retain(|(client, endpoint)| match answer_messages(*client, endpoint, &mut answer) {
                    Ok(continues) => {
                        gone += u32::from(!continues);
                        continues
                    }
                    Err(error) => {
                        failed = Some(error);
                        false
                    }
                });
                if let Some(error) = failed {
                    return Err(error);
                }
                worker.wait(Duration::from_millis(5))?;
            }
        }
        Net::Tcp => {
            let listener = TcpListener::bind(at).with_context(|| format!("cannot bind {at}"))?;
            listener.set_nonblocking(true)?;
            let mut streams: Vec<(usize, Stream)> = Vec::new();
            while clients == 0 || gone < clients {
                if let Some((stream, _)) = unless_empty(listener.accept())? {
                    streams.push((next, Stream::new(stream)?));
                    next += 1;
                }
                let mut at = 0;
                while at < streams.len() {
                    let (client, stream) = &mut streams[at];
                    if answer_stream(*client, stream, &mut answer)? {
                        at += 1;
                    } else {
                        streams.swap_remove(at);
                        gone += 1;
                    }
                }
                wait_for(Some(&listener), streams.iter().map(|(_, stream)| stream), Duration::from_millis(100))?;
            }
        }
    }
    Ok(())
}

/// Returns whether the client is still connected.
fn answer_messages(
    client: usize,
    endpoint: &Endpoint,
    answer: &mut impl FnMut(usize, &[u8]) -> Result<Vec<u8>>,
) -> Result<bool> {
    loop {
        match endpoint.try_request() {
            Ok(None) => return Ok(true),
            Ok(Some(request)) => {
                let response = answer(client, &request.message)?;
                match endpoint.respond(&request, response) {
                    Ok(_) => {}
                    Err(Error::Closed { .. }) => return Ok(false),
                    Err(error) => return Err(error.into()),
                }
            }
            Err(Error::Closed { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns whether the client is still connected. A client that violates the format is dropped.
fn answer_stream(
    client: usize,
    stream: &mut Stream,
    answer: &mut impl FnMut(usize, &[u8]) -> Result<Vec<u8>>,
) -> Result<bool> {
    let mut turn = || -> io::Result<Option<Vec<u8>>> {
        stream.flush()?;
        if stream.unsent() > UNSENT || stream.fill()? { Ok(None) } else { Err(ErrorKind::UnexpectedEof.into()) }
    };
    if turn().is_err() {
        return Ok(false);
    }
    while stream.unsent() <= UNSENT {
        let response = match stream.frame() {
            Ok(Some(request)) => answer(client, request)?,
            Ok(None) => return Ok(true),
            Err(_) => return Ok(false),
        };
        if stream.put(&[&response]).is_err() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A non-blocking stream with buffered input and output.
pub(crate) struct Stream {
    stream: TcpStream,
    input: Vec<u8>,
    used: usize,
    output: Vec<u8>,
    written: usize,
}

impl Stream {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, input: Vec::new(), used: 0, output: Vec::new(), written: 0 })
    }

    fn unsent(&self) -> usize {
        self.output.len() - self.written
    }

    /// Sends a frame; what cannot be written is buffered.
    fn put(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        self.output.extend_from_slice(&(len as u32).to_be_bytes());
        parts.iter().for_each(|part| self.output.extend_from_slice(part));
        self.flush()
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.written < self.output.len() {
            match unless_empty(self.stream.write(&self.output[self.written..]))? {
                Some(0) => return Err(ErrorKind::WriteZero.into()),
                Some(len) => self.written += len,
                None => break,
            }
        }
        if self.written == self.output.len() {
            self.output.clear();
            self.written = 0;
        } else if self.written > UNSENT {
            self.output.drain(..self.written);
            self.written = 0;
        }
        Ok(())
    }

    /// Reads available data, up to a limit. Returns whether the stream is still open.
    fn fill(&mut self) -> io::Result<bool> {
        if self.used > 0 {
            self.input.drain(..self.used);
            self.used = 0;
        }
        while self.input.len() < 2 * LONGEST {
            let len = self.input.len();
            self.input.resize(len + 256 * 1024, 0);
            let read = unless_empty(self.stream.read(&mut self.input[len..]));
            self.input.truncate(len + *read.as_ref().ok().and_then(Option::as_ref).unwrap_or(&0));
            match read? {
                Some(0) => return Ok(false),
                Some(_) => {}
                None => break,
            }
        }
        Ok(true)
    }

    /// The next complete frame.
    fn frame(&mut self) -> io::Result<Option<&[u8]>> {
        let Some((len, rest)) = self.input[self.used..].split_first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_be_bytes(*len) as usize;
        if len > LONGEST {
            return Err(ErrorKind::InvalidData.into());
        }
        if rest.len() < len {
            return Ok(None);
        }
        let from = self.used + 4;
        self.used = from + len;
        Ok(Some(&self.input[from..self.used]))
    }
}

/// Waits until a stream is readable, or writable if it has buffered output.
fn wait_for<'a>(
    listener: Option<&TcpListener>,
    streams: impl Iterator<Item = &'a Stream>,
    timeout: Duration,
) -> Result<()> {
    let mut descriptors: Vec<PollFd<'_>> = Vec::new();
    descriptors.extend(listener.map(|listener| PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)));
    descriptors.extend(streams.map(|stream| {
        let read = if stream.unsent() > UNSENT { PollFlags::empty() } else { PollFlags::IN };
        let write = if stream.unsent() > 0 { PollFlags::OUT } else { PollFlags::empty() };
        PollFd::from_borrowed_fd(stream.stream.as_fd(), read | write)
    }));
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    match poll(&mut descriptors, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => bail!("poll: {error}"),
    }
}

fn unless_empty<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error),
    }
}
