//! `/openapi.json`: the API described in OpenAPI 3.1, kept beside this file. Bodies are read field by field (see
//! [`crate::fields`]), so the description is written by hand; tests hold the two together.

use serde_json::Value;

/// The document, with this version's number.
pub fn document() -> Value {
    let document = include_str!("openapi.json");
    let mut document: Value = serde_json::from_str(document).unwrap_or_default();
    document["info"]["version"] = env!("CARGO_PKG_VERSION").into();
    document
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ask;
    use crate::fields::IGNORED;
    use serde_json::json;

    #[test]
    fn every_field_described_is_known_and_no_other() {
        let document = document();
        for (schema, read, needed) in [
            (
                "CompletionRequest",
                ask::completion as fn(&[u8]) -> Result<ask::Asked, crate::error::ApiError>,
                ("prompt", json!("x")),
            ),
            (
                "ChatRequest",
                ask::chat,
                ("messages", json!([{"role": "user", "content": "x"}])),
            ),
        ] {
            let schema = &document["components"]["schemas"][schema];
            assert_eq!(schema["required"], json!([needed.0]));
            let fields = schema["properties"].as_object().expect("fields");
            assert!(IGNORED.iter().all(|name| fields.contains_key(*name)));
            let with = |name: &str, value: Value| {
                let mut body = json!({needed.0: needed.1});
                body[name] = value;
                read(body.to_string().as_bytes())
            };
            for name in fields.keys().filter(|name| *name != needed.0) {
                // Null is the same as absent, of a field that is known.
                assert!(with(name, Value::Null).is_ok(), "{name}");
            }
            assert!(with("temprature", Value::Null).is_err());
            assert!(with("temperature", json!(0.5)).is_ok());
        }
    }
}
