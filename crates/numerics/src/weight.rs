//! Stored weight formats and the exact widening of each to f32.

use half::{bf16, f16};

/// How a weight tensor is stored. Quantised formats are GGUF's blocks along K (the input dimension).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum WeightType {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4K,
    Q5K,
    Q6K,
}

impl WeightType {
    /// Elements a block (1 for plain formats).
    pub fn block_len(self) -> usize {
        use WeightType::*;
        match self {
            F32 | F16 | Bf16 => 1,
            Q8_0 | Q4_0 | Q4_1 | Q5_0 | Q5_1 => 32,
            Q4K | Q5K | Q6K => 256,
        }
    }

    /// Bytes a block.
    pub fn block_bytes(self) -> usize {
        use WeightType::*;
        match self {
            F32 => 4,
            F16 | Bf16 => 2,
            Q8_0 => 34,
            Q4_0 => 18,
            Q4_1 => 20,
            Q5_0 => 22,
            Q5_1 => 24,
            Q4K => 144,
            Q5K => 176,
            Q6K => 210,
        }
    }

    /// Bytes one row of `cols` elements takes; `None` where `cols` is not a whole number of blocks.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_len()) {
            return None;
        }
        (cols / self.block_len()).checked_mul(self.block_bytes())
    }

    /// GGUF's name of the format.
    pub fn name(self) -> &'static str {
        use WeightType::*;
        match self {
            F32 => "F32",
            F16 => "F16",
            Bf16 => "BF16",
            Q8_0 => "Q8_0",
            Q4_0 => "Q4_0",
            Q4_1 => "Q4_1",
            Q5_0 => "Q5_0",
            Q5_1 => "Q5_1",
            Q4K => "Q4_K",
            Q5K => "Q5_K",
            Q6K => "Q6_K",
        }
    }
}

/// Widens one stored row of `out.len()` elements to f32 (NUMERICS.md section 2).
///
/// # Panics
/// Where `bytes` is not exactly the row: `ty.row_bytes(out.len()) != Some(bytes.len())`.
pub fn widen_row(ty: WeightType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(
        ty.row_bytes(out.len()),
        Some(bytes.len()),
        "a row of {} {} elements does not take {} bytes",
        out.len(),
        ty.name(),
        bytes.len()
    );
    let blocks = bytes
        .chunks_exact(ty.block_bytes())
        .zip(out.chunks_exact_mut(ty.block_len()));
    for (b, y) in blocks {
        match ty {
            WeightType::F32 => y[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            WeightType::F16 => y[0] = half_at(b, 0),
            WeightType::Bf16 => y[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            WeightType::Q8_0 => {
                let d = half_at(b, 0);
                for i in 0..32 {
                    y[i] = d * f32::from(b[2 + i] as i8);
                }
            }
            WeightType::Q4_0 => {
                let d = half_at(b, 0);
                for i in 0..32 {
                    y[i] = d * f32::from(nibble32(&b[2..], i) as i8 - 8);
                }
            }
            WeightType::Q4_1 => {
                let (d, m) = (half_at(b, 0), half_at(b, 2));
                for i in 0..32 {
                    y[i] = d.mul_add(f32::from(nibble32(&b[4..], i)), m);
                }
            }
            WeightType::Q5_0 => {
                let d = half_at(b, 0);
                for i in 0..32 {
                    let q = nibble32(&b[6..], i) | (bit(&b[2..], i) << 4);
                    y[i] = d * f32::from(q as i8 - 16);
                }
            }
            WeightType::Q5_1 => {
                let (d, m) = (half_at(b, 0), half_at(b, 2));
                for i in 0..32 {
                    let q = nibble32(&b[8..], i) | (bit(&b[4..], i) << 4);
                    y[i] = d.mul_add(f32::from(q), m);
                }
            }
            WeightType::Q4K => widen_k45(b, &[], &b[16..], y),
            WeightType::Q5K => widen_k45(b, &b[16..48], &b[48..], y),
            WeightType::Q6K => widen_q6k(b, y),
        }
    }
}

fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// Element i of 32 nibbles: low halves hold 0..16, high halves 16..32.
fn nibble32(qs: &[u8], i: usize) -> u8 {
    (qs[i % 16] >> (4 * (i / 16))) & 15
}

fn bit(bytes: &[u8], i: usize) -> u8 {
    (bytes[i / 8] >> (i % 8)) & 1
}

/// Scale and minimum (six bits each) of sub-block j of eight, out of twelve bytes.
pub fn k_scale_min(s: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        (
            (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4),
            (s[j + 4] >> 4) | ((s[j] >> 6) << 4),
        )
    }
}

/// Q4_K and, where `high` holds its fifth bits, Q5_K: eight sub-blocks of 32.
fn widen_k45(b: &[u8], high: &[u8], qs: &[u8], y: &mut [f32]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    for j in 0..8 {
        let (scale, min) = k_scale_min(&b[4..16], j);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        for l in 0..32 {
            let mut q = (qs[32 * (j / 2) + l] >> (4 * (j % 2))) & 15;
            if let Some(h) = high.get(l) {
                q |= ((h >> j) & 1) << 4;
            }
            y[32 * j + l] = scale.mul_add(f32::from(q), -min);
        }
    }
}

/// Low nibbles 128, high pairs 64, sixteen signed scales, d.
fn widen_q6k(b: &[u8], y: &mut [f32]) {
    let (low, high, scales) = (&b[..128], &b[128..192], &b[192..208]);
    let d = half_at(b, 208);
    for i in 0..256 {
        // Each half of 128: four runs of 32, which share low bytes in pairs and high bytes all.
        let (half, run, l) = (i / 128, i % 128 / 32, i % 32);
        let lo = (low[64 * half + 32 * (run % 2) + l] >> (4 * (run / 2))) & 15;
        let hi = (high[32 * half + l] >> (2 * run)) & 3;
        let q = (lo | (hi << 4)) as i8 - 32;
        y[i] = (d * f32::from(scales[i / 16] as i8)) * f32::from(q);
    }
}
