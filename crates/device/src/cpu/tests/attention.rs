//! Attention on every path against the contract.

use super::*;
use crate::cpu::attention::{
    Attend, Fold, ITEM_ROWS, Ranges, STATE_HEAD, Scratch, Sink, head_floats, padded,
};

/// One case of attention: queries at `start ..`, every key and value random, memory around them poisoned.
fn check_attention(
    isa: Isa,
    rng: &mut Rng,
    d: usize,
    group: usize,
    start: usize,
    n: usize,
    window: Option<usize>,
    hostile: bool,
) {
    let end = start + n;
    let (width, tiles) = (padded(d), end.div_ceil(64));
    let poison = rng.pick(&[f32::NAN, f32::INFINITY, -3e38, 0.0]);
    let mut order: Vec<u32> = (0..tiles as u32 + 2).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, rng.below(i + 1));
    }
    let blocks = &order[..tiles];
    let size = head_floats(d);
    let mut kv = Floats::zeroed((tiles + 2) * size);
    // SAFETY: the whole buffer.
    let pool = unsafe { kv.ptr().slice_mut(0, (tiles + 2) * size) };
    pool.fill(poison);
    let vector = |rng: &mut Rng| {
        if hostile {
            rng.hostile(d, 6.0)
        } else {
            rng.vec(d, 3.0)
        }
    };
    let keys: Vec<_> = (0..end).map(|_| vector(rng)).collect();
    let values: Vec<_> = (0..end).map(|_| vector(rng)).collect();
    for j in 0..end {
        let base = blocks[j / 64] as usize * size;
        for i in 0..d {
            pool[base + i * 64 + j % 64] = keys[j][i];
            pool[base + d * 64 + j % 64 * width + i] = values[j][i];
        }
    }
    let q: Vec<_> = (0..n * group).map(|_| vector(rng)).collect();
    let flat: Vec<f32> = q.concat();
    let scale = numerics::attention::scale_log2e((d as f64).powf(-0.5));
    let mut scratch = Scratch::new(d);
    let step = (ITEM_ROWS / group).max(1);
    let (tb, tblocks) = blocking(n);
    let columns = group * d;
    let mut out = Floats::zeroed(tb * tblocks * columns);
    let mut folded = Floats::zeroed(tb * tblocks * columns);
    let (outp, foldp) = (out.ptr(), folded.ptr());
    for i in (0..n).step_by(step) {
        let positions = step.min(n - i);
        let ranges = end.div_ceil(512);
        let state = STATE_HEAD + width;
        let mut states = Floats::zeroed(positions * group * ranges * state);
        let states = states.ptr();
        let mut attend = |from: usize, to: usize, sink: Sink| {
            // SAFETY: buffers have the sizes the kernel asks for.
            unsafe {
                isa.run(Attend {
                    q: flat[i * group * d..].as_ptr(),
                    q_stride: group * d,
                    positions,
                    group,
                    start: start + i,
                    window,
                    head_dim: d,
                    kv: pool.as_ptr(),
                    block_stride: size,
                    blocks,
                    scale,
                    ranges: Ranges::Chunks,
                    from,
                    to,
                    sink,
                    scratch: &mut scratch,
                })
            }
        };
        attend(
            0,
            ranges,
            Sink::Rows {
                out: outp.0,
                first: i,
                width: columns,
                column: 0,
                tb,
            },
        );
        for range in 0..ranges {
            // SAFETY: within the states.
            let out = unsafe { states.at(range * state) };
            let (head_stride, row_stride) = (ranges * state, group * ranges * state);
            attend(
                range,
                range + 1,
                Sink::State {
                    out,
                    row_stride,
                    head_stride,
                },
            );
        }
        for r in 0..positions * group {
            let row = i + r / group;
            // SAFETY: as above.
            unsafe {
                isa.run(Fold {
                    states: states.at(r * ranges * state),
                    count: ranges,
                    stride: state,
                    head_dim: d,
                    exact: true,
                    out: foldp.at((row / tb * columns + r % group * d) * tb + row % tb),
                    out_stride: tb,
                    scratch: &mut scratch,
                })
            };
        }
    }
    let mut want = vec![0.0; d];
    for i in 0..n {
        let seen = numerics::attention::visible(start + i, window);
        for g in 0..group {
            let (k, v) = (|j: usize| &keys[j][..], |j: usize| &values[j][..]);
            numerics::attention::attend(
                &q[i * group + g],
                k,
                v,
                seen.start,
                seen.end,
                scale,
                &mut want,
            );
            let what = format!(
                "{} d {d} group {group} start {start} n {n} window {window:?} position {i} head {g}",
                isa.name()
            );
            for (p, name) in [(outp, "whole"), (foldp, "folded")] {
                // SAFETY: within the buffers.
                let got: Vec<f32> = (0..d)
                    .map(|c| unsafe { *p.at((i / tb * columns + g * d + c) * tb + i % tb) })
                    .collect();
                assert_same(&got, &want, &format!("{what} {name}"));
            }
        }
    }
}

#[test]
fn attention_equals_the_contract() {
    let mut rng = Rng(5);
    for isa in paths() {
        for (d, group) in [
            (16, 1),
            (16, 2),
            (64, 3),
            (30, 4),
            (128, 7),
            (256, 8),
            (64, 1),
        ] {
            for (start, n) in [
                (0, 1),
                (62, 1),
                (63, 1),
                (64, 1),
                (127, 1),
                (128, 1),
                (255, 1),
                (511, 1),
                (512, 1),
                (1087, 1),
                (0, 70),
                (60, 9),
                (120, 12),
                (500, 17),
                (1020, 6),
            ] {
                for window in [None, Some(1), Some(40), Some(64), Some(128), Some(600)] {
                    let hostile = rng.below(4) == 0;
                    check_attention(isa, &mut rng, d, group, start, n, window, hostile);
                }
            }
        }
    }
}
