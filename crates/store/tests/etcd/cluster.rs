//! Members of etcd on this host's loopback addresses, and a proxy that simulates network failures.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use bifrost_store::{EtcdOptions, Store};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Timeout for the start of a cluster.
const START: Duration = Duration::from_secs(30);

pub(crate) struct Cluster {
    members: Vec<Member>,
    _directory: tempfile::TempDir,
}

struct Member {
    arguments: Vec<String>,
    endpoint: String,
    process: Child,
}

/// The etcd program, or another program beside it.
fn program(name: &str) -> PathBuf {
    let etcd =
        std::env::var_os("BIFROST_ETCD").expect("set BIFROST_ETCD, as by `BIFROST_ETCD=$(scripts/install-etcd.sh)`");
    Path::new(&etcd).with_file_name(name)
}

impl Cluster {
    /// A number of members, with additional arguments.
    pub(crate) fn start(count: usize, more: &[&str]) -> Cluster {
        let directory = tempfile::tempdir().unwrap();
        let scheme = if more.iter().any(|argument| argument.starts_with("--cert-file")) { "https" } else { "http" };
        // All ports are held until all are chosen.
        let listeners: Vec<_> = (0..2 * count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let ports: Vec<_> = listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
        drop(listeners);
        let peer = |i: usize| format!("http://127.0.0.1:{}", ports[2 * i]);
        let all: Vec<_> = (0..count).map(|i| format!("m{i}={}", peer(i))).collect();
        let member = |i: usize| {
            let endpoint = format!("{scheme}://127.0.0.1:{}", ports[2 * i + 1]);
            let arguments = [
                format!("--name=m{i}"),
                format!("--data-dir={}", directory.path().join(format!("m{i}")).display()),
                format!("--listen-peer-urls={}", peer(i)),
                format!("--initial-advertise-peer-urls={}", peer(i)),
                format!("--listen-client-urls={endpoint}"),
                format!("--advertise-client-urls={endpoint}"),
                format!("--initial-cluster={}", all.join(",")),
                "--max-txn-ops=1025".to_owned(),
                "--max-request-bytes=6291456".to_owned(),
                "--log-level=error".to_owned(),
                // Tests kill the process, not the host.
                "--unsafe-no-fsync".to_owned(),
            ];
            let arguments: Vec<_> = arguments.into_iter().chain(more.iter().map(|&s| s.to_owned())).collect();
            let process = spawn(&arguments);
            Member { arguments, endpoint, process }
        };
        Cluster { members: (0..count).map(member).collect(), _directory: directory }
    }

    pub(crate) fn options(&self, root: &str) -> EtcdOptions {
        let endpoints = self.members.iter().map(|member| member.endpoint.clone()).collect();
        EtcdOptions { endpoints, root: root.to_owned(), timeout: START, ..EtcdOptions::default() }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.members[0].endpoint.rsplit('/').next().unwrap().parse().unwrap()
    }

    /// A store in it, when it is ready.
    pub(crate) async fn store(&self, root: &str) -> Store {
        connect(self.options(root)).await
    }

    /// Kills a member with SIGKILL.
    pub(crate) fn kill(&mut self, index: usize) {
        let process = &mut self.members[index].process;
        process.kill().unwrap();
        process.wait().unwrap();
    }

    pub(crate) fn start_again(&mut self, index: usize) {
        let member = &mut self.members[index];
        member.process = spawn(&member.arguments);
    }

    /// Stops or continues a member.
    pub(crate) fn stop(&self, index: usize, is_stopped: bool) {
        let pid = rustix::process::Pid::from_child(&self.members[index].process);
        let signal = if is_stopped { rustix::process::Signal::STOP } else { rustix::process::Signal::CONT };
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) fn ctl(&self, arguments: &[&str]) {
        let begin = Instant::now();
        loop {
            let endpoint = format!("--endpoints={}", self.members[0].endpoint);
            let output = Command::new(program("etcdctl")).arg(endpoint).args(arguments).output().unwrap();
            if output.status.success() {
                return;
            }
            // A member that was just started is not ready yet.
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(begin.elapsed() < START, "etcdctl {arguments:?}: {error}");
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for member in &mut self.members {
            // SIGKILL ends a stopped member, too.
            let _ = member.process.kill();
            let _ = member.process.wait();
        }
    }
}

pub(crate) async fn connect(options: EtcdOptions) -> Store {
    let begin = Instant::now();
    loop {
        match Store::etcd(options.clone()).await {
            Ok(store) => return store,
            Err(error) if begin.elapsed() > START => panic!("{error}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

fn spawn(arguments: &[String]) -> Child {
    // Its output is shown if the test fails.
    Command::new(program("etcd")).args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap()
}

/// Behaviour of a proxy.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Network {
    Good,
    /// Responses on existing connections are lost; then these connections end. New connections work.
    LosesAnswers,
    /// No new connections, and existing ones end.
    Down,
}

/// A proxy between the store and a member.
pub(crate) struct Proxy {
    pub(crate) endpoint: String,
    network: Arc<AtomicU8>,
}

impl Proxy {
    pub(crate) async fn start(to: SocketAddr) -> Proxy {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let network = Arc::new(AtomicU8::new(Network::Good as u8));
        let of_task = network.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let network = of_task.clone();
                if network.load(Ordering::SeqCst) != Network::Down as u8 {
                    tokio::spawn(async move { carry(client, TcpStream::connect(to).await.unwrap(), &network).await });
                }
            }
        });
        Proxy { endpoint, network }
    }

    /// When this returns, all connections behave as requested.
    pub(crate) async fn set(&self, network: Network) {
        self.network.store(network as u8, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn carry(mut client: TcpStream, mut server: TcpStream, network: &AtomicU8) {
    let (mut from_client, mut from_server) = (vec![0; 65536], vec![0; 65536]);
    let mut end = None;
    loop {
        let now = network.load(Ordering::SeqCst);
        if now == Network::Down as u8 || end.is_some_and(|end| Instant::now() >= end) {
            if end.is_some() {
                network.store(Network::Good as u8, Ordering::SeqCst);
            }
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(10)) => {}
            read = client.read(&mut from_client) => match read {
                Ok(len @ 1..) => {
                    if now == Network::LosesAnswers as u8 {
                        // Until the requested number is reached.
                        end.get_or_insert(Instant::now() + Duration::from_millis(300));
                    }
                    if server.write_all(&from_client[..len]).await.is_err() { return }
                }
                _ => return,
            },
            read = server.read(&mut from_server) => match read {
                Ok(_) if end.is_some() => {}
                Ok(len @ 1..) => if client.write_all(&from_server[..len]).await.is_err() { return },
                _ => return,
            },
        }
    }
}
