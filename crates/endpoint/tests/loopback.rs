//! Real sockets on the loopback device: memory accesses by peers, and futures on two executors.

#![allow(clippy::unwrap_used)]

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bifrost_endpoint::{Choice, Endpoint, Error, RemoteRegion, Rights, Service, Worker, WorkerConfig};
use tokio::io::unix::AsyncFd;
use tokio::task::LocalSet;

/// Longer than any step takes on any machine.
const LONG: Duration = Duration::from_secs(60);
const LOCAL: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

fn config(service: Service) -> WorkerConfig {
    WorkerConfig { port: 0, service, ..WorkerConfig::new(LOCAL) }
}

/// Runs `what` with the first connection in a separate thread. Returns also the address where it listens.
fn peer<T: Send + 'static>(
    service: Service,
    what: impl FnOnce(&Worker, Endpoint) -> T + Send + 'static,
) -> (SocketAddr, JoinHandle<T>) {
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let worker = Worker::new(config(service)).unwrap();
        let mut listener = worker.listen((LOCAL, 0).into()).unwrap();
        sender.send(listener.local_addr().unwrap()).unwrap();
        let endpoint = worker.accept(&mut listener, LONG).unwrap();
        what(&worker, endpoint)
    });
    (receiver.recv().unwrap(), thread)
}

/// Registers memory, informs the peer, and polls until the peer is gone. Returns the memory.
fn serve_memory(worker: &Worker, endpoint: &Endpoint, len: usize, rights: Rights) -> Vec<u8> {
    let region = worker.register(vec![0; len]).unwrap();
    let remote = region.allow(endpoint, rights).unwrap();
    endpoint.send(remote.to_bytes().to_vec()).unwrap();
    // The application only waits for the peer to end.
    assert!(matches!(endpoint.recv(LONG), Err(Error::Closed { .. })));
    region.into_vec()
}

fn remote(endpoint: &Endpoint) -> RemoteRegion {
    RemoteRegion::from_bytes(endpoint.recv(LONG).unwrap().as_array().unwrap())
}

#[test]
fn memory_is_written_and_read_without_its_application() {
    for service in [Service::Uc, Service::Rc, Service::Both] {
        let len = 3 << 20;
        let (address, server) = peer(service, move |worker, endpoint| {
            let memory = serve_memory(worker, &endpoint, len, Rights::ReadWrite);
            (memory, worker.access_counters())
        });
        let worker = Worker::new(config(service)).unwrap();
        let endpoint = worker.connect(address, LONG).unwrap();
        let remote = remote(&endpoint);
        let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + at / 251) as u8).collect();
        // Long and short ones, several open at once.
        let mut calls = vec![];
        for piece in [0..2_000_000, 2_000_000..2_000_001, 2_000_001..2_004_097, 2_004_097..len] {
            calls.push(endpoint.begin_write(&remote, piece.start as u64, &bytes[piece]).unwrap());
        }
        let switched = endpoint.switch(Service::Rc);
        assert_eq!(switched.is_ok(), service != Service::Uc, "{switched:?}");
        assert_eq!(endpoint.service() == Some(Service::Rc), switched.is_ok());
        // It was begun after the writes, so it includes them.
        let last = endpoint.read(&remote, len as u64 - 1000, 1000, LONG).unwrap();
        assert_eq!(*last, bytes[len - 1000..]);
        for call in calls {
            assert!(endpoint.try_response(call).unwrap().unwrap().is_empty(), "answered before the read");
        }
        assert_eq!(*endpoint.read(&remote, 0, len as u32, LONG).unwrap(), bytes[..]);
        let outside = endpoint.write(&remote, len as u64, b"x", LONG).unwrap_err();
        assert!(matches!(outside, Error::Range { .. }), "{outside}");
        // The owner of the memory checks accesses itself, even if this end's information is wrong.
        let wrong = RemoteRegion { len: u64::MAX, ..remote };
        let refused = endpoint.write(&wrong, len as u64, b"x", LONG).unwrap_err().to_string();
        assert!(refused.contains("not inside"), "{refused}");
        let refused = endpoint.read(&RemoteRegion { key: remote.key + 1, len: 1 }, 0, 1, LONG).unwrap_err().to_string();
        assert!(refused.contains("no region with this key"), "{refused}");
        drop(endpoint);
        let (memory, counters) = server.join().unwrap();
        assert!(memory == bytes);
        assert_eq!((counters.writes, counters.written_bytes, counters.refused), (4, len as u64, 2));
    }
}

