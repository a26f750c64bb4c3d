//! Choice of the provider, and its description. These tests are for hosts without an RDMA NIC, and skip others.

#![allow(clippy::unwrap_used)]

use std::net::{IpAddr, Ipv6Addr};

use bifrost_verbs::{Any, AnyError, Choice, OpenError, Provider, RdmaCore, RdmaCoreConfig, SoftConfig};

const HERE: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

fn config(port: u16) -> SoftConfig {
    SoftConfig { address: HERE, port, queue_pairs: 16, regions: 16, seed: 1 }
}

fn has_nic() -> bool {
    let devices = std::fs::read_dir("/sys/class/infiniband_verbs");
    devices.is_ok_and(|mut devices| devices.any(|d| d.unwrap().file_name().to_string_lossy().starts_with("uverbs")))
}

#[test]
fn without_a_nic_auto_chooses_software_and_reports_it() {
    if has_nic() {
        eprintln!("SKIPPED: this host has an RDMA NIC");
        return;
    }
    let auto = Any::new(Choice::Auto, config(0), 1024).unwrap();
    assert!(auto.soft().is_some() && auto.verbs().is_none());
    let said = auto.to_string();
    assert!(said.starts_with("soft: RoCEv2 over UDP at [::1]:"), "{said}");
    assert!(said.contains("only on 4791"), "the port excludes a NIC: {said}");
    assert!(auto.port() > 0);
    let soft = Any::new(Choice::Soft, config(0), 1024).unwrap();
    assert!(soft.to_string().contains("as wanted"));
}

#[test]
fn without_a_nic_verbs_is_an_error_with_a_remedy() {
    if has_nic() {
        eprintln!("SKIPPED: this host has an RDMA NIC");
        return;
    }
    let config = RdmaCoreConfig { address: HERE, queue_pairs: 16, regions: 16, seed: 1 };
    let error = RdmaCore::new(config).unwrap_err();
    assert!(matches!(error, OpenError::NoDevice));
    let error = Any::new(Choice::Verbs, self::config(bifrost_wire::roce::UDP_PORT), 1024).unwrap_err();
    assert!(matches!(error, AnyError::Verbs(OpenError::NoDevice)));
    let said = error.to_string();
    assert!(said.contains("no RDMA device") && said.contains("rdma link"), "{said}");
}
