//! The chain of fused multiply-adds that every product of the contract is (NUMERICS.md section 3).

/// Continues a chain: `acc = fma(x[k], w[k], acc)` for ascending k. A chain may be cut anywhere and continued.
///
/// # Panics
/// Where the lengths differ.
#[inline(always)]
pub fn extend(acc: f32, x: &[f32], w: &[f32]) -> f32 {
    assert_eq!(x.len(), w.len(), "a chain needs operands of equal length");
    x.iter().zip(w).fold(acc, |acc, (&x, &w)| x.mul_add(w, acc))
}

/// The chain from +0.
///
/// # Panics
/// Where the lengths differ.
#[inline(always)]
pub fn dot(x: &[f32], w: &[f32]) -> f32 {
    extend(0.0, x, w)
}
