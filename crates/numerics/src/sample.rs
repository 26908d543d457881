//! Sampling: one pure function of (logits, parameters, history, seed, choice index, absolute position).

use crate::{
    math,
    philox::philox4x32_10,
    select::{self, NanLogit},
};

/// What a caller may ask of sampling. The defaults are greedy.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy; otherwise logits are divided by it.
    pub temperature: f32,
    /// Keep the `k` largest; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of largest probabilities that reaches this mass, in (0, 1].
    pub top_p: f32,
    /// Drop tokens less probable than this fraction of the most probable, in [0, 1].
    pub min_p: f32,
    /// Seed of the Philox generator.
    pub seed: u64,
    /// Which of several choices of one request this is.
    pub choice: u32,
    /// Divides (multiplies, where negative) logits of tokens already in prompt or output; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted once from logits of tokens already in the output.
    pub presence_penalty: f32,
    /// Subtracted from logits once for each time the token is in the output.
    pub frequency_penalty: f32,
    /// Added to the logits of these ids, ascending by id.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            choice: 0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
        }
    }
}

/// A parameter outside what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} is {given}, but must be {allowed}")]
pub struct BadParameter {
    /// Field of [`SamplingParams`].
    pub name: &'static str,
    /// Its value.
    pub given: String,
    /// What would do.
    pub allowed: &'static str,
}

/// Why no token could be chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// A parameter is out of range.
    #[error(transparent)]
    BadParameter(#[from] BadParameter),
    /// A logit is NaN.
    #[error(transparent)]
    Nan(#[from] NanLogit),
    /// A biased token does not exist.
    #[error("logit_bias names token {id}, outside the vocabulary of {vocab}")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Logits given.
        vocab: usize,
    },
    /// There are no logits, or none that is allowed.
    #[error("there are no logits to choose from")]
    Empty,
}

impl SamplingParams {
    /// Whether the token depends on the history at all.
    pub fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }

    /// Whether every field is within its range; the error names the first that is not.
    pub fn validate(&self) -> Result<(), BadParameter> {
        let check = |name, value: f32, ok: bool, allowed| {
            if ok {
                return Ok(());
            }
            let given = value.to_string();
            Err(BadParameter {
                name,
                given,
                allowed,
            })
        };
        let (t, p, m) = (self.temperature, self.top_p, self.min_p);
        let within = |x: f32| (-2.0..=2.0).contains(&x);
        check(
            "temperature",
            t,
            t.is_finite() && t >= 0.0,
            "finite and at least 0",
        )?;
        check("top_p", p, p > 0.0 && p <= 1.0, "above 0 and at most 1")?;
        check("min_p", m, (0.0..=1.0).contains(&m), "from 0 to 1")?;
        let r = self.repetition_penalty;
        check(
            "repetition_penalty",
            r,
            r.is_finite() && r > 0.0,
            "finite and above 0",
        )?;
        let (pp, fp) = (self.presence_penalty, self.frequency_penalty);
        check("presence_penalty", pp, within(pp), "from -2 to 2")?;
        check("frequency_penalty", fp, within(fp), "from -2 to 2")?;
        for &(_, b) in &self.logit_bias {
            check("logit_bias", b, b.is_finite(), "finite")?;
        }
        if let Some(pair) = self.logit_bias.windows(2).find(|w| w[0].0 >= w[1].0) {
            return Err(BadParameter {
                name: "logit_bias",
                given: format!("token {} before token {}", pair[0].0, pair[1].0),
                allowed: "ascending by token id, each once",
            });
        }
        Ok(())
    }
}

/// Which tokens a sequence holds already: what the penalties look at.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct History {
    /// (id, how often it is in the output), ascending by id; 0 times where it is in the prompt only.
    counts: Vec<(u32, u32)>,
}

impl History {
    /// The history after `prompt` and `output`.
    pub fn new(prompt: &[u32], output: &[u32]) -> Self {
        let mut counts: Vec<(u32, u32)> = prompt.iter().map(|&t| (t, 0)).collect();
        counts.sort_unstable();
        counts.dedup();
        let mut history = Self { counts };
        output.iter().for_each(|&t| history.push(t));
        history
    }

    /// Adds a generated token.
    pub fn push(&mut self, token: u32) {
        match self.counts.binary_search_by_key(&token, |c| c.0) {
            Ok(at) => self.counts[at].1 = self.counts[at].1.saturating_add(1),
            Err(at) => self.counts.insert(at, (token, 1)),
        }
    }

    /// (id, how often it is in the output), ascending by id.
    pub fn counts(&self) -> &[(u32, u32)] {
        &self.counts
    }
}

/// Fourth word of the Philox counter: "BLCO".
const PHILOX_DOMAIN: u32 = 0x424c_4f43;
/// Weight of the most probable token.
const ONE: f64 = 4_294_967_296.0;

