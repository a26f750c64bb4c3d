//! State of a run on the machine, so that the next run can remove what a crashed one left behind.
//!
//! A run owns a file under `/run/bifrost-lab` and keeps it locked while its process lives. The kernel releases the
//! lock when the process ends, for whatever reason: a file that can be locked belongs to a dead run. The run's name
//! is the prefix of all its namespace names and contains its process id, so leftovers are recognised without the
//! file, too.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::command;

/// Where the state files and the daemons' sockets live.
pub const STATE_DIRECTORY: &str = "/run/bifrost-lab";

/// A script in a directory of a run. It is Podman with separate storage for the run.
pub const PODMAN: &str = "podman";

/// Prefix of the names of `bifrost-fleet`'s namespaces; its process id and a hyphen follow.
const FLEET: &str = "bfleet";

/// The claim of one running lab: its unique name, and the locked state file.
#[derive(Debug)]
pub struct Run {
    id: String,
    directory: PathBuf,
    parts: AtomicU32,
    /// Removed at the end; a part has no state file.
    lock: Option<(PathBuf, File)>,
}

impl Run {
    /// Claims an unused name, after removing what dead runs left behind.
    pub fn begin() -> Result<Self> {
        require_root()?;
        let removed = clean()?;
        for name in removed {
            eprintln!("removed {name}, left behind by a run that did not end cleanly");
        }
        let nanoseconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().subsec_nanos();
        let id = format!("bl{}x{:04x}", std::process::id(), nanoseconds >> 8 & 0xffff);
        let path = Path::new(STATE_DIRECTORY).join(format!("{id}.lock"));
        let lock = File::create_new(&path).with_context(|| format!("creating {}", path.display()))?;
        lock.lock().with_context(|| format!("locking {}", path.display()))?;
        let directory = Path::new(STATE_DIRECTORY).join(&id);
        fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
        Ok(Self { id, directory, parts: AtomicU32::new(0), lock: Some((path, lock)) })
    }

    /// A separate name and directory within the run, so that several networks can exist side by side. The run must
    /// outlive it.
    ///
    /// # Errors
    /// The directory cannot be created.
    pub fn part(&self) -> Result<Self> {
        let number = self.parts.fetch_add(1, Ordering::Relaxed);
        let directory = self.directory.join(number.to_string());
        fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
        Ok(Self { id: format!("{}-{number}", self.id), directory, parts: AtomicU32::new(0), lock: None })
    }

    /// The prefix of all names of this run, `bl<pid>x<hex>`, or of this part, `bl<pid>x<hex>-<number>`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// A directory for sockets and generated configuration; removed at the end.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
        if let Some((path, _)) = &self.lock {
            let _ = fs::remove_file(path);
        }
    }
}

/// Removes containers, namespaces, processes and files of runs whose process is dead. Returns the names of everything
/// that was removed.
pub fn clean() -> Result<Vec<String>> {
    require_root()?;
    fs::create_dir_all(STATE_DIRECTORY).with_context(|| format!("creating {STATE_DIRECTORY}"))?;
    let namespaces = namespaces()?;
    let mut removed = Vec::new();
    let mut dead = BTreeSet::new();
    let mut alive = BTreeSet::new();
    for entry in fs::read_dir(STATE_DIRECTORY)? {
        let path = entry?.path();
        let Some(id) = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_suffix(".lock")) else {
            continue;
        };
        let Ok(file) = File::open(&path) else { continue };
        match file.try_lock() {
            // A run that is just starting has created its file but not locked it yet: check its process.
            Ok(()) if process_of(id).is_some_and(|pid| pid != std::process::id() && is_lab_process(pid)) => {
                alive.insert(id.to_owned());
            }
            Ok(()) => {
                dead.insert(id.to_owned());
            }
            Err(TryLockError::WouldBlock) => {
                alive.insert(id.to_owned());
            }
            Err(TryLockError::Error(error)) => bail!("locking {}: {error}", path.display()),
        }
    }
    // Before their namespaces and files are removed. Podman restarts containers, so nothing else ends them.
    for id in &dead {
        for podman in podmans(&Path::new(STATE_DIRECTORY).join(id)) {
            let shown = podman.display().to_string();
            match command::run(&shown, &["rm", "--force", "--all", "--time", "0"]) {
                Ok(names) if names.trim().is_empty() => {}
                Ok(names) => {
                    removed.push(format!("containers {}", names.split_whitespace().collect::<Vec<_>>().join(" ")))
                }
                // The files are removed anyway. Containers that remain are visible in the list of processes.
                Err(error) => eprintln!("{shown}: containers stay: {error:#}"),
            }
        }
    }
    for name in &namespaces {
        let Some(id) = run_of(name) else { continue };
        if !alive.contains(id) && process_of(id).is_some_and(|pid| dead.contains(id) || !is_lab_process(pid)) {
            remove_namespace(name)?;
            removed.push(format!("namespace {name}"));
        }
    }
    for id in dead {
        let _ = fs::remove_dir_all(Path::new(STATE_DIRECTORY).join(&id));
        let _ = fs::remove_file(Path::new(STATE_DIRECTORY).join(format!("{id}.lock")));
        removed.push(format!("state of run {id}"));
    }
    removed.extend(remove_namespaces_of_fleets()?.iter().map(|name| format!("namespace {name}")));
    Ok(removed)
}

