//! Choosing the token after a row: what is asked, and what a kernel is told of it.

use numerics::sample::{self, History, SamplingParams};
use std::collections::BTreeMap;

/// What decides the token after a row, beside its logits: the arguments of [`numerics::sample::sample`].
#[derive(Debug, Clone, PartialEq)]
pub struct Choose {
    /// Valid, with biases for ids of the vocabulary only.
    pub params: SamplingParams,
    /// What its penalties look at.
    pub history: History,
    /// The token's absolute position.
    pub position: u64,
}

/// [`Choose`] in plain numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Plain {
    /// Above 0. Greedy is top-k 1 at temperature 1, which leaves the same token.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// As asked.
    pub top_p: f32,
    /// Only weights above it are drawn: min-p, times 2^32.
    pub least: u32,
    /// The random bits.
    pub draw: u64,
    /// Divides or multiplies logits of tokens in prompt or output.
    pub repetition: f32,
    /// Subtracted from logits of tokens in the output.
    pub presence: f32,
    /// Subtracted each time they are in it.
    pub frequency: f32,
    /// Ascending by id, below the vocabulary's size.
    pub changes: Vec<Change>,
}

/// A token with a bias or a history.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Change {
    /// The token.
    pub id: u32,
    /// Its bias.
    pub bias: f32,
    /// 0 if it is in neither prompt nor output, else 1 + how often it is in the output.
    pub seen: u32,
}

impl Plain {
    /// Steps 1 and 2 of section 11, on raw logits.
    pub fn change(&self, logits: &mut [f32]) {
        for c in &self.changes {
            let Some(z) = logits.get_mut(c.id as usize) else {
                continue;
            };
            *z += c.bias;
            if c.seen > 0 {
                let r = self.repetition;
                *z = if *z > 0.0 { *z / r } else { *z * r };
            }
            if c.seen > 1 {
                *z -= (c.seen - 1) as f32 * self.frequency + self.presence;
            }
        }
    }
}

impl Choose {
    /// What a device needs of it for a vocabulary of this size.
    pub fn plain(&self, vocab: usize) -> Plain {
        let p = &self.params;
        let (temperature, top_k, top_p) = match p.temperature {
            0.0 => (1.0, 1, 1.0),
            t => (t, p.top_k, p.top_p),
        };
        let mut by_id: BTreeMap<u32, (f32, u32)> = BTreeMap::new();
        for &(id, bias) in &p.logit_bias {
            by_id.insert(id, (bias, 0));
        }
        if p.penalises() {
            for &(id, count) in self.history.counts() {
                by_id.entry(id).or_insert((0.0, 0)).1 = count.saturating_add(1);
            }
        }
        // A history may hold ids that have no logit.
        let changes = by_id.into_iter().filter(|c| (c.0 as usize) < vocab);
        Plain {
            temperature,
            top_k,
            top_p,
            // Weights are integers and those of 0 are never drawn.
            least: ((f64::from(p.min_p) * 2f64.powi(32)).ceil().max(1.0) - 1.0) as u32,
            draw: sample::draw(p, self.position),
            repetition: p.repetition_penalty,
            presence: p.presence_penalty,
            frequency: p.frequency_penalty,
            changes: changes
                .map(|(id, (bias, seen))| Change { id, bias, seen })
                .collect(),
        }
    }
}
