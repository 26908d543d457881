//! Crowds: what shares an engine with the target. A crowd is a function of (seed, trial) and the check's own settings,
//! so a failing trial can be described in full and run again alone.

use engine::Protection;
use serde::Serialize;

/// Neighbour counts worth trying first: batch sizes at which engines are known to change kernels, and one more or less.
const SIZES: [usize; 27] = [
    1, 8, 16, 2, 9, 17, 7, 15, 3, 31, 6, 32, 10, 33, 5, 63, 12, 64, 4, 65, 127, 128, 129, 254, 255,
    256, 257,
];

/// Neighbour prompt lengths: every tile, block and chunk edge, and one more or less.
const LENGTHS: [usize; 37] = [
    1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256,
    257, 319, 511, 512, 513, 1024, 1025, 2047, 2048, 2049, 4096, 4097, 8191, 8192,
];

/// Prompt tokens one sequence may prefill in a step.
const CHUNKS: [usize; 12] = [1, 2, 7, 16, 33, 63, 64, 65, 128, 255, 256, 511];

/// Tokens a step may hold in all.
const BUDGETS: [usize; 7] = [64, 100, 128, 256, 257, 512, 1024];

/// What crowds of one check are drawn from.
#[derive(Debug, Clone)]
pub struct CrowdSpace {
    /// Seed of the whole check.
    pub seed: u64,
    /// Prompt tokens of the target.
    pub target_prompt: usize,
    /// Tokens the target generates.
    pub target_tokens: usize,
    /// Most neighbours in a crowd; at least 1.
    pub max_neighbours: usize,
    /// Longest neighbour prompt, in tokens; at least 1.
    pub longest_prompt: usize,
    /// Protections neighbours may have besides the target's own.
    pub protections: Vec<Protection>,
}

/// How a neighbour picks tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NeighbourSampling {
    /// The largest logit.
    Greedy,
    /// Temperature 1 with this seed.
    Seeded(u64),
}

/// One other request.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Neighbour {
    /// Step before which it is submitted.
    pub arrives: usize,
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// How many of them are the target's own first tokens.
    pub shared_prefix: usize,
    /// Seed of the rest of its prompt.
    pub prompt_seed: u64,
    /// Tokens it generates at most.
    pub max_tokens: usize,
    /// Cancelled this many steps after its arrival.
    pub cancelled_after: Option<usize>,
    /// Preempted this many steps after its arrival.
    pub preempted_after: Option<usize>,
    /// How it picks tokens.
    pub sampling: NeighbourSampling,
    /// Its protection.
    #[serde(serialize_with = "protection_name")]
    pub protection: Protection,
}

/// What KV blocks hold before their first use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Poison {
    Nan,
    Infinity,
    MinusInfinity,
    Huge,
    Zero,
}

impl Poison {
    /// The value.
    pub fn value(self) -> f32 {
        match self {
            Poison::Nan => f32::NAN,
            Poison::Infinity => f32::INFINITY,
            Poison::MinusInfinity => f32::NEG_INFINITY,
            Poison::Huge => 3.0e38,
            Poison::Zero => 0.0,
        }
    }
}

/// Everything about one trial but the target itself.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Crowd {
    /// Which trial of the check this is.
    pub trial: usize,
    /// Tokens a step may hold.
    pub token_budget: usize,
    /// Prompt tokens one sequence may prefill in a step.
    pub prefill_chunk: usize,
    /// Tokens of the target's prompt that an earlier request left in the prefix cache; 0 is a cold cache.
    pub warm_prefix: usize,
    /// Step before which the target is submitted.
    pub target_arrives: usize,
    /// The target is preempted after it has generated this many tokens, each once, ascending.
    pub target_preempted_at: Vec<usize>,
    /// What unused KV memory holds.
    pub poison: Poison,
    /// The others, in order of submission where they arrive together.
    pub neighbours: Vec<Neighbour>,
}

