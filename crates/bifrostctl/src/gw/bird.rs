//! The configuration of BIRD 2 for the switch behind BGP proxies: what [`frr`](super::frr) prints for FRR.

use std::fmt::Write as _;

use super::frr::{Site, has_ipv6, longest};

/// Addresses of one family.
struct Family {
    /// As BIRD calls it.
    name: &'static str,
    is_v4: bool,
}

const FAMILIES: [Family; 2] = [Family { name: "ipv4", is_v4: true }, Family { name: "ipv6", is_v4: false }];

/// The configuration of the switch, as far as it concerns these proxies.
pub(super) fn switch(site: &Site) -> String {
    let Site { asn, proxies, switch_asn, switch, bfd_ms, .. } = site;
    let families = || FAMILIES.iter().filter(|family| family.is_v4 || has_ipv6(site));
    let channels: Vec<&str> = families().map(|family| family.name).collect();
    let vips: String = families().map(|family| vips(site, family)).collect();
    let kernels: String = families().map(|family| kernel(family.name)).collect();
    let taken: String = families().map(|family| channel(site, family)).collect();
    let mut text = format!(
        "\
# BIRD is to be started with -R: then packets go on to the pods while it starts again.
router id {switch};
graceful restart wait 10;

# What the switch may learn; it tells the proxies nothing.
{vips}
protocol device {{ }}
# Next hops are on this network.
protocol direct {{ {channels}; }}
{kernels}protocol bfd {{
  # FRR takes a session with GTSM for a multihop one (UDP port 4784).
  multihop {{ interval {bfd_ms} ms; multiplier 3; }};
}}
template bgp proxy {{
  local {switch} as {switch_asn};
  # GTSM (RFC 5082): one hop at most.
  multihop 1;
  ttl security on;
  hold time 3;
  keepalive time 1;
  connect delay time 1;
  connect retry time 1;
  error wait time 1, 1;
  bfd on;
  graceful restart on;
{taken}}}
",
        channels = channels.join("; "),
    );
    for (number, proxy) in (1..).zip(proxies) {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "protocol bgp proxy{number} from proxy {{ neighbor {proxy} as {asn}; }}");
    }
    text
}

/// A set of prefixes. Nothing shorter than an address: a pod that announces a network would get what is for others.
fn vips(site: &Site, family: &Family) -> String {
    let of_family = site.vips.iter().filter(|prefix| prefix.address.is_ipv4() == family.is_v4);
    let all: Vec<String> = of_family
        .map(|prefix| {
            let longest = longest(prefix.address);
            format!("{prefix}{{{longest},{longest}}}")
        })
        .collect();
    if all.is_empty() {
        return String::new();
    }
    format!("define vips_{} = [ {} ];\n", family.name, all.join(", "))
}

/// Routes to the kernel, which spreads packets over all next hops; those of a BIRD that ended stay until it knows better.
fn kernel(family: &str) -> String {
    format!(
        "protocol kernel {{\n  persist;\n  graceful restart;\n  merge paths on limit 64;\n  \
         {family} {{ import none; export where source = RTS_BGP; }};\n}}\n"
    )
}

fn channel(site: &Site, family: &Family) -> String {
    let Family { name, is_v4 } = family;
    let any = site.vips.iter().any(|prefix| prefix.address.is_ipv4() == *is_v4);
    let import = match (any, is_v4) {
        (false, _) => "none".to_owned(),
        (true, true) => format!("where net ~ vips_{name}"),
        // A proxy of FRR adds its own link-local address to the next hop, and BIRD would prefer that.
        (true, false) => format!("filter {{ if net !~ vips_{name} then reject; gw = bgp_next_hop; accept; }}"),
    };
    format!(
        "  {name} {{\n    import {import};\n    export none;\n    add paths rx;\n    import limit {} action disable;\n  }};\n",
        site.all_prefixes()
    )
}
