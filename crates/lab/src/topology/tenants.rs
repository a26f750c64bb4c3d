//! More tenants on the hosts of a network: each has its own VPC, with a guest on each host.

use std::net::Ipv4Addr;

use anyhow::Result;

use crate::state::Run;
use crate::topology::overlay::choose_congestion_control;
use crate::topology::{GUEST_MTU, Guest, Plan};

/// The VNI of the first tenant; the others follow.
const FIRST_VNI: u32 = 200;

/// Tenants in addition to the one that every network has. Dropping them removes their guests.
#[derive(Debug)]
pub struct Tenants {
    /// The guests of each tenant, in the hosts' order.
    pub guests: Vec<Vec<Guest>>,
}

impl Tenants {
    /// Creates the guests of `count` tenants (0..=8); they have no devices yet.
    ///
    /// # Errors
    /// Namespaces cannot be created.
    pub fn create(run: &Run, count: u8, plan: Plan) -> Result<Self> {
        let guest = |tenant: u8, host: u8| {
            let letter = char::from(b'a' + host);
            let name = format!("tenant-{}-{letter}", tenant + 1);
            let address = Ipv4Addr::new(10, 1 + tenant, 0, host + 1);
            Guest::create(run, name, address, format!("02:00:00:00:{:02x}:{:02x}", tenant + 1, host + 1), host, plan)
        };
        let guests = |tenant: u8| (0..plan.hosts).map(|host| guest(tenant, host)).collect::<Result<Vec<Guest>>>();
        Ok(Self { guests: (0..count).map(guests).collect::<Result<_>>()? })
    }

    /// Their part of each host's configuration, in the hosts' order.
    pub fn configuration(&self, reliability: &str) -> Vec<String> {
        let hosts = self.guests.first().map_or(0, Vec::len);
        (0..hosts).map(|host| self.on_host(host, reliability)).collect()
    }

    fn on_host(&self, host: usize, reliability: &str) -> String {
        let mut text = String::new();
        for (vni, guests) in (FIRST_VNI..).zip(&self.guests) {
            let own = &guests[host];
            text += &format!(
                "[[vpc]]\nvni = {vni}\nreliability = \"{reliability}\"\n\n\
                 [[port]]\nname = \"{}\"\nvni = {vni}\nmac = \"{}\"\naddresses = [\"{}/24\"]\nmtu = {GUEST_MTU}\n\
                 kind = \"tap\"\nnetns = \"{}\"\ndevice = \"eth0\"\n\n",
                own.name,
                own.mac,
                own.address,
                own.namespace.name(),
            );
            for (number, other) in guests.iter().enumerate().filter(|(number, _)| *number != host) {
                text += &format!(
                    "[[route]]\nvni = {vni}\nprefix = \"{}/32\"\npeer = \"host-{}\"\nmac = \"{}\"\n\n",
                    other.address,
                    char::from(b'a' + number as u8),
                    other.mac,
                );
            }
        }
        text
    }

    /// Selects Cubic, as for all guests. The guests must have their devices already.
    ///
    /// # Errors
    /// A guest has no device.
    pub fn choose_cubic(&self) -> Result<()> {
        self.guests.iter().flatten().try_for_each(|guest| choose_congestion_control(guest, "cubic"))
    }
}
