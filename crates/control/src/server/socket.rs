//! A Unix socket on which exactly one daemon listens.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::ServeError;

/// Who may connect: the owner and the group.
const MODE: u32 = 0o660;
/// How long to wait for daemons that start at the same time.
const LOCK_WAIT: Duration = Duration::from_secs(3);
/// Connections queued for accept.
const BACKLOG: i32 = 64;

/// The file of a socket on which this process listens.
#[derive(Debug)]
pub(super) struct BoundSocket {
    path: PathBuf,
    inode: (u64, u64),
}

impl BoundSocket {
    /// Removes the file, unless it was replaced.
    pub(super) fn remove(self) {
        let ours = fs::symlink_metadata(&self.path).is_ok_and(|m| (m.dev(), m.ino()) == self.inode);
        if ours && let Err(e) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), "cannot remove the socket: {e}");
        }
    }
}

/// Creates a nonblocking socket and listens on it.
pub(super) fn bind(path: &Path) -> Result<(BoundSocket, UnixListener), ServeError> {
    let failed = |what| move |source| ServeError::Io { what, path: path.to_owned(), source };
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    DirBuilder::new().recursive(true).mode(0o755).create(dir).map_err(failed("cannot create the directory of"))?;
    // Two daemons that start at once must not both find a stale socket: check and bind under a lock of the directory.
    let lock = File::open(dir).map_err(failed("cannot open the directory of"))?;
    lock_soon(&lock).map_err(failed("cannot lock the directory of"))?;
    remove_stale(path)?;
    let listener = listen(path).map_err(failed("cannot listen on"))?;
    let meta = fs::symlink_metadata(path).map_err(failed("cannot stat"))?;
    Ok((BoundSocket { path: path.to_owned(), inode: (meta.dev(), meta.ino()) }, listener))
}

/// The file of a socket that another process created, and on which this process listens, too.
pub(super) fn adopt(path: &Path) -> Result<BoundSocket, ServeError> {
    let failed = |source| ServeError::Io { what: "cannot stat", path: path.to_owned(), source };
    let meta = fs::symlink_metadata(path).map_err(failed)?;
    if !meta.file_type().is_socket() {
        return Err(ServeError::NotASocket(path.to_owned()));
    }
    Ok(BoundSocket { path: path.to_owned(), inode: (meta.dev(), meta.ino()) })
}

/// Daemons hold the lock for a moment only; other programs might lock the directory for longer.
fn lock_soon(file: &File) -> io::Result<()> {
    let deadline = Instant::now() + LOCK_WAIT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(e)) => return Err(e),
            Err(TryLockError::WouldBlock) if Instant::now() > deadline => {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "another process holds its lock"));
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn remove_stale(path: &Path) -> Result<(), ServeError> {
    let failed = |what| move |source| ServeError::Io { what, path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(failed("cannot stat")(e)),
        Ok(meta) if !meta.file_type().is_socket() => return Err(ServeError::NotASocket(path.to_owned())),
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            tracing::info!(path = %path.display(), "removing the stale socket of a dead daemon");
            fs::remove_file(path).map_err(failed("cannot remove the stale socket"))
        }
        // A full backlog also means that a process listens.
        Ok(_) => Err(ServeError::AlreadyRunning(path.to_owned())),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Err(ServeError::AlreadyRunning(path.to_owned())),
        Err(e) => Err(failed("cannot probe")(e)),
    }
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file gets the socket's mode (less the umask), so it is never accessible to others, not even for a moment.
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(MODE))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    fs::set_permissions(path, fs::Permissions::from_mode(MODE))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(UnixListener::from(socket))
}
