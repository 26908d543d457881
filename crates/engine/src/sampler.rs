//! Choosing the next token from a row, and checking the parameters that decide how.

use crate::request::Refusal;
use device::RowResult;
use numerics::sample::{History, SamplingParams, is_allowed, sample_among};

/// Whether the largest raw logit is the answer, so that the device's Top-20 suffice.
pub fn is_greedy(params: &SamplingParams) -> bool {
    params.temperature == 0.0 && !params.penalises() && params.logit_bias.is_empty()
}

/// The token at absolute `position`, as the device chose it or chosen here, among the allowed ones where there is such a
/// set, with its raw logit.
pub fn choose(
    row: &RowResult,
    params: &SamplingParams,
    history: &History,
    allowed: Option<&[u32]>,
    position: usize,
) -> Result<(u32, f32), String> {
    if let Some(chosen) = row.chosen {
        return Ok(chosen);
    }
    let missing = "the device returned no logits";
    if is_greedy(params) && allowed.is_none() {
        return row.top.first().copied().ok_or_else(|| missing.into());
    }
    let logits = row.logits.as_deref().ok_or(missing)?;
    // What follows decides the same without looking at the whole vocabulary.
    if let Some(token) = allowed.and_then(|set| obvious(row, params, set)) {
        let logit = logits.get(token as usize).ok_or(missing)?;
        return Ok((token, *logit));
    }
    let token = sample_among(logits, params, history, allowed, position as u64)
        .map_err(|e| e.to_string())?;
    Ok((token, logits[token as usize]))
}

/// The only token allowed, or, where the largest logit is the answer, the first allowed one of the Top-20.
fn obvious(row: &RowResult, params: &SamplingParams, allowed: &[u32]) -> Option<u32> {
    if is_greedy(params) {
        let among = |&&(id, _): &&(u32, f32)| is_allowed(allowed, id);
        return row.top.iter().find(among).map(|(id, _)| *id);
    }
    let (word, bits) = allowed.iter().enumerate().find(|(_, bits)| **bits != 0)?;
    let alone = bits.is_power_of_two() && allowed[word + 1..].iter().all(|&bits| bits == 0);
    alone.then(|| word as u32 * 32 + bits.trailing_zeros())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_obvious_is_what_sampling_would_choose() {
        let mut state = 7u32;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state
        };
        let mut obvious_ones = 0;
        for case in 0..2000 {
            let vocab = 40 + case % 60;
            let logits: Vec<f32> = (0..vocab)
                .map(|_| (next() % 64) as f32 / 8.0 - 4.0)
                .collect();
            let row = RowResult {
                top: numerics::select::top_k(&logits, numerics::TOP_N).unwrap(),
                logits: Some(logits.clone()),
                ..RowResult::default()
            };
            let mut allowed = vec![0u32; 4];
            for _ in 0..[1, 2, 30][case % 3] {
                let id = next() as usize % vocab;
                allowed[id / 32] |= 1 << (id % 32);
            }
            let params = SamplingParams {
                temperature: [0.0, 0.9][case / 3 % 2],
                top_p: 0.8,
                min_p: 0.2,
                ..SamplingParams::default()
            };
            let history = History::default();
            let whole = sample_among(&logits, &params, &history, Some(&allowed), 9).unwrap();
            let (token, logit) = choose(&row, &params, &history, Some(&allowed), 9).unwrap();
            assert_eq!(
                (token, logit),
                (whole, logits[whole as usize]),
                "case {case}"
            );
            obvious_ones += usize::from(obvious(&row, &params, &allowed).is_some());
        }
        assert!(obvious_ones > 800, "{obvious_ones}");
    }
}
