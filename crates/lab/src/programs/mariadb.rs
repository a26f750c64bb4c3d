//! MariaDB and `sysbench`: lookups of one row by key, over persistent connections.

use std::fs;
use std::io::Read as _;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;

use crate::patience::NothingAnswered;
use crate::process::Program;
use crate::programs::application::{
    Application, CONNECTIONS, Load, Measurement, NOBODY, READY_TIMEOUT, Server, latencies, number_after,
};
use crate::topology::Guest;

/// The port it listens on.
const PORT: u16 = 3306;
/// The name of the user and of the database.
const LAB: &str = "lab";
/// Time to create a database.
const SETUP_TIMEOUT: Duration = Duration::from_secs(120);
/// Durability is off, because disks are not measured.
const SETTINGS: [&str; 4] =
    ["--debug-no-sync", "--innodb-log-file-size=8M", "--innodb-buffer-pool-size=32M", "--skip-innodb-doublewrite"];

/// MariaDB.
#[derive(Debug, Clone, Copy)]
pub struct Mariadb;

impl Application for Mariadb {
    fn serve(&self, guest: &Guest, files: &Path, logs: &Path) -> Result<Box<dyn Server>> {
        let address = SocketAddr::from((guest.address, PORT));
        let data = files.join("mariadb");
        fs::create_dir(&data).with_context(|| format!("creating {}", data.display()))?;
        chown(&data, Some(NOBODY), Some(NOBODY)).with_context(|| format!("giving {} away", data.display()))?;
        let datadir = format!("--datadir={}", data.display());
        let mut command = Command::new("mariadb-install-db");
        command.args(["--no-defaults", "--user=nobody", "--auth-root-authentication-method=normal", "--skip-test-db"]);
        command.arg(&datadir).args(SETTINGS);
        Program::start(command, "mariadb-install-db", &logs.join("mariadb-install-db.log"))?.finish(SETUP_TIMEOUT)?;

        let first = data.join("first.sql");
        let statements =
            format!("CREATE DATABASE {LAB};\nCREATE USER {LAB}@'%';\nGRANT ALL ON {LAB}.* TO {LAB}@'%';\n");
        fs::write(&first, statements).with_context(|| format!("writing {}", first.display()))?;
        let mut command = guest.namespace.command("mariadbd");
        command.args(["--no-defaults", "--user=nobody", &datadir]).args(SETTINGS);
        command.arg(format!("--init-file={}", first.display()));
        command.arg(format!("--socket={}", data.join("socket").display()));
        command.arg(format!("--pid-file={}", data.join("pid").display()));
        command.arg(format!("--bind-address={}", guest.address)).arg(format!("--port={PORT}"));
        command.args(["--skip-name-resolve", "--skip-log-bin", "--innodb-fast-shutdown=3"]);
        let mut program = Program::start(command, "mariadbd", &logs.join("mariadbd.log"))?;
        program.wait_until_ready(&guest.namespace, READY_TIMEOUT, move || ask(address))?;
        let mut command = sysbench(guest, guest);
        command.arg("prepare");
        Program::start(command, "sysbench", &logs.join("sysbench-setup.txt"))?.finish(SETUP_TIMEOUT)?;
        Ok(Box::new(program))
    }

    fn load(&self, load: &Load<'_>) -> Result<Measurement> {
        let mut command = sysbench(load.client, load.server);
        command.arg(format!("--threads={CONNECTIONS}")).arg(format!("--time={}", load.seconds()));
        command.args(["--histogram=on", "run"]);
        parse(&load.run(command, "sysbench")?).context("parsing the output of sysbench")
    }
}

fn sysbench(client: &Guest, server: &Guest) -> Command {
    let mut command = client.namespace.command("sysbench");
    command.args(["oltp_point_select", "--db-driver=mysql", "--tables=1", "--table-size=10000"]);
    command.arg(format!("--mysql-host={}", server.address)).arg(format!("--mysql-port={PORT}"));
    command.arg(format!("--mysql-user={LAB}")).arg(format!("--mysql-db={LAB}"));
    command
}

