//! RMSNorm (NUMERICS.md section 5).

use crate::lanes;

/// `out[i] = (x[i] · r) · w[i]` with r = 1 / sqrt(Σ x² / n + eps).
///
/// # Panics
/// Where the lengths differ.
pub fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == w.len() && x.len() == out.len());
    let r = 1.0 / (lanes::sum_squares(x) / x.len() as f32 + eps).sqrt();
    for i in 0..x.len() {
        out[i] = (x[i] * r) * w[i];
    }
}
