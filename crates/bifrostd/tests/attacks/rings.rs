//! Rings, descriptors and inflight records from a driver that violates the virtio specification.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::common::front_end::{
    F_AVAILABLE, F_INDIRECT, F_NEXT, F_USED, F_WRITE, FrontEnd, GUEST, Kind, Memory, RX, SCRATCH, SET_INFLIGHT_FD, TX,
};
use crate::common::packets::{End, ping_gateway};
use crate::common::tenants::{Attachment, Pace, Tenants, Threads, repeat, spin};

/// A bad chain that uses all but one descriptor of a packed receive ring, followed by a buffer that overlaps the ring's
/// first descriptor. The daemon's copy of a packet into that buffer makes the first descriptor available again,
/// although the daemon has not returned it yet.
fn own_write(socket: &Path, size: u16) -> u64 {
    let Some(mut guest) = FrontEnd::connect(socket, Kind { packed: true, size }) else { return 0 };
    guest.set_memory();
    guest.start_rings();
    let (ring, table) = (guest.descriptors(RX), SCRATCH + (1 << 20));
    let memory = Arc::clone(&guest.memory);
    for (i, (to, len)) in [(SCRATCH, 12 + 54), (ring, 16), (SCRATCH + 4096, 2048)].into_iter().enumerate() {
        memory.descriptor(table + 16 * i as u64, GUEST + to, len, 0, F_WRITE);
    }
    memory.descriptor(ring + 16 * u64::from(size - 1), GUEST + table, 48, 1, F_INDIRECT | F_AVAILABLE);
    for slot in (0..size - 1).rev() {
        let more = if slot + 2 < size { F_NEXT } else { 0 };
        memory.descriptor(ring + 16 * u64::from(slot), GUEST + SCRATCH, 60, 0, more | F_AVAILABLE);
    }
    // Bytes 54 to 69 of the frame and of its reply are the descriptor.
    let bits = u128::from(GUEST + SCRATCH) | 2048 << 64 | 2 << 96 | u128::from(F_WRITE | F_USED) << 112;
    let mut payload = [7; 72];
    payload[12..28].copy_from_slice(&bits.to_le_bytes());
    let frame = ping_gateway(End::attacker(1), &payload);
    assert_eq!(frame[54..70], bits.to_le_bytes());
    for _ in 0..2 {
        guest.queue(&frame);
    }
    guest.kick(TX);
    // Waits until the daemon has processed them.
    for _ in 0..20 {
        std::thread::sleep(Duration::from_micros(500));
        if guest.outstanding(TX) == 0 {
            break;
        }
    }
    u64::from(guest.is_alive())
}

#[test]
fn a_buffer_over_the_ring_itself() {
    let tenants = Tenants::new(Attachment::Machine);
    tenants.judge("a buffer over the ring itself", |tenants, stop| {
        let (socket, mut turn) = (tenants.socket(), 0);
        vec![repeat(stop, move || {
            turn += 1;
            own_write(&socket, [16, 256][turn % 2])
        })]
    });
}

/// One thread repeatedly makes a ring's first descriptor available and takes it back, while another one makes the
/// daemon read the ring.
fn flip(tenants: &Tenants, stop: &Arc<AtomicBool>, ring: usize) -> Threads {
    const SIZE: u16 = 16;
    let Some(mut guest) = FrontEnd::connect(&tenants.socket(), Kind { packed: true, size: SIZE }) else {
        return Vec::new();
    };
    guest.set_memory();
    guest.start_rings();
    let (memory, at) = (Arc::clone(&guest.memory), guest.descriptors(ring));
    let direction = if ring == TX { F_WRITE } else { 0 };
    for slot in 1..SIZE {
        let more = if slot + 1 < SIZE { F_NEXT } else { 0 };
        memory.descriptor(at + 16 * u64::from(slot), GUEST + SCRATCH, 60, 0, direction | more);
    }
    let flipping = spin(stop, move || {
        memory.descriptor(at, GUEST + SCRATCH, 60, 0, direction | F_NEXT | F_AVAILABLE);
        (0..20).for_each(|_| std::hint::spin_loop());
        memory.descriptor(at, GUEST + SCRATCH, 60, 1, F_WRITE | F_USED);
        (0..20).for_each(|_| std::hint::spin_loop());
    });
    let (mut turn, mut pace) = (0u32, Pace::new(10_000.0));
    let kicking = repeat(stop, move || {
        pace.wait();
        turn += 1;
        match ring {
            // Restarts the ring, which the daemon may have disabled.
            _ if turn.is_multiple_of(64) => guest.start_rings(),
            TX => guest.kick(TX),
            _ => {
                guest.queue(&ping_gateway(End::attacker(1), &[1; 40]));
                guest.kick(TX);
            }
        }
        1
    });
    vec![flipping, kicking]
}

#[test]
fn descriptors_that_another_processor_takes_back() {
    let tenants = Tenants::new(Attachment::Machine);
    tenants.judge("transmit descriptors taken back", |tenants, stop| flip(tenants, stop, TX));
    tenants.judge("receive descriptors taken back", |tenants, stop| flip(tenants, stop, RX));
}

