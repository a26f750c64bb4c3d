//! Draws the model.

use bifrost_control::api::{ConnState, PathState};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row, Table};

use super::model::{ConnRow, Model, PathRow, Sort};
use crate::table::{conn_state, count, duration, micros, path_state};

/// Cells of a share's bar.
const BAR: usize = 10;

/// A column of a table of `T`s.
struct Column<T> {
    name: &'static str,
    width: u16,
    /// Aligned to the right.
    number: bool,
    /// Shown on narrow screens, too.
    always: bool,
    cell: fn(&T) -> Cell<'static>,
}

impl<T> Column<T> {
    const fn text(name: &'static str, width: u16, always: bool, cell: fn(&T) -> Cell<'static>) -> Column<T> {
        Column { name, width, number: false, always, cell }
    }

    const fn number(name: &'static str, width: u16, always: bool, cell: fn(&T) -> Cell<'static>) -> Column<T> {
        Column { name, width, number: true, always, cell }
    }
}

const PATH_COLUMNS: [Column<PathRow>; 10] = [
    Column::text("PEER", 12, true, |r| Cell::from(r.path.peer.clone())),
    Column::number("PATH", 4, true, |r| right(r.path.path.to_string())),
    Column::text("STATE", 7, true, |r| {
        Cell::from(path_state(&r.path)).style(match r.path.state {
            _ if r.path.drained => Style::new(),
            PathState::Active => Style::new().fg(Color::Green),
            PathState::Suspect => Style::new().fg(Color::Yellow),
            PathState::Down => Style::new().fg(Color::Red).bold(),
            PathState::Standby | PathState::Unknown => Style::new(),
        })
    }),
    Column::number("SRTT µs", 8, true, |r| right(micros(r.path.srtt_us))),
    Column::number("MIN µs", 8, false, |r| right(micros(r.path.min_rtt_us))),
    Column::number("LOSS %", 6, true, |r| {
        // The daemon's value is smoothed; a burst of losses shows at once.
        let loss = r.path.loss_percent.max(r.lost_percent);
        right(format!("{loss:.2}")).style(match loss {
            1.0.. => Style::new().fg(Color::Red),
            0.005.. => Style::new().fg(Color::Yellow),
            _ => Style::new(),
        })
    }),
    Column::text("SHARE %", 16, true, |r| {
        Cell::from(format!("{:>5.1} {}", r.path.share_percent, bar(r.path.share_percent)))
    }),
    Column::number("PKT/s", 9, true, |r| right(format!("{:.0}", r.tx_pps))),
    Column::number("CWND", 6, false, |r| right(format!("{:.0}", r.path.cwnd_packets))),
    Column::number("FLIGHT", 6, false, |r| right(r.path.in_flight_packets.to_string())),
];

const CONN_COLUMNS: [Column<ConnRow>; 11] = [
    Column::text("PEER", 12, true, |r| Cell::from(r.conn.peer.clone())),
    Column::number("VNI", 8, false, |r| right(r.conn.vni.to_string())),
    Column::text("LOCAL MAC", 17, false, |r| Cell::from(r.conn.local_mac.clone())),
    Column::text("REMOTE MAC", 17, true, |r| Cell::from(r.conn.remote_mac.clone())),
    Column::text("STATE", 11, true, |r| {
        Cell::from(conn_state(r.conn.state)).style(match r.conn.state {
            ConnState::Established => Style::new().fg(Color::Green),
            ConnState::Connecting | ConnState::Fallback => Style::new().fg(Color::Yellow),
            ConnState::Plain | ConnState::Idle | ConnState::Unknown => Style::new(),
        })
    }),
    Column::number("SRTT µs", 8, true, |r| right(micros(r.conn.srtt_us))),
    Column::number("FLIGHT/WIN", 10, false, |r| {
        right(format!("{}/{}", r.conn.in_flight_packets, r.conn.window_packets))
    }),
    Column::number("TX/s", 8, true, |r| right(format!("{:.0}", r.tx_pps))),
    Column::number("RX/s", 8, true, |r| right(format!("{:.0}", r.rx_pps))),
    Column::number("RETX/s", 7, true, |r| {
        let style = if r.retransmitted_pps > 0.0 { Style::new().fg(Color::Yellow) } else { Style::new() };
        right(format!("{:.1}", r.retransmitted_pps)).style(style)
    }),
    Column::number("HELD", 6, false, |r| right(r.conn.held_packets.to_string())),
];

