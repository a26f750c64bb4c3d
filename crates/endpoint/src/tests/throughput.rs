//! Performance bars: with losses not caused by congestion, one connection keeps 95 % of its throughput.

use bifrost_rdm::Class;

use super::world::{Link, Options, World};
use crate::HostEvent;

/// Goodput with messages of `len` bytes, over 40 ms, Gbit/s.
fn goodput(loss: f64, len: usize, seed: u64) -> (f64, World) {
    let mut world = World::new(seed, Link::new(loss), &Options::default());
    let (warm, end) = (10_000_000, 50_000_000);
    let (mut bytes, mut open) = (0u64, 0);
    while world.now < end {
        while open < 16 {
            let side = &mut world.sides[0];
            let data = side.host.vector(side.id, len);
            side.host.send(world.now, side.id, Class::Message, 0, data).unwrap();
            open += 1;
        }
        world.step(end);
        while let Some(event) = world.sides[0].host.next_event() {
            open -= u32::from(matches!(event, HostEvent::Sent { .. }));
        }
        while let Some(event) = world.sides[1].host.next_event() {
            let HostEvent::Message { connection, data, .. } = event else { continue };
            if world.now >= warm {
                bytes += data.len() as u64;
            }
            let now = world.now;
            world.sides[1].host.consumed(now, connection, data);
        }
    }
    (bytes as f64 * 8.0 / (end - warm) as f64, world)
}

#[test]
fn losses_cost_less_than_a_twentieth() {
    let (lossless, _) = goodput(0.0, 1 << 20, 1);
    assert!(lossless > 21.0, "{lossless:.2} Gbit/s of 25, of which headers take 11 %");
    for one_in in [1024.0, 256.0] {
        let (lossy, world) = goodput(1.0 / one_in, 1 << 20, 1);
        assert!(world.sides[0].dropped > 50);
        assert!(lossy >= 0.95 * lossless, "1/{one_in}: {lossy:.2} of {lossless:.2} Gbit/s");
    }
}