/// An inflight record that changes while the daemon reads it.
fn changing_record(tenants: &Tenants, stop: &Arc<AtomicBool>, packed: bool) -> Threads {
    /// The longest valid chain.
    const SIZE: u16 = 256;
    let Some(mut guest) = FrontEnd::connect(&tenants.socket(), Kind { packed, size: SIZE }) else { return Vec::new() };
    let record = Memory::new(1 << 20);
    let (header, stride) = if packed { (32, 32) } else { (16, 16) };
    let bytes = (header + stride * u64::from(SIZE)).next_multiple_of(64);
    let ours = Arc::clone(&record);
    // Writes the records of both rings; repeated each time before the daemon reads them.
    let prepare = move || {
        for ring in [0, bytes] {
            let head = if packed { 1 | 1 << 48 } else { 1 };
            if packed {
                ours.store64(ring + 8, 1 | u64::from(SIZE) << 16 | 0xffff << 32 | 0xffff << 48);
                ours.store64(ring + 16, 1 << 32 | 1 << 40);
            } else {
                ours.store64(ring + 8, 1 | u64::from(SIZE) << 16);
            }
            for i in 0..u64::from(SIZE) {
                let at = ring + header + stride * i;
                if packed {
                    ours.store64(at + 16, i);
                }
                ours.store64(at, if packed { head | i << 32 } else { head });
            }
        }
    };
    guest.set_memory();
    let message = [(1u64 << 20).to_le_bytes(), 0u64.to_le_bytes(), u64::from(SIZE).to_le_bytes()].concat();
    guest.tell(SET_INFLIGHT_FD, &message, &[File::as_fd(&record.file)]);
    let mut seed = 1u64;
    let scribbling = spin(stop, move || {
        for ring in [0, bytes] {
            for i in 0..u64::from(SIZE) {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                record.store64(ring + header + stride * i + 8, seed);
            }
        }
    });
    let mut pace = Pace::new(500.0);
    let starting = repeat(stop, move || {
        pace.wait();
        prepare();
        guest.start_rings();
        guest.enable(RX, false);
        u64::from(guest.is_alive())
    });
    vec![scribbling, starting]
}

#[test]
fn a_record_that_changes_while_it_is_read() {
    let tenants = Tenants::new(Attachment::Machine);
    for packed in [false, true] {
        tenants.judge(&format!("a changing record, packed {packed}"), |t, stop| changing_record(t, stop, packed));
    }
}

/// A receive ring full of long chains with an invalid end, refilled as soon as the daemon has processed it, and packets
/// to be placed in it.
fn long_bad_chains(tenants: &Tenants, stop: &Arc<AtomicBool>, size: u16) -> Threads {
    let Some(mut guest) = FrontEnd::connect(&tenants.socket(), Kind { packed: false, size }) else { return Vec::new() };
    guest.set_memory();
    guest.start_rings();
    let memory = Arc::clone(&guest.memory);
    for i in 0..1024 {
        let (flags, next) = if i < 1023 { (F_WRITE | F_NEXT, i as u16 + 1) } else { (0, 0) };
        memory.descriptor(SCRATCH + 16 * i, GUEST + SCRATCH + (1 << 20), 1, flags, next);
    }
    for head in 0..size {
        memory.descriptor(guest.descriptors(RX) + 16 * u64::from(head), GUEST + SCRATCH, 1024 * 16, F_INDIRECT, 0);
        memory.store16(guest.available(RX) + 4 + 2 * u64::from(head), head);
    }
    let (available, used) = (guest.available(RX), guest.used(RX));
    let mut pace = Pace::new(1000.0);
    vec![repeat(stop, move || {
        pace.wait();
        // Makes all entries of the ring available.
        memory.store16(available + 2, memory.load16(used + 2).wrapping_add(size));
        u64::from(guest.send(&ping_gateway(End::attacker(1), &[1; 40])))
    })]
}

#[test]
fn long_chains_that_end_badly() {
    let tenants = Tenants::new(Attachment::Machine);
    for size in [256, 1024] {
        tenants.judge(&format!("long bad chains, ring of {size}"), |t, stop| long_bad_chains(t, stop, size));
    }
}

/// Sends chains that fill the whole transmit ring, each with another buffer ID.
struct WholeRing {
    guest: FrontEnd,
    lap: u16,
}

impl WholeRing {
    /// The longest valid chain.
    const SIZE: u16 = 256;

    fn send(&mut self) -> u64 {
        let (memory, at) = (&self.guest.memory, self.guest.descriptors(TX));
        let first_lap = self.lap.is_multiple_of(2);
        let available = if first_lap { F_AVAILABLE } else { F_USED };
        for slot in (0..Self::SIZE).rev() {
            let more = if slot + 1 < Self::SIZE { F_NEXT } else { 0 };
            let id = self.lap % Self::SIZE;
            memory.descriptor(at + 16 * u64::from(slot), GUEST + SCRATCH, 60, id, more | available);
        }
        self.guest.kick(TX);
        self.lap = self.lap.wrapping_add(1);
        let back = if first_lap { F_AVAILABLE | F_USED } else { 0 };
        for _ in 0..2000 {
            if (memory.load64(at + 8) >> 48) as u16 & (F_AVAILABLE | F_USED) == back {
                return 1;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        // The daemon has disabled the ring: start again.
        self.guest.start_rings();
        self.lap = 0;
        0
    }
}

#[test]
fn every_id_once_with_a_chain_of_the_whole_ring() {
    let tenants = Tenants::new(Attachment::Machine);
    let start = |tenants: &Tenants| WholeRing { guest: tenants.front_end(true, WholeRing::SIZE), lap: 0 };
    let before = tenants.memory_kib().0;
    let mut ring = start(&tenants);
    let sent: u64 = (0..WholeRing::SIZE).map(|_| ring.send()).sum();
    let grown = tenants.memory_kib().0.saturating_sub(before);
    println!("{sent} chains; memory has grown by {grown} KiB");
    assert!(sent > u64::from(WholeRing::SIZE) / 2, "{sent} chains were given back");
    // The ring and the port use a few hundred bytes per descriptor.
    assert!(grown < 4 << 10, "{grown} KiB more");
    drop(ring);
    tenants.judge("whole-ring chains", |tenants, stop| {
        let mut ring = start(tenants);
        vec![repeat(stop, move || ring.send())]
    });
}
