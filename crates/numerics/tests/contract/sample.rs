//! Sampling against its section written out plainly, against probabilities, and at every edge of its parameters.

use crate::Numbers;
use numerics::{
    math,
    philox::philox4x32_10,
    sample::{History, SampleError, SamplingParams, sample, sample_among},
};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn with(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    let mut params = SamplingParams {
        temperature: 1.0,
        ..Default::default()
    };
    change(&mut params);
    params
}

fn pick(logits: &[f32], params: &SamplingParams, position: u64) -> u32 {
    sample(logits, params, &History::default(), position).expect("valid")
}

/// Which ids are ever drawn over many positions.
fn reachable(logits: &[f32], params: &SamplingParams) -> BTreeSet<u32> {
    (0..500).map(|p| pick(logits, params, p)).collect()
}

/// The section, step by step over the whole vocabulary.
fn written_out(
    logits: &[f32],
    p: &SamplingParams,
    prompt: &[u32],
    output: &[u32],
    position: u64,
) -> u32 {
    let mut z = logits.to_vec();
    for &(id, b) in &p.logit_bias {
        z[id as usize] += b;
    }
    for id in 0..z.len() {
        let count = output.iter().filter(|&&t| t as usize == id).count();
        if count > 0 || prompt.contains(&(id as u32)) {
            let r = p.repetition_penalty;
            z[id] = if z[id] > 0.0 { z[id] / r } else { z[id] * r };
        }
        if count > 0 {
            let sum = count as f32 * p.frequency_penalty;
            z[id] -= sum + p.presence_penalty;
        }
    }
    let mut ids: Vec<usize> = (0..z.len()).collect();
    ids.sort_by(|&a, &b| z[b].partial_cmp(&z[a]).expect("no NaN").then(a.cmp(&b)));
    if p.temperature == 0.0 {
        return ids[0] as u32;
    }
    if p.top_k > 0 {
        ids.truncate(p.top_k as usize);
    }
    let max = z[ids[0]];
    let w = |id: usize| -> u128 {
        let d = if z[id] == max { 0.0 } else { z[id] - max };
        (f64::from(math::exp(d / p.temperature)) * 2f64.powi(32)).trunc() as u128
    };
    if p.top_p < 1.0 {
        let total: u128 = ids.iter().map(|&i| w(i)).sum();
        let wanted = (f64::from(p.top_p) * total as f64).ceil() as u128;
        let mut n = 0;
        while ids[..n].iter().map(|&i| w(i)).sum::<u128>() < wanted {
            n += 1;
        }
        ids.truncate(n);
    }
    ids.retain(|&i| w(i) as f64 >= f64::from(p.min_p) * 2f64.powi(32));
    ids.sort();
    let words = [
        position as u32,
        (position >> 32) as u32,
        p.choice,
        0x424c4f43,
    ];
    let r = philox4x32_10(words, [p.seed as u32, (p.seed >> 32) as u32]);
    let r = u128::from(r[0]) + (u128::from(r[1]) << 32);
    let u = (r * ids.iter().map(|&i| w(i)).sum::<u128>()) >> 64;
    let mut sum = 0;
    for i in ids {
        sum += w(i);
        if sum > u {
            return i as u32;
        }
    }
    unreachable!("u is below the sum")
}

fn any_params(vocab: u32) -> impl Strategy<Value = SamplingParams> {
    let temperature = prop_oneof![
        Just(0.0f32),
        Just(1e-45),
        Just(1e-30),
        Just(f32::MAX),
        0.01f32..3.0
    ];
    let share = prop_oneof![Just(1.0f32), Just(1e-45), 0.001f32..1.0];
    let min_p = prop_oneof![Just(0.0f32), Just(1.0), 0.0f32..0.5];
    let penalty = prop_oneof![Just(1.0f32), Just(1e-38), Just(1e38), 0.5f32..2.0];
    let bias = prop::collection::btree_map(0..vocab, -1e3f32..1e3, 0..4);
    (
        (temperature, 0..vocab + 5, share, min_p),
        (any::<u64>(), any::<u32>(), penalty),
        (-2.0f32..=2.0, -2.0f32..=2.0, bias),
    )
        .prop_map(
            |((t, k, p, m), (seed, choice, r), (pp, fp, bias))| SamplingParams {
                temperature: t,
                top_k: k,
                top_p: p,
                min_p: m,
                seed,
                choice,
                repetition_penalty: r,
                presence_penalty: pp,
                frequency_penalty: fp,
                logit_bias: bias.into_iter().collect(),
            },
        )
}

