//! The API for people and programs: HTTP/1.1 with JSON over a Unix socket, or over TLS.
//!
//! | request | answer |
//! |---|---|
//! | `GET /v1/status` | [`Status`] |
//! | `POST /v1/apply` with a [`Batch`]; `?dry_run=true` changes nothing | [`Applied`](bifrost_intent::api::Applied) |
//! | `POST /v1/enroll` with an [`Enroll`] | [`Enrolled`] |
//! | `POST /v1/certificates` with a [`Certify`] | [`Certified`] |
//! | `GET /v1/objects` with an [`ObjectsQuery`] | [`Objects`](bifrost_intent::api::Objects) |
//! | `GET /v1/hosts` | a list of [`HostStatus`] |
//! | `GET /v1/overview` | [`Overview`](bifrost_intent::api::Overview) |
//! | `GET /v1/wait` with a [`WaitQuery`] | [`Waited`] |
//! | `GET /v1/why` with a [`WhyQuery`] | [`Why`](bifrost_intent::api::Why) |
//! | `GET /v1/openapi.json` | the description of all of this, OpenAPI 3.1 |
//! | `GET /metrics` | counters and gauges in the text format of Prometheus |
//!
//! Errors are those of `bifrostd`'s API: `{"error": {"what", "where", "hint"}}`.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Extension, Query, State, rejection::QueryRejection};
use axum::http::{Uri, header};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use bifrost_control::api::{ApiError, ErrorKind};
use bifrost_intent::Batch;
use bifrost_intent::api::{
    ApplyQuery, Certified, Certify, Enroll, Enrolled, HostStatus, MAX_WAIT_MS, OPENAPI, ObjectsQuery, Status,
    WaitQuery, Waited, WhyQuery,
};

use crate::caller::Caller;
use crate::enrollment::Enrollment;
use crate::metrics;
use crate::relay::{Relay, SubmitError, now_ms};
use crate::roles::{Access, Call, Door};

/// The most unreadable records that are told.
const MAX_TOLD: usize = 100;
/// How long a request that waits lets hosts' reports gather.
const GATHER: Duration = Duration::from_millis(2);

type Shared = Arc<Relay>;
type Answer<T> = Result<Json<T>, ApiError>;

/// The whole API, for those who have roles.
pub(crate) fn router(relay: Shared, door: Door, enrollment: Option<Enrollment>) -> Router {
    let changing = Router::new()
        .route("/v1/apply", post(apply))
        .route("/v1/enroll", post(enroll))
        .route("/v1/certificates", post(certify))
        .route("/v1/wait", get(wait))
        .route("/metrics", get(counted));
    let changing = changing.with_state(Arc::clone(&relay)).layer(Extension(enrollment));
    changing.merge(reading(relay)).layer(Extension(door))
}

/// The part that only reads, and answers at once. Around it is a layer that says who has roles.
pub(crate) fn reading(relay: Shared) -> Router {
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/objects", get(objects))
        .route("/v1/hosts", get(hosts))
        .route("/v1/overview", get(overview))
        .route("/v1/why", get(why))
        .route("/v1/openapi.json", get(|| async { ([(header::CONTENT_TYPE, "application/json")], OPENAPI) }))
        .fallback(unknown)
        .with_state(relay)
}

async fn status(State(relay): State<Shared>, access: Access) -> Json<Status> {
    let position = *relay.position().borrow();
    Json(relay.with(|fleet| Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        store: relay.store_name().to_owned(),
        in_sync: position.in_sync,
        revision: position.revision,
        objects: fleet.len() as u64,
        hosts: fleet.host_counts(false),
        frozen: fleet.frozen(),
        unreadable: match access.sees_everything() {
            true => fleet.unreadable().take(MAX_TOLD).map(|(key, why)| (key.clone(), why.clone())).collect(),
            false => Vec::new(),
        },
    }))
}

async fn hosts(State(relay): State<Shared>, access: Access) -> Json<Vec<HostStatus>> {
    let hosts = relay.with(|fleet| fleet.hosts());
    Json(hosts.into_iter().map(|host| access.host(host)).collect())
}

async fn apply(
    State(relay): State<Shared>,
    access: Access,
    caller: Caller,
    query: Result<Query<ApplyQuery>, QueryRejection>,
    body: Bytes,
) -> Answer<bifrost_intent::api::Applied> {
    let Query(query) = query.map_err(|e| bad_query("POST /v1/apply", &e))?;
    let batch: Batch = serde_json::from_slice(&body).map_err(|e| {
        let hint =
            "a batch is, for example, {\"changes\": [{\"op\": \"set\", \"key\": \"vpc/demo/net\", \"spec\": {}}]}";
        if let Some(audit) = relay.audit().filter(|_| !query.dry_run) {
            tokio::task::block_in_place(|| audit.unreadable(&caller, &format!("not a batch: {e}"), now_ms()));
        }
        ApiError::bad_request(e.to_string()).at("body of POST /v1/apply").hint(hint)
    })?;
    let result = if let Err(why) = access.may_change(&batch) {
        Err(tokio::task::block_in_place(|| relay.forbid(&batch, &caller, why, query.dry_run)))
    } else if query.dry_run {
        relay.try_out(&batch)
    } else {
        // On a task of its own: this one ends when the connection does.
        let made = tokio::spawn(async move { relay.submit(&batch, &caller).await });
        made.await.map_err(|e| ApiError::internal(e.to_string()))?
    };
    result.map(Json).map_err(|error| match error {
        SubmitError::Plan(problems) if problems.0.iter().any(|p| p.is_conflict) => {
            ApiError::conflict(problems.to_string())
        }
        SubmitError::Plan(problems) => ApiError::bad_request(problems.to_string()),
        SubmitError::Forbidden(why) => ApiError::new(ErrorKind::Forbidden, why),
        other => ApiError::unavailable(other.to_string()),
    })
}

