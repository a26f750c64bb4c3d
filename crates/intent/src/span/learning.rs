//! The routes that hosts learn, VPC by VPC, as the items of their topics say.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use bifrost_wire::Mac;
use ipnet::IpNet;
use serde::Deserialize;

use super::topic::Topics;
use super::{ItemId, Topic};
use crate::key::Key;
use crate::resolve::{Hop, Resolved, Routes};

/// The routes that hosts learn.
#[derive(Debug, Default)]
pub(super) struct Learning {
    vpcs: HashMap<Key, Routes, foldhash::fast::RandomState>,
    /// What has changed: VNI and prefix.
    changed: Vec<(u32, IpNet)>,
}

/// What an item says of the vNIC.
#[derive(Deserialize)]
struct To {
    mac: String,
}

impl Learning {
    /// An item of a topic may have changed.
    pub(super) fn note(&mut self, topics: &Topics, topic: &Topic, id: &ItemId) {
        let Topic::Routes(vpc) = topic else { return };
        let named = id.key.split_once('/').and_then(|(vni, prefix)| Some((vni.parse().ok()?, prefix.parse().ok()?)));
        let Some((vni, prefix)) = named else { return };
        let hop = topics.item(topic, id).and_then(|visible| {
            let to: To = serde_json::from_str(&visible.item.spec).ok()?;
            Some(Hop { host: Arc::clone(visible.except.as_ref()?), mac: to.mac.parse::<Mac>().ok()? })
        });
        let routes = self.vpcs.entry(vpc.clone()).or_default();
        routes.set(prefix, hop);
        if routes.is_empty() {
            self.vpcs.remove(vpc);
        }
        self.changed.push((vni, prefix));
    }

    pub(super) fn take_changed(&mut self) -> Vec<(u32, IpNet)> {
        std::mem::take(&mut self.changed)
    }

    pub(super) fn resolve(&self, vpc: &Key, within: IpNet, address: IpAddr) -> Resolved {
        match self.vpcs.get(vpc) {
            Some(routes) => routes.resolve(within, address),
            None => Resolved { range: within, hop: None },
        }
    }

    pub(super) fn len(&self) -> usize {
        self.vpcs.values().map(Routes::len).sum()
    }
}
