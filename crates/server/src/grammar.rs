//! Answers held to a grammar: schemas and tool calls compiled by llguidance over the model's own vocabulary.

use crate::error::ApiError;
use engine::{Constraint, Grammar, SharedGrammar};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use model::Tokenizer;
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Enters every key beside the grammar: another version of the library might allow other tokens.
const LIBRARY: &str = "llguidance 1.9";
/// Between JSON's tokens: nothing, a space, or a new line and its indentation, so that no answer loses itself in blanks.
const BLANKS: &str = r" |\n {0,32}";
/// Longer tokens are never allowed: no grammar needs them, and the library bounds them too.
const LONGEST_TOKEN: usize = 512;

/// What a vocabulary's bytes and rules are to the library.
struct Words {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

impl TokenizerEnv for Words {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        std::str::from_utf8(bytes)
            .ok()
            .filter(|_| self.tokenize_is_canonical())
            .and_then(|text| self.tokenizer.encode(text, false, false).ok())
            .unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.tokenizer.is_byte_level()
    }
}

/// Compiles grammars over one vocabulary; what that takes is made at first use. Clones share it.
#[derive(Clone, Default)]
pub struct Grammars(Arc<OnceLock<Result<ParserFactory, String>>>);

/// Why there is no grammar.
#[derive(Debug, Clone, PartialEq)]
pub enum GrammarError {
    /// The vocabulary cannot carry one.
    Vocabulary(String),
    /// The grammar asks for what there is not.
    Unsupported(String),
    /// It says nothing sensible.
    Invalid(String),
}

impl Grammars {
    /// Makes what it takes from now on, on a thread of its own: it is long for a large vocabulary.
    pub fn beginning(tokenizer: Arc<Tokenizer>) -> Self {
        let grammars = Self::default();
        let own = grammars.clone();
        let work = move || {
            let start = Instant::now();
            own.0.get_or_init(|| factory(&tokenizer));
            let seconds = start.elapsed().as_secs_f64();
            tracing::debug!("the vocabulary is ready for structured answers after {seconds:.2} s");
        };
        let thread = std::thread::Builder::new().name("grammars".into());
        let _ = thread.spawn(work); // without a thread, the first to need it makes it
        grammars
    }

    /// Compiles a grammar in the library's Lark dialect.
    pub fn compile(
        &self,
        tokenizer: &Arc<Tokenizer>,
        lark: String,
    ) -> Result<Compiled, GrammarError> {
        let factory = self.0.get_or_init(|| factory(tokenizer));
        let factory = factory
            .as_ref()
            .map_err(|why| GrammarError::Vocabulary(why.clone()))?;
        let mut key = blake3::Hasher::new_derive_key("blocklock grammar v1");
        key.update(LIBRARY.as_bytes()).update(lark.as_bytes());
        let parser = factory.create_parser(TopLevelGrammar::from_lark(lark));
        let mut matcher = Matcher::new(parser);
        // The first set decides whether any answer is possible at all, and is the dearest.
        match matcher.compute_mask() {
            Ok(_) => Ok(Compiled {
                digest: key.finalize(),
                grammar: SharedGrammar(Arc::new(Pristine(matcher))),
            }),
            Err(error) => Err(GrammarError::of(&error.to_string())),
        }
    }
}

impl GrammarError {
    fn of(message: &str) -> Self {
        let why = one_line(message);
        let lacks = [
            "nimplemented",
            "not supported",
            "supported without",
            "nknown format",
        ];
        match lacks.iter().any(|l| why.contains(l)) {
            true => Self::Unsupported(why),
            false => Self::Invalid(why),
        }
    }

    /// The refusal of a request whose `field` asks for it.
    pub fn refuse(&self, field: &str) -> ApiError {
        match self {
            Self::Vocabulary(why) | Self::Unsupported(why) => ApiError::unsupported(field, why),
            Self::Invalid(why) => ApiError::field(field, why),
        }
    }
}

