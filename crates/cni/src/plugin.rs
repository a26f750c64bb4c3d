//! The commands.

use std::time::Duration;

use bifrost_control::api::{ApplySpec, ObjectEntry, ObjectsQuery};
use bifrost_control::client::{Client, ClientError};
use bifrost_control::config::Kind;
use serde_json::Value;

use crate::answer::{self, Attached};
use crate::attachment::{self, Attachment};
use crate::call::{Call, Command, Interface};
use crate::error::{Code, Error};
use crate::ipam::Ipam;
use crate::kernel::Namespace;
use crate::network::{self, Network};

/// Maximum time for `bifrostd` to report that it is ready.
const READY: Duration = Duration::from_secs(2);

/// Executes a call, with the configuration from standard input. Returns the result to print, if any.
///
/// # Errors
/// The failure; a failed [`Command::Add`] is undone.
pub fn run(call: &Call, configuration: &[u8]) -> Result<Option<Value>, Error> {
    if call.command == Command::Version {
        let asked: Option<Value> = serde_json::from_slice(configuration).ok();
        return Ok(Some(answer::versions(asked.as_ref().and_then(|asked| asked["cniVersion"].as_str()))));
    }
    let network = Network::read(configuration)?;
    let client = Client::new(&network.socket).map_err(refused)?;
    let ipam = network.ipam.as_deref().map(|kind| Ipam { kind, path: &call.path, configuration });
    let plugin = Plugin { network: &network, client: &client, ipam };
    match (&call.interface, call.command) {
        (Some(interface), Command::Add) => {
            let attached = plugin.add(interface, call.netns.as_deref().unwrap_or_default())?;
            Ok(Some(attached.to_json(network.version)))
        }
        (Some(interface), Command::Del) => plugin.del(interface).map(|()| None),
        (Some(interface), Command::Check) => {
            plugin.check(interface, call.netns.as_deref().unwrap_or_default()).map(|()| None)
        }
        (_, Command::Gc) => plugin.gc().map(|()| None),
        _ => plugin.status().map(|()| None),
    }
}

/// The version for error results: the configuration's, if it is supported.
pub fn version_of(configuration: &[u8]) -> &'static str {
    let value: Option<Value> = serde_json::from_slice(configuration).ok();
    let version = value.and_then(|value| network::version(&value).ok());
    version.unwrap_or(answer::Version::V1_1_0).text()
}

struct Plugin<'a> {
    network: &'a Network,
    client: &'a Client,
    ipam: Option<Ipam<'a>>,
}

impl Plugin<'_> {
    fn add(&self, interface: &Interface, netns: &str) -> Result<Attached, Error> {
        // bifrostd would wait for a namespace that does not exist.
        let namespace = Namespace::open(netns)?;
        // Checked before anything is created: a failed call undoes its changes, and must not touch an earlier
        // attachment.
        let key = attachment::port_name(&self.network.name, interface);
        if !self.ports(Some(key))?.is_empty() {
            return Err(exists(interface));
        }
        let given = match self.ipam {
            Some(ipam) => ipam.add()?,
            None => attachment::chosen(&self.network.addresses),
        };
        self.attach(interface, netns, &namespace, given).map_err(|error| {
            // If another call has attached the container meanwhile, its port and addresses stay. Otherwise addresses
            // are freed only if no port is known to have them: a response may have been lost.
            if error.code == Code::Exists || self.del(interface).is_ok() {
                return error;
            }
            let message = format!("{}; the partial attachment could not be removed; DEL will remove it", error.message);
            Error { message, ..error }
        })
    }

    fn attach(
        &self,
        interface: &Interface,
        netns: &str,
        namespace: &Namespace<'_>,
        given: Attached,
    ) -> Result<Attached, Error> {
        let Attachment { item, attached, routes } = Attachment::new(self.network, interface, netns, given)?;
        let report = self.client.apply(&ApplySpec { items: vec![item], wait_for_devices: true }).map_err(refused)?;
        if report.set == 0 {
            return Err(exists(interface));
        }
        namespace.add_routes(&interface.name, &routes)?;
        Ok(attached)
    }

    fn del(&self, interface: &Interface) -> Result<(), Error> {
        // Addresses are freed only after the port is gone.
        self.remove(vec![attachment::port_name(&self.network.name, interface)])?;
        self.ipam.map_or(Ok(()), |ipam| ipam.call("DEL"))
    }

    fn check(&self, interface: &Interface, netns: &str) -> Result<(), Error> {
        let Some(previous) = &self.network.previous else {
            return Err(Error::new(Code::Configuration, "CHECK needs prevResult"));
        };
        let key = attachment::port_name(&self.network.name, interface);
        let ports = self.ports(Some(key))?;
        let port = ports.first().map(|entry| &entry.spec);
        attachment::check(interface, previous, port)?;
        let addresses = port.and_then(|port| port["addresses"].as_array()).into_iter().flatten();
        let addresses: Vec<_> = addresses.filter_map(|address| address.as_str()?.parse().ok()).collect();
        Namespace::open(netns)?.check(&interface.name, &addresses)?;
        self.ipam.map_or(Ok(()), |ipam| ipam.call("CHECK"))
    }

    fn gc(&self) -> Result<(), Error> {
        let Some(valid) = &self.network.valid else {
            return Err(Error::new(Code::Configuration, "GC needs cni.dev/valid-attachments"));
        };
        let valid: Vec<_> = valid.iter().map(|i| attachment::port_name(&self.network.name, i)).collect();
        let mut stale: Vec<_> = self.ports(None)?.into_iter().map(|entry| entry.key).collect();
        stale.retain(|key| !valid.contains(key));
        self.remove(stale)?;
        self.ipam.map_or(Ok(()), |ipam| ipam.call("GC"))
    }

    fn status(&self) -> Result<(), Error> {
        let unavailable = |error: Error| Error::new(Code::Unavailable, error.message);
        self.client.wait_ready(READY).map_err(refused).map_err(unavailable)?;
        let is_new = self.network.version == answer::Version::V1_1_0;
        let ipam = self.ipam.filter(|_| is_new);
        ipam.map_or(Ok(()), |ipam| ipam.call("STATUS").map_err(unavailable))
    }

    /// The network's ports, or one of them.
    fn ports(&self, key: Option<String>) -> Result<Vec<ObjectEntry>, Error> {
        let owner = Some(attachment::owner(&self.network.name));
        let mut query = ObjectsQuery { kind: Some(Kind::Port), owner, key, ..ObjectsQuery::default() };
        let mut ports = Vec::new();
        loop {
            let list = self.client.objects(&query).map_err(refused)?;
            ports.extend(list.objects);
            match list.next {
                Some(next) => query.from = Some(next),
                None => return Ok(ports),
            }
        }
    }

    fn remove(&self, keys: Vec<String>) -> Result<(), Error> {
        let items: Vec<_> = keys.into_iter().map(|key| attachment::removal(&self.network.name, key)).collect();
        for items in items.chunks(bifrost_control::api::MAX_APPLY_ITEMS) {
            self.client.apply(&ApplySpec { items: items.to_vec(), wait_for_devices: true }).map_err(refused)?;
        }
        Ok(())
    }
}

fn exists(interface: &Interface) -> Error {
    let text =
        format!("container {} has the interface {} in this network already", interface.container, interface.name);
    Error::new(Code::Exists, text)
}

fn refused(error: ClientError) -> Error {
    let code = match error {
        ClientError::NotRunning(_) | ClientError::Timeout { .. } => Code::Later,
        ClientError::Api(_) => Code::Refused,
        _ => Code::Io,
    };
    Error::new(code, error.to_string())
}