pub(super) fn draw(model: &Model, frame: &mut Frame<'_>) {
    // The heading and a line for each path; at most about half of the screen.
    let wanted = model.paths.len() as u16 + 3;
    let most = (frame.area().height / 2).max(4);
    let [head, paths, conns, foot] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(wanted.min(most)),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    draw_head(model, frame, head);
    draw_paths(model, frame, paths);
    draw_conns(model, frame, conns);
    draw_foot(model, frame, foot);
}

fn draw_head(model: &Model, frame: &mut Frame<'_>, area: Rect) {
    let s = &model.status;
    let busy: Vec<_> = s.workers.iter().map(|w| format!("{:.0} %", w.busy_percent)).collect();
    let mut first = vec![
        Span::from(s.host.clone()).bold(),
        format!("  bifrostd {}  up {}  workers busy: {}", s.version, duration(s.uptime_s), busy.join(" ")).into(),
    ];
    if s.faults > 0 {
        first.push(format!("  {} in force", count(s.faults, "fault")).yellow().bold());
    }
    if model.paused {
        first.push("  paused".yellow().bold());
    }
    let second = match &model.error {
        Some(error) => Line::from(error.clone().red().bold()),
        None => Line::default(),
    };
    frame.render_widget(Paragraph::new(vec![Line::from(first), second]), area);
}

fn draw_paths(model: &Model, frame: &mut Frame<'_>, area: Rect) {
    let shown = shown(&PATH_COLUMNS, area.width);
    // What the other columns and the gaps leave.
    let taken: u16 = shown.iter().map(|c| c.width + 1).sum();
    let spark = usize::from(area.width.saturating_sub(taken));
    let mut widths = widths_of(&shown);
    widths.push(Constraint::Min(0));
    let mut heading = heading_of(&shown);
    heading.push(Cell::from("RTT OVER TIME"));
    let rows = model.paths.iter().map(|row| {
        let history = Cell::from(sparkline(model.rtts(&row.path), spark)).style(Style::new().fg(Color::Cyan));
        Row::new(shown.iter().map(|column| (column.cell)(row)).chain([history]))
    });
    let title = format!(" paths ({}) ", model.paths.len());
    frame.render_widget(listing(title, heading, rows.collect(), widths), area);
}

fn draw_conns(model: &Model, frame: &mut Frame<'_>, area: Rect) {
    let shown = shown(&CONN_COLUMNS, area.width);
    let rows = model.conns.iter().skip(model.offset).take(usize::from(area.height));
    let rows = rows.map(|row| Row::new(shown.iter().map(|column| (column.cell)(row))));
    let by = match model.sort {
        Sort::Traffic => "traffic",
        Sort::Retransmissions => "retransmissions",
        Sort::Rtt => "round-trip time",
    };
    let title = format!(" connections ({}) by {by} ", model.conns.len());
    frame.render_widget(listing(title, heading_of(&shown), rows.collect(), widths_of(&shown)), area);
}

fn draw_foot(model: &Model, frame: &mut Frame<'_>, area: Rect) {
    let keys = [("q", "quit"), ("p", "pause"), ("s", "sort"), ("↑↓", "scroll connections")];
    let mut spans: Vec<Span<'_>> = Vec::new();
    for (key, what) in keys {
        spans.push(key.bold());
        spans.push(format!(" {what}   ").into());
    }
    spans.push(format!("every {} ms", model.interval.as_millis()).dim());
    frame.render_widget(Line::from(spans), area);
}

/// The columns that fit: all, or else those that matter most.
fn shown<T>(columns: &[Column<T>], width: u16) -> Vec<&Column<T>> {
    let all: u16 = columns.iter().map(|c| c.width + 1).sum();
    columns.iter().filter(|c| c.always || all <= width).collect()
}

fn widths_of<T>(columns: &[&Column<T>]) -> Vec<Constraint> {
    columns.iter().map(|c| Constraint::Length(c.width)).collect()
}

fn heading_of<T>(columns: &[&Column<T>]) -> Vec<Cell<'static>> {
    columns.iter().map(|c| if c.number { right(c.name.to_owned()) } else { Cell::from(c.name) }).collect()
}

fn listing(
    title: String,
    heading: Vec<Cell<'static>>,
    rows: Vec<Row<'static>>,
    widths: Vec<Constraint>,
) -> Table<'static> {
    Table::new(rows, widths)
        .header(Row::new(heading).style(Style::new().bold()))
        .block(Block::new().borders(Borders::TOP).title(title))
}

fn right(text: String) -> Cell<'static> {
    Cell::from(Text::from(text).right_aligned())
}

