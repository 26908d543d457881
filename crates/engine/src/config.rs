//! What an engine is built from: limits, and the few facts of a model that scheduling needs.

use crate::request::Protection;
use model::ModelConfig;
use numerics::Profile;

/// Facts of the loaded model that requests are checked and cached by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelFacts {
    /// Token ids are below this.
    pub vocab: usize,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// Key/value heads; vendor attention's split plan counts them.
    pub kv_heads: usize,
    /// The arithmetic the device runs under.
    pub profile: Profile,
}

impl ModelFacts {
    /// The facts of `config` run under `profile`.
    pub fn new(config: &ModelConfig, profile: Profile) -> Self {
        Self {
            vocab: config.vocab_size,
            context: config.context,
            kv_heads: config.kv_heads,
            profile,
        }
    }
}

/// Geometries of the locked protections. Every one of them is part of what a target's bits depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockedConfig {
    /// Rows of `rows`' prefill.
    pub rows: usize,
    /// Widths of its rows, ascending; a target takes the narrowest that holds its prompt.
    pub widths: Vec<usize>,
    /// Rows of a decode launch of `isolated` and `rows`.
    pub decode_rows: usize,
    /// Totals of `pack`'s prefill, ascending; a target takes the smallest that holds its prompt.
    pub totals: Vec<usize>,
    /// While a `pack` target decodes, neighbours run in one of so many steps.
    pub pack_share: usize,
    /// Positions of a KV part of attention; a multiple of 64.
    pub kv_part: usize,
    /// Geometries, as [`certified_as`](crate::protections::Planner::certified_as) names them, in whose launches a row's
    /// bits are known not to depend on its index, so that several targets may share one. Others have a launch each, at
    /// the anchor. Changes no bit where it is true.
    pub equivariant: Vec<(Protection, String)>,
}

impl Default for LockedConfig {
    fn default() -> Self {
        Self {
            rows: 4,
            widths: vec![64, 128, 256, 512, 1024, 2048],
            decode_rows: 8,
            totals: vec![256, 512, 1024, 2048, 4096],
            pack_share: 1,
            kv_part: 512,
            equivariant: Vec::new(),
        }
    }
}

/// Limits of an engine. None of them changes a bit of an `invariant` request.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// Tokens computed in a step at most, over all requests.
    pub token_budget: usize,
    /// Requests that hold KV at a time at most; each may need a token a step, so at most `token_budget`.
    pub max_running: usize,
    /// Requests that wait for admission at most.
    pub max_waiting: usize,
    /// Prompt tokens of one request computed in a step at most; `None`: whatever the budget leaves.
    pub chunk: Option<usize>,
    /// Keep full KV blocks of ended requests, as far as the pool has room, and share them.
    pub prefix_cache: bool,
    /// Geometries of the locked protections.
    pub locked: LockedConfig,
    /// For tests: overwrite every KV block that becomes free with one of these, in turn. Empty: leave it as it is.
    pub poison_freed: Vec<f32>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            token_budget: 512,
            max_running: 64,
            max_waiting: 1024,
            chunk: None,
            prefix_cache: true,
            locked: LockedConfig::default(),
            poison_freed: Vec::new(),
        }
    }
}

/// Why an engine could not be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// A limit is out of range.
    #[error("{name} is {given}, but must be {allowed}")]
    Config {
        /// Field of [`EngineConfig`].
        name: &'static str,
        /// Value given.
        given: usize,
        /// What is allowed.
        allowed: String,
    },
    /// The device has no KV block.
    #[error("the device has no KV blocks; at least one is needed")]
    NoKv,
    /// No protection can run there.
    #[error("the device was loaded without contract and without vendor kernels")]
    NoKernels,
}

impl EngineConfig {
    /// Checks every limit.
    pub fn validate(&self) -> Result<(), EngineError> {
        let at_least_1 = |name, given| match given {
            0 => Err(EngineError::Config {
                name,
                given,
                allowed: "at least 1".into(),
            }),
            _ => Ok(()),
        };
        at_least_1("token_budget", self.token_budget)?;
        at_least_1("max_running", self.max_running)?;
        at_least_1("max_waiting", self.max_waiting)?;
        at_least_1("chunk", self.chunk.unwrap_or(1))?;
        let l = &self.locked;
        at_least_1("rows", l.rows)?;
        at_least_1("decode_rows", l.decode_rows)?;
        at_least_1("pack_share", l.pack_share)?;
        at_least_1("kv_part", l.kv_part)?;
        if !l.kv_part.is_multiple_of(device::BLOCK_TOKENS) {
            return Err(EngineError::Config {
                name: "kv_part",
                given: l.kv_part,
                allowed: format!("a multiple of {}", device::BLOCK_TOKENS),
            });
        }
        for (name, ladder) in [("row_widths", &l.widths), ("pack_totals", &l.totals)] {
            at_least_1(name, ladder.iter().copied().min().unwrap_or(0))?;
            if let Some(w) = ladder.windows(2).find(|w| w[0] >= w[1]) {
                return Err(EngineError::Config {
                    name,
                    given: w[1],
                    allowed: format!("above {}, the rung before it", w[0]),
                });
            }
        }
        if self.max_running > self.token_budget {
            return Err(EngineError::Config {
                name: "max_running",
                given: self.max_running,
                allowed: format!(
                    "at most token_budget ({}), so that every running request can have a token a step",
                    self.token_budget
                ),
            });
        }
        Ok(())
    }
}
