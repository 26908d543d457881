//! A whole model on a GPU: what a step queues, in contract launches of profile `hopper-bf16` and on vendor kernels.

use crate::attention::Attention;
use crate::cublaslt::Place;
use crate::gated::{Gated, GatedProduct, activation_table};
use crate::gpu::{Buffer, Gpu};
use crate::lane::Lane;
use crate::launch::{self, Linear};
use crate::lists::List;
use crate::own::Own;
use crate::selection::Selection;
use crate::step::Step;
use crate::weights::{Loaded, Matrix};
use crate::{Cost, CublasLt, CudaError, pages};
use ::device::KernelFamily;
use model::config::{Activation, Rope};
use model::{ModelConfig, Weights};
use numerics::{attention, rope};
use std::sync::Arc;

type Result<T> = std::result::Result<T, CudaError>;

/// Tokens above which the vendor's products, where proven to be chains, may be faster than our own.
const MANY: usize = 32;

/// A model with its keys and values in a GPU's memory.
pub(crate) struct Decoder {
    pub config: Arc<ModelConfig>,
    pub weights: Loaded,
    pub kv: Buffer,
    pub kv_blocks: usize,
    tables: Vec<Table>,
    /// Of the model's activation function.
    activation: Buffer,
    own: Own,
    /// The vendor's products, or why there are none.
    pub products: std::result::Result<CublasLt, String>,
}

/// Cosines and sines of one kind of layer, for the first positions.
struct Table {
    rope: Rope,
    positions: usize,
    cos: Buffer,
    sin: Buffer,
}

