//! A pod that writes random bytes to the memory that it shares with the pipeline: rings, descriptors and buffers.

use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use bifrost_port::memif::{Client, ClientConfig};
use serde_json::json;

use crate::world::{Options, World, in_namespace};
use crate::{FLOWS, PACKETS, PATIENT_US, reordered};

/// Number of times that the pod attached, and that it wrote.
#[derive(Debug, Default)]
struct Done {
    attached: u32,
    writes: u32,
}

/// Attaches, writes random bytes 200 times, and attaches again, until it is stopped.
fn start(socket: &Path, stop: &Arc<AtomicBool>) -> JoinHandle<Done> {
    let config = ClientConfig {
        path: socket.to_owned(),
        name: "hostile".to_owned(),
        id: 0,
        queues: 2,
        log2_entries: 8,
        headroom: 0,
        longest: 2048,
    };
    let stop = Arc::clone(stop);
    std::thread::spawn(move || {
        let mut done = Done::default();
        let mut random = std::fs::File::open("/dev/urandom").unwrap();
        let mut bytes = [0; 256];
        while !stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_micros(200));
            let Ok(mut client) = Client::connect(&config) else { continue };
            done.attached += 1;
            let len = client.memory().metadata().unwrap().len();
            let mut queues = client.take_queues();
            // Rings are at the start of the memory, and get more than half of the writes.
            for write in 0..200 {
                random.read_exact(&mut bytes).unwrap();
                let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                let space = if write % 8 < 5 { len.min(4 * (1 << 8) * 16) } else { len };
                let part = &bytes[8..][..1 + number as usize % 200];
                client.memory().write_all_at(part, (number >> 16) % (space - 200)).unwrap();
                done.writes += 1;
                // Also wakes the pipeline.
                for queue in &mut queues {
                    queue.send(|buffer| buffer.len().min(60));
                    queue.publish();
                }
                std::thread::sleep(Duration::from_micros(50));
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        }
        done
    })
}

#[test]
fn a_pod_that_writes_anything_costs_another_one_nothing() {
    in_namespace(|| {
        let mut world = World::start(&Options { timeout_us: PATIENT_US, ..Options::default() });
        let settings = world.settings_of("two", 2);
        assert_eq!(world.command(&json!({ "command": "add_pod", "settings": settings })).0, 200);
        let stop = Arc::new(AtomicBool::new(false));
        let hostile = start(&world.path("two.sock"), &stop);
        let received = world.exchange(PACKETS, FLOWS, |world, number| {
            // The pipeline also writes to that memory. One packet every two batches leaves room in the veth devices.
            if number % 64 == 0 {
                world.send_to_another(2);
            }
        });
        stop.store(true, Ordering::Relaxed);
        let done = hostile.join().unwrap();
        assert!(done.attached > 10 && done.writes > 1_000, "{done:?}");
        assert_eq!((received.len(), reordered(&received)), (PACKETS as usize, 0), "{done:?}");
        assert_eq!(["timed_out_packets", "sent_late_packets"].map(world.order()), [0, 0]);
        let used = ["delivered_packets", "returned_bad_packets"].map(|counter| world.counter_of("two", counter));
        assert!(used.iter().all(|packets| *packets > 10), "the pipeline used its memory: {used:?}");
        // A well-behaved pod can replace it.
        let pod = world.start_another("two", 2);
        world.until_up("two", Some(&[true]));
        drop(pod);
        assert_eq!(world.stop(), (true, true));
    });
}
