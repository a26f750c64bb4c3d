//! What the gateways of a zone cost, in devices, money and power (*Albatross*, SIGCOMM'25, Fig. 15, Table 6, section 5).
//!
//! A pure function of its inputs. Prices are multiples of the price of one physical gateway.

use serde::Serialize;

/// What is bought: a device that is one gateway, or a server with several pods.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Device {
    pub(crate) name: String,
    /// Of one device.
    pub(crate) price: f64,
    /// Gateways that one device can be at a time; 1: it is a physical gateway, and has no pods.
    pub(crate) gateways: u32,
    /// Power of one device, W.
    pub(crate) watts: Option<f64>,
    /// Throughput of one device, Gbit/s.
    pub(crate) gbps: Option<f64>,
    /// Packets of one device, millions a second.
    pub(crate) mpps: Option<f64>,
    /// Latency, us.
    pub(crate) latency_us: Option<f64>,
    /// Routes (longest prefix match), millions.
    pub(crate) lpm_millions: Option<f64>,
    /// Until one more gateway forwards, s.
    pub(crate) ready_s: Option<f64>,
}

/// The inputs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Inputs {
    pub(crate) devices: Vec<Device>,
    /// What a zone consists of to begin with: clusters of each device, by its name.
    pub(crate) today: Vec<(String, u32)>,
    /// Gateways of each cluster. Two of them never share a device: its failure would cost the cluster both.
    pub(crate) gateways_per_cluster: u32,
    /// BGP sessions that a switch keeps safely.
    pub(crate) switch_peers: u32,
    /// Servers that a switch has ports for.
    pub(crate) switch_servers: u32,
    /// BGP proxies of a server, each with one session to the switch.
    pub(crate) proxies: u32,
}

/// The result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Cost {
    /// Fig. 15: ways to build the zone; the first is what it is today.
    pub(crate) zones: Vec<Zone>,
    /// Table 6, in the order of the inputs.
    pub(crate) devices: Vec<Row>,
}

/// One way to build the gateways of a zone.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Zone {
    pub(crate) name: String,
    pub(crate) devices: u64,
    pub(crate) price: f64,
    /// Nothing: the power of a device is not known.
    pub(crate) watts: Option<f64>,
    /// BGP sessions of a switch all of whose ports have such devices; nothing for a mix of devices.
    pub(crate) switch_sessions: Option<u64>,
}

/// A row of Table 6.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    #[serde(flatten)]
    pub(crate) device: Device,
    /// Of a zone all of whose gateways are such devices.
    pub(crate) zone_price: f64,
    /// Of each of its gateways, Gbit/s, if all are equal.
    pub(crate) gbps_per_gateway: Option<f64>,
    pub(crate) mpps_per_gateway: Option<f64>,
    /// Price of 1 Tbit/s.
    pub(crate) price_per_tbps: Option<f64>,
}

impl Inputs {
    /// The paper's numbers.
    pub(crate) fn paper() -> Self {
        let device = |name: &str, price, gateways, watts| Device {
            name: name.to_owned(),
            price,
            gateways,
            watts,
            gbps: None,
            mpps: None,
            latency_us: None,
            lpm_millions: None,
            ready_s: None,
        };
        // The least of "tens of days" (section 6).
        const DAYS: f64 = 10.0 * 86_400.0;
        let devices = vec![
            Device { mpps: Some(25.0), ready_s: Some(DAYS), ..device("x86", 1.0, 1, Some(500.0)) },
            Device {
                gbps: Some(3200.0),
                mpps: Some(1800.0),
                latency_us: Some(2.0),
                lpm_millions: Some(0.2),
                ready_s: Some(DAYS),
                ..device("sailfish", 1.0, 1, Some(300.0))
            },
            Device {
                gbps: Some(800.0),
                mpps: Some(120.0),
                latency_us: Some(20.0),
                lpm_millions: Some(10.0),
                ready_s: Some(10.0),
                ..device("albatross", 2.0, 4, Some(900.0))
            },
            // A zone of these costs 9.6: four servers, so eight pods a server.
            Device {
                gbps: Some(3200.0),
                mpps: Some(480.0),
                latency_us: Some(20.0),
                lpm_millions: Some(10.0),
                ready_s: Some(10.0),
                ..device("albatross-next", 2.4, 8, None)
            },
        ];
        Inputs {
            devices,
            today: vec![("x86".to_owned(), 3), ("sailfish".to_owned(), 5)],
            gateways_per_cluster: 4,
            switch_peers: 64,
            switch_servers: 32,
            proxies: 2,
        }
    }

    /// Clusters of the zone.
    pub(crate) fn clusters(&self) -> u64 {
        self.today.iter().map(|(_, clusters)| u64::from(*clusters)).sum()
    }

    /// Devices for some clusters, if each device is `gateways` at a time.
    fn needed(&self, clusters: u64, gateways: u32) -> u64 {
        let all = clusters.saturating_mul(self.gateways_per_cluster.into());
        let apart = if clusters > 0 { self.gateways_per_cluster.into() } else { 0 };
        all.div_ceil(gateways.max(1).into()).max(apart)
    }

    /// A zone of one kind of device, each of which is `gateways` at a time.
    fn zone(&self, device: &Device, gateways: u32, sessions: u32) -> Zone {
        let devices = self.needed(self.clusters(), gateways);
        Zone {
            name: device.name.clone(),
            devices,
            price: devices as f64 * device.price,
            watts: device.watts.map(|watts| devices as f64 * watts),
            switch_sessions: Some(u64::from(self.switch_servers) * u64::from(sessions)),
        }
    }

