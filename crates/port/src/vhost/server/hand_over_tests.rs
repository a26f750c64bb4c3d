//! Ports that continue in another process, with front-ends and states that are not as they should be.

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::super::device::HandedMessage;
use super::super::queue::VhostQueue;
use super::super::{MESSAGE_RATE, Mode, QueueOwner, VhostConfig, VhostError, VhostPort};
use super::HandedPort;

/// Counts how often queues start and stop.
#[derive(Clone, Default)]
struct Owner(Arc<AtomicU32>);

impl QueueOwner for Owner {
    fn start(&mut self, queue: VhostQueue) {
        self.0.fetch_add(1, Ordering::Relaxed);
        drop(queue);
    }

    fn stop(&mut self) {}
}

fn config(socket: &Path, mode: Mode) -> VhostConfig {
    VhostConfig {
        name: "vm".to_owned(),
        socket: socket.to_owned(),
        mode,
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
        queues: 1,
        packed: false,
        slicing: true,
        merged: false,
        record: None,
        message_rate: MESSAGE_RATE,
    }
}

fn adopt(socket: &Path, mode: Mode, handed: HandedPort) -> Result<VhostPort, VhostError> {
    VhostPort::adopt(config(socket, mode), Box::<Owner>::default(), handed)
}

/// Asks for the features; the back-end answers every connected front-end.
fn is_served(mut front_end: &UnixStream) -> bool {
    use std::io::{Read as _, Write as _};
    front_end.set_read_timeout(Some(Duration::from_secs(5))).expect("an option");
    let request: Vec<u8> = [1u32, 1, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    front_end.write_all(&request).is_ok() && front_end.read_exact(&mut [0; 20]).is_ok()
}

#[test]
fn a_connection_continues_in_either_process() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("vm.sock");
    let first = VhostPort::open(config(&socket, Mode::Server), Box::<Owner>::default()).expect("a port");
    let front_end = UnixStream::connect(&socket).expect("it listens");
    assert!(is_served(&front_end));
    for other_takes_over in [false, true] {
        let handed = first.hand_over().expect("nothing is half done");
        assert!(handed.listener.is_some() && handed.connection.is_some());
        let second = adopt(&socket, Mode::Server, handed).expect("a valid state");
        assert_eq!(first.leave(), Some(vec![0, 0]));
        if other_takes_over {
            assert!(second.begin(vec![0, 0]));
            second.own();
            first.handed_over();
            drop(first);
            assert!(is_served(&front_end) && second.is_connected());
            // The next front-end connects to the same socket.
            drop(front_end);
            assert!(is_served(&UnixStream::connect(&socket).expect("it listens")));
            drop(second);
            assert!(!socket.exists());
            return;
        }
        // It has not begun: its end closes nothing.
        drop(second);
        first.go_on();
        assert!(is_served(&front_end) && socket.exists());
    }
}

#[test]
fn invalid_states_are_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("vm.sock");
    let refused = |mode, handed| matches!(adopt(&socket, mode, handed), Err(VhostError::Handed(_)));
    assert!(refused(Mode::Server, HandedPort::default()), "there is no listener");
    let (one, other) = UnixStream::pair().expect("sockets");
    let listener = || Some(one.as_fd().try_clone_to_owned().expect("again"));
    assert!(refused(Mode::Client, HandedPort { listener: listener(), ..HandedPort::default() }));
    let with = |request, payload: Vec<u8>| HandedPort {
        listener: None,
        connection: Some(other.as_fd().try_clone_to_owned().expect("again")),
        messages: vec![HandedMessage { request, payload, files: Vec::new() }],
    };
    // A ring that does not exist, a size of 0, a kick without a descriptor, memory without a descriptor, nonsense.
    for (request, words) in [(8, vec![9u32, 16]), (8, vec![0, 0]), (12, vec![0, 0]), (37, vec![0; 10]), (99, vec![])] {
        let payload: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert!(refused(Mode::Client, with(request, payload)), "request {request}");
    }
    assert!(adopt(&socket, Mode::Client, with(8, vec![0, 0, 0, 0, 16, 0, 0, 0])).is_ok());
}

/// A front-end that stops in the middle of a message is disconnected, so that it cannot prevent an upgrade.
#[test]
fn a_front_end_in_the_middle_of_a_message_is_disconnected() {
    use std::io::{Read as _, Write as _};
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("vm.sock");
    let port = VhostPort::open(config(&socket, Mode::Server), Box::<Owner>::default()).expect("a port");
    let mut front_end = UnixStream::connect(&socket).expect("it listens");
    assert!(is_served(&front_end));
    front_end.write_all(&[1, 0, 0, 0]).expect("room");
    // If the thread runs the command before it has seen the message, it hands over the connection with it.
    while port.hand_over().expect("a state").connection.is_some() {
        port.go_on();
    }
    assert_eq!(front_end.read(&mut [0]).expect("the end"), 0);
    port.go_on();
    assert!(is_served(&UnixStream::connect(&socket).expect("it listens")));
}
