//! Tools: what a request offers, which calls it asks for, and how a model's family writes them.

use crate::error::ApiError;
use crate::fields::Fields;
use crate::format::name;
use crate::grammar::json_rule;
use model::ChatTemplate;
use serde_json::{Value, json};

/// Tools of one request at most.
const MOST_TOOLS: usize = 128;

/// What a request says of tools.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Tools {
    /// Offered, in order.
    pub list: Vec<Tool>,
    pub choice: Choice,
    /// One answer may call several.
    pub parallel: bool,
}

/// A function the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    pub name: String,
    /// As the template sees it: as it was given.
    pub shown: Value,
    /// Its arguments' schema, as a rule of a grammar.
    pub arguments: String,
    /// The schema holds even where the model chooses freely to call it.
    strict: bool,
}

/// Which calls are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choice {
    /// None, and the model is shown no tools.
    #[default]
    None,
    /// As the model likes.
    Auto,
    /// At least one, of any tool offered.
    Required,
    /// The tool at this place.
    Named(usize),
}

/// How a family of models writes calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>`, several in a row: Hermes, Qwen.
    Hermes,
    /// The whole answer is `{"name": …, "parameters": {…}}`: Llama 3.1 and later.
    Llama,
}

impl Family {
    /// How the model behind a template was taught to call; what is missing where it was not.
    pub fn of(template: &ChatTemplate) -> Result<Self, &'static str> {
        let source = template.tool_source();
        if !source.contains("tools") {
            Err("this model's chat template knows no tools")
        } else if source.contains("<tool_call>") {
            Ok(Self::Hermes)
        } else if source.contains("\"parameters\": ") && source.contains("tool_calls") {
            Ok(Self::Llama)
        } else {
            Err("this model's chat template has calls in a form that this server does not know")
        }
    }

    /// The key before a call's arguments.
    fn arguments(self) -> &'static str {
        match self {
            Self::Hermes => "arguments",
            Self::Llama => "parameters",
        }
    }

    /// What stands before and after a call.
    pub fn around(self) -> (&'static str, &'static str) {
        match self {
            Self::Hermes => ("<tool_call>", "</tool_call>"),
            Self::Llama => ("", ""),
        }
    }
}

impl Tools {
    /// Takes the fields of a chat.
    pub fn read(f: &mut Fields) -> Result<Self, ApiError> {
        let given: Vec<Value> = f.or("tools", Vec::new())?;
        let choice: Option<Value> = f.take("tool_choice")?;
        let parallel = f.or("parallel_tool_calls", true)?;
        let gone = "the older form of tools is not supported; use tools and tool_choice";
        f.refuse("functions", &[json!([])], gone)?;
        f.refuse("function_call", &[json!("none"), json!("auto")], gone)?;
        if given.len() > MOST_TOOLS {
            let why = format!("has {}, but at most {MOST_TOOLS} are allowed", given.len());
            return Err(ApiError::field("tools", why));
        }
        let mut list: Vec<Tool> = Vec::new();
        for (i, tool) in given.into_iter().enumerate() {
            let tool = Tool::read(i, tool)?;
            if list.iter().any(|known| known.name == tool.name) {
                let why = format!("'{}' is there twice", tool.name);
                return Err(ApiError::field(&format!("tools[{i}].function.name"), why));
            }
            list.push(tool);
        }
        let choice = match choice {
            None if list.is_empty() => Choice::None,
            None => Choice::Auto,
            Some(choice) => Choice::read(&choice, &list)?,
        };
        Ok(Self {
            list,
            choice,
            parallel,
        })
    }

    /// What the template is shown.
    pub fn shown(&self) -> Option<Vec<Value>> {
        let any = self.choice != Choice::None && !self.list.is_empty();
        any.then(|| self.list.iter().map(|t| t.shown.clone()).collect())
    }

    /// Rules of a grammar whose `calls` are those allowed; `None` of none.
    pub fn rules(&self, family: Family) -> Option<String> {
        let called: Vec<usize> = match self.choice {
            Choice::None => return None,
            Choice::Auto | Choice::Required => (0..self.list.len()).collect(),
            Choice::Named(i) => vec![i],
        };
        let key = family.arguments();
        let single = matches!(self.choice, Choice::Named(_)) || !self.parallel;
        let mut rules = match (family, single) {
            (Family::Hermes, false) => "calls: call (\"\\n\" call)*\ncall: \"<tool_call>\" inner\n",
            (Family::Hermes, true) => "calls: call\ncall: \"<tool_call>\" inner\n",
            (Family::Llama, _) => "calls: inner\n",
        }
        .to_string();
        let (open, close) = match family {
            Family::Hermes => ("\"\\n\" ", " \"\\n</tool_call>\""),
            Family::Llama => ("", ""),
        };
        let which: Vec<String> = called.iter().map(|i| format!("call_{i}")).collect();
        rules += &format!("inner: {open}( {} ){close}\n", which.join(" | "));
        for &i in &called {
            let tool = &self.list[i];
            let begin = json!(format!("{{\"name\": \"{}\", \"{key}\": ", tool.name));
            rules += &format!("call_{i}: {begin} arguments_{i} \"}}\"\n");
            rules += &format!("arguments_{i}: {}\n", tool.arguments);
        }
        Some(rules)
    }

