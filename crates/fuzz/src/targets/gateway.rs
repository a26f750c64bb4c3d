//! A frame from the wire, through the pipeline and a pod's core, and back to the wire.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, OnceLock};

use bifrost_gateway::{
    Backends, Context, Core, HEADROOM, Host, INTERNET, Nat, NatConfig, NextHop, Packet, Route, Tables, Tunnel,
    TunnelKind, Verdict, Vpc,
};
use bifrost_nicpipe::{Pipeline, PipelineConfig, PodConfig, Ring, Rings, Rules};
use bifrost_plb::{Config, TRAILER_LEN, Trailer};
use bifrost_tables::{Dir24, ExactMap, IpNet, LimiterConfig, Lpm, Rate, exact_map};
use bifrost_wire::Mac;

use crate::Input;

const LONGEST: usize = 2048;
const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
const NOW: u64 = 1 << 40;

/// Packets that the pod gets, in order.
#[derive(Default)]
struct Given(Vec<Vec<u8>>);

impl Rings for &mut Given {
    fn has_room(&mut self, _: Ring) -> bool {
        true
    }

    fn put(&mut self, _: Ring, parts: &[&[u8]]) -> bool {
        self.0.push(parts.concat());
        true
    }
}

/// One option byte, and a frame.
pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let options = input.u8();
    let frame = input.rest();
    let own: IpAddr = Ipv4Addr::new(10, 0, 0, 1).into();
    let pod = PodConfig {
        name: "pod".to_owned(),
        balancer: Config { cores: 2, queue_entries: 16, payload_slots: 64, ..Config::default() },
        interfaces: vec![None, Some(7)],
        mac: None,
        rules: Rules { own: vec![own], list: Vec::new(), control_with_data: false },
        limiter: LimiterConfig { color_entries: 16, meter_entries: 16, ..LimiterConfig::default() },
        control: Rate { per_second: 1000, burst: 10 },
        header_only_from: (options & 1 != 0).then_some(8),
        reliable: None,
    };
    let config = PipelineConfig { pods: vec![pod], longest: LONGEST, seed: 1 };
    let mut pipeline = Pipeline::new(config).unwrap_or_else(|e| panic!("{e}"));
    for interface in 0..2 {
        pipeline.pods_mut()[0].set_up(interface, true);
    }
    let nat = Nat::new(NatConfig {
        pools: vec![(INTERNET, vec![address(203, 1)]), (300, vec![address(100, 9)])],
        cores: 1,
        sessions: 8,
        seed: 2,
    });
    let (tables, neighbours) = known();
    let mut core = Core::new(Arc::clone(tables), Arc::new(nat), 2, 3);
    // Twice: the second time a session exists.
    for round in 0..2 {
        let mut given = Given::default();
        let taken = pipeline.arrive(NOW + round, NOW, frame, |_| &mut given);
        assert_eq!(given.0.len(), usize::from(taken.is_ok()));
        let Ok((place, _)) = taken else { continue };
        let context = Context { now: NOW + round, neighbours };
        let (returned, may_leave) = work(&mut core, context, &given.0[0]);
        let mut left = Vec::new();
        let pod = &mut pipeline.pods_mut()[0];
        let read = |buffer: &mut [u8]| {
            let room = buffer.get_mut(..returned.len());
            Some(room.map(|room| room.copy_from_slice(&returned)).map(|()| returned.len()).ok_or(()))
        };
        assert!(pod.take_back(place.interface, read, |leaving| left.push(leaving.parts.concat())));
        pod.release(NOW + round, u32::MAX, |leaving| left.push(leaving.parts.concat()));
        assert!(left.len() <= usize::from(may_leave), "a dropped packet does not leave");
        assert_eq!(pod.occupancy(), (0, 0), "no entry is left behind");
        for frame in &left {
            let parsed = bifrost_nic::parse(frame, frame.len()).unwrap_or_else(|e| panic!("{e:?}: {frame:02x?}"));
            assert_eq!(parsed.end as usize, frame.len());
            assert_eq!(parsed.vlan.is_some(), place.interface == 1);
        }
    }
}

