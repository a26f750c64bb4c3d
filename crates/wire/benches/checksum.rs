//! Speed of the checksum over cached packets: `cargo bench -p bifrost-wire`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use bifrost_wire::checksum;

const RUN: Duration = Duration::from_millis(300);

fn main() {
    for len in [64, 576, 1460, 9000, 65_535] {
        let from = vec![0xa5; len];
        let mut to = vec![0; len];
        let sum = gigabytes_per_second(len, || u64::from(checksum::sum(black_box(&from))));
        let copy =
            gigabytes_per_second(len, || u64::from(checksum::copy_and_sum(black_box(&from), black_box(&mut to))));
        println!("{len:>6} bytes: sum {sum:6.1} GB/s, copy_and_sum {copy:6.1} GB/s");
    }
}

fn gigabytes_per_second(len: usize, mut call: impl FnMut() -> u64) -> f64 {
    let start = Instant::now();
    let mut calls = 0u64;
    while start.elapsed() < RUN {
        for _ in 0..1000 {
            black_box(call());
        }
        calls += 1000;
    }
    (calls * len as u64) as f64 / start.elapsed().as_nanos() as f64
}
