//! Calls of tools in an answer's text, found while it comes.

use crate::tools::Family;
use serde_json::Value;

/// What a text turned out to be.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    /// Text beside calls.
    Text(String),
    /// A call begins.
    Call(String),
    /// More of the arguments of the call that began last, as the model writes them.
    Arguments(String),
}

/// Written before Llama's calls; most tokenizers have it as a special token, which is no text.
const PYTHON_TAG: &str = "<|python_tag|>";

enum State {
    /// Outside calls; the text held may be blanks or the start of a mark.
    Text,
    /// Inside a call, before its arguments.
    Head,
    /// Inside a call's arguments: how deep, and what a string's next character would be.
    Arguments {
        depth: usize,
        string: bool,
        escaped: bool,
    },
    /// After a call's arguments, up to its end.
    Tail,
    /// Inside a call that is written in another order; read whole.
    Odd,
    /// No call can come any more.
    Plain,
}

/// Splits a growing text into calls and what is beside them.
pub struct CallScanner {
    family: Family,
    names: Vec<String>,
    state: State,
    held: String,
    /// Calls found.
    calls: usize,
}

impl CallScanner {
    /// Looks for calls of these tools.
    pub fn new(family: Family, names: Vec<String>) -> Self {
        Self {
            family,
            names,
            state: State::Text,
            held: String::new(),
            calls: 0,
        }
    }

