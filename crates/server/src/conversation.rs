//! Conversations: messages as clients send them and templates want them, tools, and the day.

use crate::error::ApiError;
use crate::fields::Fields;
use crate::tools::Tools;
use model::{Content, DateTime, Message};
use serde_json::{Map, Value};
use std::time::{SystemTime, UNIX_EPOCH};

/// A conversation and what else its template is given.
#[derive(Default)]
pub struct Chat {
    pub messages: Vec<Message>,
    /// Variables for the template.
    pub variables: Map<String, Value>,
    pub tools: Tools,
    /// What the template's `strftime_now` reads; `None`: templates that ask have a date of their own.
    pub date: Option<DateTime>,
}

impl Chat {
    /// Takes the fields of a conversation, if there is one.
    pub fn read(f: &mut Fields) -> Result<Option<Self>, ApiError> {
        let messages = f.take("messages")?.map(conversation).transpose()?;
        let given: Option<Map<String, Value>> = f.take("chat_template_kwargs")?;
        let tools = Tools::read(f)?;
        let Some(messages) = messages else {
            return match given.is_some() || !tools.list.is_empty() {
                true => Err(ApiError::field("messages", "missing")),
                false => Ok(None),
            };
        };
        let mut variables = given.unwrap_or_default();
        Ok(Some(Self {
            messages,
            date: day(variables.remove("date"))?,
            variables,
            tools,
        }))
    }

    /// Whether it offers, calls or answers tools.
    pub fn has_tools(&self) -> bool {
        let has = |m: &Message| m.role == "tool" || m.extra.contains_key("tool_calls");
        self.tools.shown().is_some() || self.messages.iter().any(has)
    }
}

/// Checks the messages; text parts are joined, as templates expect a text, and the arguments of calls are read.
fn conversation(mut messages: Vec<Message>) -> Result<Vec<Message>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::field("messages", "at least one is needed"));
    }
    let mut called: Vec<String> = Vec::new();
    for (i, message) in messages.iter_mut().enumerate() {
        let at = |what: &str| format!("messages[{i}].{what}");
        match message.role.as_str() {
            "system" | "user" | "assistant" | "tool" => {}
            "developer" => message.role = "system".into(),
            other => {
                let why =
                    format!("is '{other}'; allowed: system, developer, user, assistant, tool");
                return Err(ApiError::unsupported(&at("role"), why));
            }
        }
        message.extra.retain(|_, v| !v.is_null());
        let known: &[&str] = match message.role.as_str() {
            "assistant" => &["name", "tool_calls", "reasoning_content"],
            "tool" => &["name", "tool_call_id"],
            _ => &["name"],
        };
        if let Some(name) = message.extra.keys().find(|k| !known.contains(&k.as_str())) {
            return Err(ApiError::unsupported(&at(name), "not supported"));
        }
        if let Some(calls) = message.extra.get_mut("tool_calls") {
            past_calls(&at("tool_calls"), calls, &mut called)?;
        } else if message.content.is_none() {
            return Err(ApiError::field(&at("content"), "missing"));
        }
        if message.role == "tool" {
            let field = at("tool_call_id");
            match message.extra.get("tool_call_id").map(Value::as_str) {
                Some(Some(id)) if called.iter().any(|known| known == id) => {}
                Some(Some(id)) => {
                    return Err(ApiError::field(
                        &field,
                        format!("no call before has id '{id}'"),
                    ));
                }
                _ => return Err(ApiError::field(&field, "missing")),
            }
        }
        let text = match message.content.take() {
            None => String::new(),
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => {
                let mut texts = Vec::new();
                for part in &parts {
                    match (part["type"].as_str(), part["text"].as_str()) {
                        (Some("text"), Some(text)) => texts.push(text),
                        _ => {
                            return Err(ApiError::unsupported(
                                &at("content"),
                                "only text parts are supported",
                            ));
                        }
                    }
                }
                texts.join("\n")
            }
        };
        message.content = Some(Content::Text(text));
    }
    Ok(messages)
}

/// Checks the calls of an earlier answer and notes their ids. Templates write the arguments as JSON themselves, so that
/// they get an object instead of OpenAI's text.
fn past_calls(field: &str, calls: &mut Value, called: &mut Vec<String>) -> Result<(), ApiError> {
    let bad = |what: &str, why: &str| Err(ApiError::field(&format!("{field}{what}"), why));
    let Some(calls) = calls.as_array_mut().filter(|c| !c.is_empty()) else {
        return bad("", "a list with at least one call is needed");
    };
    for (i, call) in calls.iter_mut().enumerate() {
        let at = |what: &str| format!("[{i}]{what}");
        match call["id"].as_str() {
            Some(id) => called.push(id.to_string()),
            None => return bad(&at(".id"), "missing"),
        }
        if call["type"] != "function" {
            return bad(&at(".type"), "must be 'function'");
        }
        if !call["function"]["name"].is_string() {
            return bad(&at(".function.name"), "missing");
        }
        let text = call["function"]["arguments"].as_str();
        let arguments = match text.map(serde_json::from_str::<Map<String, Value>>) {
            Some(Ok(arguments)) => arguments,
            Some(Err(e)) => {
                return bad(&at(".function.arguments"), &format!("no JSON object: {e}"));
            }
            None => return bad(&at(".function.arguments"), "a text is needed"),
        };
        call["function"]["arguments"] = arguments.into();
    }
    Ok(())
}

/// Today in UTC, from midnight on to midnight one and the same; or the day given, or none (null).
fn day(given: Option<Value>) -> Result<Option<DateTime>, ApiError> {
    match given {
        None => Ok(Some(today())),
        Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if DateTime::parse_date(&text).is_some() => {
            Ok(DateTime::parse_date(&text))
        }
        Some(other) => Err(ApiError::field(
            "chat_template_kwargs.date",
            format!("is {other}; a day such as \"2026-01-31\" is allowed, or null"),
        )),
    }
}

/// Today in UTC.
fn today() -> DateTime {
    DateTime::from_unix(now()).midnight()
}

/// Seconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ask::{Asked, Source};

    #[test]
    fn parts_become_one_text() {
        let asked = crate::ask::chat(
            br#"{"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}"#,
        );
        let Ok(Asked {
            source: Source::Chat(chat),
            ..
        }) = asked
        else {
            panic!("not read");
        };
        assert_eq!(chat.messages, [Message::new("system", "a\nb")]);
    }
}
