//! Choosing tokens as a GPU does: kernels/choose.cuh's way, step by step, with no sorting. What makes it the same token as
//! [`numerics::sample::sample`]'s is argued there; here it can be tested where there is no GPU.

use crate::choice::Plain;
use numerics::math;

/// Greater is earlier in the order; no logit's is 0.
fn key_of(z: f32) -> u32 {
    let bits = if z == 0.0 { 0 } else { z.to_bits() };
    if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    }
}

fn logit_of(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 {
        key & (u32::MAX >> 1)
    } else {
        !key
    })
}

/// Keys above `key` stay, and of equal ones the first `ties` by id.
#[derive(Clone, Copy)]
struct Cut {
    key: u32,
    ties: u64,
}

/// Tokens and weights of a bin.
#[derive(Clone, Copy, Default)]
struct Bin {
    count: u64,
    weight: u64,
}

/// A row of logits, changed, and what weights depend on.
struct Row<'a> {
    z: Vec<f32>,
    max: f32,
    plain: &'a Plain,
    listed: u64,
}

impl Row<'_> {
    fn scaled(&self, z: f32) -> f32 {
        let d = if z == self.max { 0.0 } else { z - self.max };
        d / self.plain.temperature
    }

    fn weight(&self, z: f32) -> u64 {
        match self.scaled(z) {
            x if x < -23.0 => 0,
            x => (math::exp(x) * 4_294_967_296.0) as u64,
        }
    }

    fn drawn(&self, z: f32) -> u64 {
        let weight = self.weight(z);
        if weight > u64::from(self.plain.least) {
            weight
        } else {
            0
        }
    }

    /// The token's y, where it can be drawn.
    fn y(&self, z: f32) -> Option<usize> {
        let x = self.scaled(z);
        (x >= -23.0).then_some((x * (-22.0 * 512.0)) as usize)
    }

    /// Sums by bin over the tokens that can be drawn and have one.
    fn bins(&self, bin: impl Fn(f32, usize) -> Option<usize>) -> Vec<Bin> {
        let mut bins = vec![Bin::default(); 512];
        for &z in &self.z {
            if let Some(at) = self.y(z).and_then(|y| bin(z, y)) {
                bins[at].count += 1;
                bins[at].weight += self.weight(z);
            }
        }
        bins
    }

    /// The cut in coarse bin `first` at which the running sum, of weights or of counts, reaches `target`; `above` is what
    /// comes before that bin and becomes what comes before the cut's key.
    fn inside(&self, first: usize, weights: bool, target: u64, above: &mut Bin) -> Cut {
        let before = |above: &Bin| if weights { above.weight } else { above.count };
        let fine = self.bins(|_, y| (y / 512 == first).then_some(y % 512));
        let at = reach(&fine, weights, target - before(above), above).unwrap_or(0);
        let all = first * 512 + at;
        if fine[at].count <= self.listed {
            let list: Vec<f32> = self
                .z
                .iter()
                .copied()
                .filter(|&z| self.y(z) == Some(all))
                .collect();
            for &z in &list {
                let mut here = *above;
                let mut equal = 0;
                for &other in &list {
                    if key_of(other) > key_of(z) {
                        here.count += 1;
                        here.weight += self.weight(other);
                    }
                    equal += u64::from(key_of(other) == key_of(z));
                }
                let each = if weights { self.weight(z) } else { 1 };
                let from = before(&here);
                if from < target && target <= from + equal * each {
                    *above = here;
                    let ties = (target - from).div_ceil(each);
                    return Cut {
                        key: key_of(z),
                        ties,
                    };
                }
            }
            return Cut { key: 0, ties: 0 };
        }
        let mut key = 0u32;
        for shift in [24, 16, 8, 0] {
            let fine = self.bins(|z, y| {
                let of = key_of(z);
                let same = u64::from(of ^ key) >> (shift + 8) == 0;
                (same && y == all).then_some(255 - (of >> shift & 255) as usize)
            });
            let digit = reach(&fine, weights, target - before(above), above);
            key |= (255 - digit.unwrap_or(0) as u32) << shift;
        }
        let one = self.weight(logit_of(key)).max(1);
        let ties = match weights {
            true => (target - above.weight).div_ceil(one),
            false => target - above.count,
        };
        Cut { key, ties }
    }

    fn cut(&self) -> Cut {
        let mut cut = Cut { key: 0, ties: 0 };
        let (top_k, top_p) = (self.plain.top_k, self.plain.top_p);
        let coarse = self.bins(|_, y| Some(y / 512));
        let mut total: u64 = coarse.iter().map(|b| b.weight).sum();
        let mut above = Bin::default();
        if top_k > 0
            && let Some(bin) = reach(&coarse, false, u64::from(top_k), &mut above)
        {
            cut = self.inside(bin, false, u64::from(top_k), &mut above);
            total = above.weight + cut.ties * self.weight(logit_of(cut.key));
        }
        if top_p < 1.0 {
            let wanted = (f64::from(top_p) * total as f64).ceil() as u64;
            above = Bin::default();
            if let Some(bin) = reach(&coarse, true, wanted, &mut above) {
                cut = self.inside(bin, true, wanted, &mut above);
            }
        }
        cut
    }
}