fn any_logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        1 => Just(f32::INFINITY),
        2 => Just(f32::NEG_INFINITY),
        1 => Just(f32::MAX),
        1 => Just(-0.0f32),
        3 => Just(1.5f32),
        20 => -10.0f32..10.0,
    ]
}

proptest! {
    #[test]
    fn the_section_written_out_again_gives_the_same_token(
        logits in prop::collection::vec(any_logit(), 30),
        params in any_params(30),
        prompt in prop::collection::vec(0u32..30, 0..5),
        output in prop::collection::vec(0u32..30, 0..5),
        position: u64,
    ) {
        let got = sample(&logits, &params, &History::new(&prompt, &output), position);
        prop_assert_eq!(got, Ok(written_out(&logits, &params, &prompt, &output, position)));
    }

    #[test]
    fn nothing_panics(
        logits in prop::collection::vec(any::<u32>(), 0..20),
        floats in prop::array::uniform6(any::<u32>()),
        bias in prop::collection::vec(any::<(u32, u32)>(), 0..3),
        history in prop::collection::vec(any::<u32>(), 0..5),
        (top_k, seed, choice, position) in any::<(u32, u64, u32, u64)>(),
    ) {
        let f = floats.map(f32::from_bits);
        let logits: Vec<f32> = logits.into_iter().map(f32::from_bits).collect();
        let params = SamplingParams {
            temperature: f[0], top_p: f[1], min_p: f[2], repetition_penalty: f[3],
            presence_penalty: f[4], frequency_penalty: f[5], top_k, seed, choice,
            logit_bias: bias.into_iter().map(|(id, b)| (id, f32::from_bits(b))).collect(),
        };
        let history = History::new(&history, &history);
        if let Ok(id) = sample(&logits, &params, &history, position) {
            prop_assert!((id as usize) < logits.len());
        }
    }
}

#[test]
fn greedy_is_the_first_by_order_after_bias_and_penalties() {
    let logits = [1.0, 3.0, 3.0, -0.0, 2.9];
    let greedy = SamplingParams::default();
    assert_eq!(pick(&logits, &greedy, 0), 1);
    let biased = SamplingParams {
        logit_bias: vec![(1, -0.5), (4, 0.2)],
        ..greedy.clone()
    };
    assert_eq!(pick(&logits, &biased, 0), 4);
    let penalised = SamplingParams {
        repetition_penalty: 2.0,
        ..greedy.clone()
    };
    let seen = |prompt: &[u32], output: &[u32], p: &SamplingParams| {
        sample(&logits, p, &History::new(prompt, output), 0).expect("valid")
    };
    assert_eq!(seen(&[1], &[2], &penalised), 4);
    let counted = SamplingParams {
        frequency_penalty: 0.06,
        ..greedy.clone()
    };
    assert_eq!(
        seen(&[1, 1, 1], &[], &counted),
        1,
        "the prompt is not counted"
    );
    assert_eq!(seen(&[], &[1, 2], &counted), 1);
    assert_eq!(seen(&[], &[1, 1, 2], &counted), 2);
    assert_eq!(seen(&[], &[1, 1, 2, 2], &counted), 4);
    let present = SamplingParams {
        presence_penalty: 0.5,
        ..greedy
    };
    assert_eq!(seen(&[], &[1, 1], &present), 2);
    assert_eq!(
        seen(&[], &[1, 2, 9999], &present),
        4,
        "ids without a logit are ignored"
    );
}

