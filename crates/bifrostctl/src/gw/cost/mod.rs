//! `bifrostctl gw cost`: the calculator's command line and tables.

mod model;

use clap::Args;

use crate::failure::Failure;
use crate::output::Output;
use crate::table::{Column, Number, Text, listing};
use model::{Cost, Device, Inputs};

/// Of prices, rates and powers.
const LARGEST: f64 = 1e9;
/// Of devices that `--device` may add, and of parts of `--today`.
const MOST: usize = 64;
const HINT: &str = "`bifrostctl gw cost --help` has examples";

pub(crate) const EXAMPLES: &str = "\
Examples:
  bifrostctl gw cost                                   the paper's numbers
  bifrostctl gw cost --device albatross:gateways=6,watts=1100
      servers with six pods and more power; what is not named stays
  bifrostctl gw cost --today sailfish=8 --device ours:price=1.5,gateways=4,watts=700
      a server of your own beside the others, in place of eight clusters of switches
  bifrostctl --json gw cost | jq '.cost.zones[] | {name, devices, price, watts}'";

#[derive(Debug, Args)]
pub(crate) struct CostArgs {
    /// Change a device, or add one: NAME:KEY=VALUE,... with the keys price, gateways (pods of a server; 1: a physical gateway), watts, gbps, mpps, latency_us, lpm_millions and
    /// ready_s. The paper's are x86, sailfish, albatross and albatross-next; a new one needs price and gateways
    #[arg(long = "device", value_name = "NAME:KEY=VALUE,...")]
    devices: Vec<String>,
    /// What the zone consists of: clusters of each device
    #[arg(long, value_name = "NAME=CLUSTERS,...", default_value = "x86=3,sailfish=5")]
    today: String,
    /// Gateways of each cluster, on as many devices
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    gateways_per_cluster: u32,
    /// BGP sessions that a switch keeps safely
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    switch_peers: u32,
    /// Servers that a switch has ports for
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    switch_servers: u32,
    /// BGP proxies of each server
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    proxies: u32,
}

/// Computes and prints.
pub(crate) fn run(args: &CostArgs, out: Output) -> Result<(), Failure> {
    let usage =
        |location: &'static str| move |what: String| Failure::Usage { what, location: location.to_owned(), hint: HINT };
    let mut inputs = Inputs::paper();
    for text in &args.devices {
        set(&mut inputs.devices, text).map_err(usage("--device"))?;
    }
    inputs.today = today(&args.today).map_err(usage("--today"))?;
    let CostArgs { gateways_per_cluster, switch_peers, switch_servers, proxies, .. } = *args;
    let inputs = Inputs { gateways_per_cluster, switch_peers, switch_servers, proxies, ..inputs };
    let cost = inputs.cost().map_err(usage("--today"))?;
    out.print(&serde_json::json!({ "inputs": inputs, "cost": cost }), |_| tables(&inputs, &cost))
}

/// Changes or adds the device of an option.
fn set(devices: &mut Vec<Device>, text: &str) -> Result<(), String> {
    let (name, settings) = text.split_once(':').ok_or_else(|| format!("{text:?} is not NAME:KEY=VALUE,..."))?;
    if name.is_empty() {
        return Err(format!("{text:?} names no device"));
    }
    let known = devices.iter().position(|device| device.name == name);
    let empty = Device {
        name: name.to_owned(),
        price: 0.0,
        gateways: 0,
        watts: None,
        gbps: None,
        mpps: None,
        latency_us: None,
        lpm_millions: None,
        ready_s: None,
    };
    let mut device = known.map_or(empty, |index| devices[index].clone());
    for setting in settings.split(',') {
        let (key, value) = setting.split_once('=').ok_or_else(|| format!("{setting:?} is not KEY=VALUE"))?;
        let number: Option<f64> = value.parse().ok().filter(|number| (0.0..=LARGEST).contains(number));
        let number = number.ok_or_else(|| format!("{key}: {value:?} is not a number from 0 to {LARGEST}"))?;
        match key {
            "price" => device.price = number,
            "gateways" => {
                let gateways: Option<u32> = value.parse().ok().filter(|gateways| (1..=10_000).contains(gateways));
                device.gateways = gateways.ok_or_else(|| format!("gateways: {value:?} is not 1 to 10000"))?;
            }
            "watts" => device.watts = Some(number),
            "gbps" => device.gbps = Some(number),
            "mpps" => device.mpps = Some(number),
            "latency_us" => device.latency_us = Some(number),
            "lpm_millions" => device.lpm_millions = Some(number),
            "ready_s" => device.ready_s = Some(number),
            _ => return Err(format!("{key:?} is not a key of a device")),
        }
    }
    if device.price <= 0.0 || device.gateways == 0 {
        return Err(format!("{name} needs a price above 0, and gateways"));
    }
    match known {
        Some(index) => devices[index] = device,
        None if devices.len() >= MOST => return Err(format!("more than {MOST} devices")),
        None => devices.push(device),
    }
    Ok(())
}

fn today(text: &str) -> Result<Vec<(String, u32)>, String> {
    let part = |part: &str| {
        let (name, clusters) = part.split_once('=')?;
        Some((name.to_owned(), clusters.parse().ok().filter(|clusters| *clusters <= 10_000)?))
    };
    let parts: Vec<_> = text.split(',').take(MOST + 1).collect();
    if parts.len() > MOST {
        return Err(format!("more than {MOST} parts"));
    }
    let all = parts.iter().map(|text| part(text).ok_or_else(|| format!("{text:?} is not NAME=CLUSTERS, up to 10000")));
    all.collect()
}

