//! Objects of a host that gets another number of workers.

use super::{Id, Objects};
use crate::config::{Object, PortKind};

impl super::Entry {
    fn requeued(&self, former: usize, workers: usize) -> Option<super::Entry> {
        let Object::Port(port) = &self.object else { return None };
        let mut port = port.clone();
        let is_requeued = port.kind == PortKind::Tap && port.queues == former;
        port.queues = workers;
        is_requeued.then(|| super::Entry { object: Object::Port(port), ..self.clone() })
    }
}

/// The same objects with `workers` instead of `former` workers: TAP ports with a queue for each worker, which is the
/// default, still have one for each.
pub fn with_workers(mut objects: Objects, former: usize, workers: usize) -> Objects {
    let requeued = |(id, entry): (&Id, &super::Entry)| Some((id.clone(), entry.requeued(former, workers)?));
    for (id, entry) in objects.iter().filter_map(requeued).collect::<Vec<_>>() {
        objects.insert(id, entry);
    }
    objects
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Kind;
    use crate::objects::Entry;

    fn port(name: &str, more: &str) -> (Id, Entry) {
        let spec = format!(
            "{{\"name\": \"{name}\", \"vni\": 1, \"mac\": \"02:00:00:00:00:01\", \"addresses\": [\"10.0.0.1/24\"]{more}}}"
        );
        let object = Object::parse(Kind::Port, &serde_json::from_str(&spec).unwrap(), 2).unwrap();
        (Id::of(&object), Entry { owner: "agent".into(), generation: 1, changed_ms: 0, object })
    }

    #[test]
    fn ports_with_a_queue_for_each_worker_have_one_for_each_again() {
        let vm = ", \"kind\": \"vhost-user\", \"socket\": \"/run/vm.sock\", \"queues\": 2";
        let all = [port("all", ""), port("one", ", \"queues\": 1"), port("vm", vm)];
        let objects = with_workers(all.into_iter().collect(), 2, 3);
        let queues = |name: &str| {
            let found = objects.iter().find(|(id, _)| id.key == name).map(|(_, entry)| &entry.object);
            let Some(Object::Port(port)) = found else { panic!("{name}") };
            port.queues
        };
        assert_eq!((queues("all"), queues("one"), queues("vm")), (3, 1, 2));
    }
}
