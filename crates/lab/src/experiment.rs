//! The list of experiments.

use crate::experiments::{
    applications::Applications, apply::Apply, capacity::Capacity, cni::Cni, congestion_control::CongestionControl,
    coverage::Coverage, delayed_release::DelayedRelease, ecn::Ecn, elephants::Elephants, flow_log::FlowLogExperiment,
    flow_records::FlowRecords, granularity::Granularity, gw_bgp::GwBgp, gw_elastic::GwElastic, gw_hosts::GwHosts,
    gw_kill::GwKill, gw_links::GwLinks, gw_order::GwOrder, gw_overload::GwOverload, gw_services::GwServices,
    iperf::Iperf, isolation::Isolation, learn::Learn, load_balancer::LoadBalancer, lossless::Lossless,
    migrate::Migrate, mirror::MirrorExperiment, nat::NatExperiment, nginx::NginxExperiment, outage::Outage,
    path_failure::PathFailure, rdm_block::RdmBlock, rdm_loss::RdmLoss, rdm_sort::RdmSort, rdm_upgrade::RdmUpgrade,
    redis_loss::RedisLoss, route_refresh::RouteRefresh, slicing::Slicing, soak::Soak, sockperf::Sockperf,
    stable::Stable, switch_latency::SwitchLatency, switch_overall::SwitchOverall, switch_rate::SwitchRate,
    upgrade::Upgrade, vectors::Vectors, vhost_rate::VhostRate,
};
use crate::frame::Experiment;

/// All experiments, in the order of `bifrost-lab list`.
pub fn all() -> Vec<Box<dyn Experiment>> {
    vec![
        Box::new(RedisLoss),
        Box::new(PathFailure),
        Box::new(Outage),
        Box::new(Iperf),
        Box::new(Lossless),
        Box::new(Soak),
        Box::new(Granularity),
        Box::new(Coverage),
        Box::new(DelayedRelease),
        Box::new(Slicing),
        Box::new(VhostRate),
        Box::new(Migrate),
        Box::new(SwitchOverall),
        Box::new(SwitchRate),
        Box::new(SwitchLatency),
        Box::new(FlowRecords),
        Box::new(Vectors),
        Box::new(RouteRefresh),
        Box::new(NatExperiment),
        Box::new(LoadBalancer),
        Box::new(MirrorExperiment),
        Box::new(FlowLogExperiment),
        Box::new(Apply),
        Box::new(Learn),
        Box::new(Upgrade),
        Box::new(Cni),
        Box::new(NginxExperiment),
        Box::new(Applications),
        Box::new(Isolation),
        Box::new(Elephants),
        Box::new(Capacity),
        Box::new(Ecn),
        Box::new(Stable),
        Box::new(CongestionControl),
        Box::new(Sockperf),
        Box::new(GwServices),
        Box::new(GwOrder),
        Box::new(GwOverload),
        Box::new(GwHosts),
        Box::new(GwElastic),
        Box::new(GwBgp),
        Box::new(GwKill),
        Box::new(GwLinks),
        Box::new(RdmLoss),
        Box::new(RdmUpgrade),
        Box::new(RdmSort),
        Box::new(RdmBlock),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Mode;

    #[test]
    fn quick_runs_compare_no_more_than_the_switches() {
        let switches = Mode::with_af_xdp(&Mode::SWITCHES);
        for experiment in all() {
            let (modes, full, quick) =
                (experiment.modes(), experiment.default_modes(false), experiment.default_modes(true));
            let name = experiment.name();
            assert!(full.iter().chain(&quick).all(|mode| modes.contains(mode)), "{name}");
            assert!(quick.iter().all(|mode| full.contains(mode) && switches.contains(mode)), "{name}: {quick:?}");
            let several = matches!(name, "redis-loss" | "path-failure" | "iperf" | "nginx");
            for mode in [Mode::KernelBbr, Mode::Mptcp, Mode::Flowlet, Mode::Strict] {
                assert_eq!(full.contains(&mode), several, "{name}");
            }
        }
    }
}