#[test]
fn edges_of_each_parameter() {
    let logits = [0.0, 2.0, 2.0, 1.0, -3.0];
    let all: BTreeSet<u32> = (0..5).collect();
    let ties = BTreeSet::from([1, 2]);
    assert_eq!(reachable(&logits, &with(|p| p.temperature = 1e-45)), ties);
    assert_eq!(reachable(&logits, &with(|p| p.temperature = f32::MAX)), all);
    assert_eq!(
        reachable(&logits, &with(|p| p.top_k = 1)),
        BTreeSet::from([1])
    );
    assert_eq!(reachable(&logits, &with(|p| p.top_k = 2)), ties);
    assert_eq!(reachable(&logits, &with(|p| p.top_k = 100)), all);
    assert_eq!(
        reachable(&logits, &with(|p| p.top_p = 1e-45)),
        BTreeSet::from([1])
    );
    assert_eq!(reachable(&logits, &with(|p| p.top_p = 0.7)), ties);
    assert_eq!(reachable(&logits, &with(|p| p.min_p = 1.0)), ties);
    assert_eq!(
        reachable(&logits, &with(|p| p.min_p = 0.3)),
        BTreeSet::from([1, 2, 3])
    );
    assert_eq!(reachable(&[f32::NEG_INFINITY; 3], &with(|_| {})).len(), 3);
    let inf = [1.0, f32::INFINITY, 5.0, f32::INFINITY];
    assert_eq!(reachable(&inf, &with(|_| {})), BTreeSet::from([1, 3]));
    assert_eq!(reachable(&[-1e30], &with(|_| {})), BTreeSet::from([0]));
}

