//! Hostile messages and file descriptors from a front-end: memory regions, notifiers, inflight records, and files that
//! shrink.

use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::common::front_end::{
    ADD_MEM_REG, FrontEnd, GET_VRING_BASE, Kind, MEMORY, Memory, RX, SET_FEATURES, SET_MEM_TABLE, SET_VRING_BASE,
    SET_VRING_CALL, SET_VRING_KICK, SET_VRING_NUM, TX, region, table, words,
};
use crate::common::packets::{End, ping_gateway};
use crate::common::tenants::{Attachment, Pace, Tenants, repeat};
use crate::common::{Guest, Lab, Options, eventually};

const SPLIT: Kind = Kind { packed: false, size: 256 };

/// Adds regions of one page each, at file offsets that start near the top of the address space and get ever closer to
/// the start of the file. Returns how many regions the daemon accepted.
fn pages_far_away(guest: &FrontEnd) -> u64 {
    let memory = Memory::new(4096);
    let (mut offset, mut accepted) = ((1u64 << 47) - (8 << 40), 0);
    for n in 0..52u64 {
        memory.file.set_len(offset + 4096).unwrap();
        let payload = [vec![0; 8], region(n << 20, 4096, n << 20, offset)].concat();
        if guest.is_accepted(ADD_MEM_REG, &payload, &[memory.file.as_fd()]) {
            accepted += 1;
        } else {
            // The daemon rejects the region and closes the connection.
            break;
        }
        offset = (offset / 4 * 3) & !4095;
    }
    accepted
}

#[test]
fn regions_at_huge_offsets_cost_no_address_space() {
    let tenants = Tenants::new(Attachment::Machine);
    let before = tenants.memory_kib().1;
    tenants.judge("regions of a page at huge offsets", |tenants, stop| {
        let socket = tenants.socket();
        vec![repeat(stop, move || {
            let Some(guest) = FrontEnd::connect(&socket, SPLIT) else { return 0 };
            pages_far_away(&guest)
        })]
    });
    // While such a front-end is connected, the daemon can still start threads, and a reload, which starts some, works.
    let guest = FrontEnd::connect(&tenants.socket(), SPLIT).unwrap();
    let accepted = pages_far_away(&guest);
    let addresses = tenants.memory_kib().1.saturating_sub(before);
    assert!(accepted > 0 && addresses < 1 << 20, "{accepted} regions of a page took {addresses} KiB of addresses");
    tenants.lab.hosts[0].client.reload().unwrap();
    tenants.check_alive();
}

/// A descriptor for used-buffer notifications, which [`fill`] can fill so that writes to it block: the blocking flag
/// belongs to the open file description, which both sides share. The second descriptor is the other end, which must
/// stay open.
fn full_notifier(kind: usize) -> (OwnedFd, OwnedFd) {
    let (given, kept): (OwnedFd, OwnedFd) = match kind % 3 {
        0 => {
            let (one, other) = UnixStream::pair().unwrap();
            (one.into(), other.into())
        }
        1 => {
            let (reader, writer) = std::io::pipe().unwrap();
            (writer.into(), reader.into())
        }
        _ => {
            let counter = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
            let copy = counter.try_clone().unwrap();
            (counter, copy)
        }
    };
    (given, kept)
}

fn fill(notifier: &OwnedFd) {
    let flags = fcntl_getfl(notifier).unwrap();
    fcntl_setfl(notifier, flags | OFlags::NONBLOCK).unwrap();
    while rustix::io::write(notifier, &(u64::MAX / 2).to_ne_bytes()).is_ok() {}
    while rustix::io::write(notifier, &1u64.to_ne_bytes()).is_ok_and(|n| n < 8) {}
    fcntl_setfl(notifier, flags - OFlags::NONBLOCK).unwrap();
}

