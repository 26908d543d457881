//! What a sample says: quantiles, and how sure a share is.

/// A summary of errors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// Half of the values are at most this.
    pub median: f64,
    /// 99 % of the values are at most this.
    pub p99: f64,
    /// The largest value.
    pub max: f64,
}

impl Spread {
    /// Summarises values, none of them NaN; all 0 where there are none. Quantiles are nearest ranks.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let rank = |percent: usize| (values.len() * percent).div_ceil(100).saturating_sub(1);
        let at = |i: usize| values.get(i).copied().unwrap_or(0.0);
        Self {
            median: at(rank(50)),
            p99: at(rank(99)),
            max: at(rank(100)),
        }
    }
}

/// Root mean square; 0 of nothing. Adds in the order given.
pub fn rms(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = values.len().max(1) as f64;
    (values.map(|v| v * v).sum::<f64>() / n).sqrt()
}

/// 95 % interval of a share, `hits` of `n` (Wilson's): (low, high). All of 0 to 1 where n is 0.
pub fn interval(hits: u64, n: u64) -> (f64, f64) {
    if n == 0 {
        return (0.0, 1.0);
    }
    let (z, n) = (1.959_963_984_540_054, n as f64);
    let p = hits as f64 / n;
    let centre = p + z * z / (2.0 * n);
    let half = z * (p * (1.0 - p) / n + z * z / (4.0 * n * n)).sqrt();
    let scale = 1.0 + z * z / n;
    let low = if hits == 0 {
        0.0
    } else {
        (centre - half) / scale
    };
    (low, ((centre + half) / scale).min(1.0))
}

/// ∫ f over [low, high] by Simpson's rule with `n` pairs of intervals.
pub(super) fn simpson(low: f64, high: f64, n: usize, f: impl Fn(f64) -> f64) -> f64 {
    let h = (high - low) / (2 * n) as f64;
    let inner: f64 = (1..2 * n)
        .map(|i| (2 + 2 * (i % 2)) as f64 * f(low + i as f64 * h))
        .sum();
    (f(low) + inner + f(high)) * h / 3.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_ranks() {
        let s = Spread::of((1..=200).rev().map(f64::from).collect());
        assert_eq!((s.median, s.p99, s.max), (100.0, 198.0, 200.0));
        let one = Spread::of(vec![3.0]);
        assert_eq!((one.median, one.p99, one.max), (3.0, 3.0, 3.0));
        assert_eq!(Spread::of(Vec::new()).max, 0.0);
        assert_eq!(rms([3.0, -4.0].into_iter()), 12.5f64.sqrt());
    }

    /// 15 of 50 by hand: 0.191 to 0.438.
    #[test]
    fn intervals() {
        let (low, high) = interval(15, 50);
        assert!((low - 0.191).abs() < 5e-4 && (high - 0.438).abs() < 5e-4);
        assert_eq!(interval(0, 0), (0.0, 1.0));
        let (low, high) = interval(0, 100);
        assert!(low == 0.0 && (high - 0.037).abs() < 5e-4);
        assert_eq!(interval(100, 100).1, 1.0);
    }

    #[test]
    fn cubics_are_exact() {
        let area = simpson(-1.0, 3.0, 1, |x| x * x * x - 2.0 * x + 1.0);
        assert!((area - 16.0).abs() < 1e-12, "{area}");
    }
}
