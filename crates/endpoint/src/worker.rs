//! The API: a worker per thread, and its endpoints.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::poll_fn;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use bifrost_rdm::{CloseReason, Counters, Service};
use bifrost_verbs::{Any, AnyError, Provider, RdmaCoreCounters, SoftConfig, SoftCounters};
use bifrost_wire::rdm::SetupKind;

use crate::config::WorkerConfig;
use crate::connecting::Connecting;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::flag::Flag;
use crate::host::{Host, HostConfig};
use crate::inner::{CHECK_EVERY, Inner};
use crate::region::Region;
use crate::served::AccessCounters;
use crate::setup::{self, Listener, TIMEOUT};
use crate::statistics::{self, Statistic};
use crate::wakers::Wakers;

/// Drives the connections of one thread. Clones share the same worker.
#[derive(Clone, Debug)]
pub struct Worker {
    pub(crate) inner: Rc<RefCell<Inner>>,
}

impl Worker {
    /// Creates a worker with the RDMA NIC that has the address, or with its own software NIC: RoCEv2 over UDP sockets.
    ///
    /// # Errors
    /// When the requested kind of NIC is missing, or address or port cannot be bound.
    pub fn new(config: WorkerConfig) -> Result<Self, Error> {
        let at = SocketAddr::new(config.address, config.port);
        let soft = SoftConfig {
            address: config.address,
            port: config.port,
            queue_pairs: 3 * config.connections + 1,
            regions: 65_536,
            seed: unpredictable(),
        };
        let nic = Any::new(config.provider, soft, config.mtu).map_err(|error| match error {
            AnyError::Bind(at, error) => Error::Bind(at, error),
            error => Error::Provider(at, error),
        })?;
        let host = HostConfig::new(config.connections, unpredictable());
        let host = Host::new(nic, host).map_err(|error| Error::Host(at, error))?;
        let (connections, acceptors) = (HashMap::new(), Wakers::default());
        let inner =
            Inner { config, host, connections, checked_ns: 0, acceptors, woken_ns: 0, watched: false, flag: None };
        Ok(Self { inner: Rc::new(RefCell::new(inner)) })
    }

    /// Describes what carries the packets; for a software NIC, also why it is used.
    #[must_use]
    pub fn provider(&self) -> String {
        let inner = self.inner.borrow();
        format!("{}, MTU {}", inner.host.provider(), inner.config.mtu)
    }