    /// Takes more text.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    /// Ends the text.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        let held = std::mem::take(&mut self.held);
        match (&self.state, self.family) {
            (State::Odd | State::Head, Family::Llama) => self.odd(&held, &mut parts),
            (State::Odd | State::Head, Family::Hermes) => {
                parts.push(Part::Text(self.family.around().0.to_string() + &held));
            }
            // Blanks between and after calls are no text.
            (State::Text | State::Plain, _) if self.calls == 0 || !held.trim().is_empty() => {
                parts.push(Part::Text(held));
            }
            _ => {}
        }
        self.state = State::Plain;
        parts.retain(|p| *p != Part::Text(String::new()));
        parts
    }

    /// One step; false where more text is needed.
    fn advance(&mut self, parts: &mut Vec<Part>) -> bool {
        let (open, close) = self.family.around();
        match &mut self.state {
            State::Plain => {
                if !self.held.is_empty() {
                    parts.push(Part::Text(std::mem::take(&mut self.held)));
                }
                false
            }
            State::Text if self.family == Family::Llama => {
                let rest = self.held.trim_start();
                let rest = rest.strip_prefix(PYTHON_TAG).unwrap_or(rest).trim_start();
                if rest.is_empty() || PYTHON_TAG.starts_with(rest) {
                    return false;
                }
                // Later calls are divided by semicolons; nothing else follows one.
                let rest = match self.calls {
                    0 => rest,
                    _ => rest.trim_start_matches([';', ' ', '\n']),
                };
                match rest.chars().next() {
                    None => return false,
                    Some('{') => (self.held, self.state) = (rest.to_string(), State::Head),
                    Some(_) => self.state = State::Plain,
                }
                true
            }
            State::Text => {
                if let Some(at) = self.held.find(open) {
                    let text = self.held[..at].trim_end();
                    if !text.is_empty() {
                        parts.push(Part::Text(text.to_string()));
                    }
                    self.held.drain(..at + open.len());
                    self.state = State::Head;
                    return true;
                }
                // Held back: blanks, which a call would swallow, and the start of a mark.
                let mark = (0..open.len().min(self.held.len() + 1))
                    .rev()
                    .find(|&n| self.held.ends_with(&open[..n]))
                    .unwrap_or(0);
                let keep = self.held[..self.held.len() - mark].trim_end().len();
                if keep > 0 {
                    let rest = self.held.split_off(keep);
                    parts.push(Part::Text(std::mem::replace(&mut self.held, rest)));
                }
                false
            }
            State::Head => match head(&self.held) {
                Head::Incomplete => match !close.is_empty() && self.held.contains(close) {
                    true => {
                        self.state = State::Odd;
                        true
                    }
                    false => false,
                },
                Head::Call(name, at) if self.names.contains(&name) => {
                    parts.push(Part::Call(name));
                    self.calls += 1;
                    self.held.drain(..at);
                    self.state = State::Arguments {
                        depth: 0,
                        string: false,
                        escaped: false,
                    };
                    true
                }
                _ => {
                    self.state = State::Odd;
                    true
                }
            },
            State::Arguments {
                depth,
                string,
                escaped,
            } => {
                let mut end = None;
                for (at, c) in self.held.char_indices() {
                    match c {
                        _ if *escaped => *escaped = false,
                        '\\' if *string => *escaped = true,
                        '"' => *string = !*string,
                        _ if *string => {}
                        '{' | '[' => *depth += 1,
                        '}' | ']' => *depth -= 1,
                        _ => {}
                    }
                    if *depth == 0 {
                        end = Some(at + 1);
                        break;
                    }
                }
                let rest = self.held.split_off(end.unwrap_or(self.held.len()));
                let arguments = std::mem::replace(&mut self.held, rest);
                if !arguments.is_empty() {
                    parts.push(Part::Arguments(arguments));
                }
                if end.is_some() {
                    self.state = State::Tail;
                }
                end.is_some()
            }
            State::Tail => {
                let end = if close.is_empty() { "}" } else { close };
                let Some(at) = self.held.find(end) else {
                    return false;
                };
                self.held.drain(..at + end.len());
                self.state = State::Text;
                true
            }
            State::Odd => {
                let at = match close {
                    "" => None, // it ends with the text
                    close => self.held.find(close),
                };
                let Some(at) = at else {
                    return false;
                };
                let rest = self.held.split_off(at + close.len());
                let call = std::mem::replace(&mut self.held, rest);
                self.odd(&call[..at], parts);
                self.state = State::Text;
                true
            }
        }
    }

    /// A call in any order of keys; text where it is none.
    fn odd(&mut self, call: &str, parts: &mut Vec<Part>) {
        let value: Value = serde_json::from_str(call.trim()).unwrap_or_default();
        let arguments = value.get("arguments").or_else(|| value.get("parameters"));
        let name = value["name"].as_str().map(str::to_string);
        match (name.filter(|n| self.names.contains(n)), arguments) {
            (Some(name), Some(arguments)) if arguments.is_object() => {
                parts.push(Part::Call(name));
                parts.push(Part::Arguments(arguments.to_string()));
                self.calls += 1;
            }
            _ => {
                let (open, close) = self.family.around();
                parts.push(Part::Text(format!("{open}{call}{close}")));
            }
        }
    }
}

/// The start of a call.
enum Head {
    /// More is needed to say.
    Incomplete,
    /// The name, and where the arguments' object begins.
    Call(String, usize),
    /// Not in the usual order.
    Other,
}

