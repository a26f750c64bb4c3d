//! `nginx` in a guest: one worker, one small page.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::process::Program;
use crate::topology::Guest;

/// The port of HTTP/1.1.
pub const PORT: u16 = 8080;
/// The port of HTTP/2, without TLS and from the first byte ("prior knowledge", RFC 9113, section 3.3).
pub const HTTP2_PORT: u16 = 8081;
/// Bytes of the page.
const PAGE: usize = 1024;

/// A running server. Dropping it ends the process.
#[derive(Debug)]
pub struct Nginx {
    program: Program,
}

impl Nginx {
    /// Starts the server on the guest's address and waits until it answers. Its files go to `logs`.
    pub fn start(guest: &Guest, logs: &Path) -> Result<Self> {
        fs::create_dir_all(logs).with_context(|| format!("creating {}", logs.display()))?;
        let logs = logs.canonicalize().with_context(|| format!("finding {}", logs.display()))?;
        let file = logs.join("nginx.conf");
        let address = SocketAddr::from((guest.address, PORT));
        fs::write(&file, configuration(address, &logs)).with_context(|| format!("writing {}", file.display()))?;
        let mut command = guest.namespace.command("nginx");
        command.arg("-p").arg(&logs).arg("-c").arg(&file);
        let mut program = Program::start(command, "nginx", &logs.join("nginx.log"))?;
        program.wait_until_ready(&guest.namespace, Duration::from_secs(5), move || get(address))?;
        Ok(Self { program })
    }

    /// An error if the server has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        self.program.check_alive()
    }
}

fn configuration(address: SocketAddr, logs: &Path) -> String {
    let http2 = SocketAddr::new(address.ip(), HTTP2_PORT);
    let (logs, page) = (logs.display(), "x".repeat(PAGE));
    // No worker process, which would outlive the first one; no access log.
    format!(
        "daemon off;\nmaster_process off;\nworker_processes 1;\npid {logs}/nginx.pid;\nerror_log stderr;\n\
         events {{ worker_connections 4096; }}\n\
         http {{\n access_log off;\n keepalive_requests 100000000;\n\
         client_body_temp_path {logs}/body;\n proxy_temp_path {logs}/proxy;\n fastcgi_temp_path {logs}/fastcgi;\n \
         uwsgi_temp_path {logs}/uwsgi;\n scgi_temp_path {logs}/scgi;\n\
         server {{ listen {address} backlog=4096; listen {http2} http2; location / {{ return 200 \"{page}\"; }} \
         }}\n}}\n"
    )
}

fn get(address: SocketAddr) -> Result<()> {
    let timeout = Duration::from_secs(1);
    let mut stream = TcpStream::connect_timeout(&address, timeout).context("connecting to nginx")?;
    stream.set_read_timeout(Some(timeout))?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    ensure!(answer.starts_with(b"HTTP/1.1 200 ") && answer.len() > PAGE, "unexpected answer from nginx");
    Ok(())
}
