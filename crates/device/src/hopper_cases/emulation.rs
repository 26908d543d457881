//! The CPU's emulation as an executor.

use super::{
    Attention, Choices, Embed, Gated, Heads, HopperOps, Linear, Logits, Norm, ScalarOps, Selected,
    Turned,
};
use crate::Choose;
use crate::cpu::hopper::ops;
use crate::cpu::{Isa, choose::choose};
use half::bf16;
use model::config::Activation;
use numerics::select;

/// The emulation's kernels on one path of this machine. Embedding and selection, which have no kernels of their own, are
/// the scalar reference's.
pub struct EmulationOps(pub Isa);

fn widen(x: &[bf16]) -> Vec<f32> {
    x.iter().map(|x| x.to_f32()).collect()
}

fn round(x: &[f32]) -> Vec<bf16> {
    x.iter().map(|&x| bf16::from_f32(x)).collect()
}

impl HopperOps for EmulationOps {
    fn linear(&mut self, c: &Linear) -> Result<Vec<f32>, String> {
        let (x, w) = (widen(&c.x), widen(&c.w));
        let mut y = ops::product(self.0, &x, &w, c.width, c.outputs, None);
        for row in y.chunks_exact_mut(c.outputs) {
            for (n, y) in row.iter_mut().enumerate() {
                if let Some(bias) = &c.bias {
                    *y += bias[n];
                }
                if !c.wide {
                    *y = bf16::from_f32(*y).to_f32();
                }
            }
        }
        Ok(y)
    }

    fn embed(&mut self, c: &Embed) -> Result<Vec<bf16>, String> {
        ScalarOps.embed(c)
    }

    fn norm(&mut self, c: &Norm) -> Result<(Vec<bf16>, Vec<bf16>), String> {
        let mut sums = widen(&c.h);
        let mut out = Vec::new();
        for (i, h) in sums.chunks_exact_mut(c.width).enumerate() {
            if let Some(branch) = &c.branch {
                let branch = widen(&branch[i * c.width..][..c.width]);
                ops::residual(self.0, h, &branch, None);
            }
            out.extend(ops::norm(self.0, h, &c.w, c.eps));
        }
        Ok((round(&sums), round(&out)))
    }

    fn heads(&mut self, c: &Heads) -> Result<Turned, String> {
        let (d, half) = (c.head_dim, c.head_dim / 2);
        let Turned {
            mut q,
            mut k,
            mut v,
        } = Turned::default();
        let rows = c.qkv.chunks_exact((c.heads + 2 * c.kv_heads) * d);
        for (t, row) in rows.enumerate() {
            let (cos, sin) = (&c.cos[t * half..][..half], &c.sin[t * half..][..half]);
            let turned = |head: &[bf16], norm: &Option<Vec<f32>>| {
                let mut x = widen(head);
                let norm = norm.as_ref().map(|w| (&w[..], c.eps));
                let finite = ops::rotate(self.0, &mut x, norm, cos, sin);
                (round(&x), finite)
            };
            let (queries, rest) = row.split_at(c.heads * d);
            let (keys, values) = rest.split_at(c.kv_heads * d);
            for head in queries.chunks_exact(d) {
                q.extend(turned(head, &c.q_norm).0);
            }
            for (key, value) in keys.chunks_exact(d).zip(values.chunks_exact(d)) {
                let (key, finite) = turned(key, &c.k_norm);
                if finite && value.iter().all(|x| x.is_finite()) {
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
        let act = match c.gelu {
            true => Activation::GeluTanh,
            false => Activation::Silu,
        };
        let mut out = Vec::new();
        for row in c.gate_up.chunks_exact(2 * c.width) {
            let (gate, up) = row.split_at(c.width);
            out.extend(ops::gate(self.0, act, &widen(gate), &widen(up)));
        }
        Ok(round(&out))
    }

    fn attention(&mut self, c: &Attention) -> Result<Vec<bf16>, String> {
        let mut out = Vec::new();
        let mut row = 0;
        for run in &c.runs {
            let (k, v) = &c.sequences[run.sequence];
            let width = c.heads * c.head_dim;
            let job = ops::Attention {
                q: &widen(&c.q[row * width..][..run.count * width]),
                k: &widen(k),
                v: &widen(v),
                heads: c.heads,
                kv_heads: c.kv_heads,
                head_dim: c.head_dim,
                start: run.start,
                window: c.window,
                scale: c.scale,
            };
            out.extend(round(&job.run(self.0)));
            row += run.count;
        }
        Ok(out)
    }

    fn logits(&mut self, c: &Logits) -> Result<Vec<Selected>, String> {
        ScalarOps.logits(c)
    }

    fn choose(&mut self, c: &Choices) -> Result<Vec<Option<(u32, f32)>>, String> {
        let one = |(z, ask): (&[f32], &Choose)| {
            let nan = z.iter().any(|z| z.is_nan());
            let z: Vec<f32> = z.iter().map(|&z| select::canonical(z)).collect();
            (!nan).then(|| choose(self.0, &z, ask)).flatten()
        };
        Ok(c.z.chunks_exact(c.vocab).zip(&c.asks).map(one).collect())
    }
}
