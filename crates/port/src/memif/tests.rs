use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::thread;

use proptest::prelude::*;

use super::message::{AddRing, Message, VERSION};
use super::ring::{Descriptor, NEXT};
use super::socket::Channel;
use super::*;

const LOG2: u8 = 4;
const ENTRIES: u16 = 1 << LOG2;

fn configs(dir: &tempfile::TempDir) -> (ServerConfig, ClientConfig) {
    let path = dir.path().join("memif.sock");
    let server = ServerConfig { path: path.clone(), name: "server".to_owned(), id: 7, rings: 2 };
    let client = ClientConfig {
        path,
        name: "client".to_owned(),
        id: 7,
        queues: 2,
        log2_entries: LOG2,
        headroom: 64,
        longest: 1600,
    };
    (server, client)
}

fn pair() -> (Attached, Client) {
    let dir = tempfile::tempdir().unwrap();
    let (server, client) = configs(&dir);
    let server = Server::bind(server).unwrap();
    let connecting = thread::spawn(move || Client::connect(&client).unwrap());
    (server.accept().unwrap(), connecting.join().unwrap())
}

#[test]
fn packets_return_in_their_buffers() {
    let (mut server, mut client) = pair();
    assert_eq!(server.client, "client");
    let mut queues = client.take_queues();
    let mut out = [0; 2048];
    for round in 0u32..500 {
        let count = 1 + round % u32::from(ENTRIES);
        for n in 0..count {
            assert!(server.to_client[1].room() > 0);
            server.to_client[1].push(&[&round.to_ne_bytes(), b" ", &n.to_ne_bytes()]).unwrap();
        }
        assert!(server.to_client[1].publish(), "the client wants to be woken");
        assert!(!server.to_client[1].publish(), "nothing new");
        let queue = &mut queues[1];
        assert_eq!(u32::from(queue.available()), count);
        for _ in 0..count {
            let received = queue.received().unwrap();
            let (start, len) = (received.start, received.len);
            assert_eq!((start, len), (64, 9));
            // A header in front.
            received.buffer[start - 4..start].copy_from_slice(b"head");
            queue.send_received(start - 4, len + 4);
        }
        assert!(queue.received().is_none());
        queue.publish();
        queue.clear_event();
        for n in 0..count {
            let len = server.from_client[1].pop(&mut out).unwrap().unwrap();
            assert_eq!(out[..len], [b"head", &round.to_ne_bytes()[..], b" ", &n.to_ne_bytes()].concat());
        }
        assert_eq!(server.from_client[1].pop(&mut out), None);
        server.from_client[1].release();
    }
    assert_eq!(queues[0].available(), 0, "the other queue is empty");
    client.close();
    assert_eq!(server.wait(), "left: stopped");
}

#[test]
fn full_rings_have_no_room() {
    let (mut server, mut client) = pair();
    let ring = &mut server.to_client[0];
    for _ in 0..ENTRIES {
        assert!(ring.room() > 0);
        ring.push(&[b"x"]).unwrap();
    }
    assert_eq!(ring.room(), 0);
    ring.publish();
    let mut queues = client.take_queues();
    for _ in 0..ENTRIES {
        queues[0].send(|buffer| {
            buffer[0] = 1;
            1
        });
    }
    assert_eq!(queues[0].room(), 0);
    assert_eq!(queues[0].available(), 0, "received packets cannot be sent");
    queues[0].publish();
    let mut out = [0; 64];
    assert_eq!(server.from_client[0].pop(&mut out), Some(Ok(1)));
    server.from_client[0].release();
    assert_eq!(queues[0].available(), 1);
    assert_eq!(server.to_client[0].push(&[&[0; 2000]]), Err(TooLong));
}

#[test]
fn the_server_goes() {
    let (server, client) = pair();
    drop(server);
    assert_eq!(client.wait(), "the server closed the interface");
}

