//! Elementary functions as fixed sequences of f32 operations (NUMERICS.md section 8).
//!
//! Every function is total, branch-free up to selections, and uses only additions, fused multiply-adds, one division
//! where stated, rounding to integer and bit operations: a vector kernel that performs the same steps in each lane
//! gives the same bits. Coefficients are public for such kernels, lowest degree first.

const fn bits<const N: usize>(b: [u32; N]) -> [f32; N] {
    let mut out = [0.0; N];
    let mut i = 0;
    while i < N {
        out[i] = f32::from_bits(b[i]);
        i += 1;
    }
    out
}

/// 2^f on [−1/2, 1/2], degree 6; relative error of the polynomial 2^−28.
pub const EXP2: [f32; 7] = bits([
    0x3f80_0000,
    0x3f31_7218,
    0x3e75_fdec,
    0x3d63_57bc,
    0x3c1d_9858,
    0x3aaf_8533,
    0x391f_c836,
]);
/// e^r on [−ln 2 / 2, ln 2 / 2], degree 6; relative error of the polynomial 2^−28.
pub const EXP: [f32; 7] = bits([
    0x3f80_0000,
    0x3f80_0000,
    0x3eff_fffc,
    0x3e2a_aa47,
    0x3d2a_adcb,
    0x3c09_1de8,
    0x3ab4_29a9,
]);
/// P in ln(1 + f) ≈ f − f²/2 + f³ P(f) on [√½ − 1, √2 − 1], degree 8; relative error 2^−30.
pub const LN: [f32; 9] = bits([
    0x3eaa_aaa3,
    0xbe80_0005,
    0x3e4c_d2a3,
    0xbe2a_ad72,
    0x3e11_967d,
    0xbdfe_26d0,
    0x3df3_d2a7,
    0xbdee_b288,
    0x3d88_e43a,
]);
/// Q in tanh(a) ≈ a + a³ Q(a²) on [0, 0.55], degree 4; relative error 2^−29.
pub const TANH: [f32; 5] = bits([
    0xbeaa_aaa5,
    0x3e08_867e,
    0xbd5c_9134,
    0x3cac_87e7,
    0xbbcd_224f,
]);
/// RN(log2 e).
pub const LOG2E: f32 = f32::from_bits(0x3fb8_aa3b);
/// RN(ln 2).
pub const LN2_HI: f32 = f32::from_bits(0x3f31_7218);
/// RN(ln 2 − [`LN2_HI`]); negative.
pub const LN2_LO: f32 = f32::from_bits(0xb102_e308);
/// [`exp2`] clamps its argument to these: (low, high).
pub const EXP2_CLAMP: (f32, f32) = (-151.0, 129.0);
/// [`exp`] clamps its argument to these: (low, high).
pub const EXP_CLAMP: (f32, f32) = (-104.0, 89.0);
/// Where [`tanh`] changes from its polynomial to the exponential form: below this magnitude the polynomial.
pub const TANH_SPLIT: f32 = f32::from_bits(0x3f0c_cccd);
/// RN(√(2/π)), in [`gelu_tanh`].
pub const GELU_SCALE: f32 = f32::from_bits(0x3f4c_422a);
/// RN(0.044715), in [`gelu_tanh`].
pub const GELU_CUBIC: f32 = f32::from_bits(0x3d37_2713);

#[inline(always)]
fn horner<const N: usize>(c: &[f32; N], x: f32) -> f32 {
    let mut p = c[N - 1];
    for i in (0..N - 1).rev() {
        p = p.mul_add(x, c[i]);
    }
    p
}

/// Clamps by selection; NaN passes.
#[inline(always)]
pub fn clamp(x: f32, (low, high): (f32, f32)) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// 2^e exactly for −126 ≤ e ≤ 127; +0 below. `e` must not exceed 127.
#[inline(always)]
pub fn p2(e: i32) -> f32 {
    debug_assert!(e <= 127);
    if e < -126 {
        0.0
    } else {
        f32::from_bits(((e + 127) as u32) << 23)
    }
}

/// p · 2^n for −252 ≤ n ≤ 254 by two multiplications, so that only the last can round or overflow.
#[inline(always)]
fn scale(p: f32, n: i32) -> f32 {
    let half = n >> 1;
    let pow = |e: i32| f32::from_bits(((e + 127) as u32) << 23);
    p * pow(half) * pow(n - half)
}

/// 2^f for f in [−1/2, 1/2], where the error is below 0.9 ulp; 1 exactly at 0. Elsewhere whatever the polynomial gives.
#[inline(always)]
pub fn exp2frac(f: f32) -> f32 {
    horner(&EXP2, f)
}

/// 2^x within 0.9 ulp (1 ulp where the result is subnormal); exact at integers. NaN → NaN, overflow → +∞, underflow → +0.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    let x = clamp(x, EXP2_CLAMP);
    let n = x.round_ties_even();
    scale(exp2frac(x - n), n as i32)
}

/// e^x within 1 ulp. NaN → NaN, overflow → +∞, underflow → +0.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let x = clamp(x, EXP_CLAMP);
    let n = (x * LOG2E).round_ties_even();
    let r = n.mul_add(-LN2_HI, x);
    let r = n.mul_add(-LN2_LO, r);
    scale(horner(&EXP, r), n as i32)
}

/// ln x within 1 ulp. ±0 → −∞, negative → NaN, NaN → NaN, +∞ → +∞; ln 1 = +0.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    let small = x < f32::MIN_POSITIVE;
    let scaled = if small { x * 8388608.0 } else { x };
    let bias = if small { -23 } else { 0 };
    // m = scaled · 2^−e lies in [√½, √2): 0x3f3504f3 is RN(√½).
    let shifted = scaled.to_bits().wrapping_sub(0x3f35_04f3) as i32;
    let e = shifted >> 23;
    let m = f32::from_bits(((shifted & 0x007f_ffff) + 0x3f35_04f3) as u32);
    let f = m - 1.0;
    let e = (e + bias) as f32;
    let r = (f * f).mul_add(horner(&LN, f).mul_add(f, -0.5), f);
    let y = e.mul_add(LN2_HI, e.mul_add(LN2_LO, r));
    let y = if x == f32::INFINITY { x } else { y };
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    if x >= 0.0 { y } else { f32::NAN }
}

/// tanh x within 2 ulp, odd to the bit (tanh −0 = −0). NaN → NaN, ±∞ → ±1.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let a2 = a * a;
    let near = (a2 * horner(&TANH, a2)).mul_add(a, a);
    let far = 1.0 - 2.0 / (exp(a + a) + 1.0);
    let y = if a < TANH_SPLIT { near } else { far };
    y.copysign(x)
}

/// x / (1 + e^−x).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// (x/2) · (1 + tanh(√(2/π) (x + 0.044715 x³))).
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    let u = GELU_SCALE * (GELU_CUBIC * (x * x)).mul_add(x, x);
    (0.5 * x) * (1.0 + tanh(u))
}
