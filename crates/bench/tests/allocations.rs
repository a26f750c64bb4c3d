//! Allocations per packet of the gateway, counted in the program's allocator. One test, because the count is the
//! process's.

use bifrost_bench::account::Counting;
use bifrost_bench::gateway::{PACKETS, allocations};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn nothing_allocates_per_packet() {
    let counted = allocations(2 * PACKETS);
    let names: Vec<&str> = counted.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["load_balancing", "limiter", "vpc", "eip", "snat", "idc", "cloud_service"]);
    for (name, count) in counted {
        assert_eq!(count, 0, "{name}");
    }
}
