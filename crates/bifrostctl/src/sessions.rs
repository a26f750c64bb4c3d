//! `bifrostctl sessions`: what security groups remember, and how it goes with a guest to another host.

use std::io::Read as _;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use bifrost_control::Client;
use bifrost_control::api::{MAX_SESSIONS_BYTES, PortSessions, Session, SessionFilter, SessionState};
use clap::{Args, Subcommand, ValueEnum};

use crate::failure::Failure;
use crate::output::Output;
use crate::table::{self, Number, Text};

pub(crate) const EXAMPLES: &str = "\
Examples:
  bifrostctl sessions list --port vm1 --state established
  bifrostctl sessions list --address 10.0.0.7 --protocol tcp --number 443
  bifrostctl sessions export vm1 > vm1.sessions         on the old host, when the machine has stopped there
  bifrostctl sessions import vm1.sessions               on the new one, before it gets packets";

#[derive(Debug, Subcommand)]
pub(crate) enum SessionsCommand {
    /// List sessions: who talks to whom, in which state, and when it ends
    List(ListArgs),
    /// Print a port's sessions as JSON, for `import`
    Export {
        /// The port
        port: String,
    },
    /// Go on with the sessions that a port's guest had on another host
    ///
    /// Each is checked against the rules with its next packet. Sessions of addresses that the port does not have
    /// are left out.
    Import {
        /// What `export` has printed; `-`: standard input
        file: PathBuf,
        /// The port, if it has another name here
        #[arg(long, value_name = "NAME")]
        port: Option<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Only this port's
    #[arg(long, value_name = "NAME")]
    port: Option<String>,
    /// Only tcp, udp, icmp, icmpv6, or a number
    #[arg(long, value_name = "NAME")]
    protocol: Option<String>,
    /// Only those with this address at either end
    #[arg(long, value_name = "IP")]
    address: Option<IpAddr>,
    /// Only those with this TCP or UDP port at either end
    #[arg(long, value_name = "N")]
    number: Option<u16>,
    /// Only those in this state
    #[arg(long, value_enum)]
    state: Option<State>,
    /// List at most N sessions; the last line shows the command for the next ones
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Continue after the session with this ID
    #[arg(long, value_name = "ID")]
    after: Option<u64>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum State {
    Unanswered,
    Answered,
    Closing,
    Assured,
    Established,
}

impl From<ListArgs> for SessionFilter {
    fn from(ListArgs { port, protocol, address, number, state, limit, after }: ListArgs) -> SessionFilter {
        let state = state.map(|state| match state {
            State::Unanswered => SessionState::Unanswered,
            State::Answered => SessionState::Answered,
            State::Closing => SessionState::Closing,
            State::Assured => SessionState::Assured,
            State::Established => SessionState::Established,
        });
        SessionFilter { port, protocol, address, number, state, after, limit: Some(limit) }
    }
}

/// As text; `limit`: where there are as many, there may be more.
fn listed(sessions: &[Session], limit: u64) -> String {
    let end = |address, port| SocketAddr::new(address, port).to_string();
    let rows = sessions.iter().map(|session| {
        vec![
            session.port.clone(),
            session.protocol.clone(),
            end(session.local_address, session.local_port),
            if session.is_outbound { "->" } else { "<-" }.to_owned(),
            end(session.remote_address, session.remote_port),
            session.state.to_string(),
            session.idle_s.to_string(),
            session.expires_s.to_string(),
        ]
    });
    let columns = [
        Text("PORT"),
        Text("PROTO"),
        Text("LOCAL"),
        Text(""),
        Text("REMOTE"),
        Text("STATE"),
        Number("IDLE s"),
        Number("EXPIRES s"),
    ];
    let text = table::listing(&columns, rows, "no such sessions");
    match sessions.last().filter(|_| sessions.len() as u64 >= limit) {
        Some(last) => format!("{text}\nthe list may go on: --after {}", last.id),
        None => text,
    }
}

pub(crate) fn run(client: &Client, command: SessionsCommand, out: Output) -> Result<(), Failure> {
    let (file, port) = match command {
        SessionsCommand::List(args) => {
            let limit = args.limit;
            return out.print(&client.sessions(&args.into())?, |sessions| listed(sessions, limit));
        }
        SessionsCommand::Export { port } => {
            let exported = client.export_sessions(&port)?;
            return Output { json: true }.print(&exported, |_| String::new());
        }
        SessionsCommand::Import { file, port } => (file, port),
    };
    let location = file.display().to_string();
    let wrong = |what: String| {
        let hint = "give the file that `bifrostctl sessions export` has printed on the other host";
        Failure::Usage { what, location: location.clone(), hint }
    };
    let mut text = String::new();
    let most = MAX_SESSIONS_BYTES as u64;
    let read = if location == "-" {
        std::io::stdin().lock().take(most).read_to_string(&mut text)
    } else {
        std::fs::File::open(&file).and_then(|file| file.take(most).read_to_string(&mut text))
    };
    read.map_err(|e| wrong(format!("cannot be read: {e}")))?;
    let mut sessions: PortSessions = serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?;
    if let Some(port) = port {
        sessions.port = port;
    }
    out.print(&client.import_sessions(&sessions)?, ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_says_who_began_and_how_to_go_on() {
        let session = Session {
            id: 7,
            port: "vm1".to_owned(),
            protocol: "tcp".to_owned(),
            local_address: "10.0.0.1".parse().unwrap(),
            local_port: 443,
            remote_address: "2001:db8::7".parse().unwrap(),
            remote_port: 40_000,
            is_outbound: false,
            state: SessionState::Established,
            idle_s: 3,
            expires_s: 3597,
        };
        let text = listed(&[session.clone(), Session { id: 9, is_outbound: true, ..session }], 2);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].contains("10.0.0.1:443  <-  [2001:db8::7]:40000  established"), "{text}");
        assert!(lines[2].contains("->") && lines[3].ends_with("--after 9"), "{text}");
        assert!(!listed(&[], 2).contains("after"));
    }
}
