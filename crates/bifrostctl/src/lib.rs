//! The program `bifrostctl`, which looks into a running `bifrostd` over its Unix socket; and its command line, for
//! manual pages and completions.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod capture;
mod cli;
mod drops;
mod failure;
mod fleet;
mod gw;
mod objects;
mod output;
mod printable;
mod sessions;
mod table;
mod top;
mod trace;

use std::process::ExitCode;

use bifrost_control::Client;
use bifrost_control::api::UpgradeSpec;
use bifrost_control::client::ClientError;
use bifrost_control::config::Kind;
use clap::{CommandFactory as _, Parser as _};

use cli::{Cli, Command, FaultCommand, PathCommand};
use failure::Failure;
use output::Output;

/// The program: reads the command line and does what it says.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let json = cli.json;
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(json),
    }
}

/// The command line, as a description.
pub fn command() -> clap::Command {
    Cli::command()
}

fn run(cli: Cli) -> Result<(), Failure> {
    let client = Client::new(&cli.socket)?;
    let out = Output { json: cli.json };
    match cli.command {
        Command::Status => out.print(&client.status()?, table::status),
        Command::Ports => out.print(&client.ports()?, |v| table::ports(v)),
        Command::Routes => out.print(&client.routes()?, |v| table::routes(v)),
        Command::Learned => out.print(&client.learned()?, |v| table::learned(v)),
        Command::LoadBalancers => out.print(&client.load_balancers()?, |v| table::load_balancers(v)),
        Command::Nat => out.print(&client.nat()?, |v| table::nat(v)),
        Command::Mirrors => out.print(&client.mirrors()?, |v| table::mirrors(v)),
        Command::FlowLog => out.print(&client.flow_log()?, table::flow_log),
        Command::Conns => out.print(&client.conns()?, |v| table::conns(v)),
        Command::Paths => out.print(&client.paths()?, |v| table::paths(v)),
        Command::Path(PathCommand::Drain(args)) => {
            out.print(&client.drain_path(&args.into(), true)?, table::path_drained)
        }
        Command::Path(PathCommand::Restore(args)) => {
            out.print(&client.drain_path(&args.into(), false)?, table::path_drained)
        }
        Command::Stats(args) => {
            let mut stats = client.stats()?;
            let pattern = args.pattern.unwrap_or_default();
            stats.counters.retain(|name, value| name.contains(&pattern) && (!args.nonzero || *value > 0));
            out.print(&stats, table::stats)
        }
        Command::Drops(args) => drops::run(&client, &args, out),
        Command::Reload => out.print(&client.reload()?, ToString::to_string),
        Command::Upgrade(args) => {
            // The daemon has another working directory.
            let binary = args.binary.map(std::path::absolute).transpose();
            let binary = binary.map_err(ClientError::Output)?;
            out.print(&client.upgrade(&UpgradeSpec { binary })?, ToString::to_string)
        }
        Command::Apply(args) => objects::apply(&client, &args, out),
        Command::Objects(args) => objects::list(&client, &args, out),
        Command::Port(command) => objects::change(&client, Kind::Port, command, out),
        Command::Route(command) => objects::change(&client, Kind::Route, command, out),
        Command::Sg(command) => objects::change(&client, Kind::SecurityGroup, command, out),
        Command::Sessions(command) => sessions::run(&client, command, out),
        Command::Fault(FaultCommand::List) => out.print(&client.faults()?, |v| table::faults(v)),
        Command::Fault(FaultCommand::Add(args)) => out.print(&client.add_fault(&args.spec()?)?, table::fault_added),
        Command::Fault(FaultCommand::Clear { id: None }) => out.print(&client.clear_faults()?, table::faults_cleared),
        Command::Fault(FaultCommand::Clear { id: Some(id) }) => {
            out.print(&client.remove_fault(id)?, table::faults_cleared)
        }
        Command::Capture(args) => capture::run(&client, args),
        Command::Trace(args) => trace::run(&client, args, out),
        Command::Gw(args) => gw::run(args, out),
        Command::Fleet(args) => fleet::run(args, out),
        Command::Top(args) => top::run(client, args, out),
    }
}
