//! Vendor products: the `gemm` crate on weights widened chunk by chunk. Bits may depend on the number of rows.

use super::isa::Isa;
use super::linear::Widen;
use super::pack::Packed;
use super::simd::LANES;

/// Version of the crate, for identities.
pub(crate) const VERSION: &str = "gemm-f32 0.19";

/// Units widened at once: 128 outputs.
pub(crate) const CHUNK_UNITS: usize = 8;

/// The path the crate picks by itself.
pub(crate) fn path() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            "avx512f"
        } else if is_x86_feature_detected!("fma") {
            "fma"
        } else {
            "scalar"
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        "default"
    }
}

/// The caches by which the crate blocks products, K included: bytes and ways of each level.
pub(crate) fn caches() -> String {
    let levels = gemm_common::cache::CACHE_INFO.iter();
    let level = levels.map(|c| format!("{}/{}", c.cache_bytes, c.associativity));
    level.collect::<Vec<_>>().join(" ")
}

/// `y[t·stride + 16·(unit − first)..] = x[t] · W` for `units` ≤ [`CHUNK_UNITS`] units and `rows` rows.
///
/// # Safety
/// `isa` is available; `x` is `[rows][K]`; `y` covers the outputs; `buffer` holds K · 16 · units floats.
pub(crate) unsafe fn product(
    isa: Isa,
    w: &Packed,
    unit: usize,
    units: usize,
    x: *const f32,
    rows: usize,
    y: *mut f32,
    stride: usize,
    buffer: *mut f32,
) {
    let outputs = units * LANES;
    // SAFETY: the caller's.
    unsafe {
        isa.run(Widen {
            w,
            unit,
            units,
            from: 0,
            to: w.cols,
            out: buffer,
            stride: outputs,
        });
        gemm_f32::gemm::f32::get_gemm_fn()(
            outputs,
            rows,
            w.cols,
            y,
            stride as isize,
            1,
            false,
            buffer,
            outputs as isize,
            1,
            x,
            w.cols as isize,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm_common::Parallelism::None,
        );
    }
}
