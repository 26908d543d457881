//! Order, Top-n and log-sum-exp.

use crate::Numbers;
use numerics::select::{argmax, canonical, log_sum_exp, order, top_k};
use proptest::prelude::*;

/// Few distinct values, so that ties are everywhere.
fn tied() -> impl Strategy<Value = f32> {
    prop_oneof![
        Just(0.0f32),
        Just(-0.0),
        Just(1.0),
        Just(f32::from_bits(1.0f32.to_bits() + 1)),
        Just(1e-45),
        Just(-1e-45),
        Just(f32::INFINITY),
        Just(f32::NEG_INFINITY),
        -3.0f32..3.0,
    ]
}

proptest! {
    #[test]
    fn top_k_is_the_head_of_the_sorted_whole(logits in prop::collection::vec(tied(), 0..200), n in 0usize..210) {
        let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().map(|&z| canonical(z))).collect();
        // Stable, and ids ascend already.
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all.truncate(n);
        let got = top_k(&logits, n).expect("no NaN");
        prop_assert_eq!(got.len(), all.len());
        for (g, w) in got.iter().zip(&all) {
            prop_assert_eq!((g.0, g.1.to_bits()), (w.0, w.1.to_bits()));
        }
        let first = argmax(&logits).expect("no NaN");
        prop_assert_eq!(first, top_k(&logits, 1).expect("no NaN").first().map(|t| t.0));
    }

    #[test]
    fn a_nan_anywhere_is_named(mut logits in prop::collection::vec(tied(), 1..100), at in 0usize..100) {
        let at = at % logits.len();
        logits[at] = -f32::NAN;
        for n in [0, 1, 20, 90] {
            prop_assert_eq!(top_k(&logits, n).map_err(|e| e.id), Err(at as u32));
        }
        prop_assert!(log_sum_exp(&logits).is_nan());
    }
}

#[test]
fn order_is_logit_then_id() {
    use std::cmp::Ordering::*;
    assert_eq!(order(&(5, 1.0), &(4, 0.5)), Less);
    assert_eq!(order(&(5, 1.0), &(4, 1.0)), Greater);
    assert_eq!(order(&(1, -0.0), &(2, 0.0)), Less);
    assert_eq!(order(&(2, -0.0), &(2, 0.0)), Equal);
}

#[test]
fn log_sum_exp_is_near_the_exact_one() {
    let mut n = Numbers(11);
    for len in [1, 15, 16, 17, 1000, 50_000] {
        let logits: Vec<f32> = (0..len).map(|_| n.unit() * 20.0).collect();
        let exact = logits.iter().map(|&z| f64::from(z).exp()).sum::<f64>().ln();
        let got = f64::from(log_sum_exp(&logits));
        assert!((got - exact).abs() < 4e-6, "{len}: {got} {exact}");
    }
}

#[test]
fn log_sum_exp_of_special_rows() {
    let inf = f32::INFINITY;
    assert_eq!(log_sum_exp(&[]), -inf);
    assert_eq!(log_sum_exp(&[-inf, -inf]), -inf);
    assert_eq!(log_sum_exp(&[1.0, inf, inf]), inf);
    assert_eq!(log_sum_exp(&[-inf, 3.0]), 3.0);
    assert_eq!(log_sum_exp(&[-0.0]).to_bits(), 0);
    assert_eq!(log_sum_exp(&[f32::MAX, f32::MIN]), f32::MAX);
}
