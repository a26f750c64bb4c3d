//! The steady state does not allocate, and a connection is small, as measured by a counting allocator.

#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::net::{IpAddr, Ipv6Addr};

use bifrost_endpoint::{
    Adaptive, Class, ConnectionConfig, Host, HostConfig, HostEvent, Limits, Service, Swift, SwiftConfig,
};
use bifrost_rnic::{Burst, Config, Nic};
use bifrost_wire::rdm::SetupKind;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, with counts per thread.
struct Counting;

// SAFETY: every call is passed on to `System` unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's guarantees are passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's guarantees are passed on.
        unsafe { System.realloc(memory, layout, size) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's guarantees are passed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn host(number: u16) -> Host<Nic> {
    let address = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, number));
    let seed = u64::from(number);
    let nic = Nic::new(Config { address, port: 4791, queue_pairs: 16, regions: 4096, seed });
    Host::new(nic, HostConfig::new(4, seed)).unwrap()
}

/// Sends messages of `len` bytes, eight open at a time, with one packet in `one_in` lost. Returns the allocations
/// during the arrival of `measured` messages, after a warm-up of equally many.
fn allocations(service: Service, len: usize, one_in: u32, measured: u64) -> u64 {
    let mut hosts = [host(1), host(2)];
    let limits = Limits::new(service, 1024);
    let (a, hello) = hosts[0].prepare(SetupKind::Hello, limits).unwrap();
    let (b, welcome) = hosts[1].prepare(SetupKind::Welcome, limits).unwrap();
    for (at, id, peer) in [(0, a, &welcome), (1, b, &hello)] {
        let config = ConnectionConfig::new(service, 1024);
        let swift = Box::new(Swift::new(SwiftConfig::new(50_000)));
        hosts[at].complete(0, id, peer, config, Box::new(Adaptive::default()), swift).unwrap();
    }
    assert!(hosts[0].connection_bytes(a) < 4096, "{} bytes, idle", hosts[0].connection_bytes(a));
    let mut burst = Burst::new();
    let mut random = fastrand::Rng::with_seed(7);
    let (mut now, mut open, mut arrived, mut before) = (0u64, 0, 0, 0);
    while arrived < 2 * measured {
        now += 10_000;
        if service == Service::Both && now.is_multiple_of(1_000_000) {
            let other = if now.is_multiple_of(2_000_000) { Service::Uc } else { Service::Rc };
            assert!(hosts[0].switch(now, a, other));
        }
        assert!(now < 60_000_000_000, "{arrived} have arrived");
        while open < 8 {
            let data = hosts[0].vector(a, len);
            hosts[0].send(now, a, Class::Message, 0, data).map_err(|(error, _)| error).unwrap();
            open += 1;
        }
        for from in 0..2 {
            hosts[from].provider_mut().advance(now);
            hosts[from].turn(now);
            burst.clear();
            hosts[from].provider_mut().transmit(now, 64, &mut burst);
            for packet in burst.packets() {
                if one_in == 0 || random.u32(..one_in) != 0 {
                    hosts[1 - from].provider_mut().receive(now, &packet.route, burst.payload(packet));
                }
            }
        }
        while let Some(event) = hosts[0].next_event() {
            assert!(matches!(event, HostEvent::Sent { .. }), "{event:?}");
            open -= 1;
        }
        while let Some(event) = hosts[1].next_event() {
            let HostEvent::Message { connection, data, .. } = event else { panic!("{event:?}") };
            hosts[1].consumed(now, connection, data);
            arrived += 1;
            if arrived == measured {
                before = ALLOCATIONS.with(Cell::get);
            }
        }
    }
    let made = ALLOCATIONS.with(Cell::get) - before;
    let bytes = hosts.each_ref().map(|host| host.connection_bytes(if host.connection_bytes(a) > 0 { a } else { b }));
    println!("{service:?}, {len} bytes, one in {one_in} lost: {made} allocations, {bytes:?} bytes a connection");
    assert!(bytes.iter().all(|bytes| *bytes < 64 * 1024), "{bytes:?} bytes, active");
    made
}

#[test]
fn nothing_is_allocated() {
    for service in [Service::Uc, Service::Rc, Service::Both] {
        for len in [64, 5000, 32_768, 1 << 20] {
            let measured = if len > 100_000 { 50 } else { 500 };
            assert_eq!(allocations(service, len, 0, measured), 0, "{service:?}, {len} bytes");
        }
    }
    // Losses need more memory, and then none.
    assert_eq!(allocations(Service::Uc, 1 << 20, 256, 300), 0);
}
