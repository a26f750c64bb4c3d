//! Maps requests to backend calls, and results to responses.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{Query, Request, State, rejection::QueryRejection};
use axum::http::{Method, StatusCode, Uri, Version};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use serde::{Deserialize, Serialize};

use super::Backend;
use super::capture::{Stopping, lasting_response};
use super::connections::{Lasting, Peer, whole_body};
use super::failure::failure;
use super::list::list;
use crate::api::{
    ApiError, ApplySpec, CaptureSpec, DrainSpec, Drops, ErrorBody, FaultCleared, FaultSpec, LearnSpec, MAX_ANSWERS,
    MAX_APPLY_BYTES, MAX_LEARN_BYTES, MAX_LISTED_OBJECTS, MAX_QUESTION_WAIT_MS, MAX_SESSIONS_BYTES, ObjectsQuery,
    PortSessions, QuestionsQuery, SessionFilter, SessionsQuery, TraceSpec, UpgradeSpec,
};

/// Largest body of most requests, bytes. A fault's specification has a few hundred.
const MAX_BODY: usize = 64 << 10;

type Shared = Arc<dyn Backend>;

pub(super) fn router(backend: Shared, stopping: Stopping) -> Router {
    Router::new()
        .route("/v1/status", get(|State(b): State<Shared>| call(move || b.status())))
        .route("/v1/ports", get(|State(b): State<Shared>| list(move || b.ports())))
        .route("/v1/routes", get(|State(b): State<Shared>| list(move || b.routes())))
        .route("/v1/load-balancers", get(|State(b): State<Shared>| call(move || b.load_balancers())))
        .route("/v1/nat", get(|State(b): State<Shared>| call(move || b.nat())))
        .route("/v1/mirrors", get(|State(b): State<Shared>| call(move || b.mirrors())))
        .route("/v1/flow-log", get(|State(b): State<Shared>| call(move || b.flow_log())))
        .route("/v1/conns", get(|State(b): State<Shared>| list(move || b.conns())))
        .route("/v1/paths", get(|State(b): State<Shared>| list(move || b.paths())))
        .route("/v1/paths/drain", post(|State(b): State<Shared>, body: Bytes| drain(b, body, true)))
        .route("/v1/paths/restore", post(|State(b): State<Shared>, body: Bytes| drain(b, body, false)))
        .route("/v1/stats", get(|State(b): State<Shared>| call(move || b.stats())))
        .route("/v1/samples", get(|State(b): State<Shared>| list(move || b.samples())))
        .route("/v1/drops", get(|State(b): State<Shared>| call(move || drops(&*b))))
        .route(
            "/v1/faults",
            get(|State(b): State<Shared>| call(move || b.faults())).put(add_fault).delete(remove_faults),
        )
        .route("/v1/reload", post(|State(b): State<Shared>| call(move || b.reload())))
        .route("/v1/upgrade", post(upgrade))
        .route("/v1/apply", post(apply))
        .route("/v1/objects", get(objects))
        .route("/v1/learned", get(|State(b): State<Shared>| list(move || b.learned())).post(learn))
        .route("/v1/learned/questions", get(route_questions))
        .route("/v1/sessions", get(sessions))
        .route("/v1/sessions/export", post(export_sessions))
        .route("/v1/sessions/import", post(import_sessions))
        .route("/v1/trace", post(trace))
        .route("/v1/capture", post(start_capture))
        .fallback(unknown_path)
        .method_not_allowed_fallback(unknown_method)
        .layer(middleware::from_fn(|request: Request, next: Next| {
            let most = match request.uri().path() {
                "/v1/apply" => MAX_APPLY_BYTES,
                "/v1/sessions/import" => MAX_SESSIONS_BYTES,
                "/v1/learned" => MAX_LEARN_BYTES,
                _ => MAX_BODY,
            };
            whole_body(request, next, most)
        }))
        .layer(Extension(stopping))
        .with_state(backend)
}

