//! Configurations of FRR for a BGP proxy in front of gateway pods, and of FRR or BIRD for the switch behind it
//! (*Albatross*, SIGCOMM'25, section 5).
//!
//! Pods come and go; the switch has one session for each proxy. The proxy passes on what pods announce, with their own next hops: it is not on the
//! way of any packet.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use clap::{Args, Subcommand, ValueEnum};

use super::bird;
use crate::failure::Failure;

#[derive(Debug, Subcommand)]
pub(crate) enum BgpCommand {
    /// Print the configuration of FRR (8.4 and later) or BIRD (2.0.8 and later) for one end of the session between proxy and switch
    ///
    /// Both ends get the same options. Pods speak iBGP with the proxy, which passes their addresses on with their own next hops. It prints, and changes nothing:
    /// `vtysh -f FILE` has FRR read it. BIRD must be started with `-R`, so that the switch forwards while it starts again.
    Config(BgpConfigArgs),
}

#[derive(Debug, Args)]
pub(crate) struct BgpConfigArgs {
    /// Which end
    end: BgpEnd,
    /// The program that reads it; a proxy is FRR
    #[arg(long, value_name = "NAME", default_value = "frr")]
    daemon: BgpDaemon,
    /// The AS of proxy and pods
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    asn: u32,
    /// The proxy's address on the link, where pods and switch are, too; a switch takes several, comma-separated
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',', required = true)]
    proxy: Vec<Ipv4Addr>,
    /// The network of the pods' addresses on the link
    #[arg(long, value_name = "PREFIX", value_parser = Prefix::parse_v4)]
    pods: Prefix,
    /// The AS of the switch
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    switch_asn: u32,
    /// The switch's address on the link
    #[arg(long, value_name = "ADDRESS")]
    switch: Ipv4Addr,
    /// Networks from which pods may announce addresses, comma-separated; for IPv6 ones, proxy and switch need IPv6
    /// addresses on the link
    #[arg(long, value_name = "PREFIX", value_delimiter = ',', required = true, value_parser = Prefix::parse)]
    vips: Vec<Prefix>,
    /// Pods that the proxy serves at most
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096))]
    max_pods: u16,
    /// Addresses that each pod may announce; who announces more is cut off
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    max_prefixes: u16,
    /// The interval of BFD; an end that is silent for three of them is given up
    #[arg(long, value_name = "MS", default_value_t = 50, value_parser = clap::value_parser!(u16).range(10..))]
    bfd_ms: u16,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum BgpEnd {
    Proxy,
    Switch,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum BgpDaemon {
    Frr,
    Bird,
}

impl BgpCommand {
    /// What is to be printed.
    ///
    /// # Errors
    /// There is no such configuration.
    pub(crate) fn text(self) -> Result<String, Failure> {
        let BgpCommand::Config(args) = self;
        let BgpConfigArgs { end, daemon, asn, proxy, pods, switch_asn, switch, vips, .. } = args;
        let BgpConfigArgs { max_pods, max_prefixes, bfd_ms, .. } = args;
        let usage = |what: &str, location: &str, hint| {
            Err(Failure::Usage { what: what.to_owned(), location: location.to_owned(), hint })
        };
        let site = Site { asn, proxies: proxy, pods, switch_asn, switch, vips, max_pods, max_prefixes, bfd_ms };
        match (end, daemon) {
            (BgpEnd::Proxy, BgpDaemon::Bird) => {
                usage("a proxy is FRR", "--daemon", "leave --daemon away; BIRD can be the switch")
            }
            (BgpEnd::Proxy, BgpDaemon::Frr) => match site.proxies[..] {
                [proxy] => Ok(self::proxy(&site, proxy)),
                _ => usage("several addresses for one proxy", "--proxy", "print a configuration for each proxy"),
            },
            (BgpEnd::Switch, BgpDaemon::Frr) => Ok(self::switch(&site)),
            (BgpEnd::Switch, BgpDaemon::Bird) => Ok(bird::switch(&site)),
        }
    }
}

/// A prefix, as it is written: FRR checks it, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prefix {
    pub(super) address: IpAddr,
    len: u8,
}

