//! `response_format`: a text, any JSON object, or what a schema describes.

use crate::error::ApiError;
use crate::grammar::json_rule;
use serde::Deserialize;
use serde_json::{Value, json};

/// What an answer must look like.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Format {
    /// Anything.
    #[default]
    Text,
    /// A JSON value of this schema, as a rule of a grammar.
    Json(String),
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Given {
    Text,
    JsonObject,
    JsonSchema { json_schema: Named },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    name: String,
    #[serde(rename = "description")]
    _description: Option<String>,
    schema: Option<Value>,
    /// Every schema is kept strictly.
    #[serde(rename = "strict")]
    _strict: Option<bool>,
}

/// Where a schema stands in a request.
pub const SCHEMA: &str = "response_format.json_schema.schema";

/// Reads the field.
pub fn read(given: Option<Value>) -> Result<Format, ApiError> {
    let Some(given) = given else {
        return Ok(Format::Text);
    };
    let schema = match serde_json::from_value(given) {
        Ok(Given::Text) => return Ok(Format::Text),
        Ok(Given::JsonObject) => json!({"type": "object"}),
        Ok(Given::JsonSchema { json_schema }) => {
            name("response_format.json_schema.name", &json_schema.name)?;
            let missing = || ApiError::field(SCHEMA, "missing");
            json_schema.schema.ok_or_else(missing)?
        }
        Err(e) => return Err(ApiError::field("response_format", e)),
    };
    let rule = json_rule(&schema).map_err(|e| e.refuse(SCHEMA))?;
    Ok(Format::Json(rule))
}

/// Checks a name as OpenAI does: 1 to 64 letters, digits, underscores and dashes.
pub fn name(field: &str, name: &str) -> Result<(), ApiError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    match (1..=64).contains(&name.len()) && name.chars().all(allowed) {
        true => Ok(()),
        false => Err(ApiError::field(
            field,
            format!("is '{name}'; 1 to 64 letters, digits, _ and - are allowed"),
        )),
    }
}
