//! State shared by all calls: devices, workers, the log, and the thread that keeps connections
//! alive.

use std::ffi::{CStr, CString, c_int};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use bifrost_endpoint::{Choice, Worker, WorkerConfig};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::devices::{self, Device};
use crate::fail::Fail;
use crate::ffi::{LOG_FLAGS, LOG_INFO, LOG_WARN, Logger};
use crate::frame::{HEADER, PIECE};
use crate::hub::Hub;

/// The plugin's state.
#[derive(Debug)]
pub(crate) struct Plugin {
    pub(crate) devices: Vec<Device>,
    /// The workers of the first device, then those of the next one, and so on.
    hubs: Vec<OnceLock<Mutex<Hub>>>,
    workers: usize,
    mtu: u16,
    provider: Choice,
    next: AtomicUsize,
    /// Serializes the creation of hubs.
    creation: Mutex<()>,
}

static PLUGIN: OnceLock<Plugin> = OnceLock::new();
static LOGGER: Mutex<Option<Logger>> = Mutex::new(None);
static KEEPER: OnceLock<()> = OnceLock::new();

/// Maximum number of workers per device; with the maximum number of devices, their numbers fit into
/// 12 bits.
const WORKERS_MAX: usize = 64;
/// Maximum number of connections per worker.
const CONNECTIONS: u32 = 4096;
/// The keeper polls workers that were not polled for this time.
const NEGLECTED_AFTER: Duration = Duration::from_micros(500);
/// Polls of a neglected worker at a time.
const TURNS: usize = 16;
/// Time limit for delivering sent data on a closed connection.
const FLUSH_TIME: Duration = Duration::from_secs(5);

/// Sets NCCL's log, and finds the devices once per process.
pub(crate) fn init(logger: Option<Logger>) -> Result<(), Fail> {
    if let (Some(logger), Ok(mut known)) = (logger, LOGGER.lock()) {
        *known = Some(logger);
    }
    if PLUGIN.get().is_none() {
        let plugin = Plugin::new(|name| std::env::var(name).ok())?;
        for device in &plugin.devices {
            let name = device.name.to_string_lossy();
            log(LOG_INFO, &format!("{name}: {}, {} Mbit/s", device.address, device.speed_mbps));
        }
        // Another thread may have been faster, with the same result.
        let _ = PLUGIN.set(plugin);
    }
    Ok(())
}

/// The state that [`init`] has set.
pub(crate) fn plugin() -> Result<&'static Plugin, Fail> {
    PLUGIN.get().ok_or_else(|| Fail::Usage("init was not called".to_owned()))
}

impl Plugin {
    /// Reads the settings from the environment.
    fn new(variable: impl Fn(&str) -> Option<String>) -> Result<Self, Fail> {
        let devices = devices::find(variable("BIFROST_NCCL_ADDRESSES").as_deref()).map_err(Fail::System)?;
        let number = |name: &str, default: usize, fits: &dyn Fn(usize) -> bool, what: &str| match variable(name) {
            None => Ok(default),
            Some(text) => { text.trim().parse().ok().filter(|value| fits(*value)) }
                .ok_or_else(|| Fail::Argument(format!("{name}: {text:?} is not {what}"))),
        };
        let workers =
            number("BIFROST_NCCL_WORKERS", 1, &|value| (1..=WORKERS_MAX).contains(&value), "a number from 1 to 64")?;
        let mtus = [256, 512, 1024, 2048, 4096];
        let mtu = number("BIFROST_NCCL_MTU", 1024, &|value| mtus.contains(&value), "256, 512, 1024, 2048 or 4096")?;
        let provider = match variable("BIFROST_NCCL_PROVIDER").as_deref().map(str::trim) {
            None | Some("auto") => Choice::Auto,
            Some("verbs") => Choice::Verbs,
            Some("soft") => Choice::Soft,
            Some(other) => {
                return Err(Fail::Argument(format!("BIFROST_NCCL_PROVIDER: {other:?} is not auto, verbs or soft")));
            }
        };
        let hubs = (0..devices.len() * workers).map(|_| OnceLock::new()).collect();
        let (next, creation) = (AtomicUsize::new(0), Mutex::new(()));
        Ok(Self { devices, hubs, workers, mtu: mtu as u16, provider, next, creation })
    }

    pub(crate) fn device(&self, device: c_int) -> Result<&Device, Fail> {
        let known = usize::try_from(device).ok().and_then(|at| self.devices.get(at));
        known.ok_or_else(|| {
            Fail::Argument(format!("device {device} does not exist; there are {} devices", self.devices.len()))
        })
    }

    /// Selects the workers of a device in turn.
    pub(crate) fn choose(&self, device: c_int) -> Result<u16, Fail> {
        let address = self.device(device)?.address;
        let chosen = self.next.fetch_add(1, Ordering::Relaxed) % self.workers;
        let at = device as usize * self.workers + chosen;
        let made = || Fail::Internal("an earlier call panicked".to_owned());
        let _making = self.creation.lock().map_err(|_| made())?;
        if self.hubs[at].get().is_none() {
            let worker = self.worker(address)?;
            log(LOG_INFO, &worker.provider());
            let _ = self.hubs[at].set(Mutex::new(Hub::new(worker)?));
            KEEPER.get_or_init(|| {
                let named = thread::Builder::new().name("bifrost-nccl".to_owned());
                if let Err(error) = named.spawn(keep) {
                    log(
                        LOG_WARN,
                        &format!("cannot start the thread that keeps connections alive while NCCL computes: {error}"),
                    );
                }
            });
        }
        Ok(at as u16)
    }

