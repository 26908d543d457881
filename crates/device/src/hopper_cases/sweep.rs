//! Every size on either side of a tile, bucket or chunk of a GPU's kernels: too many for a scalar reference, so that fast
//! kernels are compared with plain ones.

use super::list::{Named, add};
use super::{Attention, Case, Flavour, Linear, Run};
use crate::testing::Rng;
use numerics::attention::scale_log2e;

/// Token counts.
pub fn token_counts() -> Vec<usize> {
    let edges = [255, 256, 257, 258, 511, 512, 513, 2047, 2048, 2049];
    (1..=130).chain(edges).collect()
}

/// Positions of a last key.
fn positions() -> Vec<usize> {
    let edges = [16, 64, 128, 192, 256, 512, 640, 768, 1024, 1536, 2048, 4096];
    let around = |e: usize| e - 2..e + 2;
    let mut all: Vec<usize> = edges.into_iter().flat_map(around).collect();
    all.extend([0, 1, 8190, 8191, 8192]);
    all
}

/// All of them, in a fixed order.
pub fn sweep() -> Vec<Named> {
    let mut list = Vec::new();
    for (i, tokens) in token_counts().into_iter().enumerate() {
        // Less than a tile of outputs, tiles and one more, with short and with whole stages along K.
        for (outputs, width) in [(65, 72), (200, 512), (8 * (1 + i % 40), 1032)] {
            let flavour = Flavour::ALL[(i + outputs) % 6];
            let wide = i % 3 == 0;
            let name = format!(
                "sweep linear {tokens}x{outputs}x{width} {}{}",
                flavour.name(),
                if wide { " f32" } else { "" }
            );
            add(&mut list, name, move |rng| {
                Case::Linear(Linear {
                    tokens,
                    outputs,
                    width,
                    x: flavour.halves(rng, tokens * width, 1.0),
                    w: flavour.halves(rng, outputs * width, 2.0 / (width as f32).sqrt()),
                    bias: None,
                    wide,
                })
            });
        }
    }
    for d in [64, 128, 256] {
        for group in [1, 2, 4, 7, 8] {
            let ones: Vec<(usize, usize)> = positions().iter().map(|&p| (p, 1)).collect();
            attention(&mut list, group, d, None, &ones);
            attention(&mut list, group, d, Some(640), &ones);
            // Alone, and in launches as small as a step's.
            attention(&mut list, group, d, None, &[(8192, 1)]);
            attention(&mut list, group, d, None, &[(4095, 1), (8191, 1), (511, 1)]);
            let prompts = [(0, 2049), (0, 513), (511, 258), (1000, 130), (8063, 130)];
            attention(&mut list, group, d, None, &prompts);
            attention(&mut list, group, d, Some(1024), &prompts);
        }
        for tokens in token_counts() {
            attention(&mut list, 2, d, None, &[(tokens % 7 * 61, tokens)]);
        }
    }
    list
}

fn attention(
    list: &mut Vec<Named>,
    group: usize,
    d: usize,
    window: Option<usize>,
    runs: &[(usize, usize)],
) {
    let shape = match runs {
        [(start, count)] => format!("{start}+{count}"),
        [.., (start, count)] => format!("{} runs to {start}+{count}", runs.len()),
        [] => String::new(),
    };
    let limit = window.map_or(String::new(), |w| format!(" window {w}"));
    let name = format!("sweep attention {group}/1x{d}{limit} {shape}");
    let runs: Vec<Run> = runs
        .iter()
        .enumerate()
        .map(|(sequence, &(start, count))| Run {
            sequence,
            start,
            count,
        })
        .collect();
    add(list, name, move |rng| {
        let rows: usize = runs.iter().map(|r| r.count).sum();
        let values = |rng: &mut Rng, n| Flavour::Ordinary.halves(rng, n, 1.5);
        let sequences = runs
            .iter()
            .map(|r| {
                let n = (r.start + r.count) * d;
                (values(rng, n), values(rng, n))
            })
            .collect();
        Case::Attention(Attention {
            heads: group,
            kv_heads: 1,
            head_dim: d,
            window,
            scale: scale_log2e((d as f64).powf(-0.5)),
            sequences,
            q: Flavour::Ordinary.halves(rng, rows * group * d, 6.0),
            runs: runs.clone(),
        })
    });
}
