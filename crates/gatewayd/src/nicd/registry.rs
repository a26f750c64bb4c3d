//! The pods: those of the configuration, and those that were added at run time, each with a file in a directory.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use bifrost_control::api::ApiError;
use bifrost_nicpipe::{Mode, Pipeline, Place, Pod};
use bifrost_wire::Mac;

use super::PodSettings;
use super::engine::{Answer, Command};
use super::links::{Event, Listener};

/// All pods, by their numbers in the pipeline.
#[derive(Debug)]
pub(super) struct Pods {
    list: Vec<Option<Known>>,
    directory: Option<PathBuf>,
    longest: usize,
    events: Sender<Event>,
    last_id: u64,
}

/// The data about a pod that is known without asking the pipeline.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) name: String,
    pub(super) own: Vec<IpAddr>,
    /// The VLAN of its first interface.
    pub(super) vlan: Option<u16>,
    pub(super) mac: Option<Mac>,
    sockets: Vec<PathBuf>,
    listeners: Vec<Listener>,
    id: u64,
    /// Whether it is in the configuration file.
    configured: bool,
}

impl Pods {
    pub(super) fn new(directory: Option<PathBuf>, longest: usize, events: Sender<Event>) -> Self {
        Pods { list: Vec::new(), directory, longest, events, last_id: 0 }
    }

    /// Adds the pods of the configuration, and those that were added at run time earlier, to a pipeline that does not
    /// run yet.
    ///
    /// # Errors
    /// A pod of the configuration cannot be added. A pod of the directory that cannot be added is skipped, so that it
    /// does not stop the others.
    pub(super) fn start(&mut self, configured: &[PodSettings], pipeline: &mut Pipeline) -> Result<()> {
        for settings in configured {
            pipeline.check(&settings.pipeline)?;
            self.add_to(settings, true, |pod, _| Ok(pipeline.add(*pod)?))?;
        }
        let Some(directory) = self.directory.clone() else { return Ok(()) };
        for path in files(&directory).with_context(|| format!("reading {}", directory.display()))? {
            let mut add = || -> Result<()> {
                let settings = PodSettings::parse(&path, &fs::read_to_string(&path)?, self.longest)?;
                self.check(&settings)?;
                self.add_to(&settings, false, |pod, _| Ok(pipeline.add(*pod)?))
            };
            if let Err(error) = add() {
                tracing::error!(file = %path.display(), error = format!("{error:#}"), "a pod is left out");
            }
        }
        Ok(())
    }

    /// By number: the identifier that distinguishes each pod from later ones with the same number.
    pub(super) fn ids(&self) -> Vec<u64> {
        self.list.iter().map(|pod| pod.as_ref().map_or(0, |pod| pod.id)).collect()
    }

    /// Adds a pod. `ask` sends a command to the pipeline.
    pub(super) fn add(
        &mut self,
        settings: &str,
        ask: impl Fn(Command) -> Result<Answer, ApiError>,
    ) -> Result<(), ApiError> {
        let parsed = PodSettings::parse(Path::new("settings"), settings, self.longest);
        let parsed = parsed.map_err(|errors| ApiError::bad_request(errors.to_string()).at("settings"))?;
        self.check(&parsed).map_err(|error| ApiError::conflict(error.to_string()))?;
        let name = parsed.pipeline.name.clone();
        let added = self.add_to(&parsed, false, |pod, id| match ask(Command::Add { pod, id }) {
            Ok(Answer::Added(number)) => Ok(number),
            Ok(_) => anyhow::bail!("the pipeline has answered something else"),
            Err(error) => anyhow::bail!("{}", error.what),
        });
        let kept = added.and_then(|()| self.keep(&name, settings));
        if let Err(error) = kept {
            // A pod without its sockets or its file is removed again.
            let _ = self.take(&name, &ask);
            return Err(ApiError::conflict(format!("{error:#}")));
        }
        tracing::info!(pod = name, "added");
        Ok(())
    }