/// The server sends first: a packet header of four bytes, and the protocol version, 10 (MariaDB's documentation,
/// "Initial Handshake Packet").
fn ask(address: SocketAddr) -> Result<()> {
    let timeout = Duration::from_secs(1);
    let mut stream = TcpStream::connect_timeout(&address, timeout).context("connecting to MariaDB")?;
    stream.set_read_timeout(Some(timeout))?;
    let mut greeting = [0; 5];
    stream.read_exact(&mut greeting)?;
    ensure!(greeting[4] == 10, "MariaDB greets with {greeting:?}");
    Ok(())
}

fn parse(output: &str) -> Result<Measurement> {
    let errors = number_after(output, "ignored errors:")?;
    ensure!(errors == 0.0, "{errors} requests failed");
    let line = output.lines().find_map(|line| line.trim_start().strip_prefix("transactions:"));
    let (_, rate) = line.and_then(|line| line.split_once('(')).context("no rate of transactions")?;
    let rate = rate.split_whitespace().next().and_then(|rate| rate.parse().ok()).context("no rate of transactions")?;
    if rate == 0.0 {
        return Err(NothingAnswered.into());
    }
    let mut latency_us = latencies()?;
    let (_, rows) =
        output.split_once("value  ------------- distribution ------------- count").context("no histogram")?;
    for row in rows.lines().skip(1).take_while(|row| row.contains('|')) {
        record(&mut latency_us, row).with_context(|| format!("understanding `{row}`"))?;
    }
    ensure!(!latency_us.is_empty(), "no request in the histogram");
    Ok(Measurement { requests_per_s: rate, paced_requests_per_s: None, latency_us, lost_requests: 0 })
}

/// Records a row of the histogram: ms, a bar, number of requests. Its buckets are 1.8 % wide.
fn record(latency_us: &mut Histogram<u64>, row: &str) -> Result<()> {
    let (ms, rest) = row.split_once('|').context("no bar")?;
    let ms: f64 = ms.trim().parse().context("no time")?;
    let count = rest.split_whitespace().next_back().and_then(|count| count.parse().ok()).context("no count")?;
    latency_us.saturating_record_n((ms * 1000.0).round().max(1.0) as u64, count);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
Latency histogram (values are in milliseconds)
       value  ------------- distribution ------------- count
       0.353 |*                                        2
       0.359 |****************************************  90
     207.401 |*****                                    8
 
SQL statistics:
    transactions:                        100    (13467.14 per sec.)
    queries:                             100    (13467.14 per sec.)
    ignored errors:                      0      (0.00 per sec.)
";

    #[test]
    fn histograms_are_parsed() {
        let measured = parse(OUTPUT).unwrap();
        assert_eq!((measured.requests_per_s, measured.latency_us.len()), (13_467.14, 100));
        let at = |quantile| measured.latency_us.value_at_quantile(quantile);
        assert_eq!((at(0.02), at(0.5), at(0.92)), (353, 359, 359));
        assert!((207_400..207_600).contains(&at(0.999)), "{}", at(0.999));
    }

    #[test]
    fn malformed_results_are_errors() {
        let table = [
            ("ignored errors:                      0", "ignored errors:   2", "2 requests failed"),
            ("(13467.14", "(fast", "no rate"),
            ("(13467.14", "(0.00", "no request was answered"),
            ("distribution", "something", "no histogram"),
            ("0.359 |", "soon |", "understanding `       soon |"),
            ("  90", "  many", "no count"),
        ];
        for (what, by, expected) in table {
            let error = format!("{:#}", parse(&OUTPUT.replace(what, by)).unwrap_err());
            assert!(error.contains(expected), "{what}: {error}");
        }
    }
}
