//! PostgreSQL and its `pgbench`: lookups of one row by key, over persistent connections.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use rustix::process::{Pid, Signal, kill_process};

use crate::patience::NothingAnswered;
use crate::process::Program;
use crate::programs::application::{
    Application, CONNECTIONS, Load, Measurement, NOBODY, READY_TIMEOUT, Server, latencies, number_after,
};
use crate::topology::Guest;

/// The directory where `scripts/install-debian-packages.sh` unpacks it, with a subdirectory for its version.
const VERSIONS: &str = "/var/cache/bifrost-lab/postgresql/usr/lib/postgresql";
/// The port it listens on.
const PORT: u16 = 5432;
/// The database's owner.
const USER: &str = "postgres";
/// Time to create a database.
const SETUP_TIMEOUT: Duration = Duration::from_secs(120);

/// PostgreSQL.
#[derive(Debug, Clone, Copy)]
pub struct Postgresql;

/// The server. Dropping it ends it with all its processes.
struct Running(Program);

impl Application for Postgresql {
    fn serve(&self, guest: &Guest, files: &Path, logs: &Path) -> Result<Box<dyn Server>> {
        let address = SocketAddr::from((guest.address, PORT));
        let data = files.join("postgresql");
        fs::create_dir(&data).with_context(|| format!("creating {}", data.display()))?;
        chown(&data, Some(NOBODY), Some(NOBODY)).with_context(|| format!("giving {} away", data.display()))?;
        let mut command = Command::new("setpriv");
        command.args(UNPRIVILEGED).arg(program("initdb")?).arg("-D").arg(&data).current_dir("/");
        command.args(["-U", USER, "--auth=trust", "--no-sync", "--locale=C", "--encoding=UTF8", "--wal-segsize=1"]);
        Program::start(command, "initdb", &logs.join("initdb.log"))?.finish(SETUP_TIMEOUT)?;
        let access = data.join("pg_hba.conf");
        fs::write(&access, "host all all 0.0.0.0/0 trust\n")
            .with_context(|| format!("writing {}", access.display()))?;

        // Memory shared between its processes is released with them, even if they are killed: System V memory belongs
        // to a separate namespace, and the rest is in files.
        let mut command = guest.namespace.command("unshare");
        command.args(["--ipc", "setpriv"]).args(UNPRIVILEGED).arg(program("postgres")?).arg("-D").arg(&data);
        for setting in [
            &format!("listen_addresses={}", guest.address),
            &format!("port={PORT}"),
            "unix_socket_directories=",
            "dynamic_shared_memory_type=mmap",
            "shared_buffers=32MB",
            // Disks are not measured, and no maintenance may run during the measurement.
            "fsync=off",
            "full_page_writes=off",
            "synchronous_commit=off",
            "autovacuum=off",
            "jit=off",
        ] {
            command.args(["-c", setting]);
        }
        command.current_dir("/");
        let program = Program::start(command, "postgres", &logs.join("postgres.log"))?;
        let mut running = Running(program);
        running.0.wait_until_ready(&guest.namespace, READY_TIMEOUT, move || ask(address))?;
        let mut command = pgbench(guest, guest)?;
        command.args(["-i", "-q", "-s", "1"]).arg(USER);
        Program::start(command, "pgbench", &logs.join("pgbench-setup.txt"))?.finish(SETUP_TIMEOUT)?;
        Ok(Box::new(running))
    }

    fn load(&self, load: &Load<'_>) -> Result<Measurement> {
        let times = load.logs.join(format!("pgbench-{}.times", load.name));
        // An interrupted run has left its log files.
        remove(&files_of(&times)?)?;
        let (connections, seconds) = (CONNECTIONS.to_string(), load.seconds().to_string());
        let mut command = pgbench(load.client, load.server)?;
        command.args(["-n", "-S", "-M", "prepared", "-j", "1", "-c", &connections, "-T", &seconds, "-l"]);
        command.arg("--log-prefix").arg(&times).arg(USER);
        let output = load.run(command, "pgbench")?;
        let requests_per_s = parse(&output).context("parsing the output of pgbench")?;
        let mut latency_us = latencies()?;
        let files = files_of(&times)?;
        for file in &files {
            let reader = File::open(file).with_context(|| format!("reading {}", file.display()))?;
            for line in BufReader::new(reader).lines() {
                record(&mut latency_us, &line?).with_context(|| format!("understanding {}", file.display()))?;
            }
        }
        remove(&files)?;
        ensure!(!latency_us.is_empty(), "pgbench has logged no transaction");
        Ok(Measurement { requests_per_s, paced_requests_per_s: None, latency_us, lost_requests: 0 })
    }
}