#[test]
fn unsupported_parameters_are_refused() {
    type Change = fn(&mut ClientConfig);
    let cases: [(&str, Change); 3] = [
        ("interface 9 was requested", |c| c.id = 9),
        ("ring 1 is missing", |c| c.queues = 1),
        ("offers 2 queues", |c| c.queues = 3),
    ];
    for (text, change) in cases {
        let dir = tempfile::tempdir().unwrap();
        let (server, mut client) = configs(&dir);
        change(&mut client);
        let server = Server::bind(server).unwrap();
        let connecting = thread::spawn(move || Client::connect(&client).map(drop));
        assert!(server.accept().is_err());
        let error = connecting.join().unwrap().unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

/// A client that sends arbitrary messages.
fn converse(messages: Vec<(Message, Option<std::fs::File>)>) -> MemifError {
    let dir = tempfile::tempdir().unwrap();
    let (config, _) = configs(&dir);
    let path = config.path.clone();
    let server = Server::bind(config).unwrap();
    let client = thread::spawn(move || {
        let channel = Channel::connect(&path).unwrap();
        let _ = channel.expect();
        for (message, file) in messages {
            if channel.send(&message, file.as_ref().map(|f| f.as_fd())).is_err() || channel.expect().is_err() {
                break;
            }
        }
    });
    let error = server.accept().unwrap_err();
    client.join().unwrap();
    error
}

#[test]
fn hostile_handshakes() {
    let init = || (Message::Init { version: VERSION, id: 7, name: "x".to_owned() }, None);
    let region = |index, bytes| (Message::AddRegion { index, bytes }, Some(memory(4096)));
    let ring = |region, offset, log2_entries| {
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let ring = AddRing { c2s: true, index: 0, region, offset, log2_entries, private: 0 };
        (Message::AddRing(ring), Some(event.into()))
    };
    let null = || Some(std::fs::File::open("/dev/null").unwrap());
    let no_event = AddRing { c2s: true, index: 0, region: 0, offset: 0, log2_entries: 4, private: 0 };
    for (name, messages, text) in [
        ("old version", vec![(Message::Init { version: 1, id: 7, name: String::new() }, None)], "version"),
        ("region out of order", vec![init(), region(1, 4096)], "out of order"),
        ("empty region", vec![init(), region(0, 0)], "0 bytes"),
        ("too large", vec![init(), region(0, 1 << 33)], "at most"),
        ("longer than its file", vec![init(), region(0, 8192)], "shorter"),
        (
            "no memory",
            vec![init(), (Message::AddRegion { index: 0, bytes: 64 }, null())],
            "missing or not a memory file",
        ),
        (
            "no descriptor",
            vec![init(), (Message::AddRegion { index: 0, bytes: 64 }, None)],
            "missing or not a memory file",
        ),
        ("no such region", vec![init(), region(0, 4096), ring(1, 0, 4)], "does not exist"),
        ("beyond the region", vec![init(), region(0, 4096), ring(0, 4000, 4)], "no ring at"),
        ("not aligned", vec![init(), region(0, 4096), ring(0, 2, 4)], "no ring at"),
        ("a large ring", vec![init(), region(0, 4096), ring(0, 0, 15)], "no ring at"),
        ("a huge ring", vec![init(), region(0, 4096), ring(0, 0, 255)], "no ring at"),
        ("no cookie", vec![init(), region(0, 4096), ring(0, 0, 4)], "no ring at"),
        ("no event", vec![init(), region(0, 4096), (Message::AddRing(no_event), null())], "event counter"),
        ("no rings", vec![init(), region(0, 4096), (Message::Connect { name: String::new() }, None)], "missing"),
        ("unexpected", vec![(Message::Ack, None)], "unexpected message"),
    ] {
        let error = converse(messages).to_string();
        assert!(error.contains(text), "{name}: {error}");
    }
}

fn memory(bytes: u64) -> std::fs::File {
    let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    fd.into()
}

#[test]
fn only_a_stale_socket_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let (config, _) = configs(&dir);
    let first = Server::bind(config.clone()).unwrap();
    std::mem::forget(first);
    drop(Server::bind(config.clone()).unwrap());
    std::fs::write(&config.path, "a file").unwrap();
    assert!(Server::bind(config).unwrap_err().to_string().contains("not a socket"));
    let _: PathBuf = dir.keep();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// A client writes random data into its rings: the server reads only its own buffer and the client's memory, and
    /// terminates.
    #[test]
    fn hostile_rings(
        writes in proptest::collection::vec((any::<u16>(), any::<u16>(), any::<u32>(), any::<u32>()), 1..24),
        head in any::<u16>(),
        small in any::<bool>(),
    ) {
        let (mut server, mut client) = pair();
        let queues = client.take_queues();
        for (slot, (flags, region, len, offset)) in (0..).zip(&writes) {
            let region = if small { 0 } else { *region };
            let (len, offset) = if small { (len % 64, offset % 70_000) } else { (*len, *offset) };
            queues[0].raw_send_ring().set_descriptor(slot, Descriptor { flags: flags & NEXT, region, len, offset });
            queues[0].raw_receive_ring().set_descriptor(slot, Descriptor { flags: *flags, region, len, offset });
        }
        queues[0].raw_send_ring().set_head(head);
        queues[0].raw_receive_ring().set_head(head);
        let mut out = [0; 256];
        let taken = (0..1000).take_while(|_| server.from_client[0].pop(&mut out).is_some()).count();
        prop_assert!(taken <= usize::from(ENTRIES));
        server.from_client[0].release();
        let room = server.to_client[0].room();
        prop_assert!(room <= ENTRIES);
        for _ in 0..room {
            let _ = server.to_client[0].push(&[&[1; 100]]);
        }
        server.to_client[0].publish();
    }
}
