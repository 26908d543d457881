//! Error bounds of the elementary functions against f64, and their values at every kind of special argument.

use numerics::math;

/// |got − want| in units of the gap above the f32 nearest to `want`.
fn ulps(got: f32, want: f64) -> f64 {
    let near = (want as f32).abs();
    if near.is_infinite() {
        return if got == want as f32 {
            0.0
        } else {
            f64::INFINITY
        };
    }
    let gap = f64::from(f32::from_bits(near.to_bits() + 1).min(f32::MAX)) - f64::from(near);
    (f64::from(got) - want).abs() / if gap > 0.0 { gap } else { 2f64.powi(104) }
}

/// Largest error over every `stride`-th bit pattern whose value `domain` admits, with its argument.
fn worst(
    stride: u32,
    domain: impl Fn(f32) -> bool,
    f: impl Fn(f32) -> f32,
    exact: impl Fn(f64) -> f64,
) -> (f64, f32) {
    let mut worst = (0.0, 0.0);
    let mut bits = 0u32;
    loop {
        let x = f32::from_bits(bits);
        if domain(x) {
            let e = ulps(f(x), exact(f64::from(x)));
            assert!(!e.is_nan(), "{x:e}: {}", f(x));
            if e > worst.0 {
                worst = (e, x);
            }
        }
        match bits.checked_add(stride) {
            Some(next) => bits = next,
            None => return worst,
        }
    }
}

/// A prime, so that low mantissa bits vary. 1 sweeps every f32 (minutes); the bounds hold there too.
const STRIDE: u32 = 1009;

#[track_caller]
fn assert_bound(name: &str, bound: f64, (error, at): (f64, f32)) {
    println!("{name}: {error:.3} ulp at {at:e}");
    assert!(error <= bound, "{name}: {error} ulp at {at:e}");
}

#[test]
fn errors_are_within_the_stated_bounds() {
    let number = |x: f32| !x.is_nan();
    let half = |x: f32| x.abs() <= 0.5;
    let w = |d: &dyn Fn(f32) -> bool, f: fn(f32) -> f32, e: fn(f64) -> f64| worst(STRIDE, d, f, e);
    assert_bound("exp2frac", 0.9, w(&half, math::exp2frac, f64::exp2));
    assert_bound("exp2", 0.9, w(&number, math::exp2, f64::exp2));
    assert_bound("exp", 1.0, w(&number, math::exp, f64::exp));
    let positive = |x: f32| x >= 0.0;
    assert_bound("ln", 1.0, w(&positive, math::ln, f64::ln));
    assert_bound("tanh", 2.0, w(&number, math::tanh, f64::tanh));
}
