//! A whole model on a GPU: contract launches of profile `hopper-bf16`, and the same steps on vendor kernels.

use crate::attention::Attention;
use crate::gpu::{Buffer, Gpu};
use crate::launch::{self, Gated, Linear};
use crate::lists::List;
use crate::own::Own;
use crate::step::{Io, Known, Step, Steps};
use crate::weights::{Loaded, Matrix};
use crate::{Cost, CublasLt, CudaError, OpTime, logits, pages};
use device::{
    BlockId, Device, DeviceError, DeviceInfo, KernelFamily, Launch, RowResult, StepOutput,
    StepPlan, plan,
};
use half::bf16;
use model::config::{Activation, Rope};
use model::{ModelConfig, Weights};
use numerics::{attention, rope};
use std::sync::Arc;

type Result<T> = std::result::Result<T, CudaError>;

/// Tokens above which the vendor's products, where proven to be chains, are faster than our own.
const MANY: usize = 64;

/// A GPU that holds a model and its keys and values.
pub struct CudaDevice {
    /// Decode steps that are recorded; first, to be dropped before the memory they use.
    steps: Steps,
    pub(crate) config: Arc<ModelConfig>,
    pub(crate) weights: Loaded,
    kv: Buffer,
    kv_blocks: usize,
    tables: Vec<Table>,
    /// Of the model's activation function.
    activation: Buffer,
    pub(crate) scratch: Option<Scratch>,
    pub(crate) io: Option<Io>,
    own: Own,
    /// The vendor's products, or why there are none.
    products: std::result::Result<CublasLt, String>,
    /// Launches of the vendor family are allowed.
    vendor: bool,
    pub(crate) gpu: Arc<Gpu>,
}

/// Cosines and sines of one kind of layer, for the first positions.
struct Table {
    rope: Rope,
    positions: usize,
    cos: Buffer,
    sin: Buffer,
}

/// Activations of up to so many rows.
pub(crate) struct Scratch {
    rows: usize,
    pub(crate) h: Buffer,
    a: Buffer,
    b: Buffer,
    post: Buffer,
    qkv: Buffer,
    q: Buffer,
    attended: Buffer,
    gate_up: Buffer,
    act: Buffer,
}

impl CudaDevice {
    /// Uploads a model and makes room for `kv_blocks` blocks. With `vendor`, launches of that family are allowed; where
    /// cuBLASLt is missing they are refused with the reason, and contract launches use our own kernels alone.
    pub fn new(
        gpu: Arc<Gpu>,
        config: Arc<ModelConfig>,
        weights: &Weights,
        kv_blocks: usize,
        vendor: bool,
    ) -> Result<Self> {
        if config.head_dim > 256 || !config.head_dim.is_multiple_of(2) {
            return Err(CudaError::Unsupported(format!(
                "heads of {} elements; the GPU kernels take even sizes up to 256",
                config.head_dim
            )));
        }
        let loaded = Loaded::new(&gpu, &config, weights)?;
        let bytes = config.layers.len()
            * pages::start(kv_blocks, false, 0, config.kv_heads, config.head_dim);
        let kv = gpu.alloc(bytes, "keys and values")?;
        gpu.fill(&kv, 0, bytes, 0)?;
        let gelu = config.activation == Activation::GeluTanh;
        let own = Own::default();
        own.at_load(&gpu, &loaded)?;
        Ok(Self {
            own,
            activation: launch::activation_table(&gpu, gelu)?,
            config,
            weights: loaded,
            kv,
            kv_blocks,
            tables: Vec::new(),
            scratch: None,
            io: None,
            steps: Steps::default(),
            products: CublasLt::open(Arc::clone(&gpu)).map_err(|e| e.to_string()),
            vendor,
            gpu,
        })
    }

    /// Bytes of one block of one layer.
    fn block_bytes(&self) -> usize {
        pages::start(1, false, 0, self.config.kv_heads, self.config.head_dim)
    }

    /// Byte at which a layer's blocks begin.
    fn layer_at(&self, layer: usize) -> usize {
        layer * self.kv_blocks * self.block_bytes()
    }

    /// Memory and tables for a step. What is recorded is forgotten where any moves.
    fn prepare(&mut self, step: &Step, outputs: usize) -> Result<()> {
        let mut moved = self.prepare_tables(step.last)?;
        moved |= self.prepare_scratch(step.rows)?;
        let (hidden, vocab) = (self.config.hidden, self.head().rows);
        let (io, new) = Io::fit(self.io.take(), &self.gpu, step, outputs, hidden, vocab)?;
        self.io = Some(io);
        if moved || new {
            self.steps.forget();
        }
        Ok(())
    }

