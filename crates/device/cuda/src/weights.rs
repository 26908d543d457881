//! A model's weights in device memory: matrices as bf16, norms and biases as f32.

use crate::gpu::{Buffer, Gpu};
use crate::{CudaError, launch};
use half::bf16;
use model::{LayerWeights, ModelConfig, Tensor, Weights};
use numerics::hopper;
use numerics::weight::{WeightType, widen_row};
use rayon::prelude::*;

/// Bytes copied at a time.
const PIECE: usize = 64 << 20;

type Result<T> = std::result::Result<T, CudaError>;

/// A matrix `[rows][columns]` of bf16.
pub struct Matrix {
    /// Its elements.
    pub data: Buffer,
    /// Outputs.
    pub rows: usize,
    /// K.
    pub columns: usize,
}

/// One layer.
#[allow(missing_docs)] // as in `model::LayerWeights`; q, k and v are one matrix, so are gate and up
pub struct Layer {
    pub attn_norm: Buffer,
    pub qkv: Matrix,
    pub qkv_bias: Option<Buffer>,
    pub q_norm: Option<Buffer>,
    pub k_norm: Option<Buffer>,
    pub o: Matrix,
    pub post_attn_norm: Option<Buffer>,
    pub ffn_norm: Buffer,
    pub gate_up: Matrix,
    pub down: Matrix,
    pub post_ffn_norm: Option<Buffer>,
}

/// A whole model.
#[allow(missing_docs)]
pub struct Loaded {
    pub embed: Matrix,
    pub layers: Vec<Layer>,
    pub final_norm: Buffer,
    /// `None`: the embedding.
    pub head: Option<Matrix>,
}

impl Loaded {
    /// Converts and uploads. `progress` is told of bytes as they go, [`Loaded::bytes`] in all.
    pub fn new(
        gpu: &Gpu,
        config: &ModelConfig,
        weights: &Weights,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self> {
        let embed = matrix(gpu, &[&weights.embed], "the embedding", progress)?;
        let layers = weights.layers.iter();
        let layers = layers.map(|w| layer(gpu, config, w, progress));
        Ok(Self {
            embed,
            layers: layers.collect::<Result<_>>()?,
            final_norm: gpu.upload(&weights.final_norm, "a norm")?,
            head: match &weights.lm_head {
                Some(head) => Some(matrix(gpu, &[head], "the output matrix", progress)?),
                None => None,
            },
        })
    }

    /// Bytes of a model's matrices in device memory.
    pub fn bytes(weights: &Weights) -> usize {
        let layers = weights.layers.iter();
        let matrices = layers.flat_map(|l| [&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down]);
        let all = matrices.chain([&weights.embed]).chain(&weights.lm_head);
        all.map(|t| 2 * t.rows * t.cols).sum()
    }
}

fn layer(
    gpu: &Gpu,
    config: &ModelConfig,
    w: &LayerWeights,
    progress: &mut dyn FnMut(usize),
) -> Result<Layer> {
    let norm = |x: &[f32]| gpu.upload(x, "a norm");
    let optional = |x: &Option<Vec<f32>>| x.as_ref().map(|x| norm(x)).transpose();
    let (q, kv) = (
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
    );
    // A chain never gives -0, so adding +0 where there is no bias changes nothing.
    let biases = [(&w.q_bias, q), (&w.k_bias, kv), (&w.v_bias, kv)];
    let bias = if biases.iter().any(|b| b.0.is_some()) {
        let mut all = Vec::with_capacity(q + 2 * kv);
        for (bias, n) in biases {
            match bias {
                Some(bias) => all.extend_from_slice(bias),
                None => all.resize(all.len() + n, 0.0),
            }
        }
        Some(gpu.upload(&all, "a bias")?)
    } else {
        None
    };
    Ok(Layer {
        attn_norm: norm(&w.attn_norm)?,
        qkv: matrix(gpu, &[&w.q, &w.k, &w.v], "weights of attention", progress)?,
        qkv_bias: bias,
        q_norm: optional(&w.q_norm)?,
        k_norm: optional(&w.k_norm)?,
        o: matrix(gpu, &[&w.o], "weights of attention", progress)?,
        post_attn_norm: optional(&w.post_attn_norm)?,
        ffn_norm: norm(&w.ffn_norm)?,
        gate_up: matrix(
            gpu,
            &[&w.gate, &w.up],
            "weights of the feed-forward part",
            progress,
        )?,
        down: matrix(
            gpu,
            &[&w.down],
            "weights of the feed-forward part",
            progress,
        )?,
        post_ffn_norm: optional(&w.post_ffn_norm)?,
    })
}

/// Matrices of one width, one below the other.
fn matrix(
    gpu: &Gpu,
    parts: &[&Tensor],
    what: &str,
    progress: &mut dyn FnMut(usize),
) -> Result<Matrix> {
    let columns = parts.iter().map(|t| t.cols).max().unwrap_or(0);
    let rows: usize = parts.iter().map(|t| t.rows).sum();
    if parts.iter().any(|t| t.cols != columns) {
        return Err(CudaError::Unsupported(format!(
            "{what}: matrices of different widths"
        )));
    }
    let data = gpu.alloc(rows * columns * 2, what)?;
    let mut at = 0;
    for tensor in parts {
        let n = tensor.rows * tensor.cols;
        if let Some(recipe) = tensor.recipe()
            && u32::try_from(n).is_ok()
        {
            launch::synthetic(gpu, &data, at, n, recipe)?;
            progress(2 * n);
            at += 2 * n;
            continue;
        }
        if tensor.dtype == WeightType::Bf16 {
            for part in tensor.bytes().chunks(PIECE) {
                gpu.write(&data, at, part)?;
                progress(part.len());
                at += part.len();
            }
            continue;
        }
        // Some at a time, on all cores.
        let some = ((32 << 20) / columns.max(1)).max(1);
        let mut first = 0;
        while first < tensor.rows {
            let last = tensor.rows.min(first + some);
            let mut halves = vec![bf16::ZERO; (last - first) * columns];
            let rows = halves.par_chunks_mut(columns.max(1)).enumerate();
            rows.for_each_with(vec![0.0; columns], |wide, (i, to)| {
                widen_row(tensor.dtype, tensor.row(first + i), wide);
                to.copy_from_slice(&hopper::round_row(wide));
            });
            gpu.write(&data, at, &halves)?;
            progress(halves.len() * 2);
            at += halves.len() * 2;
            first = last;
        }
    }
    Ok(Matrix {
        data,
        rows,
        columns,
    })
}
