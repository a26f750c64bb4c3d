//! `bifrostctl sessions`: a port's sessions go with its guest to another host.

use std::io::Read as _;
use std::path::PathBuf;

use bifrost_control::Client;
use bifrost_control::api::{MAX_SESSIONS_BYTES, PortSessions};
use clap::Subcommand;

use crate::failure::Failure;
use crate::output::Output;

pub(crate) const EXAMPLES: &str = "\
Examples:
  bifrostctl sessions export vm1 > vm1.sessions         on the old host, when the machine has stopped there
  bifrostctl sessions import vm1.sessions               on the new one, before it gets packets";

#[derive(Debug, Subcommand)]
pub(crate) enum SessionsCommand {
    /// Print a port's sessions as JSON, for `import`
    Export {
        /// The port
        port: String,
    },
    /// Go on with the sessions that a port's guest had on another host
    ///
    /// The rules are asked again about each with its next packet. Sessions of addresses that the port does not have are left out.
    Import {
        /// What `export` has printed; `-`: standard input
        file: PathBuf,
        /// The port, if it has another name here
        #[arg(long, value_name = "NAME")]
        port: Option<String>,
    },
}

pub(crate) fn run(client: &Client, command: SessionsCommand, out: Output) -> Result<(), Failure> {
    let (file, port) = match command {
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
