//! Settings of a worker.

use std::net::IpAddr;
use std::time::Duration;

use bifrost_endpoint::{Choice, Order, Service, WorkerConfig};

use crate::status::{Failed, Status};
use crate::{
    ORDER_COMPLETE, ORDER_SENT, PROVIDER_AUTO, PROVIDER_SOFT, PROVIDER_VERBS, SERVICE_BOTH, SERVICE_RC, SERVICE_UC,
};

/// Settings of a worker. `bifrost_rdm_config_init` sets the defaults.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Size of this structure, bytes, as the caller knows it. Later versions are longer.
    pub size: u32,
    /// What carries packets: `BIFROST_RDM_PROVIDER_AUTO` (default), `_SOFT`, or `_VERBS`, the RDMA
    /// NIC that has the address.
    pub provider: u32,
    /// The transport service: `BIFROST_RDM_SERVICE_UC` (default), `_RC` or `_BOTH`. Must be equal
    /// at both ends.
    pub service: u32,
    /// Payload of a packet, bytes: 256, 512, 1024, 2048 or 4096. Must be equal at both ends.
    /// Default: 1024.
    pub mtu: u32,
    /// The order in which messages are delivered: `BIFROST_RDM_ORDER_SENT` (default) or
    /// `_COMPLETE`.
    pub order: u32,
    /// UDP port of RoCEv2; 0: any free port. Peers learn it at setup. Default: 4791.
    pub port: u32,
    /// Messages accepted before the application reads them, 1 to 1024. Default: 256.
    pub window: u32,
    /// The longest message accepted, bytes, up to 256 MiB, which is the default.
    pub longest: u32,
    /// Maximum number of connections, 1 to 16,384. Default: 256.
    pub connections: u32,
    /// Target queueing delay of congestion control, us, 1 to 1,000,000. Default: 500.
    pub queue_us: u32,
    /// Added to the time within which a response is expected, us, up to 1,000,000. Default: 500.
    pub patience_us: u32,
    /// How long to poll for packets before sleeping, us, up to 1,000,000. Default: 30.
    pub spin_us: u32,
}

const CONNECTIONS_MAX: u32 = 16_384;
const MICROSECONDS_MAX: u32 = 1_000_000;

impl Config {
    /// The defaults of the underlying library.
    pub(crate) fn new() -> Self {
        let config = WorkerConfig::new(IpAddr::from([0; 16]));
        Self {
            size: size_of::<Self>() as u32,
            provider: PROVIDER_AUTO,
            service: SERVICE_UC,
            mtu: config.mtu.into(),
            order: ORDER_SENT,
            port: config.port.into(),
            window: config.window.into(),
            longest: config.longest,
            connections: config.connections,
            queue_us: config.queue.as_micros() as u32,
            patience_us: config.patience.as_micros() as u32,
            spin_us: config.spin.as_micros() as u32,
        }
    }

    /// Converts to the underlying library's settings.
    pub(crate) fn worker(&self, address: IpAddr) -> Result<WorkerConfig, Failed> {
        let named = |name: &str, what: &str| Failed::invalid(format!("config.{name}: {what}"));
        let within = |name: &str, value: u32, from: u32, to: u32| {
            let fits = (from..=to).contains(&value);
            if fits { Ok(value) } else { Err(named(name, &format!("{value} is not from {from} to {to}"))) }
        };
        let provider = match within("provider", self.provider, PROVIDER_AUTO, PROVIDER_VERBS)? {
            PROVIDER_VERBS => Choice::Verbs,
            PROVIDER_SOFT => Choice::Soft,
            _ => Choice::Auto,
        };
        let service = match self.service {
            SERVICE_RC => Service::Rc,
            SERVICE_UC => Service::Uc,
            SERVICE_BOTH => Service::Both,
            other => return Err(named("service", &format!("{other} is not 1, 2 or 3"))),
        };
        let mtu = [256, 512, 1024, 2048, 4096].into_iter().find(|mtu| u32::from(*mtu) == self.mtu);
        let mtu = mtu.ok_or_else(|| named("mtu", &format!("{} is not 256, 512, 1024, 2048 or 4096", self.mtu)))?;
        let order = if within("order", self.order, ORDER_SENT, ORDER_COMPLETE)? == ORDER_SENT {
            Order::Sent
        } else {
            Order::Complete
        };
        let time =
            |name, value, from| within(name, value, from, MICROSECONDS_MAX).map(|us| Duration::from_micros(us.into()));
        let mut config = WorkerConfig::new(address);
        config.provider = provider;
        config.port = within("port", self.port, 0, 65_535)? as u16;
        config.service = service;
        config.mtu = mtu;
        config.order = order;
        config.window = within("window", self.window, 1, 1024)? as u16;
        config.longest = within("longest", self.longest, 1, config.longest)?;
        config.queue = time("queue_us", self.queue_us, 1)?;
        config.patience = time("patience_us", self.patience_us, 0)?;
        config.spin = time("spin_us", self.spin_us, 0)?;
        config.connections = within("connections", self.connections, 1, CONNECTIONS_MAX)?;
        Ok(config)
    }
}

/// Sets the defaults.
///
/// # Safety
/// `config` must be null or writable for `size` bytes, the size of the structure as the caller
/// knows it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_config_init(config: *mut Config, size: usize) -> Status {
    crate::status::run(|| {
        crate::handle::writable(config)?;
        if size != size_of::<Config>() {
            return Err(Failed::invalid("the size matches no version of bifrost_rdm_config"));
        }
        // SAFETY: the caller guarantees that it is writable.
        unsafe { config.write(Config::new()) };
        Ok(())
    })
}
