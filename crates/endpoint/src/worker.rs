//! The API: a worker for each thread, and its endpoints.

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
use crate::inner::{Inner, LOOK_EVERY};
use crate::region::Region;
use crate::served::AccessCounters;
use crate::setup::{self, Listener, PATIENCE};
use crate::statistics::{self, Statistic};
use crate::wakers::Wakers;

/// Looks after the connections of one thread. Clones are the same worker.
#[derive(Clone, Debug)]
pub struct Worker {
    pub(crate) inner: Rc<RefCell<Inner>>,
}

impl Worker {
    /// A worker with the RDMA NIC that has the address, or a software NIC of its own: RoCEv2 over UDP sockets.
    ///
    /// # Errors
    /// When there is no NIC as wanted, or the address or the port cannot be bound.
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
            Inner { config, host, connections, looked_ns: 0, acceptors, woken_ns: 0, watched: false, flag: None };
        Ok(Self { inner: Rc::new(RefCell::new(inner)) })
    }

    /// What carries the packets, in words; with software, also why.
    #[must_use]
    pub fn provider(&self) -> String {
        let inner = self.inner.borrow();
        format!("{}, MTU {}", inner.host.provider(), inner.config.mtu)
    }

    /// Listens for peers that want to set a connection up, over TCP.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn listen(&self, address: SocketAddr) -> Result<Listener, Error> {
        Listener::bind(address).map_err(|error| Error::Bind(address, error))
    }

    /// The next peer that has connected, if there is one.
    ///
    /// # Errors
    /// When the listening socket fails. Peers that are refused are no error.
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
    /// When the listening socket fails, or `timeout` is over.
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

    /// Connects to a peer that listens.
    ///
    /// # Errors
    /// When it cannot be reached, or refuses, or does not fit.
    pub fn connect(&self, peer: SocketAddr, timeout: Duration) -> Result<Endpoint, Error> {
        let (local, id, hello) = {
            let mut inner = self.inner.borrow_mut();
            let limits = inner.limits();
            let (id, hello) = inner.host.prepare(SetupKind::Hello, limits).map_err(|error| Error::Host(peer, error))?;
            (inner.config.address, id, hello)
        };
        let answer = setup::ask(local, peer, &hello, timeout);
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

    /// Begins to connect to a peer that listens, without waiting: [`Connecting::try_finish`] goes on with it.
    ///
    /// # Errors
    /// When this end has no room, or no stream can be opened.
    pub fn begin_connect(&self, peer: SocketAddr, timeout: Duration) -> Result<Connecting, Error> {
        Connecting::new(self, peer, timeout)
    }

    /// Registers memory, for peers to read and write it: [`Region::allow`] lets them in.
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

    /// What peers have done with this worker's regions.
    #[must_use]
    pub fn access_counters(&self) -> AccessCounters {
        *self.inner.borrow().host.access_counters()
    }

    /// Has a file choose the service: what this end sends on all connections of the worker, those
    /// that are made later, too, goes by `uc` or `rc`, as the file says. It is read now and every
    /// 100 ms while the worker is called. So an operator moves running processes from one service
    /// to the other by replacing a file, which should be on a local file system. Messages on their
    /// way arrive all the same, each once and in order; [`Endpoint::switch`] holds until the file
    /// says something else than before. What the file says now.
    ///
    /// # Errors
    /// [`Error::Flag`] if the worker has not both services ([`Service::Both`]), or the file cannot
    /// be read or says something else. If that happens later, the service stays, and
    /// [`Worker::followed`] says why.
    pub fn follow(&self, path: impl Into<PathBuf>) -> Result<Service, Error> {
        let mut inner = self.inner.borrow_mut();
        if inner.config.service != Service::Both {
            return Err(Error::Flag("the worker has only one service: set up both".to_owned()));
        }
        let flag = Flag::new(path.into()).map_err(Error::Flag)?;
        let service = flag.service;
        inner.flag = Some(flag);
        let now = inner.host.provider().now_ns();
        inner.switch_all(now, service);
        inner.push_out(now);
        Ok(service)
    }

    /// The service that the file of [`Worker::follow`] said last, and why it could not be used when
    /// it was last read, if it could not. `None`: no file is followed.
    #[must_use]
    pub fn followed(&self) -> Option<(Service, Option<String>)> {
        self.inner.borrow().flag.as_ref().map(|flag| (flag.service, flag.problem.clone()))
    }

    /// Does what there is to do, without waiting. Whether there was something.
    ///
    /// # Errors
    /// When the NIC's socket fails.
    pub fn poll(&self) -> Result<bool, Error> {
        self.inner.borrow_mut().poll()
    }

    /// Does what there is to do, and waits for something if there is nothing, for at most `timeout`.
    ///
    /// # Errors
    /// When the NIC's socket fails.
    pub fn wait(&self, timeout: Duration) -> Result<bool, Error> {
        self.inner.borrow_mut().wait(timeout)
    }

    /// Runs a future to its end, and the worker beside it. What other threads wake is noticed within 100 ms.
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
                self.wait(LOOK_EVERY)?;
            }
        }
    }

    /// The descriptor that is readable when something has come in, for an executor that waits on descriptors; a worker is to be
    /// polled until [`Worker::poll`] has nothing to do when it is readable, and when [`Worker::due`] is over; and once before the
    /// first wait.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn descriptor(&self) -> Result<OwnedFd, Error> {
        let mut inner = self.inner.borrow_mut();
        inner.watched = true;
        Ok(inner.host.provider().descriptor().try_clone_to_owned()?)
    }

    /// For how long the worker has nothing to do if no packet comes, at most 100 ms.
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

    /// Connects to a peer that listens, as a future; see [`Worker::block_on`].
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

    /// What the engine has counted.
    #[must_use]
    pub fn counters(&self) -> Counters {
        *self.inner.borrow().host.counters()
    }

    /// What the software NIC and its socket have counted; 0 if an RDMA NIC is used.
    #[must_use]
    pub fn nic_counters(&self) -> (bifrost_verbs::Counters, SoftCounters) {
        self.inner.borrow().host.provider().soft_counters()
    }

    /// All that has been counted, with names, meanings and advice; [`exposition`](crate::exposition) makes a
    /// text for Prometheus of it.
    #[must_use]
    pub fn statistics(&self) -> Vec<Statistic> {
        let verbs = self.verbs_counters();
        let (nic, socket) = self.nic_counters();
        let software = verbs.is_none().then_some((&nic, &socket));
        statistics::all(&self.counters(), &self.access_counters(), software, verbs.as_ref())
    }

    /// What has been counted about the RDMA NIC, if one is used.
    #[must_use]
    pub fn verbs_counters(&self) -> Option<RdmaCoreCounters> {
        self.inner.borrow().host.provider().verbs().map(|nic| *nic.counters())
    }
}

impl Endpoint {
    /// The worker that looks after this endpoint.
    #[must_use]
    pub fn worker(&self) -> Worker {
        Worker { inner: self.inner.clone() }
    }
}

/// Whether a future is to be polled.
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// 64 bits from the system's source of chance, by way of the standard library.
fn unpredictable() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// For how long set-up may take, unless the caller says otherwise.
pub const SETUP_PATIENCE: Duration = PATIENCE;
