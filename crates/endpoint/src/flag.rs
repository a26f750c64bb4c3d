//! A flag in a file, by which an operator has a running process change its service.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use bifrost_rdm::Service;
use rustix::fs::OFlags;

/// More than the longest text that means something.
const LONGEST: u64 = 16;

/// A file that says `uc` or `rc`, and what it said when it was last read.
#[derive(Debug)]
pub(crate) struct Flag {
    path: PathBuf,
    pub(crate) service: Service,
    /// Why the file could not be used when it was last read.
    pub(crate) problem: Option<String>,
}

impl Flag {
    /// # Errors
    /// Why the file cannot be used.
    pub(crate) fn new(path: PathBuf) -> Result<Self, String> {
        let service = read(&path).map_err(|problem| format!("{}: {problem}", path.display()))?;
        Ok(Self { path, service, problem: None })
    }

    /// Reads the file again; the service, if it is now another one. A file that cannot be used
    /// changes nothing.
    pub(crate) fn look(&mut self) -> Option<Service> {
        match read(&self.path) {
            Ok(service) => {
                self.problem = None;
                (std::mem::replace(&mut self.service, service) != service).then_some(service)
            }
            Err(problem) => {
                self.problem = Some(format!("{}: {problem}", self.path.display()));
                None
            }
        }
    }
}

fn read(path: &PathBuf) -> Result<Service, String> {
    let mut text = String::new();
    // A pipe without a writer is not waited for.
    let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path);
    let read = file.and_then(|file| file.take(LONGEST).read_to_string(&mut text));
    read.map_err(|error: io::Error| error.to_string())?;
    match text.trim().to_ascii_lowercase().as_str() {
        "uc" => Ok(Service::Uc),
        "rc" => Ok(Service::Rc),
        _ => Err("it says neither `uc` nor `rc`".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_what_is_understood_changes_the_service() {
        let path = std::env::temp_dir().join(format!("bifrost-flag-{}", std::process::id()));
        let _ = fs::remove_file(&path);
        assert!(Flag::new(path.clone()).unwrap_err().contains("No such file"));
        fs::write(&path, "udp").unwrap();
        assert!(Flag::new(path.clone()).unwrap_err().contains("neither"));
        fs::write(&path, "uc\n").unwrap();
        let mut flag = Flag::new(path.clone()).unwrap();
        assert_eq!((flag.service, flag.look()), (Service::Uc, None));
        fs::write(&path, " RC ").unwrap();
        assert_eq!((flag.look(), flag.look()), (Some(Service::Rc), None));
        // Half written, too long, not text, a directory, a pipe that nobody writes, nothing.
        let long = "rc".repeat(1 << 20);
        for bytes in [b"".as_slice(), b"u", long.as_bytes(), &[0xff; 9]] {
            fs::write(&path, bytes).unwrap();
            assert_eq!((flag.look(), flag.service), (None, Service::Rc));
            assert!(flag.problem.is_some(), "{bytes:?}");
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(flag.look().is_none() && flag.problem.take().is_some());
        fs::remove_dir(&path).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(flag.look().is_none() && flag.problem.take().is_some());
        fs::remove_file(&path).unwrap();
        assert!(flag.look().is_none() && flag.problem.take().is_some());
        fs::write(&path, "uc").unwrap();
        assert_eq!((flag.look(), flag.problem), (Some(Service::Uc), None));
        fs::remove_file(&path).unwrap();
    }
}
