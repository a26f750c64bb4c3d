//! Measures the speed of a store: `cargo run --release -p bifrost-store --example measure -- memory | DIRECTORY |
//! http://HOST:PORT [SECONDS]`.
//!
//! Transactions of one key with 200 bytes, one after the other and 64 concurrently; and the time until a watch reports
//! a transaction, from its start and from its acknowledgement. The keys that it writes begin with `/measure/`, and are
//! not removed.

use std::time::{Duration, Instant};

use bifrost_store::{EtcdOptions, Store, Txn, Write};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let which = arguments.next().ok_or("memory, a directory, or a member of etcd?")?;
    let time = Duration::from_secs(arguments.next().map_or(Ok(5), |seconds| seconds.parse())?);
    let store = match which.as_str() {
        "memory" => Store::memory(),
        endpoint if endpoint.starts_with("http") => {
            Store::etcd(EtcdOptions { endpoints: vec![endpoint.to_owned()], ..EtcdOptions::default() }).await?
        }
        directory => Store::open(directory)?,
    };
    for at_once in [1, 64] {
        let begin = Instant::now();
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..at_once {
            let store = store.clone();
            tasks.spawn(async move {
                let mut count = 0u64;
                while begin.elapsed() < time {
                    // Errors are printed; there is nothing else to do.
                    store.commit(&change(task, count)).await.expect("it commits");
                    count += 1;
                }
                count
            });
        }
        let count: u64 = tasks.join_all().await.iter().sum();
        println!("{at_once} at once: {:.0} transactions/s", count as f64 / begin.elapsed().as_secs_f64());
    }
    let mut watch = store.watch("/measure/", store.snapshot("/measure/").await?.revision).await?;
    let (mut whole, mut after) = (Vec::new(), Vec::new());
    let end = Instant::now() + time;
    while Instant::now() < end {
        let begin = Instant::now();
        let (acknowledged, told) =
            tokio::join!(async { store.commit(&change(0, 0)).await.map(|_| Instant::now()) }, async {
                watch.next().await.map(|_| Instant::now())
            },);
        let (acknowledged, told) = (acknowledged?, told?);
        whole.push(told - begin);
        after.push(told.saturating_duration_since(acknowledged));
    }
    for (what, mut all) in [("since its start", whole), ("since it was acknowledged", after)] {
        all.sort_unstable();
        let at = |part: f64| all[((all.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e6;
        println!("reported by a watch, {what}: P50 {:.0} us, P99 {:.0} us, of {}", at(0.5), at(0.99), all.len());
    }
    Ok(())
}

fn change(task: u64, count: u64) -> Txn {
    let key = format!("/measure/{task}/{}", count % 100);
    Txn { expect: Vec::new(), writes: vec![Write::Put { key, value: vec![b'x'; 200] }] }
}
