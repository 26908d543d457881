//! Launching each operation: which kernel, what grid, which arguments. Everything that a later operation of the same
//! stream reads may be read without waiting.

use crate::args::{Args, Shape};
use crate::gpu::{Buffer, Gpu};
use crate::{Cost, CudaError, kernels};
use model::Recipe;

type Result<T> = std::result::Result<T, CudaError>;

/// The plain kernel for products.
pub const LINEAR_REF: &str = "linear_ref";

/// A kernel for few tokens.
struct Few {
    name: &'static str,
    /// At most.
    tokens: usize,
    /// Rows of W a tile.
    rows: usize,
}

const fn few(name: &'static str, tokens: usize, rows: usize) -> Few {
    Few { name, tokens, rows }
}

/// By tokens; of equally fast ones the first is chosen.
const FEW: [Few; 9] = [
    few("linear_mma_8_64", 8, 64),
    few("linear_mma_8_48", 8, 48),
    few("linear_mma_8_32", 8, 32),
    few("linear_mma_16_64", 16, 64),
    few("linear_mma_16_48", 16, 48),
    few("linear_mma_16_32", 16, 32),
    few("linear_mma_32_64", 32, 64),
    few("linear_mma_32_48", 32, 48),
    few("linear_mma_32_32", 32, 32),
];

/// Kernels for many tokens.
const MANY: [&str; 3] = ["linear_wg_64", "linear_wg_128", "linear_wg_256"];

/// Kernels of 64 tokens by few rows of W a tile, by those.
const TURNED: [(&str, usize); 5] = [
    ("linear_turned_32", 32),
    ("linear_turned_40", 40),
    ("linear_turned_48", 48),
    ("linear_turned_80", 80),
    ("linear_turned_112", 112),
];

pub(crate) fn refuse(ok: bool, what: impl FnOnce() -> String) -> Result<()> {
    if ok {
        Ok(())
    } else {
        Err(CudaError::Unsupported(what()))
    }
}

/// Whether a buffer holds so many bytes from `at`.
pub(crate) fn holds(buffer: &Buffer, at: usize, bytes: usize, what: &str) -> Result<()> {
    refuse(at + bytes <= buffer.bytes(), || {
        format!(
            "{what}: {bytes} bytes at {at} of a buffer of {}",
            buffer.bytes()
        )
    })
}

/// The fastest kernel for a product: of those for few tokens, the one whose tiles leave no multiprocessor more rows of W to
/// stream than another's would.
fn fastest(tokens: usize, outputs: usize, width: usize, multiprocessors: usize) -> &'static str {
    let all = Linear::kernels(tokens, width);
    let first = all.first().copied().unwrap_or(LINEAR_REF);
    let Some(few) = FEW.iter().find(|f| f.name == first) else {
        return first;
    };
    let most = |f: &&Few| outputs.div_ceil(f.rows).div_ceil(multiprocessors) * f.rows;
    let able = FEW.iter().filter(|f| f.tokens == few.tokens);
    able.min_by_key(most).map_or(first, |f| f.name)
}

/// The kernels for many tokens, and of the turned ones those that give no multiprocessor two tiles.
fn candidates(tokens: usize, outputs: usize, multiprocessors: usize) -> Vec<&'static str> {
    let tiles = |rows: usize| tokens.div_ceil(64) * outputs.div_ceil(rows);
    let turned = TURNED.iter().filter(|t| tiles(t.1) <= multiprocessors);
    MANY.into_iter().chain(turned.map(|t| t.0)).collect()
}

/// `y = x · Wᵀ + bias`.
pub struct Linear<'a> {
    /// `[tokens][width]` bf16.
    pub x: &'a Buffer,
    /// `[outputs][width]` bf16.
    pub w: &'a Buffer,
    /// `[outputs]` f32.
    pub bias: Option<&'a Buffer>,
    /// `[tokens][outputs]`: f32 if `wide`, else bf16.
    pub y: &'a Buffer,
    /// See `y`.
    pub wide: bool,
    /// Rows of x.
    pub tokens: usize,
    /// Rows of W.
    pub outputs: usize,
    /// K.
    pub width: usize,
}