/// The bin in which the running sum reaches `target`; `above` grows by the bins before it.
fn reach(bins: &[Bin], weights: bool, target: u64, above: &mut Bin) -> Option<usize> {
    let mut running = Bin::default();
    for (at, bin) in bins.iter().enumerate() {
        let (from, here) = match weights {
            true => (running.weight, bin.weight),
            false => (running.count, bin.count),
        };
        if from < target && target <= from + here {
            above.count += running.count;
            above.weight += running.weight;
            return Some(at);
        }
        running.count += bin.count;
        running.weight += bin.weight;
    }
    None
}

/// The token chosen from logits without a NaN, of which a thread holds `each`, where at most `listed` tokens are compared one
/// by one; `None` where there are none.
pub fn choose(logits: &[f32], plain: &Plain, each: usize, listed: u64) -> Option<u32> {
    let mut z = logits.to_vec();
    plain.change(&mut z);
    let largest = z.iter().map(|&z| key_of(z)).max()?;
    let row = Row {
        z,
        max: logit_of(largest),
        plain,
        listed,
    };
    let cut = row.cut();
    let tied = if cut.key == 0 {
        0
    } else {
        row.drawn(logit_of(cut.key))
    };
    // (weights and ties a thread, then what they come to once ties have been counted)
    let threads: Vec<(u64, u64)> = row
        .z
        .chunks(each)
        .map(|z| {
            let above = z.iter().filter(|&&z| key_of(z) > cut.key);
            let ties = z.iter().filter(|&&z| key_of(z) == cut.key).count() as u64;
            (above.map(|&z| row.drawn(z)).sum(), ties)
        })
        .collect();
    let mut earlier = 0;
    let threads: Vec<(u64, u64)> = threads
        .into_iter()
        .map(|(sum, ties)| {
            let kept = cut.ties.saturating_sub(earlier).min(ties);
            earlier += ties;
            (sum + kept * tied, kept)
        })
        .collect();
    let total: u64 = threads.iter().map(|t| t.0).sum();
    let u = ((u128::from(plain.draw) * u128::from(total)) >> 64) as u64;
    let mut running = 0;
    for (thread, &(sum, kept)) in threads.iter().enumerate() {
        if running <= u && u < running + sum {
            let mut left = kept;
            for (i, &z) in row.z[thread * each..].iter().enumerate() {
                match key_of(z) {
                    k if k > cut.key => running += row.drawn(z),
                    k if k == cut.key && left > 0 => {
                        left -= 1;
                        running += tied;
                    }
                    _ => {}
                }
                if running > u {
                    return Some((thread * each + i) as u32);
                }
            }
        }
        running += sum;
    }
    None
}
