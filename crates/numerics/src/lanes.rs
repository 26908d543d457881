//! Sums over sixteen lanes and a tree: the contract's only sum besides the chain (NUMERICS.md section 0).

/// Accumulators of a lane sum.
pub const LANES: usize = 16;

/// Adds lane l + s to lane l for s = 8, 4, 2, 1 and returns lane 0.
#[inline(always)]
pub fn tree_sum(lanes: &[f32; LANES]) -> f32 {
    let mut a = *lanes;
    let mut s = LANES / 2;
    while s > 0 {
        for l in 0..s {
            a[l] += a[l + s];
        }
        s /= 2;
    }
    a[0]
}

/// Lane sum with `acc[i mod 16] = step(acc[i mod 16], x[i])`.
#[inline(always)]
fn fold(x: &[f32], step: impl Fn(f32, f32) -> f32) -> f32 {
    let mut acc = [0.0; LANES];
    for part in x.chunks(LANES) {
        for (a, &v) in acc.iter_mut().zip(part) {
            *a = step(*a, v);
        }
    }
    tree_sum(&acc)
}

/// Lane sum by addition.
pub fn sum(x: &[f32]) -> f32 {
    fold(x, |a, v| a + v)
}

/// Lane sum of squares by fma.
pub fn sum_squares(x: &[f32]) -> f32 {
    fold(x, |a, v| v.mul_add(v, a))
}