#[test]
fn permissions_are_per_connection() {
    let (address, server) = peer(Service::Uc, |worker, endpoint| serve_memory(worker, &endpoint, 10, Rights::Read));
    let worker = Worker::new(config(Service::Uc)).unwrap();
    let endpoint = worker.connect(address, LONG).unwrap();
    let remote = remote(&endpoint);
    let refused = endpoint.write(&remote, 0, b"x", LONG).unwrap_err().to_string();
    assert!(refused.contains("does not grant"), "{refused}");
    assert_eq!(*endpoint.read(&remote, 0, 10, LONG).unwrap(), [0; 10]);
    // A region of another worker cannot be permitted to this endpoint.
    let other = Worker::new(config(Service::Uc)).unwrap();
    let region = other.register(vec![1; 10]).unwrap();
    assert!(region.allow(&endpoint, Rights::Read).is_err());
    assert!(region.write_at(8, b"12").is_ok() && region.write_at(9, b"12").is_err());
    assert_eq!(region.into_vec(), *b"\x01\x01\x01\x01\x01\x01\x01\x0112");
    drop(endpoint);
    assert_eq!(server.join().unwrap(), [0; 10]);
}

/// The client on both executors: each kind of operation, and many calls at once.
async fn client(endpoint: Rc<Endpoint>) {
    let remote = RemoteRegion::from_bytes(endpoint.recv_async().await.unwrap().as_array().unwrap());
    endpoint.write_async(&remote, 10, b"from peer").await.unwrap();
    assert_eq!(*endpoint.read_async(&remote, 15, 4).await.unwrap(), *b"peer");
    endpoint.send_async(vec![1; 100_000]).await.unwrap();
    assert_eq!(endpoint.recv_async().await.unwrap().len(), 100_000);
    for n in 0..200u32 {
        let response = endpoint.call_async(n.to_be_bytes().to_vec()).await.unwrap();
        assert_eq!(*response, (n * 2).to_be_bytes());
    }
    let failed = endpoint.call_async(vec![]).await.unwrap_err();
    assert!(matches!(&failed, Error::Failure(_, text) if text == "no number"), "{failed}");
}

/// The server, on the library's executor.
fn server(worker: &Worker, endpoint: &Endpoint) -> Vec<u8> {
    let region = worker.register(vec![0; 100]).unwrap();
    let remote = region.allow(endpoint, Rights::ReadWrite).unwrap();
    let ended = worker.block_on(async {
        endpoint.send_async(remote.to_bytes().to_vec()).await?;
        let message = endpoint.recv_async().await?;
        endpoint.send_async(message.to_vec()).await?;
        loop {
            let request = endpoint.next_request_async().await?;
            match request.message.as_array() {
                Some(bytes) => endpoint.respond(&request, (u32::from_be_bytes(*bytes) * 2).to_be_bytes().to_vec())?,
                None => endpoint.refuse(&request, "no number")?,
            };
        }
    });
    let ended: Result<(), Error> = ended.unwrap();
    assert!(matches!(ended, Err(Error::Closed { .. })), "{ended:?}");
    region.into_vec()
}