    /// Removes a pod that was added at run time.
    pub(super) fn remove(
        &mut self,
        name: &str,
        ask: impl Fn(Command) -> Result<Answer, ApiError>,
    ) -> Result<(), ApiError> {
        let number = self.find(name)?;
        if self.get(number).is_some_and(|pod| pod.configured) {
            let error = ApiError::conflict(format!("pod {name:?} is in the configuration file")).at("pod");
            return Err(error.hint("take it out there, and start bifrost-nicd again"));
        }
        if let Some(path) = self.file(name) {
            let removed = fs::remove_file(&path).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            });
            removed.map_err(|error| ApiError::conflict(format!("removing {}: {error}", path.display())))?;
        }
        self.take(name, &ask)?;
        tracing::info!(pod = name, "removed");
        Ok(())
    }

    /// The number of the pod with a name.
    pub(super) fn find(&self, name: &str) -> Result<usize, ApiError> {
        let named = |pod: &Option<Known>| pod.as_ref().is_some_and(|pod| pod.name == name);
        self.list.iter().position(named).ok_or_else(|| {
            let names: Vec<_> = self.list.iter().flatten().map(|pod| pod.name.as_str()).collect();
            let unknown = ApiError::not_found(format!("no pod {name:?}")).at("pod");
            unknown.hint(if names.is_empty() {
                "there are none".to_owned()
            } else {
                format!("there are: {}", names.join(", "))
            })
        })
    }

    /// The number of the first pod.
    pub(super) fn first(&self) -> Result<usize, ApiError> {
        let first = self.list.iter().position(Option::is_some);
        first.ok_or_else(|| ApiError::not_found("there is no pod").at("pod"))
    }

    pub(super) fn get(&self, number: usize) -> Option<&Known> {
        self.list.get(number).and_then(Option::as_ref)
    }

    /// Disconnects all pods, and removes their sockets.
    pub(super) fn stop(&mut self) {
        self.list.drain(..).flatten().flat_map(|pod| pod.listeners).for_each(Listener::stop);
    }

    /// Checks what the pipeline does not know: names and sockets.
    fn check(&self, settings: &PodSettings) -> Result<()> {
        let name = &settings.pipeline.name;
        for other in self.list.iter().flatten() {
            anyhow::ensure!(other.name != *name, "there is a pod {name:?} already");
            if let Some(path) = settings.sockets.iter().find(|path| other.sockets.contains(path)) {
                anyhow::bail!("pod {:?} has the socket {}, too", other.name, path.display());
            }
        }
        Ok(())
    }

    /// Adds a pod. `add` adds it to the pipeline and returns its number there.
    fn add_to(
        &mut self,
        settings: &PodSettings,
        configured: bool,
        add: impl FnOnce(Box<Pod>, u64) -> Result<usize>,
    ) -> Result<()> {
        let pod = prepare(settings, self.longest)?;
        self.last_id += 1;
        let id = self.last_id;
        let number = add(Box::new(pod), id)?;
        let all = self.list.len().max(number + 1);
        self.list.resize_with(all, || None);
        let config = &settings.pipeline;
        let known = self.list[number].insert(Known {
            name: config.name.clone(),
            own: config.rules.own.clone(),
            vlan: config.interfaces.first().copied().flatten(),
            mac: config.mac,
            sockets: settings.sockets.clone(),
            listeners: Vec::new(),
            id,
            configured,
        });
        let rings = config.balancer.cores + 1;
        for (interface, path) in settings.sockets.iter().enumerate() {
            let place = Place { pod: number, interface };
            let events = self.events.clone();
            known.listeners.push(Listener::start(place, id, &config.name, path.clone(), rings, events)?);
        }
        Ok(())
    }

    /// Removes a pod. It is freed here, not by the pipeline's thread.
    fn take(&mut self, name: &str, ask: impl Fn(Command) -> Result<Answer, ApiError>) -> Result<(), ApiError> {
        let number = self.find(name)?;
        if let Answer::Removed(pod, links) = ask(Command::Remove { pod: number })? {
            drop((pod, links));
        }
        let taken = self.list[number].take();
        taken.into_iter().flat_map(|pod| pod.listeners).for_each(Listener::stop);
        Ok(())
    }

    /// Writes a pod's file atomically.
    fn keep(&self, name: &str, settings: &str) -> Result<()> {
        let Some(path) = self.file(name) else { return Ok(()) };
        let write = || {
            let new = path.with_extension("new");
            fs::write(&new, settings)?;
            fs::File::open(&new)?.sync_all()?;
            fs::rename(&new, &path)
        };
        write().with_context(|| format!("writing {}", path.display()))
    }

    fn file(&self, name: &str) -> Option<PathBuf> {
        self.directory.as_ref().map(|directory| directory.join(name).with_extension("toml"))
    }
}

/// The pods' files, sorted by name. Creates the directory if it is missing.
fn files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    fs::create_dir_all(directory)?;
    let mut all = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            all.push(path);
        }
    }
    all.sort();
    Ok(all)
}

/// Allocates a pod with all its memory.
fn prepare(settings: &PodSettings, longest: usize) -> Result<Pod> {
    let mut config = settings.pipeline.clone();
    // Random numbers: tenants must not predict the seed, and the first PSN distinguishes packets of this run from those
    // of an earlier one.
    config.limiter.seed = settings.limiter_seed.unwrap_or_else(|| fastrand::u64(..));
    config.balancer.first_psn = fastrand::u32(..);
    if let Some(transport) = &mut config.reliable {
        // Hosts recognise a restart of the program by this.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (transport.instance, transport.salt) = (since.as_micros() as u64, fastrand::u32(..));
    }
    let mut pod = Pod::new(config, longest)?;
    for vni in &settings.bypass {
        pod.limiter_mut().bypass(*vni)?;
    }
    if settings.rss {
        pod.set_mode(0, Mode::Rss);
    }
    Ok(pod)
}