/// A share as a bar of [`BAR`] cells.
fn bar(percent: f64) -> String {
    let full = (percent.clamp(0.0, 100.0) / 100.0 * BAR as f64).round() as usize;
    "█".repeat(full) + &"·".repeat(BAR - full)
}

/// The last `width` values as blocks of eighths between 0 and the largest; `×` where there was none.
fn sparkline(values: impl DoubleEndedIterator<Item = Option<f64>>, width: usize) -> String {
    const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let last: Vec<_> = values.rev().take(width).collect();
    let largest = last.iter().flatten().fold(0.0_f64, |a, b| a.max(*b));
    let block = |value: &Option<f64>| match value {
        None => '×',
        Some(_) if largest <= 0.0 => BLOCKS[0],
        Some(value) => BLOCKS[((value / largest * 8.0).ceil() as usize).clamp(1, 8) - 1],
    };
    last.iter().rev().map(block).collect()
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::model::tests::{model, sample};
    use super::*;

    fn screen(model: &Model, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(model, frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..height).map(line).collect()
    }

    #[test]
    fn the_whole_screen() {
        let expected = [
            "host-a  bifrostd 0.1.0  up 1 h 1 min  workers busy: 12 %",
            "",
            " paths (2) ",
            "PEER         PATH STATE    SRTT µs   MIN µs LOSS % SHARE %              PKT/s   CWND FLIGHT RTT OVER TIME",
            "host-b          0 active      40.0     20.0   1.25 100.0 ██████████      1000    128      0 ▂▄▆█",
            "host-b          1 down           -     20.0   1.25   0.0 ··········         0    128      0 ××××",
            "",
            " connections (2) by traffic ",
            "PEER              VNI LOCAL MAC         REMOTE MAC        STATE        SRTT µs FLIGHT/WIN     TX/s     RX/s  RETX/s   HELD",
            "host-b            100 02:00:00:00:00:01 02:00:00:00:00:02 established     42.0      0/512     4000        0   100.0      0",
            "host-b            100 02:00:00:00:00:01 02:00:00:00:00:02 established     41.0      0/512     1000     1000     0.0      0",
            "q quit   p pause   s sort   ↑↓ scroll connections   every 500 ms",
        ];
        let found = screen(&model(4), 126, 12);
        let rule = |line: &str| line.trim_end_matches('─').to_owned();
        assert_eq!(found.iter().map(|l| rule(l)).collect::<Vec<_>>(), expected.map(rule));
    }

    #[test]
    fn a_narrow_screen_shows_what_matters_most() {
        let lines = screen(&model(4), 80, 12);
        assert_eq!(lines[3], "PEER         PATH STATE    SRTT µs LOSS % SHARE %              PKT/s RTT OVER TI");
        assert_eq!(lines[8], "PEER         REMOTE MAC        STATE        SRTT µs     TX/s     RX/s  RETX/s");
    }

    #[test]
    fn errors_faults_and_pause_show() {
        let mut m = model(2);
        m.status.faults = 2;
        m.update(Err("bifrostd is not running".into()));
        m.toggle_pause();
        let lines = screen(&m, 100, 12);
        assert!(lines[0].ends_with("2 faults in force  paused"), "{}", lines[0]);
        assert_eq!(lines[1], "bifrostd is not running");
    }

    #[test]
    fn any_size_is_drawn() {
        let mut m = model(3);
        let mut many = sample(9.0);
        many.paths = (0..64).map(|i| bifrost_control::api::Path { path: i, ..many.paths[0].clone() }).collect();
        many.conns = (0..500).map(|i| bifrost_control::api::Conn { cid: i, ..many.conns[0].clone() }).collect();
        m.update(Ok(many));
        m.scroll(499);
        for (width, height) in [(1, 1), (5, 3), (20, 5), (80, 24), (300, 100)] {
            let lines = screen(&m, width, height);
            assert_eq!(lines.len(), usize::from(height));
        }
        // Many paths leave half of the screen to the connections.
        assert!(screen(&m, 126, 24).iter().any(|l| l.starts_with(" connections (500)")));
    }

    #[test]
    fn sparklines() {
        assert_eq!(sparkline([Some(1.0), Some(4.0), None, Some(8.0)].into_iter(), 10), "▁▄×█");
        assert_eq!(sparkline([Some(1.0), Some(4.0), Some(8.0)].into_iter(), 2), "▄█");
        assert_eq!(sparkline([Some(0.0)].into_iter(), 2), "▁");
        assert_eq!(sparkline([].into_iter(), 2), "");
        assert_eq!((bar(0.0), bar(50.0), bar(250.0)), ("·".repeat(10), "█████·····".into(), "█".repeat(10)));
    }
}
