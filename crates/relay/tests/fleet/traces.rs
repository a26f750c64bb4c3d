//! Traces of changes, as a collector gets them.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::trace::v1::Span;
use serde_json::Value;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use crate::eventually;
use crate::netns::Net;
use crate::world::World;

/// A span with the program and the instance that have sent it.
#[derive(Clone, Debug)]
struct Got {
    service: String,
    instance: String,
    span: Span,
}

/// Keeps what it gets.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<Got>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for all in request.into_inner().resource_spans {
            let resource = all.resource.unwrap().attributes;
            let (service, instance) = (text(&resource, "service.name"), text(&resource, "service.instance.id"));
            for span in all.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                self.0.lock().unwrap().push(Got { service: service.clone(), instance: instance.clone(), span });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// Serves in a thread that ends with the process.
    fn start(listener: TcpListener) -> Collector {
        let collector = Collector::default();
        let service = TraceServiceServer::new(collector.clone());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                listener.set_nonblocking(true).unwrap();
                let incoming = TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
                tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
            });
        });
        collector
    }

    /// The spans of the trace whose root names that object, by name and instance; empty without a root.
    fn trace_of(&self, object: &str) -> BTreeMap<(String, String), Got> {
        let all = self.0.lock().unwrap();
        let is_root = |got: &&Got| text(&got.span.attributes, "bifrost.objects").split(' ').any(|name| name == object);
        let Some(root) = all.iter().find(is_root) else { return BTreeMap::new() };
        let of_trace = all.iter().filter(|got| got.span.trace_id == root.span.trace_id);
        of_trace.map(|got| ((got.span.name.clone(), got.instance.clone()), got.clone())).collect()
    }
}

fn value<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Any> {
    attributes.iter().find(|attribute| attribute.key == key)?.value.as_ref()?.value.as_ref()
}

fn text(attributes: &[KeyValue], key: &str) -> String {
    match value(attributes, key) {
        Some(Any::StringValue(text)) => text.clone(),
        _ => String::new(),
    }
}

/// A change to look at: the two ports of a network on the first two of three hosts, which are added one after the other. Its
/// trace is that of the second port.
fn make_a_change(world: &mut World) -> [Net; 2] {
    world.run_all();
    let guests = ["web", "db"].map(|name| world.guest(name));
    world.apply(
        "- {key: host/h1, addresses: [192.0.2.1]}\n- {key: host/h2, addresses: [192.0.2.2]}\n\
         - {key: host/h3, addresses: [192.0.2.3]}\n- key: vpc/demo/net\n\
         - {key: subnet/demo/a, vpc: net, prefix: 10.0.0.0/24}\n",
    );
    eventually(20.0, "all agents are connected", || {
        world.fleet_json("hosts").as_array().unwrap().iter().filter(|host| host["connected"] == true).count() == 3
    });
    world.fleet(&format!("add port/demo/web subnets=a host=h1 netns={} --wait 20", guests[0].name()));
    world.fleet(&format!("add port/demo/db subnets=a host=h2 netns={} --wait 20", guests[1].name()));
    guests
}

/// One change: its commit, what the relay did, and when each host concerned had it in force are one trace. A host that it
/// does not concern is not in it.
#[test]
fn a_change_is_a_trace() {
    let mut world = World::new(3);
    let collector = Collector::start(world.trace());
    let [_web, db] = make_a_change(&mut world);
    let applied = |host: &str| ("apply".to_owned(), host.to_owned());
    eventually(20.0, "the trace is whole", || {
        let trace = collector.trace_of("port/demo/db");
        trace.contains_key(&applied("h1")) && trace.contains_key(&applied("h2"))
    });
    let trace = collector.trace_of("port/demo/db");
    let by_name =
        |name: &str| trace.values().find(|got| got.span.name == name).unwrap_or_else(|| panic!("{name}: {trace:?}"));
    let root = by_name("change");
    assert_eq!((root.service.as_str(), root.span.parent_span_id.len()), ("bifrost-relay", 0), "{root:?}");
    assert_eq!(text(&root.span.attributes, "enduser.id"), "uid 0");
    let revision = value(&root.span.attributes, "bifrost.revision").unwrap();
    assert_eq!(trace.len(), 7, "the third host has no port of the network: {trace:?}");
    for name in ["commit", "pass on"] {
        let span = &by_name(name).span;
        assert!(span.start_time_unix_nano >= root.span.start_time_unix_nano, "{trace:?}");
        assert!(span.end_time_unix_nano <= root.span.end_time_unix_nano, "{trace:?}");
    }
    for host in ["h1", "h2"] {
        let Got { service, span, .. } = &trace[&applied(host)];
        assert_eq!(service, "bifrost-agent");
        assert!(span.start_time_unix_nano >= root.span.start_time_unix_nano, "{trace:?}");
        assert!(span.end_time_unix_nano > span.start_time_unix_nano, "{trace:?}");
        assert_eq!(value(&span.attributes, "bifrost.revision"), Some(revision));
        let asked = &trace[&("bifrostd: apply".to_owned(), host.to_owned())].span;
        assert_eq!(asked.parent_span_id, span.span_id, "{trace:?}");
        assert!(asked.start_time_unix_nano >= span.start_time_unix_nano, "{trace:?}");
        assert!(asked.end_time_unix_nano <= span.end_time_unix_nano, "{trace:?}");
    }
    let is_below_root = |name: &str| !["change", "bifrostd: apply"].contains(&name);
    let children = trace.values().filter(|got| is_below_root(&got.span.name));
    assert!(children.clone().all(|got| got.span.parent_span_id == root.span.span_id), "{trace:?}");
    // What changes nothing has no trace.
    let before = collector.0.lock().unwrap().len();
    world.fleet(&format!("set port/demo/db netns={}", db.name()));
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(collector.0.lock().unwrap().len(), before);
    let metrics = world.metrics(0);
    assert!(metrics.contains("\nbifrost_relay_spans_dropped_total 0"), "{metrics}");
}