#[test]
fn futures_run_on_the_executor_of_the_worker() {
    let (address, other) = peer(Service::Uc, |worker, endpoint| server(worker, &endpoint));
    let worker = Worker::new(config(Service::Uc)).unwrap();
    let endpoint = Rc::new(worker.connect(address, LONG).unwrap());
    worker.block_on(client(endpoint)).unwrap();
    assert_eq!(other.join().unwrap()[10..19], *b"from peer");
}

#[test]
fn futures_run_on_tokio() {
    let (address, other) = peer(Service::Uc, |worker, endpoint| server(worker, &endpoint));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(LocalSet::new().run_until(async move {
        let worker = Worker::new(config(Service::Uc)).unwrap();
        let endpoint = Rc::new(worker.connect(address, LONG).unwrap());
        let driver = tokio::task::spawn_local(drive(worker));
        client(endpoint.clone()).await;
        // Calls of several tasks.
        let tasks: Vec<_> = (0..50u32)
            .map(|n| {
                let endpoint = endpoint.clone();
                tokio::task::spawn_local(async move { endpoint.call_async(n.to_be_bytes().to_vec()).await })
            })
            .collect();
        for (n, task) in tasks.into_iter().enumerate() {
            assert_eq!(*task.await.unwrap().unwrap(), (n as u32 * 2).to_be_bytes());
        }
        driver.abort();
    }));
    assert_eq!(other.join().unwrap()[10..19], *b"from peer");
}

/// Drives a worker on a runtime that waits on descriptors.
async fn drive(worker: Worker) {
    // SAFETY: the registration owns the descriptor, which stays open until it is dropped.
    let socket = unsafe { AsyncFd::register(worker.descriptor().unwrap()) }.unwrap();
    loop {
        tokio::select! {
            ready = socket.readable() => {
                let mut ready = ready.unwrap();
                while worker.poll().unwrap() {
                    tokio::task::yield_now().await;
                }
                ready.clear_ready();
            }
            () = tokio::time::sleep(worker.due()) => while worker.poll().unwrap() {
                tokio::task::yield_now().await;
            },
        }
    }
}

#[test]
fn connecting_does_not_block() {
    // Two workers of one thread connect to each other, so neither may block.
    let workers = [(); 2].map(|()| Worker::new(config(Service::Both)).unwrap());
    let mut listeners = [0, 1].map(|n: usize| workers[n].listen((LOCAL, 0).into()).unwrap());
    let addresses = [0, 1].map(|n: usize| listeners[n].local_addr().unwrap());
    let mut connecting = [0, 1].map(|n: usize| workers[n].begin_connect(addresses[1 - n], LONG).unwrap());
    let (mut out, mut into) = ([None, None], [None, None]);
    let until = Instant::now() + LONG;
    while out.iter().chain(&into).any(Option::is_none) {
        assert!(Instant::now() < until, "{out:?} {into:?}");
        for n in 0..2 {
            if out[n].is_none() {
                out[n] = connecting[n].try_finish().unwrap();
            }
            if into[n].is_none() {
                into[n] = workers[n].try_accept(&mut listeners[n]).unwrap();
            }
        }
    }
    assert!(matches!(connecting[0].try_finish(), Err(Error::Closed { .. })), "it has ended");
    let message = out[0].as_ref().unwrap().send(b"from 0".to_vec());
    assert!(message.is_ok());
    let other = into[1].as_ref().unwrap();
    while out[0].as_ref().unwrap().open_messages() > 0 {
        workers[0].poll().unwrap();
        workers[1].poll().unwrap();
    }
    assert_eq!(*other.try_recv().unwrap().unwrap(), *b"from 0");
}