/// Reads `{"name": NAME, "arguments": {`, or with `"parameters"`.
fn head(text: &str) -> Head {
    let mut at = 0;
    let mut name = String::new();
    for expected in ["{", "name", ":", "", ",", "arguments", ":", "{"] {
        at = text.len() - text[at..].trim_start().len();
        let rest = &text[at..];
        if rest.is_empty() {
            return Head::Incomplete;
        }
        if expected.len() == 1 {
            if !rest.starts_with(expected) {
                return Head::Other;
            }
            at += 1;
            continue;
        }
        let mut escaped = false;
        let end = rest.char_indices().skip(1).find(|&(_, c)| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let Some((end, _)) = end.filter(|_| rest.starts_with('"')) else {
            return match rest.starts_with('"') {
                true => Head::Incomplete,
                false => Head::Other,
            };
        };
        let Ok(string) = serde_json::from_str::<String>(&rest[..=end]) else {
            return Head::Other;
        };
        match expected {
            "" => name = string,
            "arguments" if string == "parameters" => {}
            expected if string == expected => {}
            _ => return Head::Other,
        }
        at += end + 1;
    }
    Head::Call(name, at - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds a text in pieces of so many characters; joins what comes.
    fn run(family: Family, text: &str, size: usize) -> (String, Vec<(String, String)>) {
        let mut scanner = CallScanner::new(family, vec!["get".into(), "get_all".into()]);
        let chars: Vec<char> = text.chars().collect();
        let mut parts = Vec::new();
        for piece in chars.chunks(size) {
            parts.extend(scanner.push(&piece.iter().collect::<String>()));
        }
        parts.extend(scanner.finish());
        let (mut text, mut calls) = (String::new(), Vec::<(String, String)>::new());
        for part in parts {
            match part {
                Part::Text(t) => text += &t,
                Part::Call(name) => calls.push((name, String::new())),
                Part::Arguments(a) => calls.last_mut().expect("a call").1 += &a,
            }
        }
        assert_eq!(scanner.calls, calls.len());
        (text, calls)
    }

    fn call(name: &str, arguments: &str) -> (String, String) {
        (name.into(), arguments.into())
    }

    #[test]
    fn calls_are_found_however_the_text_is_cut() {
        use Family::{Hermes, Llama};
        let tricky = r#"{"a": "}]</tool_call>\"{", "b": [{}]}"#;
        let one =
            format!("<tool_call>\n{{\"name\": \"get\", \"arguments\": {tricky}}}\n</tool_call>");
        let two = format!(
            "So:\n\n{one}\n<tool_call>{{\"name\":\"get_all\",\"arguments\":{{}}}}</tool_call>\n"
        );
        for size in [1, 2, 3, 7, 1000] {
            let cut = |family, text: &str| run(family, text, size);
            assert_eq!(cut(Hermes, &one), ("".into(), vec![call("get", tricky)]));
            let both = vec![call("get", tricky), call("get_all", "{}")];
            assert_eq!(cut(Hermes, &two), ("So:".into(), both));
            let llama = format!("\n{{\"name\": \"get\", \"parameters\": {tricky}}}");
            assert_eq!(cut(Llama, &llama), ("".into(), vec![call("get", tricky)]));
            let tagged =
                format!("<|python_tag|>{{\"name\": \"get\", \"parameters\": {{}}}}; {llama}");
            let both = vec![call("get", "{}"), call("get", tricky)];
            assert_eq!(cut(Llama, &tagged), ("".into(), both));
            // Keys in another order.
            let odd = r#"{"parameters": {"x": 1}, "type": "function", "name": "get"}"#;
            assert_eq!(
                cut(Llama, odd),
                ("".into(), vec![call("get", r#"{"x":1}"#)])
            );
            let odd = format!("<tool_call>{odd}</tool_call>");
            assert_eq!(
                cut(Hermes, &odd),
                ("".into(), vec![call("get", r#"{"x":1}"#)])
            );
            // Cut off: what there is of the arguments.
            assert_eq!(cut(Hermes, &one[..50]).1.len(), 1);
        }
    }

    #[test]
    fn what_is_no_call_stays_text() {
        use Family::{Hermes, Llama};
        for size in [1, 4, 1000] {
            for text in [
                "Hello <tool> world \n ",
                "a < b",
                "<tool_call>\n{\"name\": \"unknown\", \"arguments\": {}}\n</tool_call>",
                "<tool_call>no</tool_call> then",
                "<tool_call>{\"name\": \"get\"",
                "<tool_call",
                "",
            ] {
                assert_eq!(run(Hermes, text, size), (text.into(), vec![]));
            }
            for text in [
                "Hello {\"name\": \"get\", \"parameters\": {}}",
                "{\"name\": \"unknown\", \"parameters\": {}}",
                "{\"answer\": 3}",
                "{\"name\": \"get\", \"parameters\": 3}",
                "{\"nam",
                "<|python",
            ] {
                assert_eq!(run(Llama, text, size), (text.into(), vec![]), "{size}");
            }
        }
    }
}