/// A grammar ready to be followed.
pub struct Compiled {
    /// Of its text and the library that reads it.
    pub digest: blake3::Hash,
    /// For the engine.
    pub grammar: SharedGrammar,
}

/// A matcher at the start. What it learns lazily must not be shared between answers, whose limits would then depend on
/// each other.
struct Pristine(Matcher);

impl Grammar for Pristine {
    fn start(&self) -> Box<dyn Constraint> {
        Box::new(Following(self.0.deep_clone()))
    }
}

struct Following(Matcher);

impl Constraint for Following {
    fn allowed(&mut self) -> Result<Vec<u32>, String> {
        let set: SimpleVob = self.0.compute_mask().map_err(|e| why(&e))?;
        Ok(set.as_slice().to_vec())
    }

    fn take(&mut self, token: u32) -> Result<bool, String> {
        self.0.consume_token(token).map_err(|e| why(&e))?;
        Ok(self.0.is_stopped())
    }
}

/// Before the reason for which an answer could not be held to its grammar any more.
pub const BROKE: &str = "its grammar: ";

fn why(error: &dyn std::fmt::Display) -> String {
    BROKE.to_string() + &one_line(&error.to_string())
}

/// The library's message without what it adds for its own debugging.
fn one_line(message: &str) -> String {
    let message = message.split("<non-verbose/>").next().unwrap_or_default();
    let words: Vec<&str> = message.split_whitespace().collect();
    words.join(" ").chars().take(500).collect()
}

fn factory(tokenizer: &Arc<Tokenizer>) -> Result<ParserFactory, String> {
    let size = tokenizer.vocab_size() as u32;
    let words: Option<Vec<Vec<u8>>> = (0..size)
        .map(|id| {
            let mut bytes = tokenizer.bytes_of(id)?;
            if tokenizer.is_special(id) {
                bytes.insert(0, TokTrie::SPECIAL_TOKEN_MARKER); // no text becomes it
            }
            Some(bytes).map(|b| {
                if b.len() > LONGEST_TOKEN {
                    Vec::new()
                } else {
                    b
                }
            })
        })
        .collect();
    let words = words.ok_or("this model's tokenizer gives tokens no bytes of their own")?;
    if words.iter().map(Vec::len).sum::<usize>() >= 1 << 22 {
        return Err("this model's vocabulary is too large".into());
    }
    let eos: Vec<u32> = tokenizer.eos().to_vec();
    let first = eos.first().copied();
    let info = TokRxInfo::new(size, first.unwrap_or(llguidance::toktrie::INVALID_TOKEN));
    let mut trie = TokTrie::from(&info, &words);
    if !eos.is_empty() {
        trie = trie.with_eos_tokens(&eos);
    }
    let words: TokEnv = Arc::new(Words {
        trie,
        tokenizer: Arc::clone(tokenizer),
    });
    let mut factory = ParserFactory::new_simple(&words).map_err(|e| one_line(&e.to_string()))?;
    factory.quiet();
    let limits = factory.limits_mut();
    limits.verbose_errors = false;
    limits.max_lexer_states = 50_000; // 100 MB at worst
    limits.max_items_in_row = 10_000; // 2500 optional properties
    Ok(factory)
}

/// A schema as part of a Lark grammar.
pub fn json_rule(schema: &Value) -> Result<String, GrammarError> {
    let mut schema = match schema {
        // The library's own settings.
        Value::Object(fields) if fields.contains_key("x-guidance") => {
            return Err(GrammarError::of("Unimplemented keys: [\"x-guidance\"]"));
        }
        Value::Object(fields) => Value::Object(fields.clone()),
        Value::Bool(true) => json!({}),
        _ => return Err(GrammarError::of("a schema is a JSON object")),
    };
    schema["x-guidance"] = json!({"whitespace_flexible": true, "whitespace_pattern": BLANKS});
    Ok(format!("%json {schema}"))
}