    /// Listens for peers that set up connections, over TCP.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn listen(&self, address: SocketAddr) -> Result<Listener, Error> {
        Listener::bind(address).map_err(|error| Error::Bind(address, error))
    }

    /// The next peer that has connected, if any.
    ///
    /// # Errors
    /// When the listening socket fails. A refused peer is not an error.
    pub fn try_accept(&self, listener: &mut Listener) -> Result<Option<Endpoint>, Error> {
        self.poll()?;
        while let Some((stream, peer, hello)) = listener.next()? {
            let accepted = self.inner.borrow_mut().accept(stream, peer, &hello);
            if let Some(id) = accepted {
                return Ok(Some(Endpoint { inner: self.inner.clone(), id, peer }));
            }
        }
        Ok(None)
    }

    /// Waits for a peer to connect.
    ///
    /// # Errors
    /// When the listening socket fails, or on timeout.
    pub fn accept(&self, listener: &mut Listener, timeout: Duration) -> Result<Endpoint, Error> {
        let until = Instant::now() + timeout;
        loop {
            if let Some(endpoint) = self.try_accept(listener)? {
                return Ok(endpoint);
            }
            if Instant::now() >= until {
                return Err(Error::Timeout(listener.local_addr()?));
            }
            self.wait(Duration::from_millis(5))?;
        }
    }

    /// Connects to a listening peer.
    ///
    /// # Errors
    /// When the peer cannot be reached, refuses, or has incompatible settings.
    pub fn connect(&self, peer: SocketAddr, timeout: Duration) -> Result<Endpoint, Error> {
        let (local, id, hello) = {
            let mut inner = self.inner.borrow_mut();
            let limits = inner.limits();
            let (id, hello) = inner.host.prepare(SetupKind::Hello, limits).map_err(|error| Error::Host(peer, error))?;
            (inner.config.address, id, hello)
        };
        let answer = setup::exchange(local, peer, &hello, timeout);
        let mut inner = self.inner.borrow_mut();
        let connected = answer
            .map_err(|error| Error::Setup(peer, error))
            .and_then(|(stream, answer)| inner.on_answer(id, peer, stream, &answer));
        match connected {
            Ok(()) => Ok(Endpoint { inner: self.inner.clone(), id, peer }),
            Err(error) => {
                inner.host.close(id, CloseReason::Done);
                Err(error)
            }
        }
    }

    /// Begins to connect to a listening peer, without blocking: [`Connecting::try_finish`] completes it.
    ///
    /// # Errors
    /// When resources are exhausted, or no stream can be opened.
    pub fn begin_connect(&self, peer: SocketAddr, timeout: Duration) -> Result<Connecting, Error> {
        Connecting::new(Rc::clone(&self.inner), peer, timeout)
    }

    /// Registers memory that peers may read and write once [`Region::allow`] permits it.
    ///
    /// # Errors
    /// When there are 65,536 regions.
    pub fn register(&self, memory: Vec<u8>) -> Result<Region, Error> {
        let mut inner = self.inner.borrow_mut();
        let at = SocketAddr::new(inner.config.address, inner.host.provider().port());
        let len = memory.len();
        let key = inner.host.register_memory(memory).map_err(|error| Error::Host(at, error))?;
        Ok(Region { inner: self.inner.clone(), key, len })
    }

    /// Counters of peers' accesses to this worker's regions.
    #[must_use]
    pub fn access_counters(&self) -> AccessCounters {
        *self.inner.borrow().host.access_counters()
    }

    /// Follows a file that selects the service on which this end sends, `uc` or `rc`, for all present and later
    /// connections of the worker. It is read now and every 100 ms while the worker is called. An operator thus moves
    /// running processes to the other service by replacing the file, which should be on a local file system. Messages
    /// in flight still arrive, each once and in order. [`Endpoint::switch`] takes effect until the file's content
    /// changes. Returns the service in the file.
    ///
    /// # Errors
    /// [`Error::Flag`] if the worker does not have both services ([`Service::Both`]), or the file cannot be read or has
    /// other content. If that happens later, the service stays, and [`Worker::followed`] returns the reason.
    pub fn follow(&self, path: impl Into<PathBuf>) -> Result<Service, Error> {
        let mut inner = self.inner.borrow_mut();
        if inner.config.service != Service::Both {
            return Err(Error::Flag("the worker has only one service; configure `Service::Both`".to_owned()));
        }
        let flag = Flag::new(path.into()).map_err(Error::Flag)?;
        let service = flag.service;
        inner.flag = Some(flag);
        let now = inner.host.provider().now_ns();
        inner.switch_all(now, service);
        inner.push_out(now);
        Ok(service)
    }

    /// The last valid service in the file of [`Worker::follow`], and why the file was unusable when last read, if it
    /// was. `None`: no file is followed.
    #[must_use]
    pub fn followed(&self) -> Option<(Service, Option<String>)> {
        self.inner.borrow().flag.as_ref().map(|flag| (flag.service, flag.problem.clone()))
    }

    /// Handles whatever is due, without blocking. Returns whether there was anything.
    ///
    /// # Errors
    /// When the NIC's socket fails.
    pub fn poll(&self) -> Result<bool, Error> {
        self.inner.borrow_mut().poll()
    }

    /// Handles whatever is due; if nothing is, waits for at most `timeout`.
    ///
    /// # Errors
    /// When the NIC's socket fails.
    pub fn wait(&self, timeout: Duration) -> Result<bool, Error> {
        self.inner.borrow_mut().wait(timeout)
    }

    /// Runs a future to completion and drives the worker meanwhile. Wake-ups by other threads take effect within 100
    /// ms.
    ///
    /// # Errors
    /// When the NIC's socket fails.
    pub fn block_on<F: Future>(&self, future: F) -> Result<F::Output, Error> {
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        let waker = Waker::from(woken.clone());
        let mut context = Context::from_waker(&waker);
        let mut future = pin!(future);
        loop {
            if woken.0.swap(false, Ordering::AcqRel)
                && let Poll::Ready(output) = future.as_mut().poll(&mut context)
            {
                return Ok(output);
            }
            if woken.0.load(Ordering::Acquire) {
                self.poll()?;
            } else {
                self.wait(CHECK_EVERY)?;
            }
        }
    }

    /// A descriptor that is readable when packets have arrived, for executors that wait on descriptors. The worker must
    /// be polled until [`Worker::poll`] returns `false` when the descriptor is readable, when [`Worker::due`] has
    /// passed, and once before the first wait.
    ///
    /// # Errors
    /// When no descriptor is available.
    pub fn descriptor(&self) -> Result<OwnedFd, Error> {
        let mut inner = self.inner.borrow_mut();
        inner.watched = true;
        Ok(inner.host.provider().descriptor().try_clone_to_owned()?)
    }

    /// How long the worker can be idle if no packet arrives, at most 100 ms.
    #[must_use]
    pub fn due(&self) -> Duration {
        self.inner.borrow().due()
    }

    /// The next peer that connects, as a future; see [`Worker::block_on`].
    ///
    /// # Errors
    /// When the listening socket fails.
    pub async fn accept_async(&self, listener: &mut Listener) -> Result<Endpoint, Error> {
        poll_fn(|context| {
            if let Some(endpoint) = self.try_accept(listener)? {
                return Poll::Ready(Ok(endpoint));
            }
            self.inner.borrow_mut().acceptors.add(context.waker());
            Poll::Pending
        })
        .await
    }

    /// Connects to a listening peer, as a future; see [`Worker::block_on`].
    ///
    /// # Errors
    /// As for [`Worker::connect`].
    pub async fn connect_async(&self, peer: SocketAddr, timeout: Duration) -> Result<Endpoint, Error> {
        let mut connecting = self.begin_connect(peer, timeout)?;
        poll_fn(|context| {
            if let Some(endpoint) = connecting.try_finish()? {
                return Poll::Ready(Ok(endpoint));
            }
            self.inner.borrow_mut().acceptors.add(context.waker());
            Poll::Pending
        })
        .await
    }

    /// The engine's counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        *self.inner.borrow().host.counters()
    }

    /// Counters of the software NIC and its socket; 0 with an RDMA NIC.
    #[must_use]
    pub fn nic_counters(&self) -> (bifrost_verbs::Counters, SoftCounters) {
        self.inner.borrow().host.provider().soft_counters()
    }

    /// All counters, with names, descriptions and advice; [`exposition`](crate::exposition) formats them for
    /// Prometheus.
    #[must_use]
    pub fn statistics(&self) -> Vec<Statistic> {
        let verbs = self.verbs_counters();
        let (nic, socket) = self.nic_counters();
        let software = verbs.is_none().then_some((&nic, &socket));
        statistics::all(&self.counters(), &self.access_counters(), software, verbs.as_ref())
    }

    /// Counters of the RDMA NIC, if one is used.
    #[must_use]
    pub fn verbs_counters(&self) -> Option<RdmaCoreCounters> {
        self.inner.borrow().host.provider().verbs().map(|nic| *nic.counters())
    }
}

impl Endpoint {
    /// The worker of this endpoint.
    #[must_use]
    pub fn worker(&self) -> Worker {
        Worker { inner: self.inner.clone() }
    }
}

/// Whether a future must be polled.
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// 64 unpredictable bits from the system, by way of the standard library.
fn unpredictable() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Time limit of setup, unless the caller specifies another.
pub const SETUP_TIMEOUT: Duration = TIMEOUT;
