//! BIRD in a namespace. It restarts with its configuration when it has ended.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::supervised::Supervised;
use super::until::until;
use crate::command;
use crate::netns::Namespace;

const PROGRAM: &str = "/usr/sbin/bird";

/// A running BIRD. Dropping it ends it.
#[derive(Debug)]
pub struct Bird {
    program: Supervised,
    socket: PathBuf,
}

impl Bird {
    /// Starts BIRD with a configuration like the output of `bifrostctl gw bgp config switch --daemon bird`.
    ///
    /// # Errors
    /// BIRD is missing, or does not start.
    pub fn start(
        namespace: &Namespace,
        directory: &Path,
        name: &str,
        configuration: &str,
        logs: &Path,
    ) -> Result<Self> {
        std::fs::create_dir(directory)?;
        let (file, socket) = (directory.join("bird.conf"), directory.join("bird.ctl"));
        std::fs::write(&file, format!("log stderr all;\n{configuration}"))?;
        let at = |path: &Path| path.display().to_string();
        // -R: a restart is a graceful one (RFC 4724).
        let arguments = ["-R", "-f", "-c", &at(&file), "-s", &at(&socket)].map(str::to_owned);
        let program =
            Supervised::start(namespace, Path::new(PROGRAM), &arguments, &logs.join(format!("{name}-bird.log")))?;
        let bird = Bird { program, socket };
        until("BIRD answers", || Ok(bird.show("status").ok()))?;
        Ok(bird)
    }

    /// Sends SIGKILL to BIRD.
    ///
    /// # Errors
    /// BIRD is not running.
    pub fn kill(&self) -> Result<()> {
        self.program.kill()
    }

    /// The output of a `show ...` command.
    ///
    /// # Errors
    /// BIRD does not answer.
    pub fn show(&self, what: &str) -> Result<String> {
        command::run("birdc", &["-r", "-s", &self.socket.display().to_string(), &format!("show {what}")])
    }

    /// Number of established BGP sessions.
    ///
    /// # Errors
    /// BIRD does not answer.
    pub fn sessions(&self) -> Result<usize> {
        Ok(established(&self.show("protocols")?))
    }

    /// Number of its paths to a prefix.
    ///
    /// # Errors
    /// BIRD does not answer.
    pub fn paths(&self, prefix: &str) -> Result<usize> {
        Ok(self.show(&format!("route for {prefix}"))?.matches(" unicast [").count())
    }

    /// Number of networks to which it has a path by BGP.
    ///
    /// # Errors
    /// BIRD does not answer.
    pub fn networks(&self) -> Result<usize> {
        networks(&self.show("route where source = RTS_BGP primary count")?).context("a count of routes")
    }
}

/// Number of established sessions in the output of `show protocols`.
fn established(text: &str) -> usize {
    let is = |line: &&str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.get(1) == Some(&"BGP") && words.get(3) == Some(&"up") && words.last() == Some(&"Established")
    };
    text.lines().filter(is).count()
}

/// Number of networks in the output of `show route ... count`: `12 of 20 routes for 15 networks in table master4`.
fn networks(text: &str) -> Option<usize> {
    let counts = text.lines().filter_map(|line| line.split_once(" of ")?.0.trim().parse::<usize>().ok());
    counts.reduce(|all, count| all + count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_bird_says() {
        let text = "BIRD 2.0.12 ready.\nName       Proto      Table      State  Since         Info\n\
                    kernel1    Kernel     master4    up     00:23:12.375  \n\
                    proxy1     BGP        ---        up     00:23:12.375  Established   \n\
                    proxy2     BGP        ---        start  00:23:12.375  Active        \n\
                    server1    BGP        ---        start  00:23:12.375  Passive       Received: Established\n";
        assert_eq!(established(text), 1);
        let text = "BIRD 2.0.12 ready.\n256 of 513 routes for 257 networks in table master4\n\
                    0 of 0 routes for 0 networks in table master6\n";
        assert_eq!((networks(text), networks("BIRD 2.0.12 ready.\n")), (Some(256), None));
    }
}