fn tables(inputs: &Inputs, cost: &Cost) -> String {
    const ZONES: [Column; 8] = [
        Text("ZONE"),
        Number("DEVICES"),
        Number("CHANGE"),
        Number("PRICE"),
        Number("CHANGE"),
        Number("POWER W"),
        Number("CHANGE"),
        Number("SWITCH SESSIONS"),
    ];
    const DEVICES: [Column; 11] = [
        Text("DEVICE"),
        Number("ROUTES M"),
        Number("READY IN"),
        Number("PRICE"),
        Number("ZONE PRICE"),
        Number("GBIT/S"),
        Number("MPPS"),
        Number("LATENCY US"),
        Number("GBIT/S A GATEWAY"),
        Number("MPPS A GATEWAY"),
        Number("PRICE A TBIT/S"),
    ];
    let first = &cost.zones[0];
    let zones = cost.zones.iter().map(|zone| {
        vec![
            zone.name.clone(),
            zone.devices.to_string(),
            change(Some(first.devices as f64), Some(zone.devices as f64)),
            number(Some(zone.price)),
            change(Some(first.price), Some(zone.price)),
            number(zone.watts),
            change(first.watts, zone.watts),
            zone.switch_sessions.map_or_else(|| "-".to_owned(), |sessions| sessions.to_string()),
        ]
    });
    let devices = cost.devices.iter().map(|row| {
        let numbers = [
            Some(row.device.price),
            Some(row.zone_price),
            row.device.gbps,
            row.device.mpps,
            row.device.latency_us,
            row.gbps_per_gateway,
            row.mpps_per_gateway,
            row.price_per_tbps,
        ];
        let first = [row.device.name.clone(), number(row.device.lpm_millions), ready(row.device.ready_s)];
        first.into_iter().chain(numbers.map(number)).collect()
    });
    format!(
        "{} clusters of {} gateways; a switch has {} servers and keeps {} BGP sessions\n\n{}\n\n{}",
        inputs.clusters(),
        inputs.gateways_per_cluster,
        inputs.switch_servers,
        inputs.switch_peers,
        listing(&ZONES, zones, "no zones"),
        listing(&DEVICES, devices, "no devices"),
    )
}

/// With as many digits as say something.
fn number(value: Option<f64>) -> String {
    let Some(value) = value else { return "-".to_owned() };
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A time in days, if it is as long as that, or in seconds.
fn ready(seconds: Option<f64>) -> String {
    const DAY: f64 = 86_400.0;
    match seconds {
        Some(seconds) if seconds >= DAY => format!("{} d", number(Some(seconds / DAY))),
        Some(seconds) => format!("{} s", number(Some(seconds))),
        None => "-".to_owned(),
    }
}

fn change(from: Option<f64>, to: Option<f64>) -> String {
    match (from, to) {
        (Some(from), Some(to)) if from > 0.0 => format!("{:+.0} %", (to / from - 1.0) * 100.0),
        _ => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_changed_and_added() {
        let mut devices = Inputs::paper().devices;
        set(&mut devices, "albatross:gateways=6,watts=1100").unwrap();
        assert_eq!((devices[2].price, devices[2].gateways, devices[2].watts), (2.0, 6, Some(1100.0)));
        set(&mut devices, "ours:price=1.5,gateways=4").unwrap();
        assert_eq!((devices.len(), devices[4].mpps), (5, None));
        for (bad, why) in [
            ("albatross", "is not NAME:KEY=VALUE"),
            (":price=1", "names no device"),
            ("new:price=1", "needs a price above 0, and gateways"),
            ("x86:price=0", "needs a price above 0"),
            ("x86:price=nan", "is not a number"),
            ("x86:price=-1", "is not a number"),
            ("x86:gateways=1.5", "is not 1 to 10000"),
            ("x86:colour=1", "is not a key"),
            ("x86:watts", "is not KEY=VALUE"),
        ] {
            let error = set(&mut devices, bad).unwrap_err();
            assert!(error.contains(why), "{bad}: {error}");
        }
        assert_eq!(today("a=1,b=2").unwrap(), [("a".to_owned(), 1), ("b".to_owned(), 2)]);
        for bad in ["", "a", "a=", "a=-1", "a=99999", &"a=1,".repeat(100)] {
            assert!(today(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn tables_have_the_papers_numbers() {
        let inputs = Inputs::paper();
        let text = tables(&inputs, &inputs.cost().unwrap());
        let words = |start: &str| -> Vec<&str> {
            let line = text.lines().find(|line| line.starts_with(start));
            line.unwrap_or_else(|| panic!("{start}: {text}")).split_whitespace().collect()
        };
        assert_eq!(words("albatross  "), ["albatross", "8", "-75", "%", "16", "-50", "%", "7200", "-40", "%", "64"]);
        assert_eq!(words("sailfish      ")[..3], ["sailfish", "32", "+0"]);
        let last = text.lines().last().unwrap().split_whitespace().collect::<Vec<_>>();
        assert_eq!(last, ["albatross-next", "10", "10", "s", "2.4", "9.6", "3200", "480", "20", "400", "60", "0.75"]);
    }
}
