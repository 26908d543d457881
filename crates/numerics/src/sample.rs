//! Sampling: one pure function of (logits, parameters, history, seed, choice index, absolute position).

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
