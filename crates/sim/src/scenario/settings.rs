//! Settings of the transport, with the names of `bifrost_rte::Config`.

use bifrost_rte::{CcKind, Config};
use serde::{Deserialize, Serialize};

use crate::units::Ns;

/// Congestion control, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CongestionControl {
    /// Swift.
    Swift,
    /// None.
    None,
}

macro_rules! settings {
    (times { $($time:ident => $time_ns:ident,)* } optional_times { $($auto:ident => $auto_ns:ident,)* } numbers { $($number:ident: $kind:ty,)* }) => {
        /// Differences from `bifrost_rte::Config::default()`.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct TransportSettings {
            $(
                #[doc = concat!("`Config::", stringify!($time_ns), "`")]
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $time: Option<Ns>,
            )*
            $(
                #[doc = concat!("`Config::", stringify!($auto_ns), "`; without, it is adapted to the RTT")]
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $auto: Option<Ns>,
            )*
            $(
                #[doc = concat!("`Config::", stringify!($number), "`")]
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $number: Option<$kind>,
            )*
            /// `Config::congestion_control`
            #[serde(skip_serializing_if = "Option::is_none")]
            pub congestion_control: Option<CongestionControl>,
        }

        impl TransportSettings {
            /// `config` with these settings.
            pub fn on(&self, mut config: Config) -> Config {
                $(if let Some(value) = self.$time { config.$time_ns = value.0; })*
                $(if let Some(value) = self.$auto { config.$auto_ns = Some(value.0); })*
                $(if let Some(value) = self.$number { config.$number = value; })*
                match self.congestion_control {
                    Some(CongestionControl::Swift) => config.congestion_control = CcKind::Swift,
                    Some(CongestionControl::None) => config.congestion_control = CcKind::None,
                    None => {}
                }
                config
            }

            #[cfg(test)]
            fn names() -> Vec<&'static str> {
                vec![$(stringify!($time_ns),)* $(stringify!($auto_ns),)* $(stringify!($number),)* "congestion_control"]
            }
        }
    };
}

settings! {
    times {
        stickiness => stickiness_ns,
        initial_rto => initial_rto_ns,
        rto_ceiling => rto_ceiling_ns,
        plain_retry => plain_retry_ns,
        best_effort_after => best_effort_after_ns,
        idle_shrink => idle_shrink_ns,
        idle_reap => idle_reap_ns,
        probe_interval => probe_interval_ns,
        swift_noise => swift_noise_ns,
    }
    optional_times {
        rto_floor => rto_floor_ns,
        ack_delay => ack_delay_ns,
        give_up_after => give_up_after_ns,
    }
    numbers {
        version_max: u8,
        group_packets: u16,
        spray_paths: u8,
        ack_threshold: u16,
        initial_window: u16,
        max_window: u16,
        setup_queue_packets: u16,
        setup_tries: u8,
        heavy_loss_percent: u8,
        give_up_rtos: u8,
        max_connections: u32,
        max_connections_per_peer: u32,
        max_pages: u32,
        first_psn: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_of_the_transport_can_be_set() {
        let text = format!("{:#?}", Config::default());
        let fields = text.lines().filter_map(|l| l.strip_prefix("    ")).filter(|l| !l.starts_with(' '));
        let fields: Vec<&str> = fields.filter_map(|l| l.split_once(": ")).map(|(name, _)| name).collect();
        assert!(fields.contains(&"spray_paths"), "{fields:?}");
        for name in fields {
            assert!(
                name == "mutation" || TransportSettings::names().contains(&name),
                "{name} cannot be set by a scenario"
            );
        }
    }
}