#[test]
fn a_worker_talks_to_itself() {
    let worker = Worker::new(config(Service::Uc)).unwrap();
    let mut listener = worker.listen((LOCAL, 0).into()).unwrap();
    let mut connecting = worker.begin_connect(listener.local_addr().unwrap(), LONG).unwrap();
    let (mut out, mut into) = (None, None);
    while out.is_none() || into.is_none() {
        out = out.or_else(|| connecting.try_finish().unwrap());
        into = into.or_else(|| worker.try_accept(&mut listener).unwrap());
    }
    let (out, into) = (out.unwrap(), into.unwrap());
    out.send(vec![7; 100_000]).unwrap();
    assert_eq!(*into.recv(LONG).unwrap(), [7; 100_000]);
    into.send(b"back".to_vec()).unwrap();
    assert!(out.next_queued().unwrap().is_none(), "the worker was not polled");
    assert_eq!(*out.recv(LONG).unwrap(), *b"back");
}

#[test]
fn connecting_times_out_without_an_answer() {
    let worker = Worker::new(config(Service::Uc)).unwrap();
    // A listener that never accepts; and no listener.
    let listener = worker.listen((LOCAL, 0).into()).unwrap();
    let address = listener.local_addr().unwrap();
    let silent = worker.block_on(worker.connect_async(address, Duration::from_millis(50))).unwrap();
    assert!(matches!(silent, Err(Error::Timeout(_))), "{silent:?}");
    drop(listener);
    let nobody = worker.block_on(worker.connect_async(address, LONG)).unwrap();
    assert!(matches!(nobody, Err(Error::Setup(..))), "{nobody:?}");
    // Cancelled attempts release everything, however many there are.
    let listener = worker.listen((LOCAL, 0).into()).unwrap();
    for _ in 0..300 {
        let connecting = worker.begin_connect(listener.local_addr().unwrap(), LONG).unwrap();
        drop(connecting);
    }
}

#[test]
fn a_future_ends_with_its_connection_and_a_dropped_one_releases_everything() {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let (address, other) = peer(Service::Uc, move |worker, endpoint| {
        let request = endpoint.next_request(LONG).unwrap();
        let _ = worker.wait(Duration::from_millis(1));
        endpoint.respond(&request, b"late".to_vec()).unwrap();
        while !stopped.load(Ordering::Acquire) {
            worker.wait(Duration::from_millis(1)).unwrap();
        }
    });
    let worker = Worker::new(config(Service::Uc)).unwrap();
    let endpoint = worker.connect(address, LONG).unwrap();
    let given_up = worker.block_on(async { unless(endpoint.call_async(b"?".to_vec()), std::future::ready(())).await });
    assert!(given_up.unwrap().is_none(), "it cannot have been answered");
    // The response arrives, but is discarded, and its memory returns to the connection.
    while worker.counters().delivered_messages == 0 {
        worker.wait(Duration::from_millis(10)).unwrap();
    }
    stop.store(true, Ordering::Release);
    let ended = worker.block_on(endpoint.recv_async()).unwrap();
    assert!(matches!(ended, Err(Error::Closed { .. })), "{ended:?}");
    other.join().unwrap();
}

/// Returns the result of the first, or `None` once the second is ready.
async fn unless<T>(first: impl Future<Output = T>, second: impl Future<Output = ()>) -> Option<T> {
    let (mut first, mut second) = (std::pin::pin!(first), std::pin::pin!(second));
    std::future::poll_fn(|context| {
        if let std::task::Poll::Ready(value) = first.as_mut().poll(context) {
            return std::task::Poll::Ready(Some(value));
        }
        second.as_mut().poll(context).map(|()| None)
    })
    .await
}