impl Server for Running {
    fn check_alive(&mut self) -> Result<()> {
        self.0.check_alive()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Immediate shutdown, which does not wait for clients; the data is not kept.
        if let (Ok(None), Some(pid)) = (self.0.try_wait(), i32::try_from(self.0.pid()).ok().and_then(Pid::from_raw)) {
            let _ = kill_process(pid, Signal::QUIT);
        }
        for _ in 0..100 {
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A command that runs as another user, because the server refuses to run as root.
const UNPRIVILEGED: [&str; 3] = ["--reuid=65534", "--regid=65534", "--clear-groups"];

fn program(name: &str) -> Result<PathBuf> {
    let hint = "scripts/install-debian-packages.sh installs what the lab needs";
    let mut versions = fs::read_dir(VERSIONS).with_context(|| format!("no PostgreSQL in {VERSIONS}: {hint}"))?;
    let version = versions.next().with_context(|| format!("no PostgreSQL in {VERSIONS}: {hint}"))??;
    Ok(version.path().join("bin").join(name))
}

fn pgbench(client: &Guest, server: &Guest) -> Result<Command> {
    let mut command = client.namespace.command(program("pgbench")?);
    command.args(["-h", &server.address.to_string(), "-p", &PORT.to_string(), "-U", USER]);
    Ok(command)
}

/// Opens a session (PostgreSQL's documentation, "Message Formats", StartupMessage). The server refuses while it
/// starts.
fn ask(address: SocketAddr) -> Result<()> {
    let timeout = Duration::from_secs(1);
    let mut stream = TcpStream::connect_timeout(&address, timeout).context("connecting to PostgreSQL")?;
    stream.set_read_timeout(Some(timeout))?;
    let parameters = format!("user\0{USER}\0database\0{USER}\0\0");
    let mut message = (8 + parameters.len() as u32).to_be_bytes().to_vec();
    message.extend_from_slice(&0x0003_0000_u32.to_be_bytes());
    message.extend_from_slice(parameters.as_bytes());
    stream.write_all(&message)?;
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    // AuthenticationOk
    if answer != *b"R" {
        bail!("PostgreSQL answers {:?}", char::from(answer[0]));
    }
    Ok(())
}

/// The files whose names begin with the file name of `prefix`.
fn files_of(prefix: &Path) -> Result<Vec<PathBuf>> {
    let (Some(directory), Some(name)) = (prefix.parent(), prefix.file_name()) else { return Ok(Vec::new()) };
    let start = format!("{}.", name.to_string_lossy());
    let entries = fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&start) {
            files.push(entry.path());
        }
    }
    Ok(files)
}

fn remove(files: &[PathBuf]) -> Result<()> {
    files.iter().try_for_each(|file| fs::remove_file(file).with_context(|| format!("removing {}", file.display())))
}

/// Transactions per second.
fn parse(output: &str) -> Result<f64> {
    let failed = number_after(output, "number of failed transactions:")?;
    ensure!(failed == 0.0, "{failed} transactions failed");
    if number_after(output, "number of transactions actually processed:")? == 0.0 {
        return Err(NothingAnswered.into());
    }
    number_after(output, "tps =")
}

/// Records a line of the log: client, transaction, µs, script, second, µs.
fn record(latency_us: &mut Histogram<u64>, line: &str) -> Result<()> {
    let time = line.split(' ').nth(2).and_then(|time| time.parse::<u64>().ok());
    latency_us.saturating_record(time.with_context(|| format!("no time in `{line}`"))?.max(1));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
number of transactions actually processed: 26391
number of failed transactions: 0 (0.000%)
latency average = 0.605 ms
initial connection time = 9.129 ms
tps = 26440.516143 (without initial connection time)
";

    #[test]
    fn output_is_parsed() {
        assert_eq!(parse(OUTPUT).unwrap(), 26_440.516143);
        let failed = OUTPUT.replace("transactions: 0", "transactions: 3");
        assert!(parse(&failed).unwrap_err().to_string().contains("3 transactions failed"));
        assert!(parse("pgbench: error").is_err());
        let nothing = "number of transactions actually processed: 0\nnumber of failed transactions: 0 (NaN%)\n";
        assert!(parse(nothing).unwrap_err().is::<NothingAnswered>());
    }

    #[test]
    fn log_lines_are_recorded() {
        let mut latency_us = latencies().unwrap();
        record(&mut latency_us, "0 1 612 0 1700000000 123456").unwrap();
        record(&mut latency_us, "1 1 0 0 1700000000 123456").unwrap();
        assert_eq!((latency_us.len(), latency_us.min(), latency_us.max()), (2, 1, 612));
        for wrong in ["", "0 1", "0 1 failed 0 1700000000 123456"] {
            assert!(record(&mut latency_us, wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn logs_of_the_same_load_are_found() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["pgbench-a.times.12", "pgbench-a.times.12.1", "pgbench-ab.times.12", "pgbench-a.txt"] {
            File::create(directory.path().join(name)).unwrap();
        }
        let files = files_of(&directory.path().join("pgbench-a.times")).unwrap();
        assert_eq!(files.len(), 2);
        remove(&files).unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }
}
