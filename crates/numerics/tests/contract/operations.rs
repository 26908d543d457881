//! Chains, sums, norms, rotations and digests.

use crate::{Numbers, bits};
use numerics::{
    chain, digest, lanes,
    norm::rms_norm,
    rope::{RopeScaling, angle_table, cos_sin, inverse_frequencies, rotate},
};

#[test]
fn a_chain_may_be_cut_anywhere() {
    let mut n = Numbers(21);
    for len in [0, 1, 2, 31, 100] {
        let x: Vec<f32> = (0..len).map(|_| n.wide(60)).collect();
        let w: Vec<f32> = (0..len).map(|_| n.wide(60)).collect();
        let whole = chain::dot(&x, &w);
        let mut by_hand = 0.0f32;
        for k in 0..len {
            by_hand = x[k].mul_add(w[k], by_hand);
        }
        assert_eq!(whole.to_bits(), by_hand.to_bits());
        for cut in 0..=len {
            let head = chain::dot(&x[..cut], &w[..cut]);
            assert_eq!(
                chain::extend(head, &x[cut..], &w[cut..]).to_bits(),
                whole.to_bits()
            );
        }
    }
    assert_eq!(
        chain::dot(&[-0.0], &[1.0]).to_bits(),
        0,
        "a chain starts from +0"
    );
}

#[test]
fn lane_sums_follow_lanes_and_tree() {
    let mut n = Numbers(22);
    for len in [0, 1, 15, 16, 17, 33, 576] {
        let x: Vec<f32> = (0..len).map(|_| n.wide(20)).collect();
        let lane = |l: usize, f: fn(f32, f32) -> f32| {
            x.iter().skip(l).step_by(16).fold(0.0, |a, &v| f(a, v))
        };
        fn tree(lane: &dyn Fn(usize) -> f32, first: usize, stride: usize) -> f32 {
            if stride == 16 {
                return lane(first);
            }
            // Lane l at level s holds the tree over l, l + s, …: the same pairs, seen from the top.
            tree(lane, first, 2 * stride) + tree(lane, first + stride, 2 * stride)
        }
        let sum = tree(&|l| lane(l, |a, v| a + v), 0, 1);
        let squares = tree(&|l| lane(l, |a, v| v.mul_add(v, a)), 0, 1);
        assert_eq!(lanes::sum(&x).to_bits(), sum.to_bits());
        assert_eq!(lanes::sum_squares(&x).to_bits(), squares.to_bits());
    }
}

#[test]
fn rms_norm_is_near_the_exact_one() {
    let mut n = Numbers(23);
    for len in [1, 16, 64, 576, 4096] {
        let (x, w) = (n.units(len), n.units(len));
        let mut y = vec![0.0; len];
        rms_norm(&x, &w, 1e-5, &mut y);
        let ss: f64 = x.iter().map(|&v| f64::from(v).powi(2)).sum();
        let r = 1.0 / (ss / len as f64 + 1e-5f32 as f64).sqrt();
        for i in 0..len {
            let exact = f64::from(x[i]) * r * f64::from(w[i]);
            assert!((f64::from(y[i]) - exact).abs() <= 4e-7 * exact.abs() + 1e-30);
        }
    }
    let mut y = [1.0; 3];
    rms_norm(&[0.0; 3], &[1.0; 3], 1e-6, &mut y);
    assert_eq!(bits(&y), [0; 3]);
    rms_norm(&[3e38, 1.0, -1.0], &[1.0; 3], 1e-6, &mut y);
    assert_eq!(
        bits(&y),
        bits(&[0.0, 0.0, -0.0]),
        "an overflowing sum gives zeros"
    );
}

const LLAMA3: RopeScaling = RopeScaling::Llama3 {
    factor: 32.0,
    low_freq_factor: 1.0,
    high_freq_factor: 4.0,
    original_context: 8192,
};

