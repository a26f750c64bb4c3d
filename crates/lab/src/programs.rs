//! The programs whose use of the network is measured.

pub mod apache_bench;
pub mod application;
pub mod datagrams;
pub mod echo_prober;
pub mod flood;
pub mod guest_tcp;
pub mod hostile;
pub mod http2;
pub mod idle_connections;
pub mod iperf3;
pub mod key_value_client;
pub mod key_value_protocol;
pub mod mariadb;
pub mod memcached;
pub mod nginx;
pub mod open_vswitch;
pub mod packet_socket;
pub mod path_prober;
pub mod ping_pong;
pub mod postgresql;
pub mod quic;
pub mod redis_benchmark;
pub mod redis_server;
pub mod sockperf;
pub mod stream;
pub mod tcp_requests;
pub mod testpmd;

use application::Application;

use crate::options::App;

/// The application with a name.
pub fn application(app: App) -> &'static dyn Application {
    match app {
        App::Postgresql => &postgresql::Postgresql,
        App::Mariadb => &mariadb::Mariadb,
        App::Memcached => &memcached::Memcached,
        App::Http2 => &http2::Http2,
        App::Quic => &quic::Quic,
        App::Udp => &datagrams::Datagrams,
    }
}