/// What a worker does with a packet of its ring; returns whether it may leave.
fn work(core: &mut Core, context: Context<'_>, given: &[u8]) -> (Vec<u8>, bool) {
    let at = given.len() - TRAILER_LEN;
    let trailer = given[at..].first_chunk().map(|bytes| Trailer::parse(*bytes));
    let Some(Ok(trailer)) = trailer else { panic!("the pipeline's own trailer") };
    let mut buffer = vec![0; HEADROOM + 2 * LONGEST];
    buffer[HEADROOM..HEADROOM + at].copy_from_slice(&given[..at]);
    let mut packet = match trailer.payload {
        Some(_) => Packet::header_only(&mut buffer, HEADROOM, HEADROOM + at),
        None => Packet::new(&mut buffer, HEADROOM, HEADROOM + at),
    };
    let verdict = core.process(context, &mut packet);
    for piece in core.take_more() {
        assert!(matches!(verdict, Verdict::Forward(_)));
        let parsed = bifrost_nic::parse(&piece, piece.len()).unwrap_or_else(|e| panic!("{e:?}: {piece:02x?}"));
        assert!(parsed.packet_len() <= 1600 && parsed.end as usize == piece.len());
    }
    let whole = trailer.payload.is_none() || matches!(verdict, Verdict::Forward(_));
    if matches!(verdict, Verdict::Drop(_)) || !whole {
        return (Trailer { drop: true, ..trailer }.emit().to_vec(), false);
    }
    ([packet.bytes(), &trailer.emit()].concat(), true)
}

fn address(first: u8, last: u8) -> IpAddr {
    Ipv4Addr::new(first, 0, 0, last).into()
}

/// Built once: the table of the Internet is large.
fn known() -> &'static (Arc<Tables>, ExactMap<IpAddr, Mac>) {
    static KNOWN: OnceLock<(Arc<Tables>, ExactMap<IpAddr, Mac>)> = OnceLock::new();
    KNOWN.get_or_init(|| {
        let net = |text: &str| text.parse::<IpNet>().unwrap_or_else(|e| panic!("{text}: {e}"));
        let mut tables = Tables::new(vec![address(10, 1)], MAC, 1600, 7);
        let host = Host { vtep: address(10, 2), mac: MAC };
        for (vni, last) in [(100, 1), (100, 2), (200, 1), (300, 1)] {
            tables.add_host(vni, address(192, last), host);
        }
        let gre = tables.add_tunnel(Tunnel { vni: 100, remote: address(10, 3), kind: TunnelKind::Gre { key: 7 } });
        let routes = Lpm::new([
            (net("192.0.0.0/24"), Route::Local),
            (net("193.0.0.0/24"), Route::Peer(200)),
            (net("194.0.0.0/24"), Route::Idc(gre)),
            (net("0.0.0.0/0"), Route::Internet),
            (net("::/0"), Route::Internet),
        ]);
        let routes = routes.unwrap_or_else(|net| panic!("{net} twice"));
        let vpc = Vpc { routes, snat: Some(0), routers: vec![address(192, 254)], ..Vpc::default() };
        for vni in [100, 200, 300] {
            tables.vpcs.insert(vni, vpc.clone());
        }
        tables.add_eip(100, address(192, 2), address(203, 2));
        tables.nat_addresses.insert((INTERNET, address(203, 1)), ());
        tables.nat_addresses.insert((300, address(100, 9)), ());
        let backends = Backends { vni: 300, pool: 1, list: vec![(address(192, 1), 8080)] };
        tables.services.insert((100, address(192, 200), 17, 80), backends);
        let mut fib = Dir24::new(4, 1);
        if let IpNet::V4(everywhere) = net("0.0.0.0/0") {
            fib.insert(everywhere, 0).unwrap_or_else(|e| panic!("{e}"));
        }
        tables.fib4 = Some(fib);
        tables.next_hops = vec![NextHop { address: address(10, 2) }];
        tables.router = Some(address(10, 2));
        let mut neighbours = exact_map(1);
        neighbours.insert(address(10, 2), MAC);
        (Arc::new(tables), neighbours)
    })
}