/// The same with a real collector, and what it writes: from the request over store, relay and agents to the daemons.
#[test]
#[ignore = "needs BIFROST_OTELCOL"]
fn a_real_collector_gets_the_trace_of_a_change() {
    let program = std::env::var("BIFROST_OTELCOL")
        .expect("set BIFROST_OTELCOL, as by `BIFROST_OTELCOL=$(scripts/install-otel-collector.sh)`");
    let mut world = World::new(3);
    let (config, file) = (world.directory().join("otelcol.yaml"), world.directory().join("traces.json"));
    let to = world.trace_to();
    let text = format!(
        "receivers: {{otlp: {{protocols: {{grpc: {{endpoint: \"{to}\"}}}}}}}}\n\
         exporters: {{file: {{path: {}, flush_interval: 100ms}}}}\n\
         service:\n  telemetry: {{metrics: {{level: none}}}}\n\
         \x20 pipelines: {{traces: {{receivers: [otlp], exporters: [file]}}}}\n",
        file.display()
    );
    std::fs::write(&config, text).unwrap();
    let config = config.display().to_string();
    let _collector = world.run_beside_relay(&program, &["--config", &config], "otelcol.log");
    world.wait_for_listener(&to, "otelcol.log");
    let _guests = make_a_change(&mut world);
    let mut spans = Vec::new();
    eventually(30.0, "the collector has written the trace", || {
        spans = written(&std::fs::read_to_string(&file).unwrap_or_default(), "port/demo/db");
        spans.len() >= 7
    });
    let find = |name: &str, instance: &str| {
        let found =
            spans.iter().find(|span| span["name"] == name && span["instance"].as_str().unwrap().contains(instance));
        found.unwrap_or_else(|| panic!("no {name} of {instance}: {spans:#?}"))
    };
    let is_within = |inner: &Value, outer: &Value| {
        let time = |span: &Value, key: &str| span[key].as_str().unwrap().parse::<u64>().unwrap();
        time(outer, "startTimeUnixNano") <= time(inner, "startTimeUnixNano")
            && time(inner, "endTimeUnixNano") <= time(outer, "endTimeUnixNano")
    };
    let root = find("change", "");
    assert_eq!(
        (&root["service"], root["parentSpanId"].as_str().unwrap_or("")),
        (&"bifrost-relay".into(), ""),
        "{root}"
    );
    for name in ["commit", "pass on"] {
        let span = find(name, "");
        assert!(span["parentSpanId"] == root["spanId"] && is_within(span, root), "{span} {root}");
    }
    for host in ["h1", "h2"] {
        let (apply, asked) = (find("apply", host), find("bifrostd: apply", host));
        assert_eq!((&apply["service"], &apply["parentSpanId"]), (&"bifrost-agent".into(), &root["spanId"]));
        assert!(asked["parentSpanId"] == apply["spanId"] && is_within(asked, apply), "{asked} {apply}");
    }
    if let Ok(to) = std::env::var("BIFROST_SHOW_TRACE") {
        std::fs::write(to, serde_json::to_string_pretty(&spans).unwrap()).unwrap();
    }
}

/// The spans of the trace whose root names an object, in the file of a collector; each with its program and instance.
fn written(text: &str, object: &str) -> Vec<Value> {
    let list = |value: &Value, key: &str| value[key].as_array().cloned().unwrap_or_default();
    let attribute = |of: &Value, key: &str| {
        let found = list(of, "attributes").into_iter().find(|attribute| attribute["key"] == key);
        found.map_or(Value::Null, |attribute| attribute["value"]["stringValue"].clone())
    };
    let mut all = Vec::new();
    // The last line may be half written.
    for message in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        for of_program in list(&message, "resourceSpans") {
            let resource = &of_program["resource"];
            let (service, instance) = (attribute(resource, "service.name"), attribute(resource, "service.instance.id"));
            for mut span in list(&of_program, "scopeSpans").iter().flat_map(|scope| list(scope, "spans")) {
                (span["service"], span["instance"]) = (service.clone(), instance.clone());
                all.push(span);
            }
        }
    }
    let names = |span: &Value| {
        attribute(span, "bifrost.objects").as_str().is_some_and(|all| all.split(' ').any(|n| n == object))
    };
    let Some(trace) = all.iter().find(|span| names(span)).map(|root| root["traceId"].clone()) else {
        return Vec::new();
    };
    all.retain(|span| span["traceId"] == trace);
    all
}
