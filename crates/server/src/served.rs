//! What a server serves, as its owner hands it over.

use crate::grammar::Grammars;
use engine::{EngineHandle, ModelFacts, Protection};
use model::{ChatTemplate, Tokenizer};
use numerics::sample::SamplingParams;
use serde_json::Value;
use std::sync::Arc;

/// What a request is promised.
#[derive(Debug, Clone, PartialEq)]
pub struct Promise {
    /// The shapes its bits depend on; empty: none, or everything.
    pub geometry: String,
    /// Equal keys mean equal tokens and Top-20 bits; `None` where nothing is promised.
    pub key: Option<String>,
    /// Whether the promise holds here.
    pub promised: bool,
    /// Why.
    pub reason: String,
}

/// Says what a prompt of these ids is promised.
pub type Promises = dyn Fn(Protection, &[u32], &SamplingParams) -> Promise + Send + Sync;

/// What certification found out about the geometries of a locked protection: how many keep its promise on this device,
/// break it, or are not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Certified {
    pub held: u32,
    pub broken: u32,
    pub unknown: u32,
}

/// A model on its engine.
pub struct Served {
    /// The engine's thread.
    pub engine: EngineHandle,
    /// The model's name in the API.
    pub name: String,
    /// Absent: prompts are token ids only.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// What structured answers need of it.
    pub grammars: Grammars,
    /// Absent: no chat.
    pub template: Option<ChatTemplate>,
    /// Vocabulary and context.
    pub facts: ModelFacts,
    /// Tokens the KV pool holds.
    pub kv_tokens: usize,
    /// Identity of numerics, model and profile.
    pub numerics_id: String,
    /// Identity of everything else.
    pub environment_id: String,
    /// Protection of requests that name none.
    pub protection: Protection,
    /// Protections served; others are refused.
    pub protections: Vec<Protection>,
    /// What is known of the locked ones among them.
    pub certified: Vec<(Protection, Certified)>,
    /// What requests are promised.
    pub promises: Box<Promises>,
    /// What `/version` says.
    pub version: Value,
}

impl Served {
    /// The short form of both identities.
    pub fn fingerprint(&self) -> String {
        let short = |id: &str| id.chars().take(12).collect::<String>();
        format!(
            "{}-{}",
            short(&self.numerics_id),
            short(&self.environment_id)
        )
    }
}