impl Crowd {
    /// The crowd of `trial` around a target under `protection`.
    pub fn derive(space: &CrowdSpace, trial: usize, protection: Protection) -> Self {
        let mut rng = Rng::new(space.seed, trial as u64);
        let size = crowd_size(space.max_neighbours, trial, &mut rng);
        // A target prefilled token by token among many neighbours takes minutes on a real model; small chunks are for
        // short prompts.
        let smallest_chunk = space.target_prompt / 32;
        let chunks: Vec<usize> = CHUNKS
            .into_iter()
            .filter(|&c| c >= smallest_chunk)
            .collect();
        let prefill_chunk = *rng.pick(&chunks).unwrap_or(&512);
        let token_budget = (*rng.pick(&BUDGETS).unwrap_or(&256)).max(size + 2);
        // Trials alternate between a cold cache and a prefix cut at a block edge or anywhere.
        let warm_prefix = match trial % 4 {
            1 => 64 * rng.below(space.target_prompt / 64 + 1),
            3 => rng.below(space.target_prompt + 1),
            _ => 0,
        };
        let target_arrives = rng.below(6);
        let target_preempted_at = if rng.below(2) == 0 {
            let mut at: Vec<usize> = (0..1 + rng.below(3))
                .map(|_| rng.below(space.target_tokens.max(1)))
                .collect();
            at.sort_unstable();
            at.dedup();
            at
        } else {
            Vec::new()
        };
        let poison = [
            Poison::Nan,
            Poison::Infinity,
            Poison::Huge,
            Poison::MinusInfinity,
            Poison::Zero,
        ][trial % 5];
        let lengths: Vec<usize> = LENGTHS
            .into_iter()
            .filter(|&l| l <= space.longest_prompt)
            .collect();
        let mut neighbours: Vec<Neighbour> = (0..size)
            .map(|_| {
                Neighbour::draw(
                    space,
                    &lengths,
                    prefill_chunk,
                    target_arrives,
                    protection,
                    &mut rng,
                )
            })
            .collect();
        // One long prefill lands beside the target's decode.
        if let (Some(last), Some(&longest)) = (neighbours.last_mut(), lengths.last())
            && trial.is_multiple_of(2)
        {
            last.prompt_tokens = longest;
            last.shared_prefix = 0;
            last.arrives = target_arrives
                + space.target_prompt.div_ceil(prefill_chunk)
                + rng.below(space.target_tokens.max(1));
            last.cancelled_after = None;
        }
        neighbours.sort_by_key(|n| n.arrives);
        Self {
            trial,
            token_budget,
            prefill_chunk,
            warm_prefix,
            target_arrives,
            target_preempted_at,
            poison,
            neighbours,
        }
    }
}

impl Neighbour {
    fn draw(
        space: &CrowdSpace,
        lengths: &[usize],
        chunk: usize,
        target_arrives: usize,
        protection: Protection,
        rng: &mut Rng,
    ) -> Self {
        // The smaller of three draws: most prompts short, long ones present.
        let index = (0..3)
            .map(|_| rng.below(lengths.len().max(1)))
            .min()
            .unwrap_or(0);
        let prompt_tokens = lengths.get(index).copied().unwrap_or(1);
        // Half arrive with the target, half spread over its life, so that some join and some finish beside its decode.
        let life = space.target_prompt.div_ceil(chunk) + space.target_tokens;
        let arrives = if rng.below(2) == 0 {
            target_arrives.saturating_sub(2) + rng.below(5)
        } else {
            target_arrives + rng.below(life.max(1))
        };
        let shared_prefix = match rng.below(4) {
            0 => prompt_tokens.min(rng.below(space.target_prompt + 1)),
            _ => 0,
        };
        let own = space.protections.is_empty() || rng.below(4) != 0;
        Self {
            arrives,
            prompt_tokens,
            shared_prefix,
            prompt_seed: rng.next(),
            max_tokens: 1 + rng.below(2 * space.target_tokens.max(1)),
            cancelled_after: (rng.below(4) == 0).then(|| rng.below(life.max(1))),
            preempted_after: (rng.below(6) == 0).then(|| rng.below(life.max(1))),
            sampling: match rng.below(2) {
                0 => NeighbourSampling::Greedy,
                _ => NeighbourSampling::Seeded(rng.next()),
            },
            protection: if own {
                protection
            } else {
                *rng.pick(&space.protections).unwrap_or(&protection)
            },
        }
    }

    /// Its prompt: the shared part of the target's, then tokens from its seed.
    pub fn prompt(&self, target: &[u32], vocab: usize) -> Vec<u32> {
        let mut rng = Rng::new(self.prompt_seed, 0);
        let shared = self.shared_prefix.min(target.len());
        let mut prompt = target[..shared].to_vec();
        prompt.extend((shared..self.prompt_tokens.max(1)).map(|_| rng.below(vocab.max(1)) as u32));
        prompt
    }
}