/// What both ends of the session between proxy and switch know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Site {
    /// The AS of proxy and pods.
    pub(crate) asn: u32,
    /// The proxies' addresses on the link.
    pub(crate) proxies: Vec<Ipv4Addr>,
    /// The network of the pods' addresses on the link.
    pub(crate) pods: Prefix,
    pub(crate) switch_asn: u32,
    pub(crate) switch: Ipv4Addr,
    /// Networks from which addresses may be announced, each as /32 or /128.
    pub(crate) vips: Vec<Prefix>,
    /// Pods that a proxy serves at most.
    pub(crate) max_pods: u16,
    /// Addresses that each pod may announce.
    pub(crate) max_prefixes: u16,
    /// The interval of BFD, ms; an end is given up after three.
    pub(crate) bfd_ms: u16,
}

impl Site {
    /// How many addresses a proxy may announce.
    pub(super) fn all_prefixes(&self) -> u32 {
        u32::from(self.max_pods) * u32::from(self.max_prefixes)
    }
}

impl Prefix {
    /// Reads a prefix such as `10.0.0.0/24` or `2001:db8::/64`.
    ///
    /// # Errors
    /// It is none.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let bad = || format!("{text:?} is not a prefix such as 10.0.0.0/24 or 2001:db8::/64");
        let (address, len) = text.split_once('/').ok_or_else(bad)?;
        let (address, len): (IpAddr, u8) = (address.parse().map_err(|_| bad())?, len.parse().map_err(|_| bad())?);
        if len > longest(address) {
            return Err(bad());
        }
        let host_bits = u32::from(longest(address) - len);
        let network: IpAddr = match address {
            IpAddr::V4(address) => {
                Ipv4Addr::from_bits(address.to_bits() & u32::MAX.checked_shl(host_bits).unwrap_or(0)).into()
            }
            IpAddr::V6(address) => {
                Ipv6Addr::from_bits(address.to_bits() & u128::MAX.checked_shl(host_bits).unwrap_or(0)).into()
            }
        };
        if network != address {
            return Err(format!("{text}: bits are set behind the prefix; the network is {network}/{len}"));
        }
        Ok(Prefix { address, len })
    }

    /// As [`parse`](Self::parse), of IPv4 only.
    fn parse_v4(text: &str) -> Result<Self, String> {
        Self::parse(text).and_then(|prefix| match prefix.address {
            IpAddr::V4(_) => Ok(prefix),
            IpAddr::V6(_) => Err(format!("{text}: BGP sessions are over IPv4; give an IPv4 prefix")),
        })
    }
}

/// Bits of a prefix that is one address.
pub(super) fn longest(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

impl std::fmt::Display for Prefix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.address, self.len)
    }
}

/// The configuration of the proxy with an address.
pub(crate) fn proxy(site: &Site, proxy: Ipv4Addr) -> String {
    let Site { asn, pods, switch_asn, switch, max_pods, max_prefixes, .. } = site;
    format!(
        "\
frr defaults traditional
! Filters that are read while it runs (vtysh -f) hold after 1 s, and not after 5 s.
bgp route-map delay-timer 1
!
! What pods may announce, and the switch may learn; neither proxy nor pods learn anything.
{filters}!
router bgp {asn}
 bgp router-id {proxy}
 bgp log-neighbor-changes
 no bgp default ipv4-unicast
 bgp graceful-restart
 neighbor pods peer-group
 neighbor pods remote-as {asn}
 neighbor pods timers 1 3
 ! GTSM (RFC 5082): who is further away than the link cannot speak to it. FRR 8.4 sends so to pods, but does not check
 ! what they send: GATEWAY.md has a rule of nftables for that.
 neighbor pods ttl-security hops 1
 ! A pod that is gone forwards nothing. (FRR 8.4 disregards this for pods, which do not ask for it either.)
 neighbor pods graceful-restart-disable
 neighbor pods bfd profile bifrost
 bgp listen limit {max_pods}
 bgp listen range {pods} peer-group pods
 neighbor {switch} remote-as {switch_asn}
 neighbor {switch} timers 1 3
 neighbor {switch} timers connect 1
 neighbor {switch} ttl-security hops 1
 neighbor {switch} bfd profile bifrost
 address-family ipv4 unicast
  neighbor pods activate
  neighbor pods prefix-list vips in
  neighbor pods prefix-list none out
  neighbor pods maximum-prefix {max_prefixes}
  neighbor {switch} activate
  neighbor {switch} prefix-list none in
  neighbor {switch} prefix-list vips out
  ! Packets go to the pods themselves, and to all that announce an address.
  neighbor {switch} attribute-unchanged next-hop
  neighbor {switch} addpath-tx-all-paths
 exit-address-family
{ipv6}exit
!
{bfd}",
        filters = filters(site),
        ipv6 = if has_ipv6(site) { proxy_ipv6(site) } else { String::new() },
        bfd = bfd(site),
    )
}

