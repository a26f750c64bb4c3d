//! Netlink requests inside a container's network namespace.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd as _;

use futures_util::TryStreamExt as _;
use ipnet::IpNet;
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use rtnetlink::packet_route::route::RouteMessage;
use rtnetlink::{Handle, RouteMessageBuilder};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::error::{Code, Error};

/// A network namespace.
#[derive(Debug)]
pub struct Namespace<'a> {
    path: &'a str,
    file: File,
}

impl<'a> Namespace<'a> {
    /// Opens the namespace at that path.
    ///
    /// # Errors
    /// [`Code::Environment`]: it cannot be opened.
    pub fn open(path: &'a str) -> Result<Namespace<'a>, Error> {
        let file = File::open(path).map_err(|e| {
            Error::new(Code::Environment, format!("CNI_NETNS {path}: cannot open the network namespace: {e}"))
        })?;
        Ok(Namespace { path, file })
    }

    /// Adds routes over an interface.
    ///
    /// # Errors
    /// [`Code::Io`]: the kernel refuses a route; the error names it.
    pub fn add_routes(&self, interface: &str, routes: &[(IpNet, IpAddr)]) -> Result<(), Error> {
        if routes.is_empty() {
            return Ok(());
        }
        self.within(async |handle| {
            let Some(link) = link(&handle, interface).await? else {
                return Err(self.wrong(Code::Io, format!("{interface} no longer exists")));
            };
            for &(to, by) in routes {
                let added = handle.route().add(route(to, by, link.header.index)?).execute().await;
                added.map_err(|e| self.wrong(Code::Io, format!("cannot add the route to {to} by {by}: {e}")))?;
            }
            Ok(())
        })
    }

    /// Checks that an interface exists, is up, and has these addresses.
    ///
    /// # Errors
    /// [`Code::Changed`]: the error names the difference.
    pub fn check(&self, interface: &str, addresses: &[IpNet]) -> Result<(), Error> {
        self.within(async |handle| {
            let Some(link) = link(&handle, interface).await? else {
                return Err(self.wrong(Code::Changed, format!("{interface} is gone; attach the container again")));
            };
            if !link.header.flags.contains(LinkFlags::Up) {
                return Err(self.wrong(Code::Changed, format!("{interface} is down")));
            }
            let mut messages = handle.address().get().set_link_index_filter(link.header.index).execute();
            let mut there = Vec::new();
            while let Some(message) = messages.try_next().await.map_err(|e| self.failed(&e))? {
                let address = message.attributes.iter().find_map(|attribute| match attribute {
                    AddressAttribute::Address(address) => Some(*address),
                    _ => None,
                });
                there.extend(address.and_then(|address| IpNet::new(address, message.header.prefix_len).ok()));
            }
            match addresses.iter().find(|address| !there.contains(address)) {
                Some(gone) => Err(self.wrong(Code::Changed, format!("{interface} no longer has {gone}"))),
                None => Ok(()),
            }
        })
    }

    /// Runs work inside the namespace, on a separate thread, because a thread that enters it does not return.
    fn within<T: Send>(&self, work: impl AsyncFnOnce(Handle) -> Result<T, Error> + Send) -> Result<T, Error> {
        let inside = || {
            move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network))
                .map_err(|e| self.failed(&e))?;
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_io().build().map_err(|e| self.failed(&e))?;
            runtime.block_on(async {
                let (connection, handle, _) = rtnetlink::new_connection().map_err(|e| self.failed(&e))?;
                let connection = tokio::spawn(connection);
                let result = work(handle).await;
                connection.abort();
                result
            })
        };
        std::thread::scope(|scope| match scope.spawn(inside).join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }

    fn wrong(&self, code: Code, what: String) -> Error {
        Error::new(code, format!("in {}: {what}", self.path))
    }

    fn failed(&self, error: &dyn std::fmt::Display) -> Error {
        self.wrong(Code::Io, format!("cannot communicate with the kernel: {error}"))
    }
}

/// The interface with that name.
async fn link(handle: &Handle, name: &str) -> Result<Option<LinkMessage>, Error> {
    // Not looked up by name: the kernel's error for an unknown name looks like any other.
    let mut links = handle.link().get().execute();
    let failed = |e: rtnetlink::Error| Error::new(Code::Io, format!("cannot list the container's interfaces: {e}"));
    while let Some(link) = links.try_next().await.map_err(failed)? {
        let is_it = |attribute: &LinkAttribute| matches!(attribute, LinkAttribute::IfName(n) if n == name);
        if link.attributes.iter().any(is_it) {
            return Ok(Some(link));
        }
    }
    Ok(None)
}

fn route(to: IpNet, by: IpAddr, index: u32) -> Result<RouteMessage, Error> {
    let to_net = to.trunc();
    match (to_net.network(), by) {
        (IpAddr::V4(net), IpAddr::V4(by)) => Ok(RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(net, to.prefix_len())
            .gateway(by)
            .output_interface(index)
            .onlink()
            .build()),
        (IpAddr::V6(net), IpAddr::V6(by)) => Ok(RouteMessageBuilder::<Ipv6Addr>::new()
            .destination_prefix(net, to.prefix_len())
            .gateway(by)
            .output_interface(index)
            .onlink()
            .build()),
        _ => Err(Error::new(Code::Configuration, format!("gateway {by} of the route to {to} is of another family"))),
    }
}
