//! Gaps between a real model's two largest logits, at every position of a text.

use super::report::{number, percent};
use crate::args::Global;
use crate::input::{self, Prompt};
use crate::margins::{self, Margin};
use crate::session::{KvNeed, Opened};
use crate::settings::Settings;
use crate::{output, score};
use anyhow::{Result, bail};
use device::BLOCK_TOKENS;
use engine::{Protection, Request};
use serde_json::Value;
use std::path::Path;

/// Longest text read, in bytes.
const TEXT_BYTES: u64 = 64 << 20;

/// What a model makes of a text.
pub struct TextGaps {
    /// What it ran on.
    pub about: Value,
    /// Relative gaps, a position each.
    pub gaps: Vec<f64>,
    model: String,
    window: usize,
}

impl TextGaps {
    /// One teacher-forced pass over the text's first tokens, in windows of the model's context where it is longer.
    pub fn measure(global: &Global, path: &Path, tokens: usize) -> Result<Self> {
        let settings = Settings::resolve(global)?;
        let text = input::read_text(path, TEXT_BYTES)?;
        if text.is_empty() {
            bail!("{} is empty; a text is needed", path.display());
        }
        let opened = Opened::open(&settings)?;
        let mut ids = match opened.tokenizer() {
            Some(_) => opened.raw_ids(&Prompt::Text(text))?,
            // Synthetic models have no tokenizer: a token a byte.
            None => {
                let vocab = opened.facts().vocab;
                text.bytes()
                    .map(|b| (usize::from(b) % vocab) as u32)
                    .collect()
            }
        };
        ids.truncate(tokens);
        let context = opened.facts().context;
        let fits = opened.kv_blocks()? * BLOCK_TOKENS;
        let window = context.min(fits);
        let longest = window.min(ids.len());
        let blocks = longest.div_ceil(BLOCK_TOKENS);
        let session = opened.start(&[Protection::Invariant], KvNeed::Blocks(blocks))?;
        let mut gaps = Vec::new();
        for part in ids.chunks(window) {
            let request = Request::new(part.to_vec(), Protection::Invariant, 0);
            for row in score::prompt_rows(&session, request)? {
                match Margin::of(&row.top) {
                    Some(margin) => gaps.push(margin.relative),
                    None => bail!(
                        "position {}: no second finite logit, so there is no gap",
                        gaps.len()
                    ),
                }
            }
        }
        Ok(Self {
            about: session.describe(),
            gaps,
            model: session.name().to_string(),
            window,
        })
    }

    /// Share of positions whose gap is at most this.
    pub fn within(&self, gap: f64) -> f64 {
        let near = self.gaps.iter().filter(|g| **g <= gap).count();
        near as f64 / self.gaps.len() as f64
    }

    /// What they say, in a sentence.
    pub fn finding(&self) -> String {
        let near = self.within(margins::EVEN_BELOW);
        format!(
            "{} over {} tokens: {}; below {} small gaps g are met in {:.1} g of steps ({} within it).",
            self.model,
            output::count(self.gaps.len() as u64),
            margins::shares(&self.gaps),
            number(margins::EVEN_BELOW),
            near / margins::EVEN_BELOW,
            percent(near)
        )
    }

    /// What they rest on.
    pub fn assumption(&self) -> String {
        format!(
            "The model reads the text itself (teacher-forced, invariant), in windows of {} tokens.",
            output::count(self.window as u64)
        )
    }
}
