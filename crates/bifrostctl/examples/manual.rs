//! Writes the manual pages and the shell completions of both programs into a directory, from their command lines:
//! `cargo run -p bifrostctl --example manual -- DIRECTORY`. `scripts/build-deb.sh` does.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory as _};
use clap_complete::Shell;

#[allow(dead_code)] // The daemon reads the fields.
#[path = "../../bifrostd/src/cli.rs"]
mod daemon;

fn main() -> Result<(), Box<dyn Error>> {
    let directory: PathBuf = std::env::args_os().nth(1).ok_or("usage: manual DIRECTORY")?.into();
    let programs = [("bifrostctl", "1", bifrostctl::command()), ("bifrostd", "8", daemon::Cli::command())];
    for (name, section, command) in programs {
        let command = command.name(name);
        completions(&command, &directory.join("completions"))?;
        pages(command, section, &directory.join("man"))?;
    }
    Ok(())
}

fn completions(command: &Command, directory: &Path) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(directory)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command.clone(), command.get_name(), directory)?;
    }
    Ok(())
}

/// A page for the command and one for each of its subcommands: `bifrostctl-fault-add.1`.
fn pages(mut command: Command, section: &str, directory: &Path) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(directory)?;
    command = command.disable_help_subcommand(true);
    command.build();
    page(&command, section, directory)
}

fn page(command: &Command, section: &str, directory: &Path) -> Result<(), Box<dyn Error>> {
    let title = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    // Not the machine's day: the same sources give the same page.
    let man = clap_mangen::Man::new(command.clone().after_help(None::<&str>).after_long_help(None::<&str>));
    let mut text = Vec::new();
    man.title(&title).section(section).manual("Bifrost").date("").render(&mut text)?;
    if let Some(examples) = command.get_after_help() {
        text.extend(verbatim(&examples.to_string()).bytes());
    }
    fs::write(directory.join(format!("{title}.{section}")), text)?;
    for subcommand in command.get_subcommands().filter(|c| !c.is_hide_set()) {
        page(subcommand, section, directory)?;
    }
    Ok(())
}

/// A section of examples whose lines stay as they are.
fn verbatim(text: &str) -> String {
    let text = text.strip_prefix("Examples:\n").unwrap_or(text);
    let lines = text.lines().map(|line| format!("\\&{}\n", line.replace('\\', "\\e").replace('-', "\\-")));
    format!(".SH EXAMPLES\n.nf\n{}.fi\n", lines.collect::<String>())
}