impl Linear<'_> {
    /// The kernels that can do it, from fast to slow where `outputs` and `multiprocessors` do not matter.
    pub fn kernels(tokens: usize, width: usize) -> Vec<&'static str> {
        if !width.is_multiple_of(8) {
            return vec![LINEAR_REF]; // a tensor map's rows are multiples of 16 bytes
        }
        let few = FEW.iter().filter(|f| tokens <= f.tokens);
        let mut all: Vec<_> = few.map(|f| f.name).collect();
        let mut wide = MANY;
        if tokens > 128 {
            wide.reverse();
        } else if tokens > 64 {
            wide.swap(0, 1);
        }
        all.extend(wide);
        all.extend(TURNED.map(|t| t.0));
        all
    }

    /// Those worth timing for more than a few tokens.
    pub fn candidates(&self, multiprocessors: usize) -> Vec<&'static str> {
        candidates(self.tokens, self.outputs, multiprocessors)
    }

    /// What it moves and computes.
    pub fn cost(&self) -> Cost {
        let (t, n, k) = (self.tokens as f64, self.outputs as f64, self.width as f64);
        let wide = if self.wide { 4.0 } else { 2.0 };
        Cost {
            bytes: 2.0 * (n * k + t * k) + wide * t * n,
            operations: 2.0 * t * n * k,
        }
    }

    /// Whether every buffer is large enough.
    pub(crate) fn check(&self) -> Result<()> {
        let (t, n, k) = (self.tokens, self.outputs, self.width);
        holds(self.x, 0, t * k * 2, "x")?;
        holds(self.w, 0, n * k * 2, "weights")?;
        holds(self.y, 0, t * n * if self.wide { 4 } else { 2 }, "results")?;
        match self.bias {
            Some(bias) => holds(bias, 0, n * 4, "bias"),
            None => Ok(()),
        }
    }

    /// The fastest kernel.
    pub fn best(&self, multiprocessors: usize) -> &'static str {
        fastest(self.tokens, self.outputs, self.width, multiprocessors)
    }

    /// Launches it on one of [`Linear::kernels`].
    pub fn run(&self, gpu: &Gpu, kernel: &'static str) -> Result<()> {
        let (t, n, k) = (self.tokens, self.outputs, self.width);
        self.check()?;
        let out = |args: Args| {
            let args = args.optional(self.bias);
            let (narrow, wide) = if self.wide {
                (None, Some(self.y))
            } else {
                (Some(self.y), None)
            };
            args.optional(narrow).optional(wide)
        };
        if kernel == LINEAR_REF {
            let args = out(Args::new().buffer(self.x).buffer(self.w)).int(n).int(k);
            // SAFETY: the signature of linear_ref; sizes checked above.
            return unsafe { gpu.launch(kernel, Shape::new(n.div_ceil(128), 128).by(t), &args) };
        }
        // Rows of W and of x a tile, threads a block.
        let few = FEW.iter().find(|f| f.name == kernel);
        let turned = TURNED.iter().find(|t| t.0 == kernel);
        let (rows, tokens, threads, parts) = match (few, kernel) {
            (Some(f), _) => (f.rows, f.tokens, 2 * f.rows as u32 + 32, 1),
            _ if let Some(&(_, rows)) = turned => (rows, 64, 256, t.div_ceil(64)),
            (_, "linear_wg_64") => (64, 64, 256, t.div_ceil(64)),
            (_, "linear_wg_128") => (64, 128, 256, t.div_ceil(128)),
            (_, "linear_wg_256") => (128, 256, 384, t.div_ceil(256)),
            _ => return Err(CudaError::Unsupported(format!("{kernel} is no product"))),
        };
        refuse(k.is_multiple_of(8) && t <= tokens * parts, || {
            format!("{kernel} cannot do {t} tokens of {k}")
        })?;
        let w = gpu.tensor_map(self.w, n, k, rows)?;
        let x = gpu.tensor_map(self.x, t, k, tokens)?;
        let blocks = (n.div_ceil(rows) * parts).min(gpu.multiprocessors());
        let shared = kernels::unit(kernel).map_or(0, |u| u.kernels[0].dynamic);
        let args = out(Args::new().map(w).map(x)).int(n).int(k).int(t);
        // SAFETY: the signature of linear_mma and linear_wg; maps bound what is read, n and t what is written.
        unsafe { gpu.launch(kernel, Shape::new(blocks, threads).shared(shared), &args) }
    }
}

/// `y = bf16(y + bias)` for rows of `outputs`.
pub fn add_bias(gpu: &Gpu, y: &Buffer, bias: &Buffer, rows: usize, outputs: usize) -> Result<()> {
    holds(y, 0, rows * outputs * 2, "results")?;
    holds(bias, 0, outputs * 4, "bias")?;
    let args = Args::new().buffer(y).buffer(bias).int(outputs);
    let shape = Shape::new(outputs.div_ceil(256), 256).by(rows);
    // SAFETY: the signature of add_bias; sizes checked above.
    unsafe { gpu.launch("add_bias", shape, &args) }
}

/// `n` elements of a matrix of this width on which orders of addition show.
pub fn adverse(gpu: &Gpu, x: &Buffer, n: usize, width: usize, seed: usize) -> Result<()> {
    holds(x, 0, 2 * n, "data of a proof")?;
    refuse(u32::try_from(n).is_ok(), || format!("{n} elements at once"))?;
    let args = Args::new().buffer(x).int(n).int(width).int(seed);
    let shape = Shape::new(16 * gpu.multiprocessors(), 256);
    // SAFETY: the signature of adverse; n elements lie in the buffer.
    unsafe { gpu.launch("adverse", shape, &args) }
}