#[test]
fn refusals_name_the_parameter() {
    type Case = (&'static str, fn(&mut SamplingParams));
    let cases: [Case; 16] = [
        ("temperature", |p| p.temperature = -1.0),
        ("temperature", |p| p.temperature = f32::INFINITY),
        ("temperature", |p| p.temperature = f32::NAN),
        ("top_p", |p| p.top_p = 0.0),
        ("top_p", |p| p.top_p = 1.1),
        ("top_p", |p| p.top_p = f32::NAN),
        ("min_p", |p| p.min_p = -0.1),
        ("min_p", |p| p.min_p = f32::NAN),
        ("repetition_penalty", |p| p.repetition_penalty = 0.0),
        ("repetition_penalty", |p| {
            p.repetition_penalty = f32::INFINITY
        }),
        ("presence_penalty", |p| p.presence_penalty = 2.5),
        ("frequency_penalty", |p| p.frequency_penalty = f32::NAN),
        ("logit_bias", |p| {
            p.logit_bias = vec![(1, f32::NEG_INFINITY)]
        }),
        ("logit_bias", |p| p.logit_bias = vec![(1, f32::NAN)]),
        ("logit_bias", |p| p.logit_bias = vec![(1, 0.0), (1, 0.0)]),
        ("logit_bias", |p| p.logit_bias = vec![(2, 0.0), (1, 0.0)]),
    ];
    for (name, change) in cases {
        let params = with(change);
        assert_eq!(params.validate().expect_err(name).name, name);
        assert!(sample(&[1.0, 2.0, 3.0], &params, &History::default(), 0).is_err());
    }
    let unknown = with(|p| p.logit_bias = vec![(3, 1.0)]);
    let error = sample(&[1.0; 3], &unknown, &History::default(), 0);
    assert_eq!(error, Err(SampleError::UnknownToken { id: 3, vocab: 3 }));
    for t in [0.0, 1.0] {
        let params = with(|p| p.temperature = t);
        let run = |z: &[f32]| sample(z, &params, &History::default(), 0);
        assert_eq!(run(&[]), Err(SampleError::Empty));
        assert!(matches!(run(&[0.0, f32::NAN]), Err(SampleError::Nan(e)) if e.id == 1));
    }
}

#[test]
fn draws_follow_the_probabilities() {
    let mut n = Numbers(13);
    let logits: Vec<f32> = (0..16).map(|_| n.unit() * 1.5).collect();
    const DRAWS: u64 = 40_000;
    for temperature in [0.5, 1.0, 3.0] {
        let params = with(|p| (p.temperature, p.seed) = (temperature, 99));
        let mut counts = [0u64; 16];
        for position in 0..DRAWS {
            counts[pick(&logits, &params, position) as usize] += 1;
        }
        let weight = |z: f32| f64::from(z / temperature).exp();
        let total: f64 = logits.iter().map(|&z| weight(z)).sum();
        let chi2: f64 = logits
            .iter()
            .zip(counts)
            .map(|(&z, c)| {
                let expected = weight(z) / total * DRAWS as f64;
                (c as f64 - expected).powi(2) / expected
            })
            .sum();
        // 15 degrees of freedom: 37.7 is exceeded once in a thousand.
        assert!(chi2 < 37.7, "temperature {temperature}: chi² = {chi2}");
    }
}

#[test]
fn seeds_choices_and_positions_each_matter() {
    let logits = [0.0; 1000];
    let run = |seed, choice, first: u64| -> Vec<u32> {
        let params = with(|p| (p.seed, p.choice) = (seed, choice));
        (first..first + 8)
            .map(|i| pick(&logits, &params, i))
            .collect()
    };
    let base = run(0, 0, 0);
    assert_eq!(base, run(0, 0, 0));
    let others = [
        run(1, 0, 0),
        run(1 << 32, 0, 0),
        run(0, 1, 0),
        run(0, 0, 1 << 32),
        run(0, 0, 8),
    ];
    for (i, other) in others.iter().enumerate() {
        assert_ne!(&base, other, "{i}");
        assert!(others[..i].iter().all(|o| o != other));
    }
    assert_eq!(base[1..], run(0, 0, 1)[..7]);
}

/// A set of ids as bits.
fn set(ids: &[u32]) -> Vec<u32> {
    let mut words = vec![0; ids.iter().max().map_or(0, |&id| id as usize / 32 + 1)];
    ids.iter()
        .for_each(|&id| words[id as usize / 32] |= 1 << (id % 32));
    words
}

#[test]
fn an_allowed_set_is_a_smaller_vocabulary() {
    let mut numbers = Numbers(41);
    for case in 0..400u64 {
        let vocab = 1 + (case as usize * 7) % 150;
        let logits: Vec<f32> = (0..vocab).map(|_| numbers.unit() * 4.0).collect();
        let params = with(|p| {
            p.temperature = [0.0, 0.7, 1.0, 3.0][case as usize % 4];
            p.top_k = [0, 0, 3, 40][case as usize / 4 % 4];
            p.top_p = [1.0, 0.6][case as usize / 16 % 2];
            p.min_p = [0.0, 0.05][case as usize / 32 % 2];
            p.repetition_penalty = 1.3;
            p.presence_penalty = 0.5;
            p.logit_bias = vec![(0, 1.5)];
            p.seed = case;
        });
        let history = History::new(&[0], &[vocab as u32 / 2]);
        let one = |allowed: Option<&[u32]>| sample_among(&logits, &params, &history, allowed, case);
        // Everything allowed, ids beyond the vocabulary too, is the plain function.
        let all = vec![u32::MAX; vocab / 32 + 2];
        let plain = sample(&logits, &params, &history, case).expect("valid");
        assert_eq!(one(Some(&all)), Ok(plain));
        // A subset: the plain function over the logits that are left, bias and penalties applied before.
        let ids: Vec<u32> = (0..vocab as u32)
            .filter(|id| (u64::from(*id) * 31 + case) % 3 == 0)
            .collect();
        if ids.is_empty() {
            assert_eq!(one(Some(&set(&ids))), Err(SampleError::Empty));
            continue;
        }
        let mut z = logits.clone();
        z[0] += 1.5;
        for id in [0, vocab / 2] {
            let was = z[id];
            z[id] = if was > 0.0 { was / 1.3 } else { was * 1.3 };
            if id == vocab / 2 {
                z[id] -= 0.5;
            }
            if vocab / 2 == 0 {
                break;
            }
        }
        let left: Vec<f32> = ids.iter().map(|&id| z[id as usize]).collect();
        let bare = SamplingParams {
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            ..params.clone()
        };
        let index = written_out(&left, &bare, &[], &[], case);
        assert_eq!(
            one(Some(&set(&ids))),
            Ok(ids[index as usize]),
            "case {case}"
        );
    }
}

#[test]
fn what_is_not_allowed_never_wins() {
    let logits = [f32::NEG_INFINITY, f32::INFINITY, f32::NEG_INFINITY, 1.0];
    for temperature in [0.0, 1.0] {
        let params = with(|p| p.temperature = temperature);
        let one =
            |ids: &[u32]| sample_among(&logits, &params, &History::default(), Some(&set(ids)), 3);
        assert_eq!(one(&[2]), Ok(2), "even where nothing else has a logit");
        assert_eq!(one(&[0, 3]), Ok(3));
        assert_eq!(one(&[]), Err(SampleError::Empty));
        assert_eq!(
            one(&[40]),
            Err(SampleError::Empty),
            "outside the vocabulary"
        );
    }
}