#[test]
fn a_notifier_that_blocks() {
    let tenants = Tenants::new(Attachment::Machine);
    for kind in 0..3 {
        let name = ["a socket", "a pipe", "an event counter"][kind];
        tenants.judge(&format!("{name} that blocks as notifier"), |tenants, stop| {
            let mut guest = tenants.front_end(false, 256);
            let (given, kept) = full_notifier(kind);
            for ring in [RX, TX] {
                guest.tell(SET_VRING_CALL, &(ring as u64).to_le_bytes(), &[given.as_fd()]);
            }
            guest.is_alive();
            let mut pace = Pace::new(1000.0);
            vec![repeat(stop, move || {
                let _kept = &kept;
                pace.wait();
                fill(&given);
                guest.fill();
                u64::from(guest.send(&ping_gateway(End::attacker(1), &[1; 40])))
            })]
        });
    }
    // Control requests are not delayed either.
    let guest = tenants.front_end(false, 256);
    let (given, _kept) = full_notifier(0);
    fill(&given);
    guest.tell(SET_VRING_CALL, &0u64.to_le_bytes(), &[given.as_fd()]);
    guest.tell(SET_VRING_CALL, &1u64.to_le_bytes(), &[given.as_fd()]);
    guest.is_alive();
    assert_eq!(tenants.lab.hosts[0].client.ports().unwrap().len(), 2);
}

/// The inflight record of a port in client mode is a file beside the port's socket, in a directory that the VM's user
/// can write.
#[test]
fn a_record_that_is_a_link() {
    for kind in ["symlink", "directory symlink"] {
        let mut lab = Lab::new(Options::default());
        let guest = Guest::new("x", 0x21, &["10.9.0.1/24"]);
        lab.add_machine(0, &guest, "client");
        let socket = lab.machine_socket("x");
        let directory = lab.hosts[0].directory.clone();
        let precious = directory.join("precious");
        let text = "what root alone may write\n".repeat(1000);
        std::fs::write(&precious, &text).unwrap();
        let record = socket.with_added_extension("inflight");
        match kind {
            "symlink" => symlink(&precious, &record).unwrap(),
            _ => symlink(directory.join("nothing"), &record).unwrap(),
        }
        let listener = UnixListener::bind(&socket).unwrap();
        lab.start();
        let (stream, _) = listener.accept().unwrap();
        let mut guest = FrontEnd::on(stream, Kind { packed: true, size: 256 }).unwrap();
        guest.set_memory();
        guest.start_rings();
        eventually(5.0, "the machine runs, or is refused", || !lab.hosts[0].port("x").waiting || !guest.is_alive());
        for _ in 0..10 {
            guest.send(&ping_gateway(End::attacker(1), &[1; 40]));
        }
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(std::fs::read_to_string(&precious).unwrap(), text, "root wrote where a link led");
        assert!(!directory.join("nothing").exists(), "root made a file where a link led");
        drop(guest);
        let pid = lab.hosts[0].pid();
        assert_eq!(lab.hosts[0].client.status().unwrap().pid, pid);
    }
}

#[test]
fn memory_that_is_cut_while_in_use() {
    let tenants = Tenants::new(Attachment::Machine);
    tenants.judge("memory cut while in use", |tenants, stop| {
        let (socket, mut turn, mut pace) = (tenants.socket(), 0u64, Pace::new(100.0));
        vec![repeat(stop, move || {
            pace.wait();
            turn += 1;
            let Some(mut guest) = FrontEnd::running(&socket, SPLIT) else { return 0 };
            for _ in 0..64 {
                guest.queue(&ping_gateway(End::attacker(1), &[turn as u8; 1000]));
            }
            guest.kick(TX);
            // From here on, the test itself must not access the memory.
            let bytes = [0, 4096, 2 << 20, MEMORY / 2][turn as usize % 4];
            guest.memory.file.set_len(bytes).unwrap();
            for _ in 0..4 {
                guest.kick(TX);
                std::thread::sleep(Duration::from_micros(200));
            }
            1
        })]
    });
}