/// Waits and says whether the first `bytes` bytes, whole words, of two buffers are equal.
pub fn same(gpu: &Gpu, a: &Buffer, b: &Buffer, bytes: usize) -> Result<bool> {
    holds(a, 0, bytes, "results")?;
    holds(b, 0, bytes, "results")?;
    refuse(bytes.is_multiple_of(4) && bytes < 1 << 34, || {
        format!("{bytes} bytes to compare")
    })?;
    let flag = gpu.upload(&[0u32], "a flag")?;
    let args = Args::new().buffer(a).buffer(b).int(bytes / 4).buffer(&flag);
    let shape = Shape::new(16 * gpu.multiprocessors(), 256);
    // SAFETY: the signature of differ; the words lie in both buffers.
    unsafe { gpu.launch("differ", shape, &args)? };
    Ok(gpu.download::<u32>(&flag, 1)? == [0])
}

/// Makes `n` elements of a synthetic matrix from byte `at` of a buffer on; `n` must be below 2^32.
pub fn synthetic(gpu: &Gpu, to: &Buffer, at: usize, n: usize, recipe: Recipe) -> Result<()> {
    holds(to, at, 2 * n, "weights")?;
    refuse(u32::try_from(n).is_ok(), || {
        format!("{n} synthetic weights at once")
    })?;
    let args = Args::new()
        .inside(to, at)
        .int(n)
        .int(recipe.seed as u32 as usize)
        .int((recipe.seed >> 32) as usize)
        .int(recipe.tensor as usize)
        .float(recipe.factor);
    let blocks = n.div_ceil(1024).min(16 * gpu.multiprocessors());
    // SAFETY: the signature of synthetic; n elements lie in the buffer.
    unsafe { gpu.launch("synthetic", Shape::new(blocks, 256), &args) }
}

/// `x[t] = table[ids[t]]`, scaled where asked. Ids must be rows of the table.
pub fn embed(
    gpu: &Gpu,
    table: &Buffer,
    ids: &Buffer,
    x: &Buffer,
    tokens: usize,
    width: usize,
    scale: Option<f32>,
) -> Result<()> {
    holds(ids, 0, tokens * 4, "ids")?;
    holds(x, 0, tokens * width * 2, "rows")?;
    let args = Args::new()
        .buffer(table)
        .buffer(ids)
        .buffer(x)
        .int(width)
        .int(usize::from(scale.is_some()))
        .float(scale.unwrap_or(1.0));
    // SAFETY: the signature of embed; the caller answers for the ids.
    unsafe { gpu.launch("embed", Shape::new(tokens, 128), &args) }
}

/// `h = h + branch`; with weights and a place for it, `y = RMSNorm(h)`.
pub fn norm(
    gpu: &Gpu,
    h: &Buffer,
    branch: Option<&Buffer>,
    to: Option<(&Buffer, &Buffer)>,
    rows: usize,
    width: usize,
    eps: f32,
) -> Result<()> {
    holds(h, 0, rows * width * 2, "rows")?;
    if let Some(b) = branch {
        holds(b, 0, rows * width * 2, "branch")?;
    }
    if let Some((w, y)) = to {
        holds(w, 0, width * 4, "weights")?;
        holds(y, 0, rows * width * 2, "results")?;
    }
    let args = Args::new()
        .buffer(h)
        .optional(branch)
        .optional(to.map(|t| t.0))
        .optional(to.map(|t| t.1))
        .int(width)
        .float(eps);
    // SAFETY: the signature of norm_rows; sizes checked above.
    unsafe { gpu.launch("norm", Shape::new(rows, 128), &args) }
}

/// q/k norms, RoPE, and k and v into their pages.
pub struct Heads<'a> {
    /// `[tokens][heads + 2 kv_heads][head_dim]` bf16.
    pub qkv: &'a Buffer,
    /// `[tokens][heads][head_dim]` bf16.
    pub q: &'a Buffer,
    /// Pages of one layer, and the byte where they begin.
    pub pool: (&'a Buffer, usize),
    /// `[tokens]` i32: page · 64 + place, or −1 for none.
    pub slots: &'a Buffer,
    /// `[tokens]` i32: places behind it that become +0.
    pub clear: &'a Buffer,
    /// `[tokens]` i32: row of the tables.
    pub positions: &'a Buffer,
    /// `[positions][head_dim / 2]` f32.
    pub cos: &'a Buffer,
    /// Likewise.
    pub sin: &'a Buffer,
    /// `[head_dim]` f32.
    pub q_norm: Option<&'a Buffer>,
    /// Likewise.
    pub k_norm: Option<&'a Buffer>,
    /// Rows.
    pub tokens: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Even, at most 256.
    pub head_dim: usize,
    /// Epsilon of the norms.
    pub eps: f32,
}