impl Decoder {
    /// Uploads a model and makes room for `kv_blocks` blocks.
    pub fn new(
        gpu: &Arc<Gpu>,
        config: Arc<ModelConfig>,
        weights: &Weights,
        kv_blocks: usize,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self> {
        if config.head_dim > 256 || !config.head_dim.is_multiple_of(2) {
            return Err(CudaError::Unsupported(format!(
                "heads of {} elements; the GPU kernels take even sizes up to 256",
                config.head_dim
            )));
        }
        if config.vocab_size > Selection::VOCAB {
            return Err(CudaError::Unsupported(format!(
                "a vocabulary of {}; the GPU kernels take up to {} tokens",
                config.vocab_size,
                Selection::VOCAB
            )));
        }
        let loaded = Loaded::new(gpu, &config, weights, progress)?;
        let bytes = Self::kv_bytes(&config, kv_blocks);
        let kv = gpu.alloc(bytes, "keys and values")?;
        gpu.fill(&kv, 0, bytes, 0)?;
        let gelu = config.activation == Activation::GeluTanh;
        let mut own = Own::default();
        own.at_load(gpu, &loaded, &config)?;
        Ok(Self {
            own,
            activation: activation_table(gpu, gelu)?,
            config,
            weights: loaded,
            kv,
            kv_blocks,
            tables: Vec::new(),
            products: CublasLt::open(Arc::clone(gpu)).map_err(|e| e.to_string()),
        })
    }

    /// Bytes of keys and values in `blocks` blocks of all layers.
    pub fn kv_bytes(config: &ModelConfig, blocks: usize) -> usize {
        let layer = pages::start(blocks, false, 0, config.kv_heads, config.head_dim);
        config.layers.len() * layer
    }

    /// Bytes of one block of one layer.
    pub fn block_bytes(&self) -> usize {
        pages::start(1, false, 0, self.config.kv_heads, self.config.head_dim)
    }

    /// Byte at which a layer's blocks begin.
    pub fn layer_at(&self, layer: usize) -> usize {
        layer * self.kv_blocks * self.block_bytes()
    }

    /// Tables of all layers, covering `last` positions, for every queue; whether any moved.
    pub fn prepare_tables(&mut self, gpu: &Gpu, last: usize) -> Result<bool> {
        let (d, mut moved) = (self.config.head_dim, false);
        for kind in &self.config.layers {
            let found = self.tables.iter().position(|t| t.rope == kind.rope);
            if found.is_some_and(|i| self.tables[i].positions >= last) {
                continue;
            }
            let positions = last
                .next_power_of_two()
                .max(1024)
                .min(self.config.context.max(last));
            let inv = rope::inverse_frequencies(d, kind.rope.theta, kind.rope.scaling);
            let (cos, sin) = rope::angle_table(positions, &inv);
            let table = Table {
                rope: kind.rope,
                positions,
                cos: gpu.upload(&cos, "cosines")?,
                sin: gpu.upload(&sin, "sines")?,
            };
            match found {
                Some(i) => self.tables[i] = table,
                None => self.tables.push(table),
            }
            moved = true;
        }
        if moved {
            gpu.synchronize()?;
        }
        Ok(moved)
    }

    /// A product of a launch of this family, on its fastest kernel.
    pub fn product(
        &self,
        place: &Place,
        family: KernelFamily,
        w: &Matrix,
        job: &Linear,
    ) -> Result<()> {
        match (family, &self.products) {
            (KernelFamily::Contract, Ok(products))
                if job.tokens > MANY && products.chain(place, job)? =>
            {
                Ok(())
            }
            (KernelFamily::Contract, _) => self.own.run(&place.gpu, w, job),
            (KernelFamily::Vendor, Ok(vendor)) => {
                vendor.product(place, job)?;
                match job.bias {
                    Some(bias) => {
                        launch::add_bias(&place.gpu, job.y, bias, job.tokens, job.outputs)
                    }
                    None => Ok(()),
                }
            }
            (KernelFamily::Vendor, Err(why)) => Err(CudaError::Unsupported(why.clone())),
        }
    }

    /// Sections 4 to 9 of NUMERICS.md: keys and values, and the residual stream in `scratch.h`.
    pub fn forward(&self, lane: &Lane, step: &Step) -> Result<()> {
        let (Some(s), Some(io)) = (&lane.scratch, &lane.io) else {
            return Ok(());
        };
        let (c, gpu, rows) = (&*self.config, &*lane.place.gpu, step.rows);
        gpu.send(&io.sent, &io.lists, step.lists.words().len())?;
        let list = |list: List| io.lists.part(list.at, list.bytes);
        let [ids, slots, clear, positions] =
            [step.ids, step.slots, step.clear, step.positions].map(list);
        let linear = |op, w: &Matrix, bias, x, y| {
            let job = product(w, bias, x, y, rows, false);
            gpu.timed(
                op,
                || job.cost(),
                || self.product(&lane.place, step.family, w, &job),
            )
        };
        let (scale, eps) = (attention::scale_log2e(c.attn_scale), c.norm_eps);
        let norm = |h, branch: Option<&Buffer>, to: Option<(&Buffer, &Buffer)>| {
            let rows_moved = 1 + 2 * usize::from(branch.is_some()) + usize::from(to.is_some());
            let cost = || Cost::halves(rows_moved * rows * c.hidden);
            let queue = || launch::norm(gpu, h, branch, to, rows, c.hidden, eps);
            gpu.timed("norm", cost, queue)
        };
        // A branch's own norm, where there is one.
        let post = |w: Option<&Buffer>| match w {
            None => Ok(&s.b),
            Some(w) => norm(&s.b, None, Some((w, &s.post))).map(|()| &s.post),
        };
        let embed = &self.weights.embed.data;
        gpu.timed(
            "embed",
            || Cost::halves(2 * rows * c.hidden),
            || launch::embed(gpu, embed, &ids, &s.h, rows, c.hidden, c.embed_scale),
        )?;
        let mut branch: Option<&Buffer> = None;
        for (l, (kind, w)) in c.layers.iter().zip(&self.weights.layers).enumerate() {
            norm(&s.h, branch, Some((&w.attn_norm, &s.a)))?;
            linear("qkv", &w.qkv, w.qkv_bias.as_ref(), &s.a, &s.qkv)?;
            let Some(table) = self.tables.iter().find(|t| t.rope == kind.rope) else {
                return Err(CudaError::Unsupported("no table for a layer".into()));
            };
            let pool = (&self.kv, self.layer_at(l));
            let heads = launch::Heads {
                qkv: &s.qkv,
                q: &s.q,
                pool,
                slots: &slots,
                clear: &clear,
                positions: &positions,
                cos: &table.cos,
                sin: &table.sin,
                q_norm: w.q_norm.as_ref(),
                k_norm: w.k_norm.as_ref(),
                tokens: rows,
                heads: c.heads,
                kv_heads: c.kv_heads,
                head_dim: c.head_dim,
                eps,
            };
            gpu.timed(
                "heads",
                || Cost::halves(2 * rows * w.qkv.rows),
                || heads.run(gpu),
            )?;
            let job = Attention {
                q: &s.q,
                pool,
                out: &s.attended,
                window: kind.window,
                scale,
            };
            for (plan, kernel) in step.kernels(kind.window) {
                gpu.timed(
                    "attention",
                    || plan.cost(kind.window),
                    || job.run(gpu, plan, &io.lists, Some(&io.partial), kernel),
                )?;
            }
            linear("o", &w.o, None, &s.attended, &s.b)?;
            let b = post(w.post_attn_norm.as_ref())?;
            norm(&s.h, Some(b), Some((&w.ffn_norm, &s.a)))?;
            self.feed_forward(lane, step, &w.gate_up)?;
            linear("down", &w.down, None, &s.act, &s.b)?;
            branch = Some(post(w.post_ffn_norm.as_ref())?);
        }
        if branch.is_some() {
            norm(&s.h, branch, None)?;
        }
        Ok(())
    }

    /// Gates, ups and what the activation makes of them: from `scratch.a` to `scratch.act`.
    fn feed_forward(&self, lane: &Lane, step: &Step, w: &Matrix) -> Result<()> {
        let Some(s) = &lane.scratch else {
            return Ok(());
        };
        let (c, gpu, rows) = (&*self.config, &*lane.place.gpu, step.rows);
        let gelu = c.activation == Activation::GeluTanh;
        if step.family == KernelFamily::Contract
            && let Some(kernel) = self.own.gated(w, rows)
        {
            let fused = GatedProduct {
                x: &s.a,
                w: &w.data,
                y: &s.act,
                tokens: rows,
                width: c.ffn,
                columns: c.hidden,
                gelu,
            };
            return gpu.timed("gate_up", || fused.cost(), || fused.run(gpu, kernel));
        }
        let job = product(w, None, &s.a, &s.gate_up, rows, false);
        gpu.timed(
            "gate_up",
            || job.cost(),
            || self.product(&lane.place, step.family, w, &job),
        )?;
        let gated = Gated {
            gate_up: &s.gate_up,
            y: &s.act,
            tokens: rows,
            width: c.ffn,
            gelu,
            table: &self.activation,
        };
        gpu.timed(
            "activation",
            || Cost::halves(3 * rows * c.ffn),
            || gated.run(gpu, gated.best()),
        )
    }

    /// The kernel that lists the first tokens of so many rows of logits, if one is in use.
    pub fn listing(&self, rows: usize) -> Option<&'static str> {
        self.own.listing(rows)
    }

    /// The output matrix.
    pub fn head(&self) -> &Matrix {
        self.weights.head.as_ref().unwrap_or(&self.weights.embed)
    }
}

pub(crate) fn product<'a>(
    w: &'a Matrix,
    bias: Option<&'a Buffer>,
    x: &'a Buffer,
    y: &'a Buffer,
    tokens: usize,
    wide: bool,
) -> Linear<'a> {
    Linear {
        x,
        w: &w.data,
        bias,
        y,
        wide,
        tokens,
        outputs: w.rows,
        width: w.columns,
    }
}
