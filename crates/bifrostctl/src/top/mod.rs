//! `bifrostctl top`: paths and connections, live.

mod model;
mod view;

use std::io::{self, IsTerminal};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use bifrost_control::Client;
use bifrost_control::client::ClientError;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use crate::cli::TopArgs;
use crate::failure::Failure;
use crate::output::{self, Output};
use model::{Model, Sample};

/// How soon a key or a sample shows.
const TICK: Duration = Duration::from_millis(50);

/// Shows the live view until the user quits; with `--json`, prints a line for each sample instead.
pub(crate) fn run(client: Client, args: TopArgs, out: Output) -> Result<(), Failure> {
    let interval = Duration::from_millis(args.interval_ms);
    if out.json {
        return print_samples(&client, interval, args.count);
    }
    if !io::stdout().is_terminal() {
        return Err(Failure::NoTerminal);
    }
    // Before the screen is taken: a daemon that does not run is told as everywhere else.
    let first = sample(&client, Instant::now())?;
    let mut model = Model::new(interval);
    model.update(Ok(first));
    let samples = sampler(client, interval);
    let mut terminal = ratatui::try_init().map_err(Failure::Terminal)?;
    let result = live(&mut terminal, &mut model, &samples, args.count);
    ratatui::restore();
    result.map_err(Failure::Terminal)
}

/// Draws, and takes keys and samples, until the user quits or there were `count` samples.
fn live(
    terminal: &mut DefaultTerminal,
    model: &mut Model,
    samples: &Receiver<Result<Sample, ClientError>>,
    count: Option<u64>,
) -> io::Result<()> {
    let mut taken = 1;
    loop {
        terminal.draw(|frame| view::draw(model, frame))?;
        if count.is_some_and(|count| taken >= count) {
            return Ok(());
        }
        if event::poll(TICK)? {
            match event::read()? {
                Event::Key(key) if is_quit(key) => return Ok(()),
                Event::Key(key) if key.kind != KeyEventKind::Release => on_key(model, key.code),
                _ => {}
            }
        }
        match samples.try_recv() {
            Ok(sample) => {
                taken += 1;
                model.update(sample.map_err(|e| e.to_string()));
            }
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => return Err(io::Error::other("the sampler ended")),
        }
    }
}

fn is_quit(key: KeyEvent) -> bool {
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => true,
        KeyCode::Char('c') => key.modifiers.contains(KeyModifiers::CONTROL),
        _ => false,
    }
}

fn on_key(model: &mut Model, code: KeyCode) {
    match code {
        KeyCode::Char('p') => model.toggle_pause(),
        KeyCode::Char('s') => model.next_sort(),
        KeyCode::Up => model.scroll(-1),
        KeyCode::Down => model.scroll(1),
        KeyCode::PageUp => model.scroll(-10),
        KeyCode::PageDown => model.scroll(10),
        KeyCode::Home => model.scroll(isize::MIN),
        _ => {}
    }
}

/// Takes samples on a thread of its own: a daemon that does not answer must not keep the user from quitting.
fn sampler(client: Client, interval: Duration) -> Receiver<Result<Sample, ClientError>> {
    let (send, receive): (SyncSender<_>, _) = sync_channel(1);
    let start = Instant::now();
    thread::spawn(move || {
        loop {
            thread::sleep(interval);
            // Nobody receives once the view has ended.
            if send.send(sample(&client, start)).is_err() {
                return;
            }
        }
    });
    receive
}

fn sample(client: &Client, start: Instant) -> Result<Sample, ClientError> {
    let (status, paths, conns) = (client.status()?, client.paths()?, client.conns()?);
    Ok(Sample { at_s: start.elapsed().as_secs_f64(), status, paths, conns })
}

fn print_samples(client: &Client, interval: Duration, count: Option<u64>) -> Result<(), Failure> {
    let start = Instant::now();
    let mut printed = 0;
    loop {
        let reading = output::line(&serde_json::to_string(&sample(client, start)?)?)?;
        printed += 1;
        if !reading || count.is_some_and(|count| printed >= count) {
            return Ok(());
        }
        thread::sleep(interval);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_quit() {
        let key = |code, modifiers| is_quit(KeyEvent::new(code, modifiers));
        assert!(key(KeyCode::Char('q'), KeyModifiers::NONE));
        assert!(key(KeyCode::Esc, KeyModifiers::NONE));
        assert!(key(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert!(!key(KeyCode::Char('c'), KeyModifiers::NONE));
    }
}
