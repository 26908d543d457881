//! A conversation to token ids, such that what people say can never act as a special token.

use crate::template::{ChatTemplate, Content, Message, RenderOptions, TemplateError};
use crate::tokenizer::{Tokenizer, TokenizerError};
use serde_json::Value as Json;

/// Why a conversation could not be turned into token ids.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The template failed.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl ChatTemplate {
    /// Renders and tokenizes a conversation. Special tokens the template writes are special; text in a message, a tool or a
    /// variable that spells one, such as `<|im_end|>`, stays text and cannot forge a turn.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<Vec<u32>, ChatError> {
        let mut special = tokenizer.special_tokens();
        special.sort_by_key(|token| std::cmp::Reverse(token.len())); // The longest match counts.
        let mut shielded = messages.to_vec();
        // A private-use character that no message holds, put inside what spells a special token.
        let texts = (messages, &options.tools, &options.variables);
        let texts = serde_json::to_string(&texts).unwrap_or_default();
        let Some(mark) = ('\u{e000}'..='\u{f8ff}').find(|&c| !texts.contains(c)) else {
            let reason = "the messages use every private-use character".to_owned();
            return Err(TokenizerError::Encode(reason).into());
        };
        let mut any = false;
        for message in &mut shielded {
            let mut shield = |text: &mut String| any |= shield(text, &special, mark);
            shield(&mut message.role);
            match &mut message.content {
                Some(Content::Text(text)) => shield(text),
                Some(Content::Parts(parts)) => {
                    parts
                        .iter_mut()
                        .for_each(|part| each_text(part, &mut shield));
                }
                None => {}
            }
            message
                .extra
                .values_mut()
                .for_each(|value| each_text(value, &mut shield));
        }
        let mut options = options.clone();
        let mut shield = |text: &mut String| any |= shield(text, &special, mark);
        for tool in options.tools.iter_mut().flatten() {
            each_text(tool, &mut shield);
        }
        let variables = std::mem::take(&mut options.variables);
        let mut variables = Json::Object(variables);
        each_text(&mut variables, &mut shield);
        if let Json::Object(variables) = variables {
            options.variables = variables;
        }
        let options = &options;
        if !any {
            let text = self.render(messages, options)?;
            return Ok(tokenizer.encode(&text, false, true)?);
        }

        let text = self.render(&shielded, options)?;
        let mut ids = Vec::new();
        let mut plain = String::new();
        let mut rest = text.as_str();
        while let Some(c) = rest.chars().next() {
            let token = special.iter().find(|token| rest.starts_with(**token));
            match token.and_then(|token| Some((token, tokenizer.token_id(token)?))) {
                Some((token, id)) => {
                    ids.extend(tokenizer.encode(&plain, false, false)?);
                    ids.push(id);
                    plain.clear();
                    rest = &rest[token.len()..];
                }
                None => {
                    plain.extend((c != mark).then_some(c));
                    rest = &rest[c.len_utf8()..];
                }
            }
        }
        ids.extend(tokenizer.encode(&plain, false, false)?);
        Ok(ids)
    }
}

/// Puts `mark` after the first character of every special token in `text`; whether there was one.
fn shield(text: &mut String, special: &[&str], mark: char) -> bool {
    let found = special.iter().any(|token| text.contains(token));
    if found {
        let mut out = String::new();
        for (at, c) in text.char_indices() {
            out.push(c);
            if special.iter().any(|token| text[at..].starts_with(token)) {
                out.push(mark);
            }
        }
        *text = out;
    }
    found
}

/// Calls `each` on every string in a JSON value, keys included.
fn each_text(value: &mut Json, each: &mut impl FnMut(&mut String)) {
    match value {
        Json::String(text) => each(text),
        Json::Array(items) => items.iter_mut().for_each(|item| each_text(item, each)),
        Json::Object(fields) => {
            let given = std::mem::take(fields);
            fields.extend(given.into_iter().map(|(mut key, mut field)| {
                each(&mut key);
                each_text(&mut field, each);
                (key, field)
            }));
        }
        _ => {}
    }
}
