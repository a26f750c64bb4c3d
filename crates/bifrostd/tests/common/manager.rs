//! A service manager that keeps descriptors while the daemon is not running (`sd_notify(3)`, `sd_listen_fds(3)`).

use std::collections::BTreeMap;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Shell script that replaces itself by the daemon, with its own process ID in LISTEN_PID.
const BECOME: &str = "LISTEN_PID=$$ exec \"$0\" \"$@\"";

/// Keeps descriptors by name until dropped.
pub struct Manager {
    socket: PathBuf,
    kept: Arc<Mutex<BTreeMap<String, OwnedFd>>>,
    stop: Arc<AtomicBool>,
    listening: Option<JoinHandle<()>>,
}

impl Manager {
    pub fn start(socket: &Path) -> Manager {
        let _ = std::fs::remove_file(socket);
        let listener = UnixDatagram::bind(socket).unwrap();
        listener.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let (kept, stop): (Arc<Mutex<BTreeMap<_, _>>>, Arc<AtomicBool>) = Default::default();
        let (theirs, stopped) = (Arc::clone(&kept), Arc::clone(&stop));
        let listening = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let Some((text, fds)) = receive(&listener) else { continue };
                take(&text, fds, &mut theirs.lock().unwrap_or_else(PoisonError::into_inner));
            }
        });
        Manager { socket: socket.to_owned(), kept, stop, listening: Some(listening) }
    }

    pub fn names(&self) -> Vec<String> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    /// Replaces the descriptor with this name.
    pub fn keep(&self, name: &str, fd: OwnedFd) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), fd);
    }

    /// The program and first arguments for [`Command`].
    pub fn program(daemon: &str) -> [&str; 4] {
        ["sh", "-c", BECOME, daemon]
    }

    /// Hands the descriptors over to `command`.
    pub fn hand_over(&self, command: &mut Command) {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let names = kept.keys().cloned().collect::<Vec<_>>().join(":");
        command.env("NOTIFY_SOCKET", &self.socket).env("LISTEN_FDS", kept.len().to_string());
        command.env("LISTEN_FDNAMES", names);
        // Duplicates with numbers above the final ones, so that no descriptor is overwritten before it has been copied.
        let above: Vec<OwnedFd> = kept.values().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 500).unwrap()).collect();
        let take = move || {
            for (number, fd) in (3..).zip(&above) {
                // SAFETY: a system call on descriptor numbers, which the child does not use otherwise.
                if unsafe { libc::dup2(fd.as_raw_fd(), number) } < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        };
        // SAFETY: only an async-signal-safe system call.
        unsafe { command.pre_exec(take) };
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.listening.take() {
            let _ = thread.join();
        }
    }
}

/// Receives a message, or `None` after a timeout.
fn receive(socket: &UnixDatagram) -> Option<(String, Vec<OwnedFd>)> {
    let (mut text, mut space) = ([0; 4096], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))]);
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = recvmsg(socket, &mut [IoSliceMut::new(&mut text)], &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
    let fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fds = fds.flatten().collect();
    Some((String::from_utf8_lossy(&text[..message.bytes]).into_owned(), fds))
}

fn take(text: &str, fds: Vec<OwnedFd>, kept: &mut BTreeMap<String, OwnedFd>) {
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let Some(name) = value("FDNAME") else { return };
    if value("FDSTORE") == Some("1") {
        kept.extend(fds.into_iter().map(|fd| (name.to_owned(), fd)));
    }
    if value("FDSTOREREMOVE") == Some("1") {
        kept.remove(name);
    }
}