/// The configuration of the switch, as far as it concerns these proxies.
pub(crate) fn switch(site: &Site) -> String {
    let Site { proxies, switch_asn, switch, .. } = site;
    let neighbors: String = proxies.iter().map(|proxy| neighbor(site, *proxy)).collect();
    let activated: String = proxies.iter().map(|proxy| activated(site, *proxy, "")).collect();
    format!(
        "\
frr defaults traditional
! Filters that are read while it runs (vtysh -f) hold after 1 s, and not after 5 s.
bgp route-map delay-timer 1
!
{filters}{map}!
router bgp {switch_asn}
 bgp router-id {switch}
 bgp log-neighbor-changes
 no bgp default ipv4-unicast
 ! While a proxy starts again, packets go on to its pods.
 bgp graceful-restart
 bgp bestpath as-path multipath-relax
{neighbors} address-family ipv4 unicast
  maximum-paths 64
{activated} exit-address-family
{ipv6}exit
!
{bfd}",
        filters = filters(site),
        map = if has_ipv6(site) { NEXT_HOPS } else { "" },
        ipv6 = if has_ipv6(site) { switch_ipv6(site) } else { String::new() },
        bfd = bfd(site),
    )
}

fn neighbor(site: &Site, proxy: Ipv4Addr) -> String {
    format!(
        " neighbor {proxy} remote-as {asn}
 neighbor {proxy} timers 1 3
 neighbor {proxy} timers connect 1
 neighbor {proxy} ttl-security hops 1
 neighbor {proxy} bfd profile bifrost
",
        asn = site.asn
    )
}

/// What the switch takes from a proxy, of one family; `more` is put behind the filter.
fn activated(site: &Site, proxy: Ipv4Addr, more: &str) -> String {
    format!(
        "  neighbor {proxy} activate
  neighbor {proxy} prefix-list vips in
{more}  neighbor {proxy} prefix-list none out
  neighbor {proxy} maximum-prefix {all}
",
        all = site.all_prefixes()
    )
}

pub(super) fn has_ipv6(site: &Site) -> bool {
    site.vips.iter().any(|prefix| prefix.address.is_ipv6())
}

/// IPv6 prefixes over the same sessions.
fn proxy_ipv6(site: &Site) -> String {
    let Site { switch, max_prefixes, .. } = site;
    format!(
        " address-family ipv6 unicast
  neighbor pods activate
  neighbor pods prefix-list vips in
  neighbor pods prefix-list none out
  neighbor pods maximum-prefix {max_prefixes}
  neighbor {switch} activate
  neighbor {switch} prefix-list none in
  neighbor {switch} prefix-list vips out
  neighbor {switch} attribute-unchanged next-hop
  neighbor {switch} addpath-tx-all-paths
 exit-address-family
"
    )
}

/// A proxy of FRR adds its own link-local address to the next hop, and FRR would prefer that: packets are to go to the
/// pods.
const NEXT_HOPS: &str = "!\nroute-map pods permit 10\n set ipv6 next-hop prefer-global\nexit\n";

