//! Chat templates: a conversation to the text a model was trained to continue, by the model's own Jinja template.
//!
//! Templates are written for the Python library `transformers`, so its settings and functions hold here: blocks trim
//! their newline and indentation, `raise_exception`, `strftime_now`, a `tojson` that leaves HTML alone, Python's string
//! and dictionary methods, loop controls, `{% generation %}`.

use crate::gguf::Metadata;
use crate::template_date::DateTime;
use crate::template_json::{from_json, to_json};
use crate::tokenizer::{Tokenizer, one_line, read_json};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, ErrorKind, Value};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use std::path::Path;

/// What a message says: a text, or a list of parts as multimodal templates take them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Plain text.
    Text(String),
    /// Parts such as `{"type": "text", "text": "…"}`, handed to the template as they are.
    Parts(Vec<Json>),
}

/// One turn of a conversation, in the form of the OpenAI API.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, `tool` and what else the template knows.
    pub role: String,
    /// What is said; absent or null where an assistant only calls tools.
    #[serde(default)]
    pub content: Option<Content>,
    /// Every other field (`name`, `tool_calls`, `tool_call_id`, `reasoning_content`…), handed to the template.
    #[serde(flatten)]
    pub extra: serde_json::Map<String, Json>,
}

impl Message {
    /// A message with a plain text.
    pub fn new(role: impl Into<String>, text: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: Some(Content::Text(text.into())),
            extra: serde_json::Map::new(),
        }
    }
}

/// What a rendering may depend on besides the messages.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions {
    /// Tools on offer, as JSON schemas; `None` and an empty list are the same.
    pub tools: Option<Vec<Json>>,
    /// End with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// What `strftime_now` reads. `None`: templates do not see that function, and fall back to their fixed date.
    pub date: Option<DateTime>,
    /// Further variables, such as `enable_thinking`; they win over the standard ones.
    pub variables: serde_json::Map<String, Json>,
}

/// Why a template could not be used. The message is one line.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TemplateError {
    /// It is not valid Jinja.
    #[error("chat template{}: {reason}", line_of(.line))]
    Syntax {
        /// Line in the template, from 1.
        line: Option<usize>,
        /// What is wrong.
        reason: String,
    },
    /// The template itself refused the conversation (`raise_exception`).
    #[error("the chat template refuses the conversation: {message} (line {line})")]
    Refused {
        /// The template's words.
        message: String,
        /// Line in the template, from 1.
        line: usize,
    },
    /// It failed on this conversation.
    #[error("chat template{}: {reason}", line_of(.line))]
    Render {
        /// Line in the template, from 1.
        line: Option<usize>,
        /// What is wrong.
        reason: String,
    },
    /// A file that should hold a template does not.
    #[error("no chat template can be read from {origin}: {reason}")]
    Source {
        /// The file.
        origin: String,
        /// Why.
        reason: String,
    },
}

fn line_of(line: &Option<usize>) -> String {
    line.map_or(String::new(), |n| format!(", line {n}"))
}

/// Name of the template used where no other fits.
const DEFAULT: &str = "default";
/// Name of the template `transformers` uses when tools are given and a model has one.
const TOOL_USE: &str = "tool_use";
/// Marks an error raised by the template's own `raise_exception`.
const REFUSED: &str = "\u{1}refused ";

/// One or more compiled templates of a model.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    /// Of the template named [`TOOL_USE`].
    tool_source: Option<String>,
    /// `bos_token` and `eos_token`.
    tokens: Vec<(&'static str, String)>,
}

impl ChatTemplate {
    /// Compiles a template. Errors name the line.
    pub fn new(source: &str) -> Result<Self, TemplateError> {
        Self::named(&[(DEFAULT.to_owned(), source.to_owned())])
    }

