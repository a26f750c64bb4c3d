//! The socket between front-ends and ports: a path in the file system, whose directory other users may be able to
//! write.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, chmod, fstat, open, openat, statat, unlinkat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::VhostError;

/// The owner and the group may connect. Without this the umask decides, and a strict one excludes the group.
const SOCKET_MODE: u32 = 0o660;

/// A name in a directory that stays valid if the path to the directory changes.
#[derive(Debug)]
pub(super) struct Entry {
    directory: OwnedFd,
    name: OsString,
}

impl Entry {
    /// # Errors
    /// The directory does not exist, or the path does not name an entry of one.
    pub(super) fn of(path: &Path) -> io::Result<Entry> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Entry { directory: open(parent, flags, Mode::empty())?, name })
    }

    /// Metadata of the entry; a symbolic link is not followed.
    pub(super) fn stat(&self) -> Result<Stat, Errno> {
        statat(&self.directory, self.name.as_os_str(), AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Opens the entry; a symbolic link is not followed.
    pub(super) fn open(&self, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        openat(&self.directory, self.name.as_os_str(), flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, mode)
    }

    /// Removes the entry.
    pub(super) fn remove(&self) -> Result<(), Errno> {
        unlinkat(&self.directory, self.name.as_os_str(), AtFlags::empty())
    }
}

/// A listening socket, and its entry in the file system.
#[derive(Debug)]
pub(super) struct Listening {
    entry: Entry,
    /// Device and inode.
    identity: (u64, u64),
}

impl Listening {
    /// The socket at `path`, where another process has created it. `None`: there is none.
    pub(super) fn of(path: &Path) -> Option<Listening> {
        let entry = Entry::of(path).ok()?;
        let there = entry.stat().ok().filter(is_socket)?;
        let identity = (there.st_dev, there.st_ino);
        Some(Listening { entry, identity })
    }

    /// Removes the socket, if the entry is still the one created.
    pub(super) fn remove(&self) {
        if self.entry.stat().is_ok_and(|there| (there.st_dev, there.st_ino) == self.identity) {
            let _ = self.entry.remove();
        }
    }
}

/// Maximum connections waiting to be accepted. They are served at a limited rate: a front-end that makes thousands and
/// leaves them would otherwise block its own port for minutes.
const WAITING: i32 = 16;

/// Creates the socket; replaces a stale one.
pub(super) fn listen(path: &Path) -> Result<(UnixListener, Listening), VhostError> {
    let bad = |problem| VhostError::Path { path: path.to_owned(), problem };
    let failed = |source| VhostError::Listen { path: path.to_owned(), source };
    let entry = Entry::of(path).map_err(failed)?;
    if let Ok(there) = entry.stat() {
        if !is_socket(&there) {
            return Err(bad("the path exists but is not a socket; remove it or correct port.socket"));
        }
        // A socket with a full queue is in use, too.
        if matches!(call(path.as_os_str()), Ok(_) | Err(Errno::AGAIN)) {
            return Err(bad("another process listens there; stop it or correct port.socket"));
        }
        entry.remove().map_err(|error| failed(error.into()))?;
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    rustix::net::listen(&listener, WAITING).map_err(|error| failed(error.into()))?;
    let identity = restrict(&entry).map_err(|error| failed(error.into()))?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok((listener, Listening { entry, identity }))
}

/// Sets the mode of the new socket, but not of another file that has replaced it meanwhile.
fn restrict(entry: &Entry) -> Result<(u64, u64), Errno> {
    let there = entry.open(OFlags::PATH, Mode::empty())?;
    let stat = fstat(&there)?;
    if !is_socket(&stat) || stat.st_uid != rustix::process::geteuid().as_raw() {
        return Err(Errno::ACCESS);
    }
    chmod(format!("/proc/self/fd/{}", there.as_raw_fd()), Mode::from_raw_mode(SOCKET_MODE))?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Connects to a front-end that listens at `path`. Does not block if the queue of the socket is full.
///
/// # Errors
/// No process listens there, the queue is full (`EAGAIN`), or it is not a socket.
pub(super) fn dial(path: &Path) -> Result<OwnedFd, Errno> {
    let there = open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    if !is_socket(&fstat(&there)?) {
        return Err(Errno::NOTSOCK);
    }
    let stream = call(OsStr::from_bytes(format!("/proc/self/fd/{}", there.as_raw_fd()).as_bytes()))?;
    // Not shared: no other process has this open file.
    let flags = rustix::fs::fcntl_getfl(stream.as_fd())?;
    rustix::fs::fcntl_setfl(stream.as_fd(), flags - OFlags::NONBLOCK)?;
    Ok(stream)
}

fn call(path: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&stream, &SocketAddrUnix::new(path)?)?;
    Ok(stream)
}

fn is_socket(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Socket
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Fills the queue of a socket that never accepts.
    fn fill(path: &Path) -> Vec<OwnedFd> {
        std::iter::from_fn(|| call(path.as_os_str()).ok()).collect()
    }

    #[test]
    fn a_socket_that_never_accepts_blocks_nobody() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("vm.sock");
        let _listener = UnixListener::bind(&path).expect("a listener");
        let _queue = fill(&path);
        assert_eq!(dial(&path).err(), Some(Errno::AGAIN));
        assert!(matches!(listen(&path), Err(VhostError::Path { .. })), "another process listens");
    }

    #[test]
    fn symbolic_links_are_not_followed() {
        let directory = tempfile::tempdir().expect("a directory");
        let (path, link) = (directory.path().join("vm.sock"), directory.path().join("link"));
        let listener = UnixListener::bind(&path).expect("a listener");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        assert!(dial(&link).is_err());
        assert!(matches!(listen(&link), Err(VhostError::Path { .. })));
        let stream = UnixStream::from(dial(&path).expect("connects"));
        let (mut other, _) = listener.accept().expect("accepts");
        std::io::Write::write_all(&mut other, b"x").expect("room");
        std::io::Read::read_exact(&mut &stream, &mut [0]).expect("it waits for the byte");
    }

    #[test]
    fn a_mode_is_for_the_socket_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let (path, secret) = (directory.path().join("vm.sock"), directory.path().join("secret"));
        std::fs::write(&secret, "").expect("a file");
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).expect("its mode");
        // As if the directory's owner had replaced it first.
        let entry = Entry::of(&path).expect("a directory");
        std::os::unix::fs::symlink(&secret, &path).expect("a link");
        assert!(restrict(&entry).is_err());
        std::fs::remove_file(&path).expect("the link");
        std::fs::hard_link(&secret, &path).expect("another name");
        assert!(restrict(&entry).is_err());
        assert_eq!(std::fs::metadata(&secret).expect("there").permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn only_our_own_socket_is_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("vm.sock");
        let (_listener, listening) = listen(&path).expect("a socket");
        std::fs::remove_file(&path).expect("the socket");
        std::fs::write(&path, "something else").expect("a file");
        listening.remove();
        assert!(path.exists());
        std::fs::remove_file(&path).expect("the file");
        let (_listener, listening) = listen(&path).expect("a socket");
        listening.remove();
        assert!(!path.exists());
    }
}