/// Messages in random order, with sizes and addresses that change while the rings run.
#[test]
fn messages_out_of_order() {
    let tenants = Tenants::new(Attachment::Machine);
    tenants.judge("messages out of order", |tenants, stop| {
        let (socket, mut random, mut pace) = (tenants.socket(), fastrand::Rng::with_seed(7), Pace::new(5000.0));
        let mut guest: Option<FrontEnd> = None;
        vec![repeat(stop, move || {
            pace.wait();
            if guest.is_none() || random.u32(..50) == 0 && !guest.as_ref().unwrap().is_alive() {
                guest = FrontEnd::running(&socket, Kind { packed: random.bool(), size: 1 << random.u16(1..12) });
            }
            let Some(guest) = &mut guest else { return 0 };
            let ring = random.usize(..3);
            let index = (ring as u64).to_le_bytes();
            match random.u32(..12) {
                0 => guest.tell(SET_VRING_NUM, &words(&[ring as u32, random.u32(..40_000)]), &[]),
                1 => guest.tell(SET_VRING_BASE, &words(&[ring as u32, random.u32(..)]), &[]),
                2 => guest.tell(GET_VRING_BASE, &words(&[ring as u32]), &[]),
                3 => guest.tell(SET_VRING_KICK, &index, &[guest.kicks[0].as_fd()]),
                4 => guest.tell(SET_VRING_CALL, &index, &[guest.memory.file.as_fd()]),
                5 => guest.enable(ring, random.bool()),
                6 => {
                    guest.set_address(ring.min(1));
                    true
                }
                7 => {
                    guest.set_memory();
                    true
                }
                8 => {
                    // Less memory than the rings need, the same file twice, or no memory at all.
                    let regions = [region(0x4000_0000, 1 << 20, 0x7f00_0000_0000, 0), region(0, 4096, 0, 0)];
                    let fd = guest.memory.file.as_fd();
                    let count = random.usize(..3);
                    guest.tell(SET_MEM_TABLE, &table(&regions[..count]), &[fd, fd][..count])
                }
                9 => guest.tell(SET_FEATURES, &random.u64(..).to_le_bytes(), &[]) && random.u32(..4) > 0,
                10 => guest.tell(random.u32(..60), &vec![random.u8(..); random.usize(..100)], &[]),
                _ => {
                    guest.start_rings();
                    true
                }
            };
            guest.send(&ping_gateway(End::attacker(1), &[1; 40]));
            1
        })]
    });
    // Afterwards, the daemon serves a conforming front-end.
    let mut guest = tenants.front_end(false, 256);
    guest.send(&ping_gateway(End::attacker(1), &[1; 40]));
    eventually(2.0, "the gateway answers", || !guest.receive().is_empty());
}

/// Many connections to a port that serves one at a time, each with an incomplete message.
#[test]
fn front_ends_that_wait() {
    let tenants = Tenants::new(Attachment::Machine);
    let held: Arc<std::sync::Mutex<Vec<UnixStream>>> = Arc::default();
    tenants.judge("connections that say nothing", |tenants, stop| {
        let (socket, held) = (tenants.socket(), Arc::clone(&held));
        vec![repeat(stop, move || {
            std::thread::sleep(Duration::from_millis(5));
            let mut held = held.lock().unwrap();
            if held.len() > 50 {
                held.clear();
            }
            // The daemon's listen backlog may be full.
            let stream = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
            stream.set_nonblocking(true).unwrap();
            let connected = stream.connect(&socket2::SockAddr::unix(&socket).unwrap()).is_ok();
            let mut stream = UnixStream::from(stream);
            let _ = stream.write_all(&words(&[5, 1, 100]));
            held.push(stream);
            u64::from(connected)
        })]
    });
    held.lock().unwrap().clear();
    // The daemon limits the connection rate and keeps the backlog short, so the attacker's own port is soon available
    // again.
    let mut guest = None;
    eventually(5.0, "the port serves a machine again", || {
        guest = FrontEnd::running(&tenants.socket(), SPLIT);
        guest.is_some()
    });
    let mut guest = guest.unwrap();
    guest.send(&ping_gateway(End::attacker(1), &[1; 40]));
    eventually(2.0, "the gateway answers", || !guest.receive().is_empty());
}