async fn enroll(
    access: Access,
    caller: Caller,
    Extension(enrollment): Extension<Option<Enrollment>>,
    body: Bytes,
) -> Answer<Enrolled> {
    let enroll: Enroll = serde_json::from_slice(&body).map_err(|e| {
        ApiError::bad_request(e.to_string()).at("body of POST /v1/enroll").hint("for example {\"host\": \"h1\"}")
    })?;
    let enrollment = enrollment.ok_or_else(gives_none)?;
    if let Err(why) = access.may(Call::GiveCertificates) {
        enrollment.forbid(&enroll, &caller, &why);
        return Err(ApiError::new(ErrorKind::Forbidden, why));
    }
    enrollment.invite(&enroll, &caller).await.map(Json)
}

async fn certify(
    access: Access,
    caller: Caller,
    Extension(enrollment): Extension<Option<Enrollment>>,
    body: Bytes,
) -> Answer<Certified> {
    let certify: Certify = serde_json::from_slice(&body).map_err(|e| {
        let hint = "for example {\"name\": \"alice\", \"roles\": [{\"project\": \"demo\", \"role\": \"viewer\"}], \"request\": PEM}";
        ApiError::bad_request(e.to_string()).at("body of POST /v1/certificates").hint(hint)
    })?;
    let enrollment = enrollment.ok_or_else(gives_none)?;
    match access.may(Call::GiveCertificates) {
        Ok(()) => enrollment.certify(&certify, &caller).map(Json),
        Err(why) => Err(enrollment.forbid_certificate(&certify, &caller, why)),
    }
}

fn gives_none() -> ApiError {
    let hint = "start it with --ca-key, or sign certificates otherwise";
    ApiError::conflict("this relay gives no certificates").hint(hint)
}

async fn objects(
    State(relay): State<Shared>,
    access: Access,
    query: Result<Query<ObjectsQuery>, QueryRejection>,
) -> Answer<bifrost_intent::api::Objects> {
    let Query(query) = query.map_err(|e| bad_query("GET /v1/objects", &e))?;
    Ok(Json(relay.with(|fleet| fleet.objects(&query, |key| access.sees(key)))))
}

async fn overview(State(relay): State<Shared>, access: Access) -> Response {
    match access.projects() {
        None => ([(header::CONTENT_TYPE, "application/json")], relay.overview()).into_response(),
        Some(projects) => Json(relay.overview_of(&projects)).into_response(),
    }
}

async fn wait(
    State(relay): State<Shared>,
    access: Access,
    query: Result<Query<WaitQuery>, QueryRejection>,
) -> Answer<Waited> {
    let Query(query) = query.map_err(|e| bad_query("GET /v1/wait", &e))?;
    let until = tokio::time::Instant::now() + Duration::from_millis(query.timeout_ms.min(MAX_WAIT_MS));
    let mut progress = relay.progress();
    let mut waiting = relay.with(|fleet| fleet.waiting(query.revision));
    while !waiting.is_empty()
        && tokio::time::Instant::now() < until
        && tokio::time::timeout_at(until, progress.changed()).await.is_ok()
    {
        relay.with(|fleet| waiting.retain(|host| fleet.is_waiting(host, query.revision)));
        // Many hosts say that they have it at about the same time.
        tokio::time::sleep(GATHER).await;
    }
    Ok(Json(relay.with(|fleet| Waited {
        waiting: waiting.iter().map(|host| access.host(fleet.host(host))).collect(),
        refusing: {
            let refusing = fleet.refusing(query.since.unwrap_or(query.revision)).into_iter();
            refusing.map(|host| access.host(host)).filter(|host| !host.problems.is_empty()).collect()
        },
    })))
}

async fn why(
    State(relay): State<Shared>,
    access: Access,
    query: Result<Query<WhyQuery>, QueryRejection>,
) -> Answer<bifrost_intent::api::Why> {
    let Query(query) = query.map_err(|e| bad_query("GET /v1/why", &e))?;
    // What one may not see is not there.
    let found = relay.with(|fleet| fleet.why(&query.key)).filter(|_| access.sees(&query.key));
    found.map(Json).ok_or_else(|| ApiError::not_found("there is no such object").at(query.key.to_string()))
}

async fn counted(State(relay): State<Shared>) -> Result<Response, ApiError> {
    let text = metrics::text(&relay).map_err(|e| ApiError::internal(e.to_string()))?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

async fn unknown(uri: Uri) -> ApiError {
    let hint = "/v1/ has status, apply, enroll, certificates, objects, hosts, overview, wait, why and openapi.json";
    ApiError::not_found("no such resource").at(uri.path()).hint(hint)
}

fn bad_query(request: &str, error: &QueryRejection) -> ApiError {
    ApiError::bad_request(error.body_text()).at(format!("query of {request}"))
}
