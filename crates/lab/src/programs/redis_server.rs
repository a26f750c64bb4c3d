//! `redis-server` in a guest, without persistence.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::machine::Machine;
use crate::process::Program;
use crate::topology::Guest;

/// The port the server listens on.
pub const PORT: u16 = 6379;

/// Starts a server in a virtual machine and waits until it answers. It ends with the machine.
pub fn start_in_machine(machine: &mut Machine) -> Result<()> {
    let script = format!(
        "redis-server --port {PORT} --save '' --appendonly no --protected-mode no --daemonize yes --dir /run \
         --maxclients 2000\n\
         until redis-cli -p {PORT} ping | grep -q PONG; do sleep 0.05; done"
    );
    machine.run(&script, Duration::from_secs(20)).context("starting redis-server")?;
    Ok(())
}

/// A running server. Dropping it ends the process.
#[derive(Debug)]
pub struct RedisServer {
    program: Program,
}

impl RedisServer {
    /// Starts the server on the guest's address and waits until it answers.
    pub fn start(guest: &Guest, logs: &Path) -> Result<Self> {
        let address = guest.address.to_string();
        let mut command = guest.namespace.command("redis-server");
        command.args(["--bind", &address, "--port", &PORT.to_string()]);
        command.args(["--save", "", "--appendonly", "no", "--protected-mode", "no", "--daemonize", "no"]);
        command.args(["--dir", "/", "--maxclients", "2000"]);
        let mut program = Program::start(command, "redis-server", &logs.join("redis-server.log"))?;
        let socket_address = SocketAddr::from((guest.address, PORT));
        program.wait_until_ready(&guest.namespace, Duration::from_secs(5), move || ping(socket_address))?;
        Ok(Self { program })
    }

    /// An error if the server has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        self.program.check_alive()
    }
}

fn ping(address: SocketAddr) -> Result<()> {
    let timeout = Duration::from_secs(1);
    let mut stream = TcpStream::connect_timeout(&address, timeout).context("connecting to redis-server")?;
    stream.set_read_timeout(Some(timeout))?;
    stream.write_all(b"PING\r\n")?;
    let mut answer = [0; 7];
    stream.read_exact(&mut answer)?;
    if answer != *b"+PONG\r\n" {
        bail!("redis-server answered {:?}", String::from_utf8_lossy(&answer));
    }
    Ok(())
}
