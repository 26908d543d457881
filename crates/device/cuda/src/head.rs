//! The output matrix's product where only the first tokens in order are asked of its rows: it lists those that may be among
//! them while it makes the logits, which are written nowhere.

use crate::args::{Args, Shape};
use crate::gpu::{Buffer, Gpu};
use crate::launch::{holds, refuse};
use crate::{Cost, CudaError, kernels};

type Result<T> = std::result::Result<T, CudaError>;

/// A kernel, and the most rows of x it does.
const KERNELS: [(&str, usize); 3] = [
    ("linear_head_32", 32),
    ("linear_head_64", 64),
    ("linear_head_128", 128),
];

/// Rows of W a tile of theirs, and threads a block.
const TILE: usize = 128;
const THREADS: u32 = 384;

/// Blocks at most, and words of a row's state, as in `kernels/firsts.cuh`.
const PEAKS: usize = 160;
const STATE: usize = 32 + PEAKS;

/// Where products list tokens.
pub struct Lists {
    /// `[rows][room]` of 8 bytes: a logit's place in the order above a token's.
    pub keys: Buffer,
    /// What blocks tell each other; 0 but between a product and its selection.
    pub state: Buffer,
    /// Rows.
    pub rows: usize,
    /// Tokens a row: every one of the vocabulary, if need be.
    pub room: usize,
}

impl Lists {
    /// Bytes of `keys`.
    pub fn bytes(rows: usize, room: usize) -> usize {
        rows * room * 8
    }

    /// Lists in `keys`, which may serve for something else between a selection and the next product.
    pub fn new(gpu: &Gpu, keys: Buffer, rows: usize, room: usize) -> Result<Self> {
        holds(&keys, 0, Self::bytes(rows, room), "lists")?;
        let bytes = rows * STATE * 4;
        let state = gpu.alloc(bytes, "lists")?;
        gpu.fill(&state, 0, bytes, 0)?;
        Ok(Self {
            keys,
            state,
            rows,
            room,
        })
    }
}

/// The first tokens by `x · Wᵀ`.
pub struct Head<'a> {
    /// `[tokens][width]` bf16.
    pub x: &'a Buffer,
    /// `[outputs][width]` bf16.
    pub w: &'a Buffer,
    /// Rows of x.
    pub tokens: usize,
    /// Rows of W.
    pub outputs: usize,
    /// Those that count, from the first on.
    pub vocab: usize,
    /// K.
    pub width: usize,
}

impl Head<'_> {
    /// The kernels that can do it, from fast to slow; none for many rows.
    pub fn kernels(tokens: usize, width: usize) -> Vec<&'static str> {
        let able = KERNELS.iter().filter(|k| tokens <= k.1);
        match width.is_multiple_of(8) {
            true => able.map(|k| k.0).collect(),
            false => Vec::new(), // a tensor map's rows are multiples of 16 bytes
        }
    }

    /// What it moves and computes.
    pub fn cost(&self) -> Cost {
        let (t, n, k) = (self.tokens as f64, self.vocab as f64, self.width as f64);
        Cost {
            bytes: 2.0 * (n * k + t * k),
            operations: 2.0 * t * n * k,
        }
    }

    /// Launches it on one of [`Head::kernels`].
    pub fn run(&self, gpu: &Gpu, kernel: &'static str, lists: &Lists) -> Result<()> {
        let (t, n, k) = (self.tokens, self.outputs, self.width);
        holds(self.x, 0, t * k * 2, "x")?;
        holds(self.w, 0, n * k * 2, "weights")?;
        let most = KERNELS.iter().find(|f| f.0 == kernel).map_or(0, |f| f.1);
        refuse(k.is_multiple_of(8) && t <= most, || {
            format!("{kernel} cannot list tokens of {t} rows of {k}")
        })?;
        refuse(
            self.vocab <= n && self.vocab <= lists.room && t <= lists.rows,
            || {
                format!(
                    "{t} rows of {} tokens listed; there are {n}, and room for {} rows of {}",
                    self.vocab, lists.rows, lists.room
                )
            },
        )?;
        let w = gpu.tensor_map(self.w, n, k, TILE)?;
        let x = gpu.tensor_map(self.x, t, k, most)?;
        let tiles = self.vocab.div_ceil(TILE);
        let blocks = tiles.min(gpu.multiprocessors()).min(PEAKS);
        let shared = kernels::unit(kernel).map_or(0, |u| u.kernels[0].dynamic);
        let args = Args::new().map(w).map(x);
        let args = args.optional(None).optional(None).optional(None);
        let args = args.int(self.vocab).int(k).int(t);
        let args = args
            .buffer(&lists.keys)
            .int(lists.room)
            .buffer(&lists.state);
        let shape = Shape::new(blocks, THREADS).shared(shared);
        // SAFETY: the signature of linear_wg with HEAD; maps bound what is read, and a row's list has room for
        // every token.
        unsafe { gpu.launch(kernel, shape, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_kernels() {
        let headers = kernels::HEADERS.iter();
        let firsts = headers.clone().find(|h| h.0 == "firsts.cuh").unwrap().1;
        let defined = |name: &str, value: &str| {
            let line = format!("#define {name} {value}  //");
            assert!(firsts.contains(&line), "{line}");
        };
        defined("PEAKS", &PEAKS.to_string());
        defined("STATE", "(32 + PEAKS)");
        for (name, tokens) in KERNELS {
            let defines = kernels::unit(name).unwrap().defines;
            assert!(defines.contains(&"HEAD=1"), "{name}");
            assert!(defines.contains(&&*format!("WG={}", TILE / 64)), "{name}");
            assert!(defines.contains(&&*format!("TN={tokens}")), "{name}");
        }
        assert_eq!(THREADS as usize, 2 * TILE + 128);
    }
}