    /// Tables of all layers, covering `last` positions; whether any moved.
    fn prepare_tables(&mut self, last: usize) -> Result<bool> {
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
                cos: self.gpu.upload(&cos, "cosines")?,
                sin: self.gpu.upload(&sin, "sines")?,
            };
            match found {
                Some(i) => self.tables[i] = table,
                None => self.tables.push(table),
            }
            moved = true;
        }
        Ok(moved)
    }

    fn prepare_scratch(&mut self, rows: usize) -> Result<bool> {
        if self.scratch.as_ref().is_some_and(|s| s.rows >= rows) {
            return Ok(false);
        }
        self.scratch = None;
        let (c, rows) = (&self.config, rows.next_power_of_two());
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let halves = |width: usize| self.gpu.alloc(rows * width * 2, "activations");
        self.scratch = Some(Scratch {
            rows,
            h: halves(c.hidden)?,
            a: halves(c.hidden)?,
            b: halves(c.hidden)?,
            post: halves(c.hidden)?,
            qkv: halves(q + 2 * kv)?,
            q: halves(q)?,
            attended: halves(q)?,
            gate_up: halves(2 * c.ffn)?,
            act: halves(c.ffn)?,
        });
        Ok(true)
    }

    /// A product of a launch of this family, on its fastest kernel.
    pub(crate) fn product(&self, family: KernelFamily, w: &Matrix, job: &Linear) -> Result<()> {
        match (family, &self.products) {
            (KernelFamily::Contract, Ok(products))
                if job.tokens > MANY && products.chain(job)? =>
            {
                Ok(())
            }
            (KernelFamily::Contract, _) => self.own.run(&self.gpu, w, job),
            (KernelFamily::Vendor, Ok(vendor)) => {
                vendor.product(job)?;
                match job.bias {
                    Some(bias) => launch::add_bias(&self.gpu, job.y, bias, job.tokens, job.outputs),
                    None => Ok(()),
                }
            }
            (KernelFamily::Vendor, Err(why)) => Err(CudaError::Unsupported(why.clone())),
        }
    }

    /// Sections 4 to 9 of NUMERICS.md: keys and values, and the residual stream in `scratch.h`.
    fn forward(&self, step: &Step) -> Result<()> {
        let (Some(s), Some(io)) = (&self.scratch, &self.io) else {
            return Ok(());
        };
        self.gpu
            .send(&io.sent, &io.lists, step.lists.words().len())?;
        let list = |list: List| io.lists.part(list.at, list.bytes);
        let [ids, slots, clear, positions] =
            [step.ids, step.slots, step.clear, step.positions].map(list);
        let (c, gpu, rows) = (&*self.config, &self.gpu, step.rows);
        let linear = |op, w: &Matrix, bias, x, y| {
            let job = product(w, bias, x, y, rows, false);
            gpu.timed(op, || job.cost(), || self.product(step.family, w, &job))
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
            linear("gate_up", &w.gate_up, None, &s.a, &s.gate_up)?;
            let gated = Gated {
                gate_up: &s.gate_up,
                y: &s.act,
                tokens: rows,
                width: c.ffn,
                gelu: c.activation == Activation::GeluTanh,
                table: &self.activation,
            };
            gpu.timed(
                "activation",
                || Cost::halves(3 * rows * c.ffn),
                || gated.run(gpu, gated.best()),
            )?;
            linear("down", &w.down, None, &s.act, &s.b)?;
            branch = Some(post(w.post_ffn_norm.as_ref())?);
        }
        if branch.is_some() {
            norm(&s.h, branch, None)?;
        }
        Ok(())
    }

    /// The output matrix.
    pub(crate) fn head(&self) -> &Matrix {
        self.weights.head.as_ref().unwrap_or(&self.weights.embed)
    }

    /// From now on operations are timed one by one, and nothing is recorded.
    pub fn time_operations(&mut self, on: bool) {
        self.steps.forget();
        self.gpu.time_operations(on);
    }

    /// Their times since the last call.
    pub fn take_times(&mut self) -> Result<Vec<OpTime>> {
        self.gpu.take_times()
    }

    /// Runs a launch and waits. Decode steps are recorded when one of their shape comes a second time, and replayed from
    /// then on: a shape's first time also proves and loads the vendor's kernels, which a recording must not.
    fn run(&mut self, launch: &Launch) -> Result<Vec<RowResult>> {
        let mut step = Step::new(&self.config, launch)?;
        let groups = logits::groups(launch, &step.starts, step.rows);
        step.ask(&groups, self.config.vocab_size);
        let most = groups.iter().map(|g| g.rows.len()).max().unwrap_or(0);
        self.prepare(&step, most)?;
        if let Some(io) = &mut self.io {
            let words = step.lists.words();
            io.sent.words_mut()[..words.len()].copy_from_slice(words);
        }
        if !self.gpu.times_operations()
            && let [group] = &groups[..]
            && let Some(outputs) = group.consecutive()
            && let Some(shape) = step.shape(&self.config, outputs)
        {
            let queue = |gpu: &Self| {
                gpu.forward(&step)?;
                gpu.logits(&step, group)
            };
            match self.steps.recorded(&shape) {
                Some(Known::Recorded(graph)) => self.gpu.replay(graph)?,
                Some(Known::Seen) => match self.gpu.record(|| queue(self)) {
                    Ok(graph) => {
                        self.gpu.replay(&graph)?;
                        self.steps.keep(shape, Known::Recorded(graph));
                    }
                    Err(error) => {
                        tracing::warn!("{error}; steps of this shape are queued one by one");
                        self.steps.keep(shape, Known::NotRecordable);
                        queue(self)?;
                    }
                },
                Some(Known::NotRecordable) => queue(self)?,
                None => {
                    queue(self)?;
                    self.steps.keep(shape, Known::Seen);
                }
            }
            self.gpu.synchronize()?;
            return self.collect(group);
        }
        self.forward(&step)?;
        let mut out = Vec::new();
        for group in &groups {
            self.logits(&step, group)?;
            self.gpu.synchronize()?;
            out.extend(self.collect(group)?);
        }
        // A launch without outputs fails here, not later.
        self.gpu.synchronize()?;
        Ok(out)
    }

    fn check(&self, block: BlockId) -> std::result::Result<usize, DeviceError> {
        if (block as usize) < self.kv_blocks {
            return Ok(block as usize);
        }
        Err(DeviceError::InvalidPlan(format!(
            "KV block {block} is outside the pool of {} blocks",
            self.kv_blocks
        )))
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

impl Device for CudaDevice {
    fn info(&self) -> DeviceInfo {
        let mut facts = vec![("profile".to_string(), "hopper-bf16".to_string())];
        facts.extend(self.gpu.facts());
        if let Ok(vendor) = &self.products {
            facts.push(("cublaslt".into(), vendor.version()));
        }
        DeviceInfo {
            name: format!("cuda:{}", self.gpu.index()),
            facts,
        }
    }

    fn kv_blocks(&self) -> usize {
        self.kv_blocks
    }

    fn supports(&self, family: KernelFamily) -> bool {
        family == KernelFamily::Contract || (self.vendor && self.products.is_ok())
    }

    fn copy_bandwidth(&mut self) -> Option<f64> {
        self.gpu.copy_bandwidth().ok()
    }

    fn mixes_families(&self) -> bool {
        true
    }

    fn unsupported(&self, family: KernelFamily) -> String {
        match family {
            KernelFamily::Contract => "contract kernels are always there".into(),
            KernelFamily::Vendor => match &self.products {
                Ok(_) => "the device was loaded without vendor kernels".into(),
                Err(why) => why.clone(),
            },
        }
    }

    fn execute(&mut self, step: &StepPlan) -> std::result::Result<StepOutput, DeviceError> {
        let (vocab, context) = (self.config.vocab_size, self.config.context);
        plan::validate(step, vocab, context, self.kv_blocks)?;
        if step.launches.iter().any(|l| !self.supports(l.family)) {
            return Err(DeviceError::Unsupported(
                self.unsupported(KernelFamily::Vendor),
            ));
        }
        let mut out = StepOutput::default();
        for launch in &step.launches {
            let mut rows = Vec::new();
            if !launch.segments.is_empty() {
                let results = self.run(launch);
                if results.is_err() {
                    // What was queued still reads the lists, which the next step writes.
                    let _ = self.gpu.synchronize();
                }
                let mut all = results?.into_iter();
                for segment in &launch.segments {
                    rows.push(all.by_ref().take(segment.outputs.len()).collect());
                }
            }
            out.rows.push(rows);
        }
        Ok(out)
    }

    fn copy_blocks(
        &mut self,
        pairs: &[(BlockId, BlockId)],
    ) -> std::result::Result<(), DeviceError> {
        let n = self.block_bytes();
        for &(from, to) in pairs {
            let (from, to) = (self.check(from)?, self.check(to)?);
            for layer in 0..self.config.layers.len() {
                let base = self.layer_at(layer);
                self.gpu
                    .copy(&self.kv, base + from * n, &self.kv, base + to * n, n)?;
            }
        }
        self.gpu.synchronize()?;
        Ok(())
    }

    fn fill_blocks(
        &mut self,
        blocks: &[BlockId],
        value: f32,
    ) -> std::result::Result<(), DeviceError> {
        let n = self.block_bytes();
        let bits = bf16::from_f32(value).to_bits();
        for &block in blocks {
            let block = self.check(block)?;
            for layer in 0..self.config.layers.len() {
                self.gpu
                    .fill_halves(&self.kv, self.layer_at(layer) + block * n, n, bits)?;
            }
        }
        self.gpu.synchronize()?;
        Ok(())
    }
}