    /// The zone as it is today.
    ///
    /// # Errors
    /// A device of `today` is none of `devices`.
    fn today(&self) -> Result<Zone, String> {
        let mut zone = Zone { name: String::new(), devices: 0, price: 0.0, watts: Some(0.0), switch_sessions: None };
        let mut names = Vec::new();
        for (name, clusters) in &self.today {
            let device = self.devices.iter().find(|device| device.name == *name);
            let device = device.ok_or_else(|| format!("no device is named {name:?}; --device can add it"))?;
            let needed = self.needed((*clusters).into(), device.gateways);
            zone.devices = zone.devices.saturating_add(needed);
            zone.price += needed as f64 * device.price;
            zone.watts = zone.watts.zip(device.watts).map(|(all, watts)| all + needed as f64 * watts);
            names.push(format!("{clusters} {name}"));
        }
        zone.name = format!("today: {}", names.join(", "));
        Ok(zone)
    }

    /// Computes all of it.
    ///
    /// # Errors
    /// What is wrong with the inputs.
    pub(crate) fn cost(&self) -> Result<Cost, String> {
        let mut zones = vec![self.today()?];
        for device in &self.devices {
            let pods = device.gateways > 1;
            zones.push(self.zone(device, device.gateways, if pods { self.proxies } else { 1 }));
            // Without proxies each pod has a session of its own, and the switch has no more of them.
            let most = (self.switch_peers / self.switch_servers.max(1)).max(1);
            if pods && most < device.gateways {
                let name = format!("{}, no BGP proxies", device.name);
                zones.push(Zone { name, ..self.zone(device, most, most) });
            }
        }
        let rows = self.devices.iter().map(|device| {
            let each = |all: f64| all / f64::from(device.gateways.max(1));
            Row {
                zone_price: self.zone(device, device.gateways, 1).price,
                gbps_per_gateway: device.gbps.map(each),
                mpps_per_gateway: device.mpps.map(each),
                price_per_tbps: device.gbps.filter(|gbps| *gbps > 0.0).map(|gbps| device.price / gbps * 1000.0),
                device: device.clone(),
            }
        });
        Ok(Cost { devices: rows.collect(), zones })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zone<'a>(cost: &'a Cost, name: &str) -> &'a Zone {
        cost.zones.iter().find(|zone| zone.name == name).unwrap()
    }

    #[test]
    fn the_papers_numbers_come_out_of_its_inputs() {
        let cost = Inputs::paper().cost().unwrap();
        // Fig. 15: 32 gateways and 12,000 W; 8 servers, half the price, 7,200 W.
        let today = zone(&cost, "today: 3 x86, 5 sailfish");
        assert_eq!((today.devices, today.price, today.watts), (32, 32.0, Some(12_000.0)));
        let ours = zone(&cost, "albatross");
        assert_eq!((ours.devices, ours.price, ours.watts), (8, 16.0, Some(7200.0)));
        // Table 6: 32, 16 and 9.6 times the price of a device.
        let price = |name: &str| cost.devices.iter().find(|row| row.device.name == name).unwrap().zone_price;
        assert_eq!((price("sailfish"), price("albatross")), (32.0, 16.0));
        assert!((price("albatross-next") - 9.6).abs() < 1e-9);
        // Two proxies for each of 32 servers are the 64 sessions of section 5.
        assert_eq!(ours.switch_sessions, Some(64));
    }

    #[test]
    fn without_proxies_nothing_is_saved() {
        let cost = Inputs::paper().cost().unwrap();
        let zone = zone(&cost, "albatross, no BGP proxies");
        // Two pods a server (section 5), so 16 servers at twice the price.
        assert_eq!((zone.devices, zone.price, zone.switch_sessions), (16, 32.0, Some(64)));
        // A switch with room for four sessions a server needs none.
        let cost = Inputs { switch_peers: 128, ..Inputs::paper() }.cost().unwrap();
        assert!(!cost.zones.iter().any(|zone| zone.name == "albatross, no BGP proxies"));
    }

    #[test]
    fn gateways_of_a_cluster_do_not_share_a_device() {
        let mut inputs = Inputs::paper();
        inputs.today = vec![("albatross".to_owned(), 1)];
        let cost = inputs.cost().unwrap();
        assert_eq!(zone(&cost, "albatross").devices, 4);
        assert_eq!(zone(&cost, "albatross-next").devices, 4);
        inputs.gateways_per_cluster = 1;
        assert_eq!(zone(&inputs.cost().unwrap(), "albatross").devices, 1);
        inputs.today = vec![("albatross".to_owned(), 0)];
        assert_eq!(zone(&inputs.cost().unwrap(), "albatross").devices, 0);
    }

    #[test]
    fn devices_must_be_known() {
        let today = vec![("mainframe".to_owned(), 1)];
        let error = Inputs { today, ..Inputs::paper() }.cost().unwrap_err();
        assert!(error.contains("mainframe"), "{error}");
        // A device without a known power makes the power of the zone unknown.
        let today = vec![("albatross-next".to_owned(), 1), ("x86".to_owned(), 1)];
        assert_eq!(Inputs { today, ..Inputs::paper() }.cost().unwrap().zones[0].watts, None);
    }
}