fn switch_ipv6(site: &Site) -> String {
    let of = |proxy: &Ipv4Addr| activated(site, *proxy, &format!("  neighbor {proxy} route-map pods in\n"));
    let activated: String = site.proxies.iter().map(of).collect();
    format!(" address-family ipv6 unicast\n  maximum-paths 64\n{activated} exit-address-family\n")
}

fn filters(site: &Site) -> String {
    let mut text = String::new();
    for (number, prefix) in (1..).zip(&site.vips) {
        let family = if prefix.address.is_ipv4() { "ip" } else { "ipv6" };
        // Nothing shorter: a pod that announces a network would get what is for others.
        let longest = longest(prefix.address);
        let longer = if prefix.len < longest { format!(" ge {longest}") } else { String::new() };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{family} prefix-list vips seq {} permit {prefix}{longer}", 5 * number);
    }
    text.push_str("ip prefix-list none seq 5 deny any\n");
    if has_ipv6(site) {
        text.push_str("ipv6 prefix-list none seq 5 deny any\n");
    }
    text
}

/// Behind `router bgp`: in front of it, FRR 8 would have the neighbours' sessions without their profile.
fn bfd(site: &Site) -> String {
    let ms = site.bfd_ms;
    format!(
        "bfd\n profile bifrost\n  detect-multiplier 3\n  receive-interval {ms}\n  transmit-interval {ms}\n exit\nexit\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site() -> Site {
        Site {
            asn: 64_512,
            proxies: vec![[10, 1, 0, 2].into()],
            pods: Prefix::parse("10.1.0.0/24").unwrap(),
            switch_asn: 65_000,
            switch: [10, 1, 0, 254].into(),
            vips: ["10.0.0.0/24", "203.0.113.7/32"].map(|text| Prefix::parse(text).unwrap()).to_vec(),
            max_pods: 64,
            max_prefixes: 16,
            bfd_ms: 50,
        }
    }

    #[test]
    fn configurations_are_as_they_were_tried() {
        let mut both = site();
        both.vips.push(Prefix::parse("fd00::/64").unwrap());
        let address = both.proxies[0];
        for (text, file, golden) in [
            (proxy(&site(), address), "proxy.conf", include_str!("golden/proxy.conf")),
            (switch(&site()), "switch.conf", include_str!("golden/switch.conf")),
            (proxy(&both, address), "proxy-ipv6.conf", include_str!("golden/proxy-ipv6.conf")),
            (switch(&both), "switch-ipv6.conf", include_str!("golden/switch-ipv6.conf")),
            (bird::switch(&site()), "bird.conf", include_str!("golden/bird.conf")),
            (bird::switch(&both), "bird-ipv6.conf", include_str!("golden/bird-ipv6.conf")),
        ] {
            if std::env::var_os("BIFROST_WRITE_DOCS").is_some() {
                let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/gw/golden").join(file);
                std::fs::write(path, &text).unwrap();
            } else {
                assert_eq!(text, golden, "{file}; BIFROST_WRITE_DOCS=1 writes it again");
            }
        }
    }

    #[test]
    fn a_switch_has_each_proxy() {
        let two = Site { proxies: vec![[10, 1, 0, 2].into(), [10, 1, 0, 3].into()], ..site() };
        for (text, wanted) in [(switch(&two), " remote-as 64512"), (bird::switch(&two), "from proxy {")] {
            assert_eq!(text.matches(wanted).count(), 2, "{text}");
        }
    }

    #[test]
    fn prefixes() {
        for good in ["10.0.0.0/24", "0.0.0.0/0", "1.2.3.4/32", "fd00::/8", "::/0", "2001:db8::1/128"] {
            assert_eq!(Prefix::parse(good).unwrap().to_string(), good);
        }
        for bad in ["10.0.0.0", "10.0.0.1/24", "10.0.0.0/33", "fd00::1/64", "::/129", "/8", "a/b"] {
            assert!(Prefix::parse(bad).is_err(), "{bad}");
        }
        assert!(Prefix::parse_v4("10.1.0.0/24").is_ok() && Prefix::parse_v4("fd01::/64").is_err());
    }
}
