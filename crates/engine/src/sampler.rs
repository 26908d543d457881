//! Choosing the next token from a row, and checking the parameters that decide how.

use crate::request::Refusal;
use device::RowResult;
use numerics::sample::{History, SamplingParams, sample_among};

/// Whether the largest raw logit is the answer, so that the device's Top-20 suffice.
pub fn is_greedy(params: &SamplingParams) -> bool {
    params.temperature == 0.0
        && params.repetition_penalty == 1.0
        && params.presence_penalty == 0.0
        && params.frequency_penalty == 0.0
        && params.logit_bias.is_empty()
}

/// Chooses the token at absolute `position`, among the allowed ones where there is such a set; returns it with its raw
/// logit.
pub fn choose(
    row: &RowResult,
    params: &SamplingParams,
    history: &History,
    allowed: Option<&[u32]>,
    position: usize,
) -> Result<(u32, f32), String> {
    let missing = "the device returned no logits";
    if is_greedy(params) && allowed.is_none() {
        return row.top.first().copied().ok_or_else(|| missing.into());
    }
    let logits = row.logits.as_deref().ok_or(missing)?;
    let token = sample_among(logits, params, history, allowed, position as u64)
        .map_err(|e| e.to_string())?;
    Ok((token, logits[token as usize]))
}

/// Refuses parameters out of range.
pub fn validate(params: &SamplingParams, vocab: usize) -> Result<(), Refusal> {
    params.validate().map_err(|bad| Refusal::BadParameter {
        name: bad.name,
        given: bad.given,
        allowed: bad.allowed,
    })?;
    match params
        .logit_bias
        .iter()
        .find(|(id, _)| *id as usize >= vocab)
    {
        Some((id, _)) => Err(Refusal::BadParameter {
            name: "logit_bias",
            given: format!("for token {id} of a vocabulary of {vocab}"),
            allowed: "for token ids of the vocabulary",
        }),
        None => Ok(()),
    }
}
