//! Errors as answers.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use crate::api::{ApiError, ErrorBody};

/// The answer to a request that failed.
pub(super) fn failure(error: ApiError) -> Response {
    error.into_response()
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(ErrorBody::from(self))).into_response()
    }
}
