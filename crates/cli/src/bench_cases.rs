//! What `bench` measures: how many sequences at once, their prompts, what they generate; and how fast it could be.

use crate::session::Opened;
use model::ModelConfig;
use serde::{Serialize, Serializer};
use std::fmt;

/// Prompt tokens of the sequences of a batch, which take them in turn.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompts(Vec<usize>);

/// A batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// Sequences at once.
    pub sequences: usize,
    /// Their prompts.
    pub prompts: Prompts,
    /// Tokens each generates.
    pub new: usize,
}

impl Prompts {
    /// At least one length.
    pub fn new(lengths: &[u32]) -> Self {
        Self(lengths.iter().map(|&n| n as usize).collect())
    }

    /// Of sequence `i`.
    pub fn of(&self, i: usize) -> usize {
        self.0[i % self.0.len()]
    }

    /// Of that many sequences.
    pub fn first(&self, sequences: usize) -> impl Iterator<Item = usize> + Clone {
        self.0.iter().copied().cycle().take(sequences)
    }
}

impl fmt::Display for Prompts {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let all: Vec<String> = self.0.iter().map(usize::to_string).collect();
        f.write_str(&all.join(","))
    }
}

/// One length as a number, several as a list.
impl Serialize for Prompts {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [one] => one.serialize(to),
            several => several.serialize(to),
        }
    }
}

/// The batches by which whole engines are compared on a GPU.
pub fn suite() -> Vec<Case> {
    let mixed = [512, 64, 128, 256, 1024, 2048, 384, 768];
    let cases: [(usize, &[u32], usize); 6] = [
        (1, &[512], 128),
        (8, &[512], 128),
        (8, &mixed, 128),
        (32, &[512], 128),
        (128, &[256], 64),
        (1, &[8192], 32),
    ];
    let case = |(sequences, prompts, new)| Case {
        sequences,
        prompts: Prompts::new(prompts),
        new,
    };
    cases.map(case).to_vec()
}

/// The dense bf16 peak of an H100 or H200 SXM, operations a second, by NVIDIA's data sheet.
const PEAK: f64 = 989.4e12;

/// The least time a GPU could take, by bytes and by operations.
pub struct Floors<'a> {
    config: &'a ModelConfig,
    kv_bytes: f64,
    bandwidth: f64,
}

impl<'a> Floors<'a> {
    /// `bandwidth`: bytes a second that a copy within the device's memory moves.
    pub fn new(opened: &'a Opened, bandwidth: f64) -> Self {
        Self {
            config: &opened.model().config,
            kv_bytes: opened.kv_bytes_per_token() as f64,
            bandwidth,
        }
    }

    /// Elements of a layer's matrices, all layers, and of the output matrix.
    fn elements(&self) -> (f64, f64) {
        let c = self.config;
        let heads = 2 * c.heads + 2 * c.kv_heads;
        let layer = c.hidden * (heads * c.head_dim + 3 * c.ffn);
        (
            (c.layers.len() * layer) as f64,
            (c.hidden * c.vocab_size) as f64,
        )
    }

    /// Milliseconds to read every weight once, as bf16, and every key and value of the sequences, halfway through what
    /// they generate.
    pub fn decode_step_ms(&self, case: &Case) -> f64 {
        let (layers, head) = self.elements();
        let keys: usize = case.prompts.first(case.sequences).sum();
        let keys = keys as f64 + (case.sequences * case.new) as f64 / 2.0;
        1e3 * (2.0 * (layers + head) + keys * self.kv_bytes) / self.bandwidth
    }

    /// Milliseconds for the operations of all prompts' products and attention at the tensor cores' peak.
    pub fn first_tokens_ms(&self, case: &Case) -> f64 {
        let (layers, head) = self.elements();
        let c = self.config;
        let (mut tokens, mut pairs) = (0.0, 0.0);
        for prompt in case.prompts.first(case.sequences) {
            tokens += prompt as f64;
            for kind in &c.layers {
                let seen = kind.window.unwrap_or(prompt).min(prompt) as f64;
                pairs += seen * (prompt as f64 - seen / 2.0);
            }
        }
        let attention = 4.0 * (c.heads * c.head_dim) as f64 * pairs;
        let products = 2.0 * (layers * tokens + head * case.sequences as f64);
        1e3 * (attention + products) / PEAK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_take_prompts_in_turn() {
        let prompts = Prompts::new(&[5, 6, 7]);
        assert_eq!(prompts.first(5).collect::<Vec<_>>(), [5, 6, 7, 5, 6]);
        assert_eq!((prompts.of(4), prompts.to_string()), (6, "5,6,7".into()));
        assert_eq!(serde_json::json!(prompts), serde_json::json!([5, 6, 7]));
        assert_eq!(serde_json::json!(Prompts::new(&[9])), serde_json::json!(9));
    }
}