/// Chooses the token at `position`, its absolute position in the sequence (the prompt's length for the first generated),
/// from the raw `logits` of the position before (NUMERICS.md section 11).
pub fn sample(
    logits: &[f32],
    params: &SamplingParams,
    history: &History,
    position: u64,
) -> Result<u32, SampleError> {
    sample_among(logits, params, history, None, position)
}

/// The same among allowed tokens only: id `i` is bit `i % 32` of word `i / 32`; ids beyond the words are not allowed.
pub fn sample_among(
    logits: &[f32],
    params: &SamplingParams,
    history: &History,
    allowed: Option<&[u32]>,
    position: u64,
) -> Result<u32, SampleError> {
    params.validate()?;
    if let Some(id) = logits.iter().position(|z| z.is_nan()) {
        return Err(NanLogit { id: id as u32 }.into());
    }
    let mut z = logits.to_vec();
    adjust(&mut z, params, history)?;
    let Some(allowed) = allowed else {
        return choose(&z, params, position);
    };
    // The others are left out, and order is kept, so that the rest is as if they did not exist.
    let ids: Vec<u32> = (0..z.len() as u32)
        .filter(|&id| is_allowed(allowed, id))
        .collect();
    let z: Vec<f32> = ids.iter().map(|&id| z[id as usize]).collect();
    Ok(ids[choose(&z, params, position)? as usize])
}

/// Whether a set as [`sample_among`] takes it holds `id`.
pub fn is_allowed(set: &[u32], id: u32) -> bool {
    set.get(id as usize / 32)
        .is_some_and(|word| word >> (id % 32) & 1 == 1)
}

/// Index of the one chosen.
fn choose(z: &[f32], params: &SamplingParams, position: u64) -> Result<u32, SampleError> {
    if params.temperature == 0.0 {
        return select::argmax(z)?.ok_or(SampleError::Empty);
    }
    let kept = weigh(z, params)?;
    let total: u64 = kept.iter().map(|k| k.1).sum();
    let u = (u128::from(draw(params, position)) * u128::from(total)) >> 64;
    let mut running = 0;
    for &(id, w) in &kept {
        running += u128::from(w);
        if running > u {
            return Ok(id);
        }
    }
    Err(SampleError::Empty)
}

/// Bias and penalties.
fn adjust(z: &mut [f32], params: &SamplingParams, history: &History) -> Result<(), SampleError> {
    let vocab = z.len();
    for &(id, bias) in &params.logit_bias {
        *z.get_mut(id as usize)
            .ok_or(SampleError::UnknownToken { id, vocab })? += bias;
    }
    for &(id, count) in &history.counts {
        // A history may hold ids that have no logit: padded rows of an embedding, say.
        let Some(z) = z.get_mut(id as usize) else {
            continue;
        };
        let r = params.repetition_penalty;
        *z = if *z > 0.0 { *z / r } else { *z * r };
        if count > 0 {
            *z -= count as f32 * params.frequency_penalty + params.presence_penalty;
        }
    }
    Ok(())
}

/// (id, integer weight) of the tokens that may be drawn, ascending by id.
fn weigh(z: &[f32], params: &SamplingParams) -> Result<Vec<(u32, u64)>, SampleError> {
    let max = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |z: f32| {
        // Equal infinities have no difference.
        let d = if z == max { 0.0 } else { z - max };
        let x = d / params.temperature;
        // Below −23 the weight is 0 anyway, and most of a vocabulary lies there.
        if x < -23.0 {
            0
        } else {
            (math::exp(x) * ONE as f32) as u64
        }
    };
    let mut kept: Vec<(u32, f32, u64)> = match params.top_k as usize {
        k if k > 0 && k < z.len() => select::top_k(z, k)?
            .into_iter()
            .map(|(id, z)| (id, z, weight(z)))
            .collect(),
        _ => (0..).zip(z).map(|(id, &z)| (id, z, weight(z))).collect(),
    };
    kept.retain(|k| k.2 > 0);
    if params.top_p < 1.0 {
        kept.sort_unstable_by(|a, b| select::order(&(a.0, a.1), &(b.0, b.1)));
        let total: u64 = kept.iter().map(|k| k.2).sum();
        let wanted = (f64::from(params.top_p) * total as f64).ceil() as u64;
        let mut sum = 0;
        let enough = kept.iter().position(|k| {
            sum += k.2;
            sum >= wanted
        });
        kept.truncate(enough.map_or(kept.len(), |i| i + 1));
    }
    let floor = f64::from(params.min_p) * ONE;
    kept.retain(|k| k.2 as f64 >= floor);
    kept.sort_unstable_by_key(|k| k.0);
    Ok(kept.into_iter().map(|(id, _, w)| (id, w)).collect())
}

/// 64 random bits of (seed, choice, position): step 8's r.
pub fn draw(params: &SamplingParams, position: u64) -> u64 {
    let counter = [
        position as u32,
        (position >> 32) as u32,
        params.choice,
        PHILOX_DOMAIN,
    ];
    let key = [params.seed as u32, (params.seed >> 32) as u32];
    let r = philox4x32_10(counter, key);
    u64::from(r[0]) | u64::from(r[1]) << 32
}