#[test]
fn a_file_moves_all_connections_while_they_are_used() {
    let path = std::env::temp_dir().join(format!("bifrost-follow-{}", std::process::id()));
    std::fs::write(&path, "rc").unwrap();
    let followed = path.clone();
    let (address, server) = peer(Service::Both, move |worker, first| {
        // The file's content applies to existing connections.
        assert_eq!(worker.follow(followed).unwrap(), Service::Rc);
        assert_eq!(first.service(), Some(Service::Rc));
        let mut services = vec![];
        while let Ok(request) = first.next_request(LONG) {
            first.respond(&request, request.message.to_vec()).unwrap();
            if services.last() != Some(&first.service()) {
                services.push(first.service());
            }
        }
        services
    });
    let worker = Worker::new(config(Service::Both)).unwrap();
    assert!(worker.followed().is_none());
    assert!(matches!(worker.follow("/nonexistent"), Err(Error::Flag(_))));
    worker.follow(&path).unwrap();
    // And to later ones.
    let endpoint = worker.connect(address, LONG).unwrap();
    assert_eq!(endpoint.service(), Some(Service::Rc));
    // The peer answers once it has read the file, which may change from then on.
    assert_eq!(*endpoint.call(b"followed".to_vec(), LONG).unwrap(), *b"followed");
    let until = Instant::now() + LONG;
    let mut sequence = 0u64;
    for (text, service) in [("uc", Service::Uc), ("rc", Service::Rc), ("nonsense", Service::Rc), ("uc", Service::Uc)] {
        std::fs::write(&path, text).unwrap();
        // The other end checks the file itself, within 100 ms.
        let seen = Instant::now() + Duration::from_millis(300);
        while endpoint.service() != Some(service) || Instant::now() < seen {
            assert!(Instant::now() < until, "{text}: {:?}", worker.followed());
            sequence += 1;
            let bytes = sequence.to_be_bytes();
            assert_eq!(*endpoint.call(bytes.to_vec(), LONG).unwrap(), bytes);
        }
        let (followed, problem) = worker.followed().unwrap();
        assert_eq!((followed, problem.is_some()), (service, text == "nonsense"));
    }
    drop(endpoint);
    let services: Vec<_> = server.join().unwrap().into_iter().flatten().collect();
    assert_eq!(services, [Service::Rc, Service::Uc, Service::Rc, Service::Uc]);
    std::fs::remove_file(&path).unwrap();
    // A worker with only one service has no choice.
    assert!(matches!(Worker::new(config(Service::Uc)).unwrap().follow(&path), Err(Error::Flag(_))));
}

#[test]
fn a_host_with_several_addresses_connects_from_the_workers() {
    let [here, there] = [2, 1].map(|last| IpAddr::from([127, 0, 0, last]));
    let worker_at = |address| Worker::new(WorkerConfig { port: 0, ..WorkerConfig::new(address) }).unwrap();
    let (sender, receiver) = mpsc::channel();
    let server = std::thread::spawn(move || {
        let worker = worker_at(there);
        let mut listener = worker.listen((there, 0).into()).unwrap();
        sender.send(listener.local_addr().unwrap()).unwrap();
        let endpoint = worker.accept(&mut listener, LONG).unwrap();
        let peer = endpoint.peer().ip();
        assert_eq!(endpoint.recv(LONG).unwrap().to_vec(), b"from another address");
        peer
    });
    let worker = worker_at(here);
    let endpoint = worker.connect(receiver.recv().unwrap(), LONG).unwrap();
    endpoint.send(b"from another address".to_vec()).unwrap();
    // The peer may end before its last acknowledgement arrives.
    let _ = endpoint.flush(LONG);
    assert_eq!(server.join().unwrap(), here);
}

#[test]
fn a_worker_says_what_carries_its_packets() {
    let worker = Worker::new(WorkerConfig { provider: Choice::Soft, ..config(Service::Uc) }).unwrap();
    let name = worker.provider();
    assert!(name.starts_with("soft: RoCEv2 over UDP at [::1]:") && name.ends_with("MTU 1024"), "{name}");
    assert!(worker.verbs_counters().is_none());
    // No RDMA NIC has the loopback address.
    let wanted = WorkerConfig { provider: Choice::Verbs, ..WorkerConfig::new(LOCAL) };
    let error = Worker::new(wanted).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Provider(..)), "{error}");
    assert!(error.to_string().starts_with("no RDMA NIC for [::1]:4791: "), "{error}");
}