fn drops(backend: &dyn Backend) -> Result<Drops, ApiError> {
    let samples = backend.samples()?.collect::<Result<Vec<_>, _>>()?;
    Ok(Drops::of(backend.status()?.uptime_s, &samples.concat()))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FaultQuery {
    id: Option<u64>,
}

async fn add_fault(State(backend): State<Shared>, body: Bytes) -> Response {
    match serde_json::from_slice::<FaultSpec>(&body) {
        Ok(spec) => call(move || backend.add_fault(spec)).await,
        Err(e) => {
            let hint = "a fault is, for example, {\"port\": \"web1\", \"loss_percent\": 1}";
            failure(ApiError::bad_request(e.to_string()).at("body of PUT /v1/faults").hint(hint))
        }
    }
}

async fn drain(backend: Shared, body: Bytes, drained: bool) -> Response {
    match serde_json::from_slice::<DrainSpec>(&body) {
        Ok(spec) => call(move || backend.drain_path(spec, drained)).await,
        Err(e) => {
            let hint = "a path is, for example, {\"peer\": \"host-b\", \"path\": 2}";
            let at = if drained { "body of POST /v1/paths/drain" } else { "body of POST /v1/paths/restore" };
            failure(ApiError::bad_request(e.to_string()).at(at).hint(hint))
        }
    }
}

async fn apply(State(backend): State<Shared>, body: Bytes) -> Response {
    match serde_json::from_slice::<ApplySpec>(&body) {
        Ok(spec) => call(move || backend.apply(spec)).await,
        Err(e) => {
            let hint = "a batch is, for example, {\"items\": [{\"op\": \"delete\", \"kind\": \"port\", \"key\": \"web1\", \
                        \"owner\": \"agent\"}]}; nothing was changed";
            failure(ApiError::bad_request(e.to_string()).at("body of POST /v1/apply").hint(hint))
        }
    }
}

/// The named program runs with the daemon's privileges. Members of the socket's group must not choose it.
async fn upgrade(State(backend): State<Shared>, Extension(peer): Extension<Peer>, body: Bytes) -> Response {
    if peer.uid != 0 && peer.uid != rustix::process::geteuid().as_raw() {
        let error = ApiError::bad_request("only root and the daemon's own user may request an upgrade");
        return failure(error.at("POST /v1/upgrade").hint("use sudo"));
    }
    match serde_json::from_slice::<UpgradeSpec>(&body) {
        Ok(spec) => call(move || backend.upgrade(spec)).await,
        Err(e) => {
            let hint = "for example {}, or {\"binary\": \"/usr/bin/bifrostd\"}; nothing was changed";
            failure(ApiError::bad_request(e.to_string()).at("body of POST /v1/upgrade").hint(hint))
        }
    }
}

async fn objects(State(backend): State<Shared>, query: Result<Query<ObjectsQuery>, QueryRejection>) -> Response {
    let refuse = |what: String| {
        let hint = "for example ?kind=port&key=web1, ?owner=agent&limit=100, or ?digest";
        failure(ApiError::bad_request(what).at("query of GET /v1/objects").hint(hint))
    };
    match query {
        Ok(Query(query)) if query.limit.is_some_and(|limit| !(1..=MAX_LISTED_OBJECTS).contains(&limit)) => {
            refuse(format!("limit is not in 1..={MAX_LISTED_OBJECTS}"))
        }
        Ok(Query(query)) if query.digest.is_some() => call(move || backend.object_digests(query)).await,
        Ok(Query(query)) => call(move || backend.objects(query)).await,
        Err(e) => refuse(e.body_text()),
    }
}

async fn learn(State(backend): State<Shared>, body: Bytes) -> Response {
    let refuse = |what: String| {
        let hint = "for example {\"answers\": [{\"vni\": 4096, \"range\": \"10.0.0.2/32\", \"route\": {\"peer\": \"host-b\", \
                    \"mac\": \"02:00:00:00:00:02\"}}]}; nothing was changed";
        failure(ApiError::bad_request(what).at("body of POST /v1/learned").hint(hint))
    };
    match serde_json::from_slice::<LearnSpec>(&body) {
        Ok(spec) if spec.answers.len() > MAX_ANSWERS => refuse(format!("there are more than {MAX_ANSWERS} answers")),
        Ok(spec) => call(move || backend.learn(spec)).await,
        Err(e) => refuse(e.to_string()),
    }
}

async fn route_questions(
    State(backend): State<Shared>,
    query: Result<Query<QuestionsQuery>, QueryRejection>,
) -> Response {
    match query {
        Ok(Query(QuestionsQuery { wait_ms })) => {
            let wait = Duration::from_millis(wait_ms.min(MAX_QUESTION_WAIT_MS));
            call(move || backend.route_questions(wait)).await
        }
        Err(e) => {
            let error = ApiError::bad_request(e.body_text()).at("query of GET /v1/learned/questions");
            failure(error.hint("for example ?wait_ms=500"))
        }
    }
}

async fn sessions(State(backend): State<Shared>, query: Result<Query<SessionFilter>, QueryRejection>) -> Response {
    match query {
        Ok(Query(filter)) => list(move || backend.sessions(filter)).await,
        Err(e) => {
            let hint = "for example ?port=vm1&state=established&limit=100";
            failure(ApiError::bad_request(e.body_text()).at("query of GET /v1/sessions").hint(hint))
        }
    }
}

async fn export_sessions(State(backend): State<Shared>, body: Bytes) -> Response {
    match serde_json::from_slice::<SessionsQuery>(&body) {
        Ok(query) => call(move || backend.export_sessions(query)).await,
        Err(e) => {
            let hint = "for example {\"port\": \"vm1\"}";
            failure(ApiError::bad_request(e.to_string()).at("body of POST /v1/sessions/export").hint(hint))
        }
    }
}

async fn import_sessions(State(backend): State<Shared>, body: Bytes) -> Response {
    match serde_json::from_slice::<PortSessions>(&body) {
        Ok(sessions) => call(move || backend.import_sessions(sessions)).await,
        Err(e) => {
            let hint = "send the response of POST /v1/sessions/export on the other host; nothing was changed";
            failure(ApiError::bad_request(e.to_string()).at("body of POST /v1/sessions/import").hint(hint))
        }
    }
}

async fn trace(State(backend): State<Shared>, body: Bytes) -> Response {
    match serde_json::from_slice::<TraceSpec>(&body) {
        Ok(spec) => call(move || spec.check().and_then(|()| backend.trace(spec))).await,
        Err(e) => {
            let hint = "a packet is, for example, {\"port\": \"web1\", \"to\": \"10.0.0.2\", \"tcp\": [40000, 80]}";
            failure(ApiError::bad_request(e.to_string()).at("body of POST /v1/trace").hint(hint))
        }
    }
}

async fn start_capture(
    State(backend): State<Shared>,
    Extension(stopping): Extension<Stopping>,
    Extension(lasting): Extension<Lasting>,
    version: Version,
    body: Bytes,
) -> Response {
    let spec = match serde_json::from_slice::<CaptureSpec>(&body) {
        Ok(spec) => spec,
        Err(e) => {
            let hint = "a capture is, for example, {\"at\": [\"drop\"], \"filter\": \"tcp port 80\", \"seconds\": 10}";
            return failure(ApiError::bad_request(e.to_string()).at("body of POST /v1/capture").hint(hint));
        }
    };
    match tokio::task::spawn_blocking(move || spec.check().and_then(|()| backend.capture(spec))).await {
        Ok(Ok(stream)) => lasting_response(stream, stopping, lasting, version),
        Ok(Err(error)) => failure(error),
        Err(e) => failure(ApiError::internal(format!("the request's handler failed: {e}"))),
    }
}

async fn remove_faults(State(backend): State<Shared>, query: Result<Query<FaultQuery>, QueryRejection>) -> Response {
    match query {
        Ok(Query(FaultQuery { id: Some(id) })) => {
            call(move || backend.remove_fault(id).map(|()| FaultCleared { removed: 1 })).await
        }
        Ok(Query(FaultQuery { id: None })) => {
            call(move || backend.clear_faults().map(|removed| FaultCleared { removed })).await
        }
        Err(e) => {
            let hint = "DELETE /v1/faults removes all, DELETE /v1/faults?id=3 one";
            failure(ApiError::bad_request(e.body_text()).at("query of DELETE /v1/faults").hint(hint))
        }
    }
}

async fn unknown_path(uri: Uri) -> Response {
    let hint = "/v1/ has status, ports, routes, load-balancers, nat, mirrors, flow-log, conns, paths, stats, samples, drops, \
                faults, reload, upgrade, apply, objects, sessions, trace and capture";
    failure(ApiError::not_found("no such resource").at(uri.path()).hint(hint))
}

async fn unknown_method(method: Method, uri: Uri) -> Response {
    let error = ApiError::bad_request(format!("method {method} is not allowed here")).at(uri.path());
    (StatusCode::METHOD_NOT_ALLOWED, Json(ErrorBody::from(error))).into_response()
}

/// Runs a backend call on a thread that may block, and responds with its result.
async fn call<T, F>(f: F) -> Response
where
    T: Serialize + Send + 'static,
    F: FnOnce() -> Result<T, ApiError> + Send + 'static,
{
    match tokio::task::spawn_blocking(f).await {
        Ok(Ok(value)) => Json(value).into_response(),
        Ok(Err(error)) => failure(error),
        Err(e) => {
            failure(ApiError::internal(format!("the request's handler failed: {e}")).hint("see the daemon's log"))
        }
    }
}
