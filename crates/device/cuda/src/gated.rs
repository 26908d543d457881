//! `act(gate) · up`, by itself and in the product that makes both.

use crate::args::{Args, Shape};
use crate::gpu::{Buffer, Gpu};
use crate::launch::{holds, refuse};
use crate::{Cost, CudaError, kernels};

type Result<T> = std::result::Result<T, CudaError>;

/// An activation function's values for every bf16, by bits.
pub fn activation_table(gpu: &Gpu, gelu: bool) -> Result<Buffer> {
    let table = gpu.alloc(2 << 16, "a table")?;
    let args = Args::new().buffer(&table).int(usize::from(gelu));
    // SAFETY: the signature of activation_table, which writes 2^16 values.
    unsafe { gpu.launch("activation_table", Shape::new(512, 128), &args)? };
    Ok(table)
}

/// `y = act(gate) · up` from `[tokens][2][width]`.
pub struct Gated<'a> {
    /// Gates and ups.
    pub gate_up: &'a Buffer,
    /// Results.
    pub y: &'a Buffer,
    /// Rows.
    pub tokens: usize,
    /// Elements a row of y.
    pub width: usize,
    /// gelu_tanh, not silu.
    pub gelu: bool,
    /// Its [`activation_table`].
    pub table: &'a Buffer,
}

impl Gated<'_> {
    /// The kernels that can do it.
    pub fn kernels(width: usize) -> Vec<&'static str> {
        match width.is_multiple_of(8) {
            true => vec!["activation", "activation_many"],
            false => vec!["activation"],
        }
    }

    /// The fastest kernel.
    pub fn best(&self) -> &'static str {
        // Filling shared memory with the table takes microseconds.
        match self.width.is_multiple_of(8) && self.tokens * self.width >= 1 << 22 {
            true => "activation_many",
            false => "activation",
        }
    }

    /// Launches it on one of [`Gated::kernels`].
    pub fn run(&self, gpu: &Gpu, kernel: &'static str) -> Result<()> {
        let (tokens, width) = (self.tokens, self.width);
        holds(self.gate_up, 0, tokens * width * 4, "gates")?;
        holds(self.y, 0, tokens * width * 2, "results")?;
        holds(self.table, 0, 2 << 16, "a table")?;
        refuse(Self::kernels(width).contains(&kernel), || {
            format!("{kernel} cannot do rows of {width}")
        })?;
        let args = Args::new().buffer(self.gate_up).buffer(self.y);
        if kernel == "activation_many" {
            refuse(u32::try_from(tokens * width / 8).is_ok(), || {
                format!("{tokens} rows of {width} at once")
            })?;
            let args = args.buffer(self.table).int(width).int(tokens);
            let shape = Shape::new(gpu.multiprocessors(), 1024).shared(128 << 10);
            // SAFETY: the signature of activation_many; sizes checked above.
            return unsafe { gpu.launch(kernel, shape, &args) };
        }
        let args = args.int(width).int(usize::from(self.gelu));
        let shape = Shape::new(width.div_ceil(512), 128).by(tokens);
        // SAFETY: the signature of activation; sizes checked above.
        unsafe { gpu.launch(kernel, shape, &args) }
    }
}

/// Kernels that multiply, activate and multiply again, by most tokens.
const FUSED: [(&str, usize); 3] = [
    ("linear_gated_8", 8),
    ("linear_gated_16", 16),
    ("linear_gated_32", 32),
];

/// Rows of W a tile of theirs: half of them gates.
const TILE: usize = 64;

/// `y = act(x · Gᵀ) · (x · Uᵀ)` for few tokens. What lies between rounds as if it were written down.
pub struct GatedProduct<'a> {
    /// `[tokens][columns]` bf16.
    pub x: &'a Buffer,
    /// G above U: `[2][width][columns]` bf16.
    pub w: &'a Buffer,
    /// `[tokens][width]` bf16.
    pub y: &'a Buffer,
    /// Rows of x.
    pub tokens: usize,
    /// Rows of G.
    pub width: usize,
    /// K.
    pub columns: usize,
    /// gelu_tanh, not silu.
    pub gelu: bool,
}

impl GatedProduct<'_> {
    /// The kernels that can do it, from fast to slow; none for many tokens.
    pub fn kernels(tokens: usize, columns: usize) -> Vec<&'static str> {
        let able = FUSED.iter().filter(|f| tokens <= f.1);
        match columns.is_multiple_of(8) {
            true => able.map(|f| f.0).collect(),
            false => Vec::new(), // a tensor map's rows are multiples of 16 bytes
        }
    }

    /// What it moves and computes.
    pub fn cost(&self) -> Cost {
        let (t, n, k) = (self.tokens as f64, self.width as f64, self.columns as f64);
        Cost {
            bytes: 2.0 * (2.0 * n * k + t * k + t * n),
            operations: 4.0 * t * n * k,
        }
    }

    /// Launches it on one of [`GatedProduct::kernels`].
    pub fn run(&self, gpu: &Gpu, kernel: &'static str) -> Result<()> {
        let (t, n, k) = (self.tokens, self.width, self.columns);
        holds(self.x, 0, t * k * 2, "x")?;
        holds(self.w, 0, 2 * n * k * 2, "weights")?;
        holds(self.y, 0, t * n * 2, "results")?;
        let most = FUSED.iter().find(|f| f.0 == kernel).map_or(0, |f| f.1);
        refuse(k.is_multiple_of(8) && t <= most, || {
            format!("{kernel} cannot do {t} tokens of {k}")
        })?;
        let w = gpu.tensor_map(self.w, 2 * n, k, TILE / 2)?;
        let x = gpu.tensor_map(self.x, t, k, most)?;
        let blocks = n.div_ceil(TILE / 2).min(gpu.multiprocessors());
        let shared = kernels::unit(kernel).map_or(0, |u| u.kernels[0].dynamic);
        let args = Args::new().map(w).map(x).optional(None).buffer(self.y);
        let args = args.optional(None).int(n).int(k).int(t);
        let args = args.int(usize::from(self.gelu));
        let shape = Shape::new(blocks, 2 * TILE as u32 + 32).shared(shared);
        // SAFETY: the signature of linear_mma with GATED; maps bound what is read, n and t what is written.
        unsafe { gpu.launch(kernel, shape, &args) }
    }
}
