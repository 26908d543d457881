//! The scalar reference as an executor.

use super::{
    Attention, Choices, Embed, Gated, Heads, HopperOps, Linear, Logits, Norm, Selected, Turned,
};
use crate::Choose;
use half::bf16;
use numerics::sample::{SampleError, sample};
use numerics::{attention, hopper, math, rope, select};

/// `numerics`, one element after the other.
pub struct ScalarOps;

fn round(x: &[f32]) -> impl Iterator<Item = bf16> {
    x.iter().map(|&x| bf16::from_f32(x))
}

fn widen(x: &[bf16]) -> Vec<f32> {
    x.iter().map(|x| x.to_f32()).collect()
}

impl HopperOps for ScalarOps {
    fn linear(&mut self, c: &Linear) -> Result<Vec<f32>, String> {
        let mut out = Vec::with_capacity(c.tokens * c.outputs);
        for x in c.x.chunks_exact(c.width) {
            for (n, w) in c.w.chunks_exact(c.width).enumerate() {
                let y = hopper::linear(x, w, c.bias.as_ref().map(|b| b[n]));
                out.push(if c.wide {
                    y
                } else {
                    bf16::from_f32(y).to_f32()
                });
            }
        }
        Ok(out)
    }

    fn embed(&mut self, c: &Embed) -> Result<Vec<bf16>, String> {
        let mut out = Vec::new();
        for &id in &c.ids {
            let row = &c.table[id as usize * c.width..][..c.width];
            match c.scale {
                None => out.extend(row),
                Some(s) => out.extend(row.iter().map(|x| bf16::from_f32(x.to_f32() * s))),
            }
        }
        Ok(out)
    }

    fn norm(&mut self, c: &Norm) -> Result<(Vec<bf16>, Vec<bf16>), String> {
        let sums: Vec<bf16> = match &c.branch {
            None => c.h.clone(),
            Some(branch) => {
                let pairs = c.h.iter().zip(branch);
                pairs
                    .map(|(h, b)| bf16::from_f32(h.to_f32() + b.to_f32()))
                    .collect()
            }
        };
        let mut out = Vec::new();
        for row in sums.chunks_exact(c.width) {
            let mut y = vec![0.0; c.width];
            hopper::rms_norm(&widen(row), &c.w, c.eps, &mut y);
            out.extend(round(&y));
        }
        Ok((sums, out))
    }

    fn heads(&mut self, c: &Heads) -> Result<Turned, String> {
        let (d, half) = (c.head_dim, c.head_dim / 2);
        let Turned {
            mut q,
            mut k,
            mut v,
        } = Turned::default();
        for (t, row) in c
            .qkv
            .chunks_exact((c.heads + 2 * c.kv_heads) * d)
            .enumerate()
        {
            let (cos, sin) = (&c.cos[t * half..][..half], &c.sin[t * half..][..half]);
            let turned = |head: &[bf16], norm: &Option<Vec<f32>>| {
                let mut x = widen(head);
                if let Some(w) = norm {
                    let raw = x.clone();
                    hopper::rms_norm(&raw, w, c.eps, &mut x);
                }
                rope::rotate(&mut x, cos, sin);
                round(&x).collect::<Vec<_>>()
            };
            let (queries, rest) = row.split_at(c.heads * d);
            let (keys, values) = rest.split_at(c.kv_heads * d);
            for head in queries.chunks_exact(d) {
                q.extend(turned(head, &c.q_norm));
            }
            for (key, value) in keys.chunks_exact(d).zip(values.chunks_exact(d)) {
                let key = turned(key, &c.k_norm);
                if key.iter().chain(value).all(|x| x.is_finite()) {
                    k.extend(key);
                    v.extend(value);
                } else {
                    k.extend(vec![bf16::NAN; d]);
                    v.extend(vec![bf16::ZERO; d]);
                }
            }
        }
        Ok(Turned { q, k, v })
    }

    fn gated(&mut self, c: &Gated) -> Result<Vec<bf16>, String> {
        let act = if c.gelu { math::gelu_tanh } else { math::silu };
        let mut out = Vec::new();
        for row in c.gate_up.chunks_exact(2 * c.width) {
            let (gate, up) = row.split_at(c.width);
            out.extend(gate.iter().zip(up).map(|(&g, &u)| hopper::gated(act, g, u)));
        }
        Ok(out)
    }

    fn attention(&mut self, c: &Attention) -> Result<Vec<bf16>, String> {
        let d = c.head_dim;
        let mut out = vec![bf16::ZERO; c.q.len()];
        let mut row = 0;
        for run in &c.runs {
            let (k, v) = &c.sequences[run.sequence];
            for position in run.start..run.start + run.count {
                let seen = attention::visible(position, c.window);
                for head in 0..c.heads {
                    let of = |j: usize| (j * c.kv_heads + head / (c.heads / c.kv_heads)) * d;
                    let columns = (row * c.heads + head) * d..(row * c.heads + head + 1) * d;
                    hopper::attend(
                        &c.q[columns.clone()],
                        |j| &k[of(j)..][..d],
                        |j| &v[of(j)..][..d],
                        seen.start,
                        seen.end,
                        c.scale,
                        &mut out[columns],
                    );
                }
                row += 1;
            }
        }
        Ok(out)
    }

    fn logits(&mut self, c: &Logits) -> Result<Vec<Selected>, String> {
        let rows = c.z.chunks_exact(c.vocab).map(|row| {
            let logits: Vec<f32> = row.iter().map(|&z| select::canonical(z)).collect();
            Selected {
                top: select::top_k(&logits, numerics::TOP_N).ok(),
                log_sum_exp: select::log_sum_exp(&logits),
                logits,
            }
        });
        Ok(rows.collect())
    }

    fn choose(&mut self, c: &Choices) -> Result<Vec<Option<(u32, f32)>>, String> {
        let one = |(z, ask): (&[f32], &Choose)| match sample(
            z,
            &ask.params,
            &ask.history,
            ask.position,
        ) {
            Ok(id) => Ok(Some((id, select::canonical(z[id as usize])))),
            Err(SampleError::Nan(_)) => Ok(None),
            Err(error) => Err(error.to_string()),
        };
        c.z.chunks_exact(c.vocab).zip(&c.asks).map(one).collect()
    }
}
