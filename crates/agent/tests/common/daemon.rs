//! `bifrostd`'s API with its objects, and nothing behind it.

use std::path::Path;
use std::sync::{Arc, Mutex};

use bifrost_control::api::*;
use bifrost_control::objects::Store;
use bifrost_control::server::{Backend, CaptureStream, Pages, ServerHandle, serve};
use bifrost_control::{Config, api};

/// The daemon; it ends when it is dropped, and its objects with it.
pub struct Daemon {
    fake: Arc<Fake>,
    server: Option<ServerHandle>,
}

struct Fake {
    store: Mutex<Store>,
    pid: u32,
}

impl Daemon {
    pub fn start(socket: &Path, pid: u32) -> Daemon {
        let file = "[host]\nname = \"host-a\"\n[underlay]\naddresses = [\"192.0.2.1\"]\n";
        let store = Mutex::new(Store::new(Arc::new(Config::parse(file, "t").unwrap())));
        let fake = Arc::new(Fake { store, pid });
        let server = serve(socket, Arc::clone(&fake) as Arc<dyn Backend>).unwrap();
        Daemon { fake, server: Some(server) }
    }

    pub fn keys(&self) -> Vec<String> {
        self.fake.store.lock().unwrap().others().keys().map(|id| format!("{} {}", id.kind, id.key)).collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.server.take().unwrap().stop();
    }
}

fn none<T>() -> Result<T, ApiError> {
    Err(ApiError::unavailable("this daemon has objects and nothing else"))
}

impl Backend for Fake {
    fn status(&self) -> Result<Status, ApiError> {
        let workers = vec![WorkerStatus::default()];
        Ok(Status { host: "host-a".into(), pid: self.pid, workers, ..Status::default() })
    }
    fn apply(&self, spec: ApplySpec) -> Result<ApplyReport, ApiError> {
        let mut store = self.store.lock().unwrap();
        let plan = store.plan(&spec.items, 1)?;
        let set = plan.changes().values().flatten().count() as u64;
        let deleted = plan.changes().len() as u64 - set;
        let report = ApplyReport { set, deleted, unchanged: plan.unchanged(), ..ApplyReport::default() };
        store.commit(plan);
        Ok(report)
    }
    fn objects(&self, query: ObjectsQuery) -> Result<ObjectList, ApiError> {
        self.store.lock().unwrap().list(&query)
    }
    fn object_digests(&self, query: ObjectsQuery) -> Result<Vec<ObjectsDigest>, ApiError> {
        Ok(self.store.lock().unwrap().digests(&query))
    }
    fn ports(&self) -> Result<Pages<PortStatus>, ApiError> {
        none()
    }
    fn routes(&self) -> Result<Pages<Route>, ApiError> {
        none()
    }
    fn load_balancers(&self) -> Result<Vec<LoadBalancerStatus>, ApiError> {
        none()
    }
    fn nat(&self) -> Result<Vec<NatStatus>, ApiError> {
        none()
    }
    fn mirrors(&self) -> Result<Vec<MirrorStatus>, ApiError> {
        none()
    }
    fn flow_log(&self) -> Result<FlowLogStatus, ApiError> {
        none()
    }
    fn conns(&self) -> Result<Pages<Conn>, ApiError> {
        none()
    }
    fn paths(&self) -> Result<Pages<api::Path>, ApiError> {
        none()
    }
    fn drain_path(&self, _: DrainSpec, _: bool) -> Result<DrainReport, ApiError> {
        none()
    }
    fn stats(&self) -> Result<Stats, ApiError> {
        none()
    }
    fn samples(&self) -> Result<Pages<Sample>, ApiError> {
        none()
    }
    fn faults(&self) -> Result<Vec<FaultEntry>, ApiError> {
        none()
    }
    fn add_fault(&self, _: FaultSpec) -> Result<FaultEntry, ApiError> {
        none()
    }
    fn remove_fault(&self, _: u64) -> Result<(), ApiError> {
        none()
    }
    fn clear_faults(&self) -> Result<u64, ApiError> {
        none()
    }
    fn reload(&self) -> Result<ReloadReport, ApiError> {
        none()
    }
    fn trace(&self, _: TraceSpec) -> Result<Trace, ApiError> {
        none()
    }
    fn capture(&self, _: CaptureSpec) -> Result<Box<dyn CaptureStream>, ApiError> {
        none()
    }
}