    /// Compiles a model's templates, (name, source) each. The one named `default`, or else the first, is used, unless
    /// tools are given and one is named `tool_use`.
    pub fn named(templates: &[(String, String)]) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|e| syntax_error(&e))?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<Value, minijinja::Error> {
                let message = format!("{REFUSED}{message}");
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        let default = templates
            .iter()
            .position(|(name, _)| name == DEFAULT)
            .unwrap_or(0);
        for (i, (name, source)) in templates.iter().enumerate() {
            let name = if i == default { DEFAULT } else { name };
            environment
                .add_template_owned(name.to_owned(), without_generation_tags(source))
                .map_err(|e| syntax_error(&e))?;
        }
        Ok(Self {
            environment,
            source: templates
                .get(default)
                .map_or(String::new(), |(_, source)| source.clone()),
            tool_source: templates
                .iter()
                .find(|(name, _)| name == TOOL_USE)
                .map(|(_, source)| source.clone()),
            tokens: Vec::new(),
        })
    }

    /// The template in a GGUF file's metadata (`tokenizer.chat_template`), if it has one.
    pub fn from_gguf_metadata(metadata: &Metadata) -> Result<Option<Self>, TemplateError> {
        let source = metadata.get_str("tokenizer.chat_template");
        let source = source.map_err(|e| TemplateError::Source {
            origin: "the GGUF file".into(),
            reason: one_line(&e.to_string()),
        })?;
        source.map(Self::new).transpose()
    }

    /// The template in a model's folder, if it has one: `chat_template.jinja`, else `chat_template` in
    /// `chat_template.json` or `tokenizer_config.json`, a string or a list of `{"name", "template"}`.
    pub fn from_dir(folder: &Path) -> Result<Option<Self>, TemplateError> {
        let path = folder.join("chat_template.jinja");
        let source_error = |path: &Path, reason: String| TemplateError::Source {
            origin: path.display().to_string(),
            reason: one_line(&reason),
        };
        match std::fs::read_to_string(&path) {
            Ok(source) => return Self::new(&source).map(Some),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(source_error(&path, e.to_string())),
        }
        for name in ["chat_template.json", "tokenizer_config.json"] {
            let path = folder.join(name);
            let config = read_json(&path).map_err(|e| source_error(&path, e.to_string()))?;
            let wrong = || {
                let reason = "chat_template is neither a string nor a list of {name, template}";
                source_error(&path, reason.into())
            };
            match config.as_ref().and_then(|c| c.get("chat_template")) {
                None | Some(Json::Null) => continue,
                Some(Json::String(source)) => return Self::new(source).map(Some),
                Some(Json::Array(list)) if !list.is_empty() => {
                    let text = |item: &Json, key: &str| item[key].as_str().map(str::to_owned);
                    let templates: Option<Vec<_>> = list
                        .iter()
                        .map(|item| Some((text(item, "name")?, text(item, "template")?)))
                        .collect();
                    return Self::named(&templates.ok_or_else(wrong)?).map(Some);
                }
                Some(_) => return Err(wrong()),
            }
        }
        Ok(None)
    }

    /// Lets the template see the tokenizer's `bos_token` and `eos_token`.
    pub fn with_tokens(mut self, tokenizer: &Tokenizer) -> Self {
        let eos = tokenizer.eos().first().copied();
        self.tokens = [("bos_token", tokenizer.bos()), ("eos_token", eos)]
            .into_iter()
            .filter_map(|(name, id)| Some((name, tokenizer.token(id?)?)))
            .collect();
        self
    }

    /// The source of the default template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The source of the template used where tools are given.
    pub fn tool_source(&self) -> &str {
        self.tool_source.as_deref().unwrap_or(&self.source)
    }

    /// Whether a rendering may depend on the date.
    pub fn reads_date(&self) -> bool {
        [self.source(), self.tool_source()]
            .iter()
            .any(|source| source.contains("strftime_now"))
    }

    /// Renders a conversation. The result depends on the arguments alone; no clock is read.
    pub fn render(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<String, TemplateError> {
        let tools = options.tools.as_ref().filter(|tools| !tools.is_empty());
        let messages: Vec<Value> = messages.iter().map(message_value).collect();
        let mut context: Vec<(String, Value)> = vec![
            ("messages".into(), Value::from(messages)),
            (
                "tools".into(),
                tools.map_or(Value::from(()), |t| t.iter().map(from_json).collect()),
            ),
            ("documents".into(), Value::from(())),
            (
                "add_generation_prompt".into(),
                Value::from(options.add_generation_prompt),
            ),
        ];
        for (name, token) in &self.tokens {
            context.push(((*name).into(), Value::from(token.as_str())));
        }
        if let Some(date) = options.date {
            let now = move |format: String| date.format(&format);
            context.push(("strftime_now".into(), Value::from_function(now)));
        }
        for (name, value) in &options.variables {
            context.retain(|(known, _)| known != name);
            context.push((name.clone(), from_json(value)));
        }
        let tool_template = tools.and_then(|_| self.environment.get_template(TOOL_USE).ok());
        let template = match tool_template {
            Some(template) => template,
            None => self
                .environment
                .get_template(DEFAULT)
                .map_err(|e| syntax_error(&e))?,
        };
        template
            .render(Value::from_pairs(context))
            .map_err(|e| render_error(&e))
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}

fn message_value(message: &Message) -> Value {
    let content = match &message.content {
        None => Value::from(()),
        Some(Content::Text(text)) => Value::from(text.as_str()),
        Some(Content::Parts(parts)) => parts.iter().map(from_json).collect(),
    };
    let standard = [
        ("role".to_owned(), Value::from(message.role.as_str())),
        ("content".to_owned(), content),
    ];
    let extra = message.extra.iter().map(|(k, v)| (k.clone(), from_json(v)));
    Value::from_pairs(standard.into_iter().chain(extra))
}

/// `{% generation %}` marks the assistant's words for training masks and prints them unchanged, so a block that is
/// always entered stands in for it; whitespace control and lines stay as they are.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let word = tag[2..end].trim_matches(['-', '+']).trim();
        let replacement = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            other => other,
        };
        out.push_str(&if replacement == word {
            tag.to_owned()
        } else {
            tag.replacen(word, replacement, 1)
        });
        rest = after;
    }
    out + rest
}

/// The library's kind and detail in one line, with the innermost cause.
fn reason(error: &minijinja::Error) -> String {
    let mut text = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    one_line(&text)
}

fn syntax_error(error: &minijinja::Error) -> TemplateError {
    TemplateError::Syntax {
        line: error.line(),
        reason: reason(error),
    }
}

fn render_error(error: &minijinja::Error) -> TemplateError {
    match error.detail().and_then(|d| d.strip_prefix(REFUSED)) {
        Some(message) => TemplateError::Refused {
            message: one_line(message),
            line: error.line().unwrap_or(0),
        },
        None => TemplateError::Render {
            line: error.line(),
            reason: reason(error),
        },
    }
}
