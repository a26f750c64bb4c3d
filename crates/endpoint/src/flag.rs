//! A file by which an operator changes the service of a running process.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use bifrost_rdm::Service;
use rustix::fs::OFlags;

/// Longer than any valid content.
const LONGEST: u64 = 16;

/// A file that contains `uc` or `rc`, and its content when last read.
#[derive(Debug)]
pub(crate) struct Flag {
    path: PathBuf,
    pub(crate) service: Service,
    /// Why the file was unusable when last read.
    pub(crate) problem: Option<String>,
}

impl Flag {
    /// # Errors
    /// Why the file is unusable.
    pub(crate) fn new(path: PathBuf) -> Result<Self, String> {
        let service = read(&path).map_err(|problem| format!("{}: {problem}", path.display()))?;
        Ok(Self { path, service, problem: None })
    }

    /// Reads the file again. Returns the service if it has changed. An unusable file changes nothing.
    pub(crate) fn reload(&mut self) -> Option<Service> {
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
    // Do not block on a pipe without a writer.
    let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path);
    let read = file.and_then(|file| file.take(LONGEST).read_to_string(&mut text));
    read.map_err(|error: io::Error| error.to_string())?;
    match text.trim().to_ascii_lowercase().as_str() {
        "uc" => Ok(Service::Uc),
        "rc" => Ok(Service::Rc),
        _ => Err("it contains neither `uc` nor `rc`".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_valid_content_changes_the_service() {
        let path = std::env::temp_dir().join(format!("bifrost-flag-{}", std::process::id()));
        let _ = fs::remove_file(&path);
        assert!(Flag::new(path.clone()).unwrap_err().contains("No such file"));
        fs::write(&path, "udp").unwrap();
        assert!(Flag::new(path.clone()).unwrap_err().contains("neither"));
        fs::write(&path, "uc\n").unwrap();
        let mut flag = Flag::new(path.clone()).unwrap();
        assert_eq!((flag.service, flag.reload()), (Service::Uc, None));
        fs::write(&path, " RC ").unwrap();
        assert_eq!((flag.reload(), flag.reload()), (Some(Service::Rc), None));
        // Incomplete, too long, not text, a directory, a pipe without a writer, nothing.
        let long = "rc".repeat(1 << 20);
        for bytes in [b"".as_slice(), b"u", long.as_bytes(), &[0xff; 9]] {
            fs::write(&path, bytes).unwrap();
            assert_eq!((flag.reload(), flag.service), (None, Service::Rc));
            assert!(flag.problem.is_some(), "{bytes:?}");
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(flag.reload().is_none() && flag.problem.take().is_some());
        fs::remove_dir(&path).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(flag.reload().is_none() && flag.problem.take().is_some());
        fs::remove_file(&path).unwrap();
        assert!(flag.reload().is_none() && flag.problem.take().is_some());
        fs::write(&path, "uc").unwrap();
        assert_eq!((flag.reload(), flag.problem), (Some(Service::Uc), None));
        fs::remove_file(&path).unwrap();
    }
}
