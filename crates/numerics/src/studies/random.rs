//! Random inputs of the studies.

use crate::philox::philox4x32_10;

/// Which study draws: studies of one seed share no input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Study {
    Drift = 1,
    Planted,
    Plain,
    Columns,
    TopTwo,
    Scores,
    Answers,
}

/// The stream of one sample of a study: a pure function of (seed, study, sample).
#[derive(Debug, Clone)]
pub struct Random {
    key: [u32; 2],
    counter: [u32; 4],
    spare: Option<f64>,
}

impl Random {
    /// The beginning of a sample's stream.
    pub fn new(seed: u64, study: Study, sample: u64) -> Self {
        Self {
            key: [seed as u32, (seed >> 32) as u32],
            counter: [0, study as u32, sample as u32, (sample >> 32) as u32],
            spare: None,
        }
    }

    /// Two uniform numbers in (0, 1), multiples of 2^−53 that are odd, so that neither end occurs.
    pub fn uniforms(&mut self) -> [f64; 2] {
        let [a, b, c, d] = philox4x32_10(self.counter, self.key);
        self.counter[0] = self.counter[0].wrapping_add(1);
        let unit = |low: u32, high: u32| {
            let bits = u64::from(high) << 32 | u64::from(low);
            ((bits >> 12) as f64 + 0.5) * (1.0 / (1u64 << 52) as f64)
        };
        [unit(a, b), unit(c, d)]
    }

    /// A standard normal number (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        let [u, v] = self.uniforms();
        let radius = (-2.0 * libm::log(u)).sqrt();
        let (sin, cos) = libm::sincos(std::f64::consts::TAU * v);
        self.spare = Some(radius * sin);
        radius * cos
    }

    /// So many standard normal numbers.
    pub fn normals(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| self.normal()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normals_have_their_moments_and_streams_differ() {
        let draw = |sample| Random::new(7, Study::Drift, sample).normals(100_001);
        let x = draw(0);
        let moment = |k: i32| x.iter().map(|v| v.powi(k)).sum::<f64>() / x.len() as f64;
        // Five standard errors each: √(1/n), √(2/n), √(15/n), √(96/n).
        assert!(moment(1).abs() < 0.016 && (moment(2) - 1.0).abs() < 0.023);
        assert!(moment(3).abs() < 0.062 && (moment(4) - 3.0).abs() < 0.155);
        assert_eq!(x, draw(0));
        assert!(x.iter().zip(draw(1)).all(|(a, b)| *a != b));
        let other = Random::new(7, Study::Plain, 0).normals(4);
        assert!(x.iter().zip(other).all(|(a, b)| *a != b));
    }

    #[test]
    fn uniforms_stay_inside() {
        let mut random = Random::new(0, Study::Answers, u64::MAX);
        for _ in 0..10_000 {
            assert!(random.uniforms().iter().all(|&u| u > 0.0 && u < 1.0));
        }
    }
}