/// The largest crowd first, then the sizes at thresholds, then anything.
fn crowd_size(max: usize, trial: usize, rng: &mut Rng) -> usize {
    let known: Vec<usize> = SIZES.into_iter().filter(|&s| s < max).collect();
    match trial {
        0 => max,
        t if t <= known.len() => known[t - 1],
        _ => 1 + rng.below(max),
    }
}

/// `len` token ids below `vocab`, a function of `seed`: prompts for models without a tokenizer.
pub fn random_prompt(seed: u64, len: usize, vocab: usize) -> Vec<u32> {
    let mut rng = Rng::new(seed, 0x70726f6d7074);
    (0..len).map(|_| rng.below(vocab.max(1)) as u32).collect()
}

fn protection_name<S: serde::Serializer>(p: &Protection, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(p.name())
}

/// SplitMix64: enough to shuffle a test plan, and the same everywhere for ever.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut rng = Self(seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95));
        rng.next();
        rng
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in 0..n, n ≥ 1.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((self.next() as u128 * n as u128) >> 64) as usize
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        if of.is_empty() {
            return None;
        }
        of.get(self.below(of.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> CrowdSpace {
        CrowdSpace {
            seed: 7,
            target_prompt: 130,
            target_tokens: 24,
            max_neighbours: 24,
            longest_prompt: 513,
            protections: vec![Protection::None, Protection::Invariant],
        }
    }

    #[test]
    fn a_crowd_is_a_function_of_seed_and_trial() {
        for trial in 0..50 {
            let a = Crowd::derive(&space(), trial, Protection::Invariant);
            assert_eq!(a, Crowd::derive(&space(), trial, Protection::Invariant));
            let other_seed = CrowdSpace { seed: 8, ..space() };
            assert_ne!(a, Crowd::derive(&other_seed, trial, Protection::Invariant));
        }
    }

    #[test]
    fn crowds_keep_their_limits_and_reach_every_situation() {
        let space = space();
        let crowds: Vec<Crowd> = (0..300)
            .map(|t| Crowd::derive(&space, t, Protection::Invariant))
            .collect();
        for c in &crowds {
            assert!((1..=24).contains(&c.neighbours.len()));
            assert!(c.token_budget > c.neighbours.len());
            assert!(c.warm_prefix <= 130);
            assert!(c.target_preempted_at.iter().all(|&s| s < 24));
            for n in &c.neighbours {
                assert!((1..=513).contains(&n.prompt_tokens) && n.shared_prefix <= n.prompt_tokens);
                let prompt = n.prompt(&[5; 130], 100);
                assert_eq!(prompt.len(), n.prompt_tokens);
                assert!(prompt[..n.shared_prefix].iter().all(|&t| t == 5));
            }
        }
        let all = || crowds.iter().flat_map(|c| &c.neighbours);
        for length in LENGTHS.iter().filter(|&&l| l <= 513) {
            assert!(all().any(|n| n.prompt_tokens == *length), "{length}");
        }
        for size in SIZES.iter().filter(|&&s| s <= 24).chain([&24]) {
            assert!(crowds.iter().any(|c| c.neighbours.len() == *size), "{size}");
        }
        for cut in [0, 64, 128] {
            assert!(crowds.iter().any(|c| c.warm_prefix == cut), "{cut}");
        }
        assert!(all().any(|n| n.cancelled_after.is_some()));
        assert!(all().any(|n| n.preempted_after.is_some()));
        assert!(all().any(|n| n.protection == Protection::None));
        assert!(all().any(|n| n.shared_prefix > 64));
        assert!(crowds.iter().any(|c| !c.target_preempted_at.is_empty()));
    }

    #[test]
    fn one_neighbour_and_one_token_are_enough() {
        let tiny = CrowdSpace {
            target_prompt: 1,
            target_tokens: 1,
            max_neighbours: 1,
            longest_prompt: 1,
            protections: vec![],
            ..space()
        };
        for trial in 0..100 {
            let c = Crowd::derive(&tiny, trial, Protection::None);
            assert_eq!(c.neighbours.len(), 1);
            assert_eq!(c.neighbours[0].prompt_tokens, 1);
        }
    }
}
