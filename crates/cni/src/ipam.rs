//! The plugin that gives out addresses, which the configuration names (specification, section "Plugin delegation").

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::Value;

use crate::answer::Attached;
use crate::error::{Code, Error};

/// The longest answer that is read, bytes.
const MAX_ANSWER: u64 = 4 << 20;

/// A plugin, and what it is told.
#[derive(Clone, Copy, Debug)]
pub struct Ipam<'a> {
    /// Its name.
    pub kind: &'a str,
    /// Where plugins are.
    pub path: &'a [PathBuf],
    /// The network's configuration, as this plugin has got it.
    pub configuration: &'a [u8],
}

#[derive(Deserialize)]
struct Failure {
    #[serde(default)]
    code: u32,
    #[serde(default)]
    msg: String,
    #[serde(default)]
    details: Value,
}

impl Ipam<'_> {
    /// Has it give out addresses.
    ///
    /// # Errors
    /// It cannot be run, or refuses.
    pub fn add(self) -> Result<Attached, Error> {
        let answer = self.run("ADD")?;
        serde_json::from_slice(&answer).map_err(|e| {
            Error::new(Code::Decoding, format!("what the plugin {} answers to ADD is not understood: {e}", self.kind))
        })
    }

    /// Runs it for another command, whose answer says nothing.
    ///
    /// # Errors
    /// It cannot be run, or refuses.
    pub fn tell(self, command: &str) -> Result<(), Error> {
        self.run(command).map(drop)
    }

    fn run(self, command: &str) -> Result<Vec<u8>, Error> {
        let failed = |what: &str, error: std::io::Error| {
            Error::new(Code::Io, format!("cannot {what} the plugin {}: {error}", self.kind))
        };
        let program = self.find()?;
        // All other variables are those that this plugin has got.
        let mut child = Command::new(program)
            .env("CNI_COMMAND", command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| failed("run", e))?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let mut answer = Vec::new();
        let result = std::thread::scope(|scope| {
            // On a thread of its own: a plugin may answer before it has read everything.
            scope.spawn(move || {
                // One that does not want it all says itself what is wrong.
                let _ = stdin.map(|mut stdin| stdin.write_all(self.configuration));
            });
            stdout.map_or(Ok(0), |stdout| stdout.take(MAX_ANSWER).read_to_end(&mut answer))
        });
        let status = child.wait().map_err(|e| failed("wait for", e))?;
        result.map_err(|e| failed("read from", e))?;
        if status.success() {
            return Ok(answer);
        }
        let Ok(failure) = serde_json::from_slice::<Failure>(&answer) else {
            let text = format!("the plugin {} has failed with {status}, without a message", self.kind);
            return Err(Error::new(Code::Io, text));
        };
        let details = failure.details.as_str().map(|details| format!(": {details}")).unwrap_or_default();
        let code = if failure.code == Code::Later as u32 { Code::Later } else { Code::Io };
        Err(Error::new(code, format!("{} (code {}): {}{details}", self.kind, failure.code, failure.msg)))
    }

    fn find(self) -> Result<PathBuf, Error> {
        if self.kind.contains('/') || self.kind.starts_with('.') {
            return Err(Error::new(
                Code::Configuration,
                format!("ipam.type {:?} is not the name of a plugin", self.kind),
            ));
        }
        let mut candidates = self.path.iter().map(|directory| directory.join(self.kind));
        candidates.find(|file| file.is_file()).ok_or_else(|| {
            let path: Vec<_> = self.path.iter().map(|path: &PathBuf| Path::display(path).to_string()).collect();
            let text = format!("there is no plugin {} in CNI_PATH ({}); install it there", self.kind, path.join(":"));
            Error::new(Code::Io, text)
        })
    }
}
