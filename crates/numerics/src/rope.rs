//! Rotary position embedding.

/// How rotary frequencies are scaled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Plain `theta^(-2i/d)`.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3's piecewise scaling.
    Llama3 {
        /// Divisor of the lowest frequencies.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are divided by `factor`.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` stay.
        high_freq_factor: f64,
        /// Context the base model was trained on, in tokens.
        original_context: usize,
    },
}

/// Rotations a position of one pair index: f64 angles a position, for i < `head_dim` / 2. Computed in f64 with the
/// `libm` crate only, so that no platform's library decides a bit.
pub fn inverse_frequencies(head_dim: usize, theta: f64, scaling: RopeScaling) -> Vec<f64> {
    (0..head_dim / 2)
        .map(|i| {
            let inv = libm::pow(theta, -((2 * i) as f64) / head_dim as f64);
            match scaling {
                RopeScaling::None => inv,
                RopeScaling::Linear { factor } => inv / factor,
                RopeScaling::Llama3 {
                    factor,
                    low_freq_factor,
                    high_freq_factor,
                    original_context,
                } => {
                    let context = original_context as f64;
                    let wavelength = 2.0 * std::f64::consts::PI / inv;
                    if wavelength < context / high_freq_factor {
                        inv
                    } else if wavelength > context / low_freq_factor {
                        inv / factor
                    } else {
                        let smooth = (context / wavelength - low_freq_factor)
                            / (high_freq_factor - low_freq_factor);
                        (1.0 - smooth) * (inv / factor) + smooth * inv
                    }
                }
            }
        })
        .collect()
}

/// Fills `cos` and `sin`, one entry a pair, for `position`.
///
/// # Panics
/// Where the lengths differ.
pub fn cos_sin(position: usize, inv: &[f64], cos: &mut [f32], sin: &mut [f32]) {
    assert!(inv.len() == cos.len() && inv.len() == sin.len());
    for i in 0..inv.len() {
        let angle = position as f64 * inv[i];
        cos[i] = libm::cos(angle) as f32;
        sin[i] = libm::sin(angle) as f32;
    }
}

/// (cos, sin) of the positions 0..`positions`, each `[position][pair]`.
pub fn angle_table(positions: usize, inv: &[f64]) -> (Vec<f32>, Vec<f32>) {
    let pairs = inv.len();
    let (mut cos, mut sin) = (vec![0.0; positions * pairs], vec![0.0; positions * pairs]);
    for p in 0..positions {
        let row = p * pairs..(p + 1) * pairs;
        cos_sin(p, inv, &mut cos[row.clone()], &mut sin[row]);
    }
    (cos, sin)
}

/// Rotates one head in place; pairs are (i, i + d/2).
///
/// # Panics
/// Where `x` is not twice as long as `cos` and `sin`.
pub fn rotate(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    assert!(x.len() == 2 * half && sin.len() == half);
    for i in 0..half {
        let (a, b) = (x[i], x[i + half]);
        x[i] = a.mul_add(cos[i], -(b * sin[i]));
        x[i + half] = b.mul_add(cos[i], a * sin[i]);
    }
}
