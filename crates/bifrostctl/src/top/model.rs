//! What `top` knows: the last sample, rates from the one before, and a history of every path.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use bifrost_control::api::{Conn, Path, Status};
use serde::Serialize;

/// Samples of round-trip time that are kept per path.
const HISTORY: usize = 240;

/// What one round of requests gave.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Sample {
    /// When, seconds since the start.
    pub(super) at_s: f64,
    pub(super) status: Status,
    pub(super) paths: Vec<Path>,
    pub(super) conns: Vec<Conn>,
}

/// A path, as it is shown.
#[derive(Clone, Debug)]
pub(super) struct PathRow {
    pub(super) path: Path,
    /// Packets sent per second since the sample before.
    pub(super) tx_pps: f64,
    /// Share of these that were found lost in the same time; 0 to 100.
    pub(super) lost_percent: f64,
}

/// A connection, as it is shown.
#[derive(Clone, Debug)]
pub(super) struct ConnRow {
    pub(super) conn: Conn,
    pub(super) tx_pps: f64,
    pub(super) rx_pps: f64,
    pub(super) retransmitted_pps: f64,
}

/// What connections are sorted by, the largest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    Traffic,
    Retransmissions,
    Rtt,
}

/// Everything that the view shows.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) interval: Duration,
    pub(super) status: Status,
    pub(super) paths: Vec<PathRow>,
    pub(super) conns: Vec<ConnRow>,
    /// Why the last sample failed.
    pub(super) error: Option<String>,
    pub(super) paused: bool,
    pub(super) sort: Sort,
    /// Connections scrolled past.
    pub(super) offset: usize,
    last: Option<Sample>,
    history: BTreeMap<(String, u8), VecDeque<Option<f64>>>,
}

impl Model {
    pub(super) fn new(interval: Duration) -> Model {
        Model {
            interval,
            status: Status::default(),
            paths: Vec::new(),
            conns: Vec::new(),
            error: None,
            paused: false,
            sort: Sort::Traffic,
            offset: 0,
            last: None,
            history: BTreeMap::new(),
        }
    }

    /// Takes a sample, or the reason why there is none.
    pub(super) fn update(&mut self, sample: Result<Sample, String>) {
        if self.paused {
            return;
        }
        let sample = match sample {
            Ok(sample) => sample,
            Err(e) => {
                self.error = Some(e);
                return;
            }
        };
        self.error = None;
        // Counters of a restarted daemon start at zero.
        let last = self.last.take().filter(|last| last.status.pid == sample.status.pid);
        let elapsed = last.as_ref().map_or(0.0, |last| sample.at_s - last.at_s);
        self.paths = path_rows(&sample.paths, last.as_ref(), elapsed);
        self.conns = conn_rows(&sample.conns, last.as_ref(), elapsed);
        self.sort_conns();
        self.remember(&sample.paths);
        self.status = sample.status.clone();
        self.offset = self.offset.min(self.conns.len().saturating_sub(1));
        self.last = Some(sample);
    }

    /// The last round-trip times of a path, oldest first; none: not measured, or down.
    pub(super) fn rtts(&self, path: &Path) -> impl DoubleEndedIterator<Item = Option<f64>> + '_ {
        self.history.get(&(path.peer.clone(), path.path)).into_iter().flatten().copied()
    }

    pub(super) fn toggle_pause(&mut self) {
        self.paused = !self.paused;
    }

    pub(super) fn next_sort(&mut self) {
        self.sort = match self.sort {
            Sort::Traffic => Sort::Retransmissions,
            Sort::Retransmissions => Sort::Rtt,
            Sort::Rtt => Sort::Traffic,
        };
        self.sort_conns();
    }

    /// Scrolls the connections.
    pub(super) fn scroll(&mut self, by: isize) {
        self.offset = self.offset.saturating_add_signed(by).min(self.conns.len().saturating_sub(1));
    }

    fn sort_conns(&mut self) {
        let key = |row: &ConnRow| match self.sort {
            Sort::Traffic => row.tx_pps + row.rx_pps,
            Sort::Retransmissions => row.retransmitted_pps,
            Sort::Rtt => row.conn.srtt_us.unwrap_or(0.0),
        };
        // By CID among equals, so that rows stay where they are.
        self.conns.sort_by(|a, b| key(b).total_cmp(&key(a)).then(a.conn.cid.cmp(&b.conn.cid)));
    }

    fn remember(&mut self, paths: &[Path]) {
        self.history.retain(|(peer, number), _| paths.iter().any(|p| p.peer == *peer && p.path == *number));
        for path in paths {
            let history = self.history.entry((path.peer.clone(), path.path)).or_default();
            let down = path.state == bifrost_control::api::PathState::Down;
            history.push_back(path.srtt_us.filter(|_| !down));
            if history.len() > HISTORY {
                history.pop_front();
            }
        }
    }
}

fn path_rows(paths: &[Path], last: Option<&Sample>, elapsed: f64) -> Vec<PathRow> {
    let before: HashMap<_, _> = last.into_iter().flat_map(|l| &l.paths).map(|p| ((&p.peer, p.path), p)).collect();
    let rows = paths.iter().map(|path| {
        let before = before.get(&(&path.peer, path.path));
        let sent = before.map_or(0, |b| path.tx_packets.saturating_sub(b.tx_packets));
        let lost = before.map_or(0, |b| path.lost_packets.saturating_sub(b.lost_packets));
        // A loss is found after the packet was sent, perhaps in an interval without another one.
        let lost_percent = if lost == 0 { 0.0 } else { 100.0 * lost as f64 / sent.max(lost) as f64 };
        PathRow { path: path.clone(), tx_pps: rate(sent, elapsed), lost_percent }
    });
    let mut rows: Vec<_> = rows.collect();
    rows.sort_by(|a, b| (&a.path.peer, a.path.path).cmp(&(&b.path.peer, b.path.path)));
    rows
}

