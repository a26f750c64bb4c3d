//! The IPAM plugin that the configuration names (specification, section "Plugin delegation").

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::Value;

use crate::answer::Attached;
use crate::error::{Code, Error};

/// Maximum length of its output, bytes.
const MAX_ANSWER: u64 = 4 << 20;

/// An IPAM plugin and its input.
#[derive(Clone, Copy, Debug)]
pub struct Ipam<'a> {
    /// Its name.
    pub kind: &'a str,
    /// Directories of plugins.
    pub path: &'a [PathBuf],
    /// The network's configuration, as this plugin received it.
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
    /// Has it allocate addresses.
    ///
    /// # Errors
    /// It cannot be run, or refuses.
    pub fn add(self) -> Result<Attached, Error> {
        let answer = self.run("ADD")?;
        serde_json::from_slice(&answer).map_err(|e| {
            Error::new(Code::Decoding, format!("cannot parse the result of ADD from the plugin {}: {e}", self.kind))
        })
    }

    /// Runs it for another command, whose output is ignored.
    ///
    /// # Errors
    /// It cannot be run, or refuses.
    pub fn call(self, command: &str) -> Result<(), Error> {
        self.run(command).map(drop)
    }

    fn run(self, command: &str) -> Result<Vec<u8>, Error> {
        let failed = |what: &str, error: std::io::Error| {
            Error::new(Code::Io, format!("cannot {what} the plugin {}: {error}", self.kind))
        };
        let program = self.find()?;
        // The plugin inherits all other variables.
        let mut child = Command::new(program)
            .env("CNI_COMMAND", command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| failed("run", e))?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let mut answer = Vec::new();
        let result = std::thread::scope(|scope| {
            // On a separate thread: a plugin may write output before it has read all input.
            scope.spawn(move || {
                // A plugin that does not read everything reports its own error.
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
            let text = format!("the plugin {} failed with {status} and no message", self.kind);
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
            let text = format!("plugin {} not found in CNI_PATH ({}); install it there", self.kind, path.join(":"));
            Error::new(Code::Io, text)
        })
    }
}