impl Heads<'_> {
    /// The kernels that can do it.
    pub fn kernels(head_dim: usize) -> Vec<&'static str> {
        match head_dim.is_power_of_two() && (16..=256).contains(&head_dim) {
            true => vec!["heads", "heads_many"],
            false => vec!["heads"],
        }
    }

    /// Launches it on the fastest kernel. Slots and positions must lie in the pool and the tables.
    pub fn run(&self, gpu: &Gpu) -> Result<()> {
        let all = Self::kernels(self.head_dim);
        let best = match self.tokens {
            256.. => all.last(),
            _ => all.first(),
        };
        self.run_on(gpu, best.copied().unwrap_or("heads"))
    }

    /// Launches it on one of [`Heads::kernels`].
    pub fn run_on(&self, gpu: &Gpu, kernel: &'static str) -> Result<()> {
        let (t, d) = (self.tokens, self.head_dim);
        refuse(d <= 256 && d.is_multiple_of(2), || {
            format!("heads of {d}; even and at most 256 are allowed")
        })?;
        holds(
            self.qkv,
            0,
            t * (self.heads + 2 * self.kv_heads) * d * 2,
            "q, k and v",
        )?;
        holds(self.q, 0, t * self.heads * d * 2, "queries")?;
        for list in [self.slots, self.clear, self.positions] {
            holds(list, 0, t * 4, "a list of tokens")?;
        }
        refuse(Self::kernels(d).contains(&kernel), || {
            format!("{kernel} cannot do heads of {d}")
        })?;
        let units = self.heads + self.kv_heads;
        let many = kernel == "heads_many";
        let lanes = match d.is_multiple_of(16) {
            true if many => d / 16,
            true => (d / 8).next_power_of_two(),
            false => 32,
        };
        let args = Args::new()
            .buffer(self.qkv)
            .buffer(self.q)
            .inside(self.pool.0, self.pool.1)
            .buffer(self.slots)
            .buffer(self.clear)
            .buffer(self.positions)
            .buffer(self.cos)
            .buffer(self.sin)
            .optional(self.q_norm)
            .optional(self.k_norm)
            .int(self.heads)
            .int(self.kv_heads)
            .int(d)
            .int(lanes)
            .float(self.eps);
        let shape = match many {
            // Two heads a lane. Of thousands of tokens in small blocks, which take turns at waiting for memory.
            true => {
                let most = if t < 2048 { 256 } else { 64 };
                let threads = (units.div_ceil(2) * lanes).next_multiple_of(32);
                Shape::new(t, threads.min(most) as u32)
            }
            false => Shape::new((units * lanes).div_ceil(128), 128).by(t),
        };
        // SAFETY: the signature of both; the caller answers for slots and positions.
        unsafe { gpu.launch(kernel, shape, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_leave_no_multiprocessor_more_to_stream_than_they_must() {
        let of = |tokens, outputs| fastest(tokens, outputs, 4096, 132);
        // 128 tiles of 48, of 32; elsewhere as many rows a multiprocessor by any tile, so the largest.
        assert_eq!(of(1, 6144), "linear_mma_8_48");
        assert_eq!(of(8, 4096), "linear_mma_8_32");
        assert_eq!(of(8, 24576), "linear_mma_8_64");
        assert_eq!(of(9, 151936), "linear_mma_16_64");
        assert_eq!(of(32, 4096), "linear_mma_32_32");
        assert_eq!(of(33, 4096), "linear_wg_64");
        assert_eq!(of(128, 4096), "linear_wg_128");
        assert_eq!(of(129, 4096), "linear_wg_256");
        assert_eq!(fastest(1, 4096, 12, 132), LINEAR_REF);
        for kernel in Linear::kernels(1, 64) {
            assert!(kernels::unit(kernel).is_some(), "{kernel}");
        }
    }

    #[test]
    fn narrow_tiles_are_tried_where_no_multiprocessor_gets_two() {
        let turned = |tokens, outputs| -> Vec<&str> {
            let all = candidates(tokens, outputs, 132).into_iter();
            all.filter_map(|k| k.strip_prefix("linear_turned_"))
                .collect()
        };
        assert_eq!(turned(64, 4224), ["32", "40", "48", "80", "112"]);
        assert_eq!(turned(64, 4225), ["40", "48", "80", "112"]);
        assert_eq!(turned(65, 5120), ["80", "112"]);
        assert_eq!(turned(128, 7393), [""; 0]);
        assert_eq!(candidates(128, 7393, 132), MANY);
    }
}
