//! What a caller asks of the engine, and what comes back.

use crate::constraint::SharedGrammar;
use numerics::sample::SamplingParams;

/// How a request's bits are kept. Each is planned by one file under `protections/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protection {
    /// Vendor kernels, shared batches: bits depend on everything in the batch.
    None,
    /// Vendor kernels, locked: the prompt alone, then decode in a fixed number of rows.
    Isolated,
    /// Vendor kernels, locked: prompts in a fixed number of rows of fixed width, decode in a fixed number of rows.
    Rows,
    /// Vendor kernels, locked: prompts packed to a fixed total with the target at the end, which then decodes alone.
    Pack,
    /// Contract kernels: bits depend on the request alone.
    Invariant,
}

impl Protection {
    /// Every protection.
    pub const ALL: [Protection; 5] = [
        Protection::None,
        Protection::Isolated,
        Protection::Rows,
        Protection::Pack,
        Protection::Invariant,
    ];

    /// The name used on the command line, in messages and in receipts.
    pub fn name(self) -> &'static str {
        match self {
            Protection::None => "none",
            Protection::Isolated => "isolated",
            Protection::Rows => "rows",
            Protection::Pack => "pack",
            Protection::Invariant => "invariant",
        }
    }
}

impl std::fmt::Display for Protection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Names a request within one engine, in order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One sequence to complete.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Token ids; at least one.
    pub prompt: Vec<u32>,
    /// How its bits are kept.
    pub protection: Protection,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Tokens to generate at most; 0 only scores the prompt.
    pub max_tokens: usize,
    /// Generating one of these ends the request; the token is reported.
    pub stop_tokens: Vec<u32>,
    /// Report a row for every prompt position from this one on (`Event::PromptRow`): the distribution of the token that
    /// follows it. Keeps the prefix cache from skipping those positions.
    pub prompt_rows_from: Option<usize>,
    /// Whether cached prefixes may be read and written.
    pub use_cache: bool,
    /// Cached prefixes are shared only among requests with the same salt.
    pub cache_salt: Option<String>,
    /// What the answer is held to. Tokens are chosen among those it allows; rows stay raw.
    pub grammar: Option<SharedGrammar>,
    /// Rows carry ln Σ exp of all logits, of which log probabilities are made.
    pub log_sum_exp: bool,
}

impl Request {
    /// A greedy request with the cache on and nothing else asked.
    pub fn new(prompt: Vec<u32>, protection: Protection, max_tokens: usize) -> Self {
        Self {
            prompt,
            protection,
            sampling: SamplingParams::default(),
            max_tokens,
            stop_tokens: Vec::new(),
            prompt_rows_from: None,
            use_cache: true,
            cache_salt: None,
            grammar: None,
            log_sum_exp: false,
        }
    }
}

/// The distribution after one position, before bias, penalties, temperature and masks.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The largest raw logits by (logit descending, id ascending), `numerics::TOP_N` of them or the whole vocabulary.
    pub top: Vec<(u32, f32)>,
    /// ln Σ exp(logit), where asked.
    pub log_sum_exp: Option<f32>,
    /// Raw logit of the token that follows: the next prompt token, or the one chosen. `None` after the last prompt
    /// position of a request that generates nothing.
    pub chosen_logit: Option<f32>,
}

/// Why a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// One of its stop tokens was generated, or its grammar lets nothing follow.
    Stop,
    /// `max_tokens` were generated.
    Length,
    /// The model's context is full.
    Context,
    /// The caller cancelled it.
    Cancelled,
    /// It can't go on: a NaN logit, or the device failed.
    Failed(String),
}

/// Something that happened to a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// It left the queue; this many prompt tokens came from the prefix cache. Sent again after a preemption.
    Admitted {
        /// Prompt tokens whose KV was already there.
        cached_tokens: usize,
    },
    /// A prompt position asked for by `prompt_rows_from`; ascending, each once.
    PromptRow {
        /// Position in the prompt.
        position: usize,
        /// The distribution of the token after it.
        row: Row,
    },
    /// A generated token.
    Token {
        /// 0 for the first generated.
        index: usize,
        /// Its id.
        token: u32,
        /// The distribution it was chosen from.
        row: Row,
    },
    /// The last event of a request.
    Finished {
        /// Why.
        reason: FinishReason,
    },
}

/// Why a request was not taken. Each message names the value and the limit.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// No prompt.
    #[error("the prompt is empty; at least one token is needed")]
    EmptyPrompt,
    /// Longer than the model's context.
    #[error("the prompt has {given} tokens, but at most {limit} fit the model's context")]
    PromptTooLong {
        /// Prompt tokens given.
        given: usize,
        /// The context, less one where a token is to be generated.
        limit: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {given} at position {position} is outside the vocabulary of {vocab}")]
    UnknownToken {
        /// The id.
        given: u32,
        /// Where.
        position: usize,
        /// Vocabulary size.
        vocab: usize,
    },
    /// A sampling parameter out of range.
    #[error("{name} is {given}, but must be {allowed}")]
    BadParameter {
        /// Parameter.
        name: &'static str,
        /// Value given.
        given: String,
        /// What is allowed.
        allowed: &'static str,
    },
    /// The queue is full.
    #[error("the queue holds {limit} waiting requests, its limit; try again later")]
    QueueFull {
        /// The limit.
        limit: usize,
    },
    /// Needs more KV than the pool has even when alone.
    #[error("prompt and answer need {needed} KV blocks of 64 tokens, but the pool has {limit}")]
    KvTooSmall {
        /// Blocks needed.
        needed: usize,
        /// Blocks in the pool.
        limit: usize,
    },
    /// The device was loaded without what the protection needs, or the protection can't keep a promise asked for.
    #[error("protection {protection} is not available: {reason}")]
    Unavailable {
        /// Which.
        protection: Protection,
        /// Why.
        reason: String,
    },
}