#[test]
fn rotary_frequencies_follow_their_scaling() {
    let plain = inverse_frequencies(64, 500_000.0, RopeScaling::None);
    let linear = inverse_frequencies(64, 500_000.0, RopeScaling::Linear { factor: 8.0 });
    let llama3 = inverse_frequencies(64, 500_000.0, LLAMA3);
    assert_eq!((plain.len(), plain[0]), (32, 1.0));
    let (mut kept, mut divided, mut between) = (0, 0, 0);
    for i in 0..32 {
        let exact = 500_000f64.powf(-2.0 * i as f64 / 64.0);
        assert!((plain[i] / exact - 1.0).abs() < 1e-15);
        assert_eq!(linear[i], plain[i] / 8.0);
        if llama3[i] == plain[i] {
            kept += 1;
        } else if llama3[i] == plain[i] / 32.0 {
            divided += 1;
        } else {
            assert!(llama3[i] < plain[i] && llama3[i] > plain[i] / 32.0);
            between += 1;
        }
    }
    assert_eq!((kept, between, divided), (15, 3, 14));
}

#[test]
fn rotation_turns_pairs_by_the_angle() {
    let inv = inverse_frequencies(16, 10_000.0, RopeScaling::None);
    let (table_cos, table_sin) = angle_table(300, &inv);
    let mut n = Numbers(24);
    for position in [0, 1, 63, 299] {
        let (mut cos, mut sin) = ([0.0; 8], [0.0; 8]);
        cos_sin(position, &inv, &mut cos, &mut sin);
        assert_eq!(bits(&cos), bits(&table_cos[8 * position..][..8]));
        assert_eq!(bits(&sin), bits(&table_sin[8 * position..][..8]));
        let x = n.units(16);
        let mut y = x.clone();
        rotate(&mut y, &cos, &sin);
        for i in 0..8 {
            let (s, c) = (position as f64 * inv[i]).sin_cos();
            let (a, b) = (f64::from(x[i]), f64::from(x[i + 8]));
            assert!((f64::from(y[i]) - (a * c - b * s)).abs() < 2e-7);
            assert!((f64::from(y[i + 8]) - (b * c + a * s)).abs() < 2e-7);
        }
        if position == 0 {
            assert_eq!(y, x);
        }
    }
}

#[test]
fn digests_separate_fields_and_domains() {
    use digest::{Digest, Encoder, step_digest};
    let all = [
        Encoder::new("test one").text("a", "bc").finish(),
        Encoder::new("test two").text("a", "bc").finish(),
        Encoder::new("test one").text("ab", "c").finish(),
        Encoder::new("test one")
            .text("a", "b")
            .text("c", "")
            .finish(),
        Encoder::new("test one").u32("a", 1).finish(),
        Encoder::new("test one").u64("a", 1).finish(),
        Encoder::new("test one").f32("a", 0.0).finish(),
        Encoder::new("test one").f32("a", -0.0).finish(),
        step_digest(1, &[(1, 2.0), (3, 1.0)]),
        step_digest(2, &[(1, 2.0), (3, 1.0)]),
        step_digest(1, &[(1, 2.0), (3, f32::from_bits(1.0f32.to_bits() + 1))]),
        step_digest(1, &[(1, 2.0), (4, 1.0)]),
        step_digest(1, &[(1, 2.0)]),
    ];
    for i in 0..all.len() {
        assert!(all[..i].iter().all(|d| *d != all[i]), "{i}");
        assert_eq!(all[i].to_string().parse(), Ok(all[i]));
    }
    // The encoding, byte by byte.
    let mut raw = blake3::Hasher::new_derive_key("test one");
    raw.update(b"\x02\0\0\0ab\x08\0\0\0\0\0\0\0\x01\0\0\0\x02\0\0\0");
    let fields = Encoder::new("test one").u32s("ab", [1, 2]).finish();
    assert_eq!(fields, Digest(*raw.finalize().as_bytes()));
    for bad in [
        "",
        "00",
        &"0".repeat(63),
        &"G".repeat(64),
        &"A".repeat(64),
        &"é".repeat(32),
    ] {
        assert!(bad.parse::<Digest>().is_err());
    }
}