    /// Creates a worker with the RDMA NIC of the address, or else in software with a free port.
    /// Only one process can use the NIC's port.
    fn worker(&self, address: IpAddr) -> Result<Worker, Fail> {
        let mut config = WorkerConfig::new(address);
        config.mtu = self.mtu;
        config.longest = (HEADER + PIECE) as u32;
        config.connections = CONNECTIONS;
        config.spin = Duration::ZERO;
        if self.provider != Choice::Soft {
            config.provider = Choice::Verbs;
            match Worker::new(config) {
                Ok(worker) => return Ok(worker),
                Err(error) if self.provider == Choice::Verbs => return Err(Fail::System(error.to_string())),
                Err(error) => log(LOG_INFO, &format!("using software: {error}")),
            }
        }
        config.provider = Choice::Soft;
        config.port = 0;
        Worker::new(config).map_err(|error| Fail::System(error.to_string()))
    }

    /// Locks a worker for this thread.
    pub(crate) fn hub(&self, at: u16) -> Result<MutexGuard<'_, Hub>, Fail> {
        let hub = self.hubs.get(usize::from(at)).and_then(OnceLock::get);
        let hub = hub.ok_or_else(|| Fail::Argument("the pointer is not from this plugin".to_owned()))?;
        hub.lock().map_err(|_| Fail::Internal("an earlier call of this worker panicked".to_owned()))
    }

    /// Closes a connection once all sent data has arrived, or after [`FLUSH_TIME`].
    pub(crate) fn close(&self, at: u16, id: u32, sender: bool) -> Result<(), Fail> {
        let until = Instant::now() + FLUSH_TIME;
        loop {
            let mut hub = self.hub(at)?;
            hub.poll()?;
            let known = hub.comms.get_mut(&id).filter(|comm| comm.is_sender() == sender);
            let comm = known.ok_or_else(|| Fail::Argument("unknown connection".to_owned()))?;
            comm.progress();
            let flushed = comm.is_flushed();
            if flushed || Instant::now() > until {
                hub.comms.remove(&id);
                if !flushed {
                    log(LOG_WARN, "a connection was closed before all sent data had arrived");
                }
                return Ok(());
            }
            drop(hub);
            thread::sleep(NEGLECTED_AFTER / 10);
        }
    }
}

/// Writes to NCCL's log.
pub(crate) fn log(level: c_int, text: &str) {
    let logger = LOGGER.lock().map_or(None, |logger| *logger);
    let (Some(logger), Ok(text)) = (logger, CString::new(text.replace('\0', " "))) else { return };
    const FILE: &CStr = c"bifrost";
    // SAFETY: NCCL provided the function for this; the format takes one string.
    unsafe { logger(level, LOG_FLAGS, FILE.as_ptr(), 0, c"NET/Bifrost : %s".as_ptr(), text.as_ptr()) };
}

/// Polls workers that NCCL does not poll: it calls while it waits, but not while it computes. A
/// peer that hears nothing for seconds would consider the connection dead.
fn keep() {
    let Ok(plugin) = plugin() else { return };
    loop {
        let hubs: Vec<&Mutex<Hub>> = plugin.hubs.iter().filter_map(OnceLock::get).collect();
        let mut due = Duration::from_millis(100);
        let mut driven = false;
        let mut descriptors = Vec::with_capacity(hubs.len());
        for hub in hubs {
            match hub.try_lock() {
                Ok(mut hub) if hub.polled.elapsed() >= NEGLECTED_AFTER => {
                    let before = hub.polled;
                    // NCCL's next call reports the same error.
                    for _ in 0..TURNS {
                        if !matches!(hub.progress(), Ok(true)) {
                            break;
                        }
                    }
                    // Neglected until NCCL polls again.
                    hub.polled = before;
                    due = due.min(hub.worker.due());
                    descriptors.push(hub.descriptor.clone());
                }
                Err(TryLockError::Poisoned(_)) => {}
                _ => driven = true,
            }
        }
        if driven {
            due = due.min(NEGLECTED_AFTER);
            thread::sleep(NEGLECTED_AFTER);
        }
        let timeout = Timespec { tv_sec: 0, tv_nsec: due.subsec_nanos().max(50_000).into() };
        let mut waits: Vec<PollFd<'_>> =
            descriptors.iter().map(|descriptor| PollFd::from_borrowed_fd(descriptor.as_fd(), PollFlags::IN)).collect();
        let _ = poll(&mut waits, Some(&timeout));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_checked() {
        let with = |name: &'static str, value: &'static str| {
            Plugin::new(move |asked| {
                let known = [("BIFROST_NCCL_ADDRESSES", "::1"), (name, value)];
                known.iter().rev().find(|(known, _)| *known == asked).map(|(_, value)| (*value).to_owned())
            })
        };
        let plugin = with("BIFROST_NCCL_MTU", "4096").unwrap();
        assert_eq!((plugin.devices.len(), plugin.workers, plugin.mtu), (1, 1, 4096));
        assert!(plugin.device(0).is_ok() && plugin.device(1).is_err() && plugin.device(-1).is_err());
        for (name, value) in [
            ("BIFROST_NCCL_MTU", "1500"),
            ("BIFROST_NCCL_PROVIDER", "nic"),
            ("BIFROST_NCCL_WORKERS", "0"),
            ("BIFROST_NCCL_WORKERS", "65"),
            ("BIFROST_NCCL_WORKERS", "many"),
            ("BIFROST_NCCL_ADDRESSES", "2001:db8::1"),
        ] {
            let error = with(name, value).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
