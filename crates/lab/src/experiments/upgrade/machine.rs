//! A QEMU machine behind a port of the first host, and requests from the second host's guest to it.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use anyhow::Result;

use crate::daemon::VNI;
use crate::lab::Network;
use crate::programs::tcp_requests::{Answers, TcpRequests};
use crate::qemu::{Device, Image, Qemu};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 9);
const MAC: &str = "02:00:00:00:00:09";
const MTU: u32 = 1450;
const PORT: u16 = 5_001;

/// The running machine.
pub(super) struct Machine {
    _qemu: Qemu,
    requests: TcpRequests,
}

impl Machine {
    /// Adds the port to the configuration of the first host, and its route to that of the second; boots the machine,
    /// and sends requests.
    pub(super) fn start(network: &Network, logs: &Path) -> Result<Self> {
        let directory = network.directory().join("machine");
        std::fs::create_dir_all(&directory)?;
        let socket = directory.join("port.vhost");
        let [here, there] = &network.topology.hosts[..] else { anyhow::bail!("there are not two hosts") };
        let port = format!(
            "\n[[port]]\nname = \"machine\"\nkind = \"vhost-user\"\nmode = \"client\"\nsocket = \"{}\"\nvni = {VNI}\n\
             mac = \"{MAC}\"\naddresses = [\"{ADDRESS}/24\"]\nmtu = {MTU}\n",
            socket.display()
        );
        let route =
            format!("\n[[route]]\nvni = {VNI}\nprefix = \"{ADDRESS}/32\"\npeer = \"{}\"\nmac = \"{MAC}\"\n", here.name);
        network.overlay.daemons[0].reconfigure(|text| text + &port)?;
        network.overlay.daemons[1].reconfigure(|text| text + &route)?;
        let image = Image::build(&directory, ADDRESS, MTU, &format!("nc -ll -p {PORT} -e cat"))?;
        let device = Device::VhostUser(&socket);
        let mut qemu = Qemu::start(&image, &here.namespace, ("machine", MAC), device, (&directory, logs), None)?;
        qemu.wait_until_ready()?;
        let requests = TcpRequests::start(&there.guest.namespace, SocketAddr::from((ADDRESS, PORT)))?;
        Ok(Self { _qemu: qemu, requests })
    }

    /// Ends the machine.
    pub(super) fn finish(self) -> Result<Answers> {
        self.requests.finish()
    }
}
