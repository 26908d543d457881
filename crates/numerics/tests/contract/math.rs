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

/// A prime, so that low mantissa bits vary. With 1, over the arguments where the functions neither saturate nor round
/// to 1, the worst are 0.80 (exp2frac), 0.88 (exp2), 0.90 (exp), 0.92 (ln) and 1.59 (tanh) ulp.
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

#[test]
fn special_arguments() {
    use math::{exp, exp2, gelu_tanh, ln, silu, tanh};
    let inf = f32::INFINITY;
    for f in [exp2, exp, ln, tanh, silu, gelu_tanh] {
        assert!(f(f32::NAN).is_nan());
        assert!(f(-f32::NAN).is_nan());
    }
    for n in -149..128 {
        assert_eq!(exp2(n as f32), 2f64.powi(n) as f32, "2^{n}");
    }
    for f in [exp2, exp] {
        assert_eq!((f(inf), f(-inf), f(f32::MAX)), (inf, 0.0, inf));
        assert_eq!((f(0.0), f(-0.0), f(f32::MIN)), (1.0, 1.0, 0.0));
        assert_eq!(f(-200.0).to_bits(), 0, "underflow is +0");
    }
    assert_eq!((exp2(128.0), exp2(-150.0)), (inf, 0.0));
    assert!(exp2(127.999_99) < inf && exp(88.72) < inf && exp(88.73) == inf);
    assert_eq!((ln(0.0), ln(-0.0), ln(inf)), (-inf, -inf, inf));
    assert!(ln(-1.0).is_nan() && ln(-inf).is_nan());
    assert_eq!(ln(1.0).to_bits(), 0);
    for x in [0.0f32, 1e-45, 1e-30, 0.3, 0.55, 0.56, 1.0, 9.0, 20.0, inf] {
        assert_eq!(tanh(-x).to_bits(), (-tanh(x)).to_bits());
    }
    assert_eq!((tanh(inf), tanh(1e-45)), (1.0, 1e-45));
    assert_eq!((silu(inf), silu(-1e30), silu(0.0)), (inf, 0.0, 0.0));
    assert_eq!((gelu_tanh(inf), gelu_tanh(-1e30)), (inf, 0.0));
    assert!(gelu_tanh(1e30) == 1e30 && silu(1e30) == 1e30);
}

#[test]
fn powers_of_two() {
    for e in -126..=127 {
        assert_eq!(math::p2(e), 2f64.powi(e) as f32);
    }
    for e in [-127, -150, -33_554_432, i32::MIN] {
        assert_eq!(math::p2(e).to_bits(), 0);
    }
}

#[test]
fn activations_are_near_their_functions() {
    let (mut silu, mut gelu) = (0.0f64, 0.0f64);
    for i in -88_000..88_000 {
        let x = i as f32 * 1e-3 + 1e-5;
        let d = f64::from(x);
        silu = silu.max(ulps(math::silu(x), d / (1.0 + (-d).exp())));
        let u = (2.0 / std::f64::consts::PI).sqrt() * (d + 0.044715 * d * d * d);
        let error = f64::from(math::gelu_tanh(x)) - 0.5 * d * (1.0 + u.tanh());
        gelu = gelu.max(error.abs() / d.abs());
    }
    println!(
        "silu: {silu:.3} ulp; gelu_tanh: 2^{:.2} of |x|",
        gelu.log2()
    );
    assert!(silu <= 3.0 && gelu <= 2f64.powi(-22));
}
