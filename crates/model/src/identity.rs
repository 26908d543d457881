//! What a model's weights are, whatever file they came in.

use crate::weights::{Tensor, Weights};
use numerics::digest::{Digest, Encoder};
use numerics::weight::widen_row;
use rayon::prelude::*;

/// Elements hashed as one leaf, rounded up to whole rows. Part of the hash.
const LEAF: usize = 1 << 16;

impl Weights {
    /// A hash of all weights as the f32 values they widen to, so that equal weights have equal hashes in every file
    /// format. A tied head counts as the embedding it is. Reads every weight.
    pub fn content_hash(&self) -> Digest {
        let mut out = Encoder::new("blocklock weights v1");
        let embed = tensor_hash(&self.embed);
        out.digest("embed", &embed);
        for layer in &self.layers {
            for (name, vector) in layer.vectors() {
                out.u32s(name, vector.iter().map(|v| v.to_bits()));
            }
            for (name, matrix) in layer.matrices() {
                out.digest(name, &tensor_hash(matrix));
            }
        }
        out.u32s("final_norm", self.final_norm.iter().map(|v| v.to_bits()));
        out.digest("lm_head", &self.lm_head.as_ref().map_or(embed, tensor_hash));
        out.finish()
    }
}

/// Hash of a matrix: its shape and the hashes of its leaves, which the pool computes in any order.
fn tensor_hash(t: &Tensor) -> Digest {
    let rows = LEAF.div_ceil(t.cols);
    let leaves: Vec<Digest> = (0..t.rows.div_ceil(rows))
        .into_par_iter()
        .map(|leaf| {
            let mut hasher = blake3::Hasher::new_derive_key("blocklock weights leaf v1");
            let mut values = vec![0f32; t.cols];
            let mut bytes = vec![[0u8; 4]; t.cols];
            let mut made = Vec::new();
            for r in leaf * rows..t.rows.min((leaf + 1) * rows) {
                widen_row(t.dtype, t.row_in(r, &mut made), &mut values);
                for (b, v) in bytes.iter_mut().zip(&values) {
                    *b = v.to_le_bytes();
                }
                hasher.update(bytes.as_flattened());
            }
            Digest(*hasher.finalize().as_bytes())
        })
        .collect();
    let mut out = Encoder::new("blocklock weights tensor v1");
    out.u64("rows", t.rows as u64).u64("cols", t.cols as u64);
    for leaf in &leaves {
        out.digest("leaf", leaf);
    }
    out.finish()
}
