use super::*;

fn path(i: u8) -> PathId {
    PathId::masked(i)
}

/// The oldest packet of `path` if one that left later on it is known to have arrived.
fn overtaken(w: &SendWindow, pool: &Pool<SendPage>, path: PathId) -> Option<(Psn, Record)> {
    w.oldest_on(pool, path).filter(|(_, record)| w.is_overtaken_on(path, record))
}

#[test]
fn a_later_packet_on_the_same_path_overtakes() {
    let mut pool = Pool::new(8);
    let mut w = SendWindow::new(Psn(u32::MAX - 2));
    let psns: Vec<Psn> =
        (0..8u32).map(|i| w.push(&mut pool, i, 0, path((i % 2) as u8), Tick(i), 0).expect("room")).collect();
    // The third packet of path 0 arrives: the two before it on path 0 are overtaken, path 1 is not.
    assert!(w.finish(&mut pool, psns[4], |_| true).is_some());
    assert_eq!(overtaken(&w, &pool, path(0)).map(|(p, _)| p), Some(psns[0]));
    assert!(overtaken(&w, &pool, path(1)).is_none());
    // Retransmitted on path 1, it is behind everything there.
    let before = w.resend(&mut pool, psns[0], path(1), Tick(20), Resend::default()).expect("outstanding");
    assert_eq!(before.handle, 0);
    assert_eq!(overtaken(&w, &pool, path(0)).map(|(p, _)| p), Some(psns[2]));
    assert!(w.finish(&mut pool, psns[2], |_| false).is_some());
    assert!(overtaken(&w, &pool, path(0)).is_none(), "psn 6 left after the packet that arrived");
    assert!(w.finish(&mut pool, psns[7], |_| true).is_some());
    assert_eq!(overtaken(&w, &pool, path(1)).map(|(p, _)| p), Some(psns[1]));
    assert!(w.finish(&mut pool, psns[1], |_| false).is_some());
    w.advance(&mut pool);
    assert_eq!(w.una(), psns[0], "the retransmission is still in flight");
    assert!(w.finish(&mut pool, psns[1], |_| true).is_none(), "only once");
}

#[test]
fn lists_stay_whole_under_random_use() {
    let mut seed = 88_172_645_463_325_252u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let mut pool = Pool::new(128);
    let mut w = SendWindow::new(Psn(u32::MAX - 1000));
    let mut out: Vec<(Psn, u8, u32)> = Vec::new();
    for step in 0..if cfg!(miri) { 1_000 } else { 200_000u32 } {
        match random() % 10 {
            0..=4 => {
                let p = (random() % 4) as u8;
                if let Some(psn) = w.push(&mut pool, step, 0, path(p), Tick(step), 9) {
                    out.push((psn, p, step));
                }
            }
            5..=7 if !out.is_empty() => {
                let i = (random() % out.len() as u64) as usize;
                let i = if random() % 4 != 0 { 0 } else { i };
                let (psn, p, sent) = out.remove(i);
                let (record, in_flight) = w.finish(&mut pool, psn, |_| false).expect("outstanding");
                assert!(in_flight);
                assert_eq!((record.path(), record.sent, record.distance()), (path(p), Tick(sent), 9));
                w.advance(&mut pool);
            }
            _ if !out.is_empty() => {
                let i = (random() % out.len() as u64) as usize;
                let p = (random() % 4) as u8;
                w.resend(&mut pool, out[i].0, path(p), Tick(step), Resend::default()).expect("outstanding");
                let (psn, ..) = out.remove(i);
                out.push((psn, p, step));
            }
            _ => {}
        }
        assert_eq!(usize::from(w.outstanding()), out.len());
        for p in 0..4u8 {
            // `out` is in sending order, so the first of each path is the head of its list.
            let expected = out.iter().find(|o| o.1 == p).map(|o| o.0);
            assert_eq!(w.oldest_on(&pool, path(p)).map(|(psn, _)| psn), expected, "step {step}");
        }
    }
}

#[test]
fn the_window_and_the_pool_are_bounds() {
    let mut pool = Pool::new(128);
    let mut w = SendWindow::new(Psn(7));
    let mut count = 0;
    while w.push(&mut pool, 1, 0, path(0), Tick(0), 0).is_some() {
        count += 1;
    }
    assert_eq!(count, SEND_WINDOW);
    let mut drained = 0;
    w.drain(&mut pool, |_, _| drained += 1);
    assert_eq!((drained, pool.used(), w.span()), (SEND_WINDOW, 0, 0));
    let mut tiny = Pool::new(1);
    let mut w = SendWindow::new(Psn(0));
    for _ in 0..64 {
        assert!(w.push(&mut tiny, 1, 0, path(0), Tick(0), 0).is_some());
    }
    assert!(w.push(&mut tiny, 1, 0, path(0), Tick(0), 0).is_none());
}
