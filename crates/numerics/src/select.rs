//! Order, Top-n and log-sum-exp over logits (NUMERICS.md section 10).

use crate::math;
use std::cmp::Ordering;

/// A logit is NaN: the row has no meaning and its request ends with an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the logit of token {id} is NaN")]
pub struct NanLogit {
    /// The first such token.
    pub id: u32,
}

/// −0 becomes +0; all else stays.
#[inline(always)]
pub fn canonical(logit: f32) -> f32 {
    if logit == 0.0 { 0.0 } else { logit }
}

/// The contract's order: logit descending, then id ascending. Neither logit may be NaN.
#[inline]
pub fn order(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.partial_cmp(&a.1)
        .unwrap_or(Ordering::Equal)
        .then(a.0.cmp(&b.0))
}

/// The first id by the contract's order; `None` of no logits.
pub fn argmax(logits: &[f32]) -> Result<Option<u32>, NanLogit> {
    Ok(top_k(logits, 1)?.first().map(|t| t.0))
}

/// The first `n` (id, canonical logit) by the contract's order; all of them where there are fewer.
pub fn top_k(logits: &[f32], n: usize) -> Result<Vec<(u32, f32)>, NanLogit> {
    const INSERT_UP_TO: usize = 64;
    let n = n.min(logits.len());
    if let Some(id) = logits.iter().position(|z| z.is_nan()) {
        return Err(NanLogit { id: id as u32 });
    }
    if n == 0 {
        return Ok(Vec::new());
    }
    let pair = |i: usize| (i as u32, canonical(logits[i]));
    if n > INSERT_UP_TO {
        let mut all: Vec<_> = (0..logits.len()).map(pair).collect();
        all.select_nth_unstable_by(n - 1, order);
        all.truncate(n);
        all.sort_unstable_by(order);
        return Ok(all);
    }
    let mut top: Vec<(u32, f32)> = (0..n).map(pair).collect();
    top.sort_unstable_by(order);
    for i in n..logits.len() {
        // Ids ascend, so that a tie with the last one loses.
        if logits[i] > top[n - 1].1 {
            let new = pair(i);
            let at = top.partition_point(|t| order(t, &new) == Ordering::Less);
            top.pop();
            top.insert(at, new);
        }
    }
    Ok(top)
}

/// Terms of [`log_sum_exp`] count in units of 1 / this.
pub const SUM_UNIT: f32 = (1u64 << 40) as f32;

/// A term exp(logit − max) ≤ 1 as an integer, so that the order of the sum does not matter.
#[inline(always)]
pub fn sum_term(e: f32) -> u64 {
    (e * SUM_UNIT) as u64
}

/// ln Σ exp(logit). −∞ of no logits or of −∞ only, +∞ where one is +∞, NaN where one is NaN.
pub fn log_sum_exp(logits: &[f32]) -> f32 {
    if logits.iter().any(|z| z.is_nan()) {
        return f32::NAN;
    }
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max.is_infinite() {
        return max;
    }
    let sum: u64 = logits.iter().map(|z| sum_term(math::exp(z - max))).sum();
    log_of_sum(max, sum)
}

/// [`log_sum_exp`] from the largest logit, finite, and the sum of [`sum_term`]s.
pub fn log_of_sum(max: f32, sum: u64) -> f32 {
    canonical(max) + math::ln(sum as f32 * (1.0 / SUM_UNIT))
}
