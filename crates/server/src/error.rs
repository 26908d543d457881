//! Refusals in the OpenAI API's shape: `{"error": {message, type, param, code}}`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use engine::{Refusal, SubmitError};
use serde_json::{Value, json};

/// An error's code, for the log: it holds nothing of a request, as a message might.
#[derive(Clone, Copy)]
pub struct Code(pub &'static str);

/// A request that got no answer.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    /// The field at fault.
    param: Option<String>,
    code: &'static str,
}

impl ApiError {
    /// Of any status.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
            code,
        }
    }

    /// A field's value is wrong.
    pub fn field(name: &str, message: impl std::fmt::Display) -> Self {
        let mut error = Self::new(
            StatusCode::BAD_REQUEST,
            "invalid_value",
            format!("{name}: {message}"),
        );
        error.param = Some(name.into());
        error
    }

    /// A field asks for what this server does not have.
    pub fn unsupported(name: &str, message: impl std::fmt::Display) -> Self {
        Self {
            code: "unsupported",
            ..Self::field(name, message)
        }
    }

    /// Something broke on this side.
    pub fn broken(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", message)
    }

    /// The server takes no requests now.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
    }

    /// The body.
    pub fn to_json(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.to_json())).into_response();
        response.extensions_mut().insert(Code(self.code));
        if matches!(self.status.as_u16(), 429 | 503) {
            let headers = response.headers_mut();
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let param = match &refusal {
            Refusal::QueueFull { .. } => {
                return Self::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    "queue_full",
                    refusal.to_string(),
                );
            }
            Refusal::BadParameter { name, .. } => Some(*name),
            Refusal::Unavailable { .. } => Some("protection"),
            Refusal::KvTooSmall { .. } => Some("max_tokens"),
            _ => Some("prompt"),
        };
        let code = match &refusal {
            Refusal::PromptTooLong { .. } => "context_length_exceeded",
            Refusal::Unavailable { .. } => "protection_unavailable",
            _ => "invalid_value",
        };
        Self {
            param: param.map(Into::into),
            ..Self::new(StatusCode::BAD_REQUEST, code, refusal.to_string())
        }
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::Refused(refusal) => refusal.into(),
            SubmitError::Stopped(_) => Self::unavailable(error.to_string()),
        }
    }
}