/// Removes the namespaces of each `bifrost-fleet` that was killed, and what runs in them. Returns their names.
pub(crate) fn remove_namespaces_of_fleets() -> Result<Vec<String>> {
    let is_dead = |pid: u32| !Path::new("/proc").join(pid.to_string()).exists();
    let left: Vec<String> = namespaces()?.into_iter().filter(|name| fleet_of(name).is_some_and(is_dead)).collect();
    left.iter().try_for_each(|name| remove_namespace(name))?;
    Ok(left)
}

/// The scripts [`PODMAN`] of a run: in its directory, and in subdirectories.
fn podmans(directory: &Path) -> Vec<PathBuf> {
    let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let parts = entries(directory).filter(|path| path.is_dir());
    let both =
        parts.flat_map(|part| entries(&part).filter(|path| path.is_dir()).chain([part.clone()]).collect::<Vec<_>>());
    both.chain([directory.to_owned()]).map(|part| part.join(PODMAN)).filter(|script| script.is_file()).collect()
}

/// Returns an error that says what to do if the process does not run as root.
pub fn require_root() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("bifrost-lab makes network namespaces and needs root: run it with sudo");
    }
    Ok(())
}

fn namespaces() -> Result<Vec<String>> {
    let list = command::run("ip", &["netns", "list"])?;
    Ok(list.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
}

/// The run id that a namespace's name begins with, if it is a name of the lab.
fn run_of(namespace: &str) -> Option<&str> {
    let (id, _) = namespace.split_once('-')?;
    process_of(id).map(|_| id)
}

/// The process id inside a run id.
fn process_of(id: &str) -> Option<u32> {
    let (pid, random) = id.strip_prefix("bl")?.split_once('x')?;
    let hexadecimal = random.len() == 4 && random.bytes().all(|b| b.is_ascii_hexdigit());
    if hexadecimal { pid.parse().ok() } else { None }
}

/// The process id of the `bifrost-fleet` that a namespace belongs to, if its name says so.
fn fleet_of(namespace: &str) -> Option<u32> {
    namespace.strip_prefix(FLEET)?.split_once('-')?.0.parse().ok()
}

fn is_lab_process(pid: u32) -> bool {
    // Process ids are reused: only a living process of this program counts as owner. Names of test programs have a
    // hash.
    fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains("lab"))
}

/// Ends the processes inside a namespace without a living owner, and deletes it.
fn remove_namespace(name: &str) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        let pids = command::run("ip", &["netns", "pids", name])?;
        let pids: Vec<&str> = pids.split_whitespace().collect();
        if pids.is_empty() || Instant::now() > deadline {
            break;
        }
        for pid in pids.iter().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)) {
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    command::run("ip", &["netns", "del", name])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_of_podman_are_found_in_all_parts_of_a_run() {
        let run = std::env::temp_dir().join(format!("bifrost-lab-{}", std::process::id()));
        for part in ["kill-f0", "0/kill-b0", "1/2/too-deep"] {
            fs::create_dir_all(run.join(part)).unwrap();
            fs::write(run.join(part).join(PODMAN), "").unwrap();
        }
        fs::create_dir_all(run.join("elastic-0").join(PODMAN)).unwrap();
        let mut found = podmans(&run);
        found.sort();
        assert_eq!(found, ["0/kill-b0/podman", "kill-f0/podman"].map(|path| run.join(path)));
        fs::remove_dir_all(run).unwrap();
    }

    #[test]
    fn only_our_names_are_recognised() {
        let table = [
            ("bl12x00ff-host-a", Some("bl12x00ff")),
            ("bl12x00ff", None),
            ("bl12-host-a", None),
            ("blx00ff-host-a", None),
            ("bl12x00fg-host-a", None),
            ("bl12x00ff0-host-a", None),
            ("other-bl12x00ff", None),
            ("blue-green", None),
        ];
        for (name, expected) in table {
            assert_eq!(run_of(name), expected, "{name}");
        }
        let fleets = [("bfleet12-h0", Some(12)), ("bfleet12", None), ("bfleet-h0", None), ("bl12x00ff-host-a", None)];
        for (name, expected) in fleets {
            assert_eq!(fleet_of(name), expected, "{name}");
        }
    }
}