fn conn_rows(conns: &[Conn], last: Option<&Sample>, elapsed: f64) -> Vec<ConnRow> {
    let before: HashMap<_, _> = last.into_iter().flat_map(|l| &l.conns).map(|c| (c.cid, c)).collect();
    let rows = conns.iter().map(|conn| {
        let since = |value: fn(&Conn) -> u64| {
            let before = before.get(&conn.cid).map_or(value(conn), |b| value(b));
            rate(value(conn).saturating_sub(before), elapsed)
        };
        ConnRow {
            conn: conn.clone(),
            tx_pps: since(|c| c.tx_packets),
            rx_pps: since(|c| c.rx_packets),
            retransmitted_pps: since(|c| c.retransmitted_packets),
        }
    });
    rows.collect()
}

fn rate(count: u64, elapsed: f64) -> f64 {
    if elapsed > 0.0 { count as f64 / elapsed } else { 0.0 }
}

#[cfg(test)]
pub(super) mod tests {
    use bifrost_control::api::{ConnState, PathState, WorkerStatus};

    use super::*;

    /// Two paths and two connections; counters grow with `at_s`.
    pub(crate) fn sample(at_s: f64) -> Sample {
        let n = (at_s * 1000.0) as u64;
        let path = |path, state, srtt_us, share_percent, tx_packets, lost_packets| Path {
            peer: "host-b".into(),
            path,
            state,
            srtt_us,
            min_rtt_us: Some(20.0),
            share_percent,
            tx_packets,
            lost_packets,
            loss_percent: 1.25,
            cwnd_packets: 128.0,
            ..Path::default()
        };
        let conn = |cid, tx_packets, rx_packets, retransmitted_packets| Conn {
            cid,
            peer: "host-b".into(),
            vni: 100,
            state: ConnState::Established,
            local_mac: "02:00:00:00:00:01".into(),
            remote_mac: "02:00:00:00:00:02".into(),
            window_packets: 512,
            srtt_us: Some(40.0 + f64::from(cid)),
            tx_packets,
            rx_packets,
            retransmitted_packets,
            ..Conn::default()
        };
        Sample {
            at_s,
            status: Status {
                host: "host-a".into(),
                version: "0.1.0".into(),
                pid: 7,
                uptime_s: 3700.0,
                workers: vec![WorkerStatus { busy_percent: 12.5, ..WorkerStatus::default() }],
                ..Status::default()
            },
            paths: vec![
                path(1, PathState::Down, None, 0.0, 10, 10),
                path(0, PathState::Active, Some(10.0 + 20.0 * at_s), 100.0, n, n / 100),
            ],
            conns: vec![conn(1, n, n, 0), conn(2, 4 * n, 0, n / 10)],
        }
    }

    pub(crate) fn model(samples: usize) -> Model {
        let mut model = Model::new(Duration::from_millis(500));
        for i in 0..samples {
            model.update(Ok(sample(i as f64 * 0.5)));
        }
        model
    }

    #[test]
    fn rates_and_order() {
        let mut m = model(3);
        assert_eq!(m.paths[0].path.path, 0);
        assert_eq!((m.paths[0].tx_pps, m.paths[0].lost_percent), (1000.0, 1.0));
        assert_eq!((m.paths[1].tx_pps, m.paths[1].lost_percent), (0.0, 0.0));
        assert_eq!(m.conns.iter().map(|c| c.conn.cid).collect::<Vec<_>>(), [2, 1]);
        assert_eq!((m.conns[0].tx_pps, m.conns[0].retransmitted_pps), (4000.0, 100.0));
        m.next_sort();
        m.next_sort();
        assert_eq!(m.sort, Sort::Rtt);
        assert_eq!(m.conns.iter().map(|c| c.conn.cid).collect::<Vec<_>>(), [2, 1]);
        let rtts: Vec<_> = m.rtts(&m.paths[0].path).collect();
        assert_eq!(rtts, [Some(10.0), Some(20.0), Some(30.0)]);
    }

    #[test]
    fn a_restarted_daemon_has_no_rates_yet() {
        let mut m = model(3);
        let mut fresh = sample(1.5);
        fresh.status.pid = 8;
        m.update(Ok(fresh));
        assert_eq!(m.paths[0].tx_pps, 0.0);
    }

    #[test]
    fn pause_keeps_and_errors_show() {
        let mut m = model(2);
        m.toggle_pause();
        m.update(Err("gone".into()));
        assert_eq!(m.error, None);
        m.toggle_pause();
        m.update(Err("gone".into()));
        assert_eq!((m.error.as_deref(), m.paths.len()), (Some("gone"), 2));
        m.update(Ok(sample(1.0)));
        assert_eq!(m.error, None);
    }

    #[test]
    fn bounds() {
        let mut m = model(HISTORY + 10);
        assert_eq!(m.rtts(&m.paths[0].path).count(), HISTORY);
        m.scroll(5);
        assert_eq!(m.offset, 1);
        m.scroll(isize::MIN);
        assert_eq!(m.offset, 0);
        let mut none = sample(200.0);
        none.paths.clear();
        none.conns.clear();
        m.update(Ok(none));
        assert!(m.history.is_empty() && m.offset == 0);
    }
}
