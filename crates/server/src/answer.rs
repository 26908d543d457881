//! One answer on its way: tokens to text and to what is reported of each.

use crate::calls::{CallScanner, Part};
use crate::stop::StopScanner;
use engine::{Event, FinishReason, Row};
use model::{StreamDecoder, Tokenizer};

/// A token and the distribution it was chosen from.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Id.
    pub token: u32,
    /// Its text, special tokens included.
    pub text: String,
    /// Characters of all tokens before it.
    pub offset: usize,
    /// `None` for a prompt's first token, which follows nothing.
    pub row: Option<Row>,
}

/// What an event added.
#[derive(Debug, Default, PartialEq)]
pub struct Piece {
    /// Text that is certain now.
    pub text: String,
    /// And what is of calls.
    pub calls: Vec<CallPart>,
    /// Tokens, as far as they are reported.
    pub entries: Vec<Entry>,
}

/// A part of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct CallPart {
    /// Which call of the answer, from 0.
    pub index: usize,
    /// The tool, where the call begins.
    pub name: Option<String>,
    /// More of its arguments.
    pub arguments: String,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A stop token, a stop string or the model's own end.
    Stop,
    /// The same, and it called tools.
    ToolCalls,
    /// Its limit of tokens, or the context is full.
    Length,
    /// The server's time limit.
    Timeout,
}

impl Finish {
    /// The name in replies.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::ToolCalls => "tool_calls",
            Finish::Length => "length",
            Finish::Timeout => "timeout",
        }
    }
}

/// See the module's page.
pub struct Answer {
    decoder: Option<StreamDecoder>,
    scanner: StopScanner,
    /// Where the answer may call tools; and calls so far.
    calls: Option<CallScanner>,
    called: usize,
    /// Each token has an entry.
    reported: bool,
    /// The prompt where it is echoed.
    echoed: Option<Vec<u32>>,
    offset: usize,
    /// Tokens generated.
    pub generated: usize,
    /// Prompt tokens found in the cache.
    pub cached: usize,
    /// Why it ended.
    pub finish: Option<Finish>,
    /// Entries of the prompt that wait for its end.
    waiting: Vec<Entry>,
}

/// A token's text; its id where there is no tokenizer.
pub fn token_text(tokenizer: Option<&Tokenizer>, id: u32) -> String {
    tokenizer.map_or_else(|| id.to_string(), |t| t.decode(&[id], false))
}

impl Answer {
    /// An answer that ends before any of `stop`, and begins with a prompt where that is echoed. Where its tokens are not
    /// `reported`, pieces have text only.
    pub fn new(
        tokenizer: Option<&Tokenizer>,
        stop: &[String],
        echoed: Option<Vec<u32>>,
        reported: bool,
    ) -> Self {
        let mut answer = Self {
            decoder: tokenizer.map(|_| StreamDecoder::new(true)),
            scanner: StopScanner::new(stop),
            calls: None,
            called: 0,
            reported,
            echoed: None,
            offset: 0,
            generated: 0,
            cached: 0,
            finish: None,
            waiting: Vec::new(),
        };
        if let Some(prompt) = echoed.filter(|_| reported) {
            let first = prompt.first().copied();
            first.iter().for_each(|&t| {
                let entry = answer.entry(tokenizer, t, None);
                answer.waiting.push(entry);
            });
            answer.echoed = Some(prompt);
        }
        answer
    }

    /// Looks for calls.
    pub fn calling(mut self, calls: Option<CallScanner>) -> Self {
        self.calls = calls;
        self
    }

    /// Puts text, or what is left at the end, where it belongs.
    fn say(&mut self, text: String, end: bool, piece: &mut Piece) {
        let Some(calls) = &mut self.calls else {
            piece.text = text;
            return;
        };
        let mut parts = calls.push(&text);
        if end {
            parts.extend(calls.finish());
        }
        for part in parts {
            let (name, arguments) = match part {
                Part::Text(text) => {
                    piece.text += &text;
                    continue;
                }
                Part::Call(name) => {
                    self.called += 1;
                    (Some(name), String::new())
                }
                Part::Arguments(arguments) => (None, arguments),
            };
            piece.calls.push(CallPart {
                index: self.called.saturating_sub(1),
                name,
                arguments,
            });
        }
    }

    fn entry(&mut self, tokenizer: Option<&Tokenizer>, token: u32, row: Option<Row>) -> Entry {
        let text = token_text(tokenizer, token);
        let offset = self.offset;
        self.offset += text.chars().count();
        Entry {
            token,
            text,
            offset,
            row,
        }
    }

    /// Takes an event. An error says what broke.
    pub fn take(&mut self, tokenizer: Option<&Tokenizer>, event: Event) -> Result<Piece, String> {
        let mut piece = Piece::default();
        if self.finish.is_some() {
            return Ok(piece);
        }
        match event {
            Event::Admitted { cached_tokens } => self.cached = self.cached.max(cached_tokens),
            Event::PromptRow { position, row } => {
                let next = self
                    .echoed
                    .as_ref()
                    .and_then(|p| p.get(position + 1).copied());
                if let Some(token) = next {
                    let entry = self.entry(tokenizer, token, Some(row));
                    self.waiting.push(entry);
                }
            }
            Event::Token { token, row, .. } => {
                if self.reported {
                    piece.entries = std::mem::take(&mut self.waiting);
                    piece.entries.push(self.entry(tokenizer, token, Some(row)));
                }
                self.generated += 1;
                let text = match (&mut self.decoder, tokenizer) {
                    (Some(decoder), Some(tokenizer)) => decoder.push(tokenizer, token),
                    _ if self.generated > 1 => format!(" {token}"),
                    _ => token.to_string(),
                };
                let text = self.scanner.push(&text);
                let stopped = self.scanner.stopped();
                self.say(text, stopped, &mut piece);
                if stopped {
                    self.finish = Some(self.stop());
                }
            }
            Event::Finished { reason } => {
                let finish = match reason {
                    FinishReason::Stop => Finish::Stop,
                    FinishReason::Length | FinishReason::Context => Finish::Length,
                    FinishReason::Cancelled => return Err("the request was cancelled".into()),
                    FinishReason::Failed(why) => return Err(why),
                };
                piece = self.end(tokenizer, finish);
            }
        }
        Ok(piece)
    }

    /// Ends the answer; returns what was held back.
    pub fn end(&mut self, tokenizer: Option<&Tokenizer>, finish: Finish) -> Piece {
        let mut text = String::new();
        if let (Some(decoder), Some(tokenizer)) = (self.decoder.take(), tokenizer) {
            text = self.scanner.push(&decoder.finish(tokenizer));
        }
        let stopped = self.scanner.stopped();
        text += &self.scanner.finish();
        let mut piece = Piece {
            entries: std::mem::take(&mut self.waiting),
            ..Piece::default()
        };
        self.say(text, true, &mut piece);
        self.finish = Some(match finish {
            _ if stopped => self.stop(),
            Finish::Stop => self.stop(),
            finish => finish,
        });
        piece
    }

    /// An end that the model or a stop string chose.
    fn stop(&self) -> Finish {
        match self.called {
            0 => Finish::Stop,
            _ => Finish::ToolCalls,
        }
    }
}