    /// The start of a grammar of free text in which calls, wherever the model begins one, are held to `rules`; `None` unless
    /// all tools are strict and the model chooses.
    pub fn free(&self, family: Family) -> Option<&'static str> {
        if self.choice != Choice::Auto || !self.list.iter().all(|tool| tool.strict) {
            return None;
        }
        Some(match (family, self.parallel) {
            (Family::Hermes, true) => concat!(
                "start: turn* rest?\nturn: before inner\n",
                "before[lazy]: /(.|\\n)*/ \"<tool_call>\"\nrest: /(.|\\n)+/\n"
            ),
            (Family::Hermes, false) => concat!(
                "start: turn | rest?\nturn: before inner\n",
                "before[lazy]: /(.|\\n)*/ \"<tool_call>\"\nrest: /(.|\\n)+/\n"
            ),
            // An answer that begins like a call is one.
            (Family::Llama, _) => "start: calls | rest?\nrest: /[^{\\s](.|\\n)*/\n",
        })
    }

    /// Whether one of them must be called.
    pub fn must_call(&self) -> bool {
        matches!(self.choice, Choice::Required | Choice::Named(_))
    }
}

impl Tool {
    fn read(i: usize, shown: Value) -> Result<Self, ApiError> {
        let at = |what: &str| format!("tools[{i}]{what}");
        if shown["type"] != "function" {
            let why = "only {\"type\": \"function\"} is supported";
            return Err(ApiError::unsupported(&at(".type"), why));
        }
        let Some(function) = shown["function"].as_object() else {
            return Err(ApiError::field(&at(".function"), "an object is needed"));
        };
        for (key, value) in function {
            let fits = match key.as_str() {
                "name" => true,
                "description" => value.is_string() || value.is_null(),
                "parameters" => value.is_object() || value.is_null(),
                "strict" => value.is_boolean() || value.is_null(),
                _ => {
                    return Err(ApiError::unsupported(
                        &at(&format!(".function.{key}")),
                        "not known",
                    ));
                }
            };
            if !fits {
                let field = at(&format!(".function.{key}"));
                return Err(ApiError::field(&field, "is of the wrong type"));
            }
        }
        let called = function.get("name").and_then(Value::as_str);
        let called = called.ok_or_else(|| ApiError::field(&at(".function.name"), "missing"))?;
        name(&at(".function.name"), called)?;
        let schema = match function.get("parameters") {
            // No parameters: an empty object.
            None | Some(Value::Null) => {
                json!({"type": "object", "properties": {}, "additionalProperties": false})
            }
            Some(schema) => {
                let mut schema = schema.clone();
                if schema.get("type").is_none() {
                    schema["type"] = "object".into();
                }
                schema
            }
        };
        if schema["type"] != "object" {
            let field = at(".function.parameters");
            return Err(ApiError::field(&field, "its type must be 'object'"));
        }
        Ok(Self {
            name: called.into(),
            arguments: json_rule(&schema).map_err(|e| e.refuse(&at(".function.parameters")))?,
            strict: function.get("strict") == Some(&Value::Bool(true)),
            shown,
        })
    }
}

impl Choice {
    fn read(given: &Value, list: &[Tool]) -> Result<Self, ApiError> {
        let bad = |why: String| Err(ApiError::field("tool_choice", why));
        let choice = match (given.as_str(), given["function"]["name"].as_str()) {
            (Some("none"), _) => return Ok(Self::None),
            (Some("auto"), _) if list.is_empty() => return Ok(Self::None),
            (Some("auto"), _) => Self::Auto,
            (Some("required"), _) => Self::Required,
            (None, Some(called)) if given["type"] == "function" => {
                match list.iter().position(|t| t.name == called) {
                    Some(i) => Self::Named(i),
                    None => return bad(format!("'{called}' is not among tools")),
                }
            }
            _ => {
                return bad(format!(
                    "is {given}; allowed: none, auto, required, \
                     {{\"type\": \"function\", \"function\": {{\"name\": …}}}}"
                ));
            }
        };
        match list.is_empty() {
            true => bad("needs tools".into()),
            false => Ok(choice),
        }
    }
}
