//! A request's fields, taken out one by one. What is left over at the end would have changed nothing here, so it is an
//! error, unless it is known to change no answer.

use crate::error::ApiError;
use axum::http::StatusCode;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Fields that change no answer, ignored as OpenAI does.
pub const IGNORED: [&str; 7] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
];

/// The fields of a body.
pub struct Fields(Map<String, Value>);

impl Fields {
    /// Reads a JSON object.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let bad = |m: String| ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", m);
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self(map)),
            Ok(_) => Err(bad("the body must be a JSON object".into())),
            Err(e) => Err(bad(format!("the body is not JSON: {e}"))),
        }
    }

    /// Takes a field; null is the same as absent.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value)
                .map(Some)
                .map_err(|e| ApiError::field(name, e)),
        }
    }

    /// Takes a field, or what it is by default.
    pub fn or<T: DeserializeOwned>(&mut self, name: &str, default: T) -> Result<T, ApiError> {
        Ok(self.take(name)?.unwrap_or(default))
    }

    /// A number that the engine keeps as f32: read as decimal text, so that it is rounded once, as on the command line.
    pub fn f32(&mut self, name: &str, default: f32) -> Result<f32, ApiError> {
        match self.take::<f64>(name)? {
            None => Ok(default),
            Some(x) => Ok(narrow(x)),
        }
    }

    /// Refuses a field unless its value is one that asks for nothing.
    pub fn refuse(&mut self, name: &str, nothing: &[Value], why: &str) -> Result<(), ApiError> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(()),
            Some(value) if nothing.contains(&value) => Ok(()),
            Some(_) => Err(ApiError::unsupported(name, why)),
        }
    }

    /// Nothing may be left but what is ignored.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.0.keys().find(|k| !IGNORED.contains(&k.as_str())) {
            None => Ok(()),
            Some(name) => Err(ApiError::unsupported(
                name,
                "this server does not know this field, and it might change the answer",
            )),
        }
    }
}

/// The f32 nearest to the shortest decimal that reads as `x`.
pub fn narrow(x: f64) -> f32 {
    x.to_string().parse().unwrap_or(x as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_over_is_named_unless_it_changes_nothing() {
        let mut f = Fields::parse(br#"{"n": 2, "user": "x", "top_p": null}"#).unwrap();
        assert_eq!(f.take::<u32>("n"), Ok(Some(2)));
        assert_eq!(f.take::<f64>("top_p"), Ok(None));
        assert_eq!(f.finish(), Ok(()));
        let f = Fields::parse(br#"{"user": "x", "beam_width": 4}"#).unwrap();
        let error = f.finish().unwrap_err().to_json();
        assert_eq!(error["error"]["param"], "beam_width");
        assert!(Fields::parse(b"[1]").is_err() && Fields::parse(b"{").is_err());
    }

    #[test]
    fn numbers_are_rounded_once() {
        for text in ["0.7", "0.1", "1.3", "0.30000001"] {
            let x: f64 = text.parse().unwrap();
            assert_eq!(narrow(x), text.parse::<f32>().unwrap());
        }
    }
}
