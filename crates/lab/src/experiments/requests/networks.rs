//! Containers with clients and servers, and the networks that services of the switch are compared with: a kernel that
//! forwards between veth pairs, and Open vSwitch with its datapath in user space.

use std::net::Ipv4Addr;

use anyhow::Result;

use crate::lab::{Lab, Network};
use crate::netns::Namespace;
use crate::programs::open_vswitch::{Datapath, OpenVswitch};
use crate::topology::Guest;

/// The client's address in a reference network.
pub(crate) const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);
/// MAC address of the gateway that an Open vSwitch stands for.
const GATEWAY_MAC: &str = "02:00:00:00:01:fe";

/// The address of server `number`, from 0, in a reference network.
pub(crate) const fn server(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(203, 0, 113 + number, 1)
}

/// Creates a container with the number `n`, 1 to 250, without a device. Clients use the first processor, like the
/// switch, and `servers` the second.
///
/// # Errors
/// The namespace cannot be created.
pub(crate) fn container(lab: &Lab, (n, name): (u8, &str), address: Ipv4Addr, is_server: bool) -> Result<Guest> {
    let mut namespace = Namespace::create(format!("{}-{n}-{name}", lab.run.id()))?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if !lab.options.share_processors && processors > 1 {
        namespace.pin(usize::from(is_server));
    }
    let mac = format!("02:00:00:00:01:{n:02x}");
    Ok(Guest { namespace, name: name.to_owned(), address, mac })
}

/// The `[[port]]` of a container in the VPC `vni`; `more` are further lines.
pub(crate) fn port(guest: &Guest, vni: u32, more: &str) -> String {
    format!(
        "[[port]]\nname = \"{}\"\nvni = {vni}\nmac = \"{}\"\naddresses = [\"{}/24\"]\nnetns = \"{}\"\ndevice = \
         \"eth0\"\n{more}",
        guest.name,
        guest.mac,
        guest.address,
        guest.namespace.name()
    )
}

/// A client, servers, and what forwards between them. Each has a veth pair and its own subnet; the forwarder has
/// `.254` in each.
#[derive(Debug)]
pub(crate) struct Reference {
    /// The switch; it ends before its namespace is deleted.
    switch: Option<OpenVswitch>,
    /// The client, with the address [`CLIENT`].
    pub(crate) client: Guest,
    /// The servers, with the addresses [`server`].
    pub(crate) servers: Vec<Guest>,
    /// What forwards; deleted last.
    middle: Namespace,
}

impl Reference {
    /// A kernel that forwards, with nftables `rules`. The client is at its device `in`, servers are at `out0`, `out1`
    /// and so on. Containers get numbers from `first` on.
    ///
    /// # Errors
    /// The network cannot be built, or the rules are refused.
    pub(crate) fn nftables(lab: &Lab, first: u8, servers: u8, rules: &str) -> Result<Self> {
        let reference = Self::build(lab, ("nft", first), servers)?;
        let router = &reference.middle;
        let mut batch = String::from("addr add 10.1.0.254/24 dev in\n");
        for number in 0..servers {
            batch += &format!("addr add 203.0.{}.254/24 dev out{number}\n", 113 + number);
        }
        router.ip_batch(&batch)?;
        router.write_sysctls(&[("net/ipv4/ip_forward", "1")])?;
        router.run("nft", &["-f", "-"], rules)?;
        Ok(reference)
    }

    /// Open vSwitch with its datapath in user space. The client is at port 1 and server `n` at port 2 + `n` of the
    /// bridge. `groups` are OpenFlow groups; `flows` gets the MAC addresses of client and servers. `network` keeps its
    /// files.
    ///
    /// # Errors
    /// The network cannot be built, or the flows are refused.
    pub(crate) fn open_vswitch(
        (lab, network, label): (&Lab, &Network, &str),
        first: u8,
        servers: u8,
        groups: &[String],
        flows: impl FnOnce(&str, &[String]) -> String,
    ) -> Result<Self> {
        let mut reference = Self::build(lab, ("ovs", first), servers)?;
        let directory = network.directory().join("reference.ovs");
        let logs = lab.logs(label).join("ovs");
        let switch = OpenVswitch::start(&reference.middle, Datapath::Userspace, directory, &logs)?;
        let mut words = String::from("-- add-br br0 -- set bridge br0 datapath_type=netdev fail_mode=secure");
        for (device, port) in Self::devices(servers).zip(1..) {
            words += &format!(" -- add-port br0 {device} -- set interface {device} ofport_request={port}");
        }
        switch.configure(&words)?;
        for group in groups {
            switch.add_group("br0", group)?;
        }
        let macs: Vec<String> = reference.servers.iter().map(|server| server.mac.clone()).collect();
        switch.replace_flows("br0", &flows(&reference.client.mac, &macs))?;
        for guest in reference.guests() {
            let [a, b, c, _] = guest.address.octets();
            guest
                .namespace
                .ip_batch(&format!("neigh add {a}.{b}.{c}.254 lladdr {GATEWAY_MAC} dev eth0 nud permanent\n"))?;
            // Open vSwitch does not complete checksums that a container leaves to its device.
            guest.namespace.run("ethtool", &["-K", "eth0", "tx", "off"], "")?;
        }
        reference.switch = Some(switch);
        Ok(reference)
    }

    /// Returns an error if the switch has ended.
    ///
    /// # Errors
    /// The switch has ended.
    pub(crate) fn check_alive(&mut self) -> Result<()> {
        self.switch.as_mut().map_or(Ok(()), OpenVswitch::check_alive)
    }

    fn build(lab: &Lab, (name, first): (&str, u8), servers: u8) -> Result<Self> {
        let middle = container(lab, (first, &format!("{name}-middle")), Ipv4Addr::UNSPECIFIED, false)?.namespace;
        let client = container(lab, (first + 1, &format!("{name}-client")), CLIENT, false)?;
        let create = |n| container(lab, (first + 2 + n, &format!("{name}-server{n}")), server(n), true);
        let servers: Vec<Guest> = (0..servers).map(create).collect::<Result<_>>()?;
        let reference = Reference { switch: None, client, servers, middle };
        for (device, guest) in Self::devices(reference.servers.len() as u8).zip(reference.guests()) {
            let Guest { namespace, mac, address, .. } = guest;
            reference.middle.ip_batch(&format!(
                "link add {device} type veth peer name eth0 address {mac} netns {}\nlink set {device} up\n",
                namespace.name()
            ))?;
            let [a, b, c, _] = address.octets();
            namespace.ip_batch(&format!(
                "addr add {address}/24 dev eth0\nlink set eth0 up\nroute add default via {a}.{b}.{c}.254 dev eth0\n"
            ))?;
        }
        Ok(reference)
    }

    /// The middle's devices: the client's, and the servers'.
    fn devices(servers: u8) -> impl Iterator<Item = String> {
        ["in".to_owned()].into_iter().chain((0..servers).map(|number| format!("out{number}")))
    }

    /// The client and the servers, in the order of [`Reference::devices`].
    fn guests(&self) -> impl Iterator<Item = &Guest> {
        [&self.client].into_iter().chain(&self.servers)
    }
}
