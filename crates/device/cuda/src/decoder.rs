//! A whole model on a GPU: contract launches of profile `hopper-bf16`.

use crate::attention::{Attention, Heads as HeadSizes, Plan, Run};
use crate::gpu::{Buffer, Gpu};
use crate::launch::{self, Linear, Selection};
use crate::weights::{Loaded, Matrix};
use crate::{CudaError, pages};
use device::{
    BLOCK_TOKENS, BlockId, Device, DeviceError, DeviceInfo, KernelFamily, RowResult, Segment,
    StepOutput, StepPlan, plan,
};
use half::bf16;
use model::config::{Activation, Rope};
use model::{ModelConfig, Weights};
use numerics::{attention, rope};
use std::sync::Arc;

type Result<T> = std::result::Result<T, CudaError>;

/// Rows of logits computed at a time.
const LOGIT_ROWS: usize = 128;

/// A GPU that holds a model and its keys and values.
pub struct CudaDevice {
    config: Arc<ModelConfig>,
    weights: Loaded,
    kv: Buffer,
    kv_blocks: usize,
    tables: Vec<Table>,
    scratch: Option<Scratch>,
    gpu: Arc<Gpu>,
}

/// Cosines and sines of one kind of layer, for the first positions.
struct Table {
    rope: Rope,
    positions: usize,
    cos: Buffer,
    sin: Buffer,
}

/// Activations of up to so many rows.
struct Scratch {
    rows: usize,
    h: Buffer,
    a: Buffer,
    b: Buffer,
    post: Buffer,
    qkv: Buffer,
    q: Buffer,
    attended: Buffer,
    gate_up: Buffer,
    act: Buffer,
}

/// What a launch's kernels read beside activations.
struct Step {
    rows: usize,
    ids: Buffer,
    slots: Buffer,
    clear: Buffer,
    positions: Buffer,
    last: usize,
    attention: Vec<Plan>,
}

impl CudaDevice {
    /// Uploads a model and makes room for `kv_blocks` blocks.
    pub fn new(
        gpu: Arc<Gpu>,
        config: Arc<ModelConfig>,
        weights: &Weights,
        kv_blocks: usize,
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
        Ok(Self {
            config,
            weights: loaded,
            kv,
            kv_blocks,
            tables: Vec::new(),
            scratch: None,
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

    /// The table of a layer, covering `last` positions.
    fn prepare_tables(&mut self, last: usize) -> Result<()> {
        let d = self.config.head_dim;
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
        }
        Ok(())
    }

    fn prepare_scratch(&mut self, rows: usize) -> Result<()> {
        if self.scratch.as_ref().is_some_and(|s| s.rows >= rows) {
            return Ok(());
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
        Ok(())
    }

    /// The segments' rows one after another, gaps left out.
    fn step(&self, segments: &[Segment]) -> Result<Step> {
        let gpu = &self.gpu;
        let rows = segments.iter().map(|s| s.tokens.len()).sum();
        let most = segments.iter().map(|s| s.blocks.len()).max().unwrap_or(0);
        let (mut ids, mut slots, mut clear, mut positions) = (vec![], vec![], vec![], vec![]);
        let mut table = vec![-1i32; segments.len() * most];
        let (mut single, mut longer) = (Vec::new(), Vec::new());
        for (i, segment) in segments.iter().enumerate() {
            let run = Run {
                row: ids.len(),
                sequence: i,
                start: segment.start,
                count: segment.tokens.len(),
            };
            if run.count == 1 {
                &mut single
            } else {
                &mut longer
            }
            .push(run);
            for (to, &block) in table[i * most..].iter_mut().zip(&segment.blocks) {
                *to = block as i32;
            }
            for (t, &token) in segment.tokens.iter().enumerate() {
                let p = segment.start + t;
                ids.push(token as i32);
                positions.push(p as i32);
                slots.push(
                    (segment.blocks[p / BLOCK_TOKENS] as usize * BLOCK_TOKENS + p % BLOCK_TOKENS)
                        as i32,
                );
                // A page that this launch begins is +0 behind the last key, whatever it held.
                let last = t + 1 == segment.tokens.len();
                let begun = p / BLOCK_TOKENS * BLOCK_TOKENS >= segment.start;
                let behind = BLOCK_TOKENS - 1 - p % BLOCK_TOKENS;
                clear.push(if last && begun { behind as i32 } else { 0 });
            }
        }
        let heads = HeadSizes {
            query: self.config.heads,
            kv: self.config.kv_heads,
            dim: self.config.head_dim,
        };
        let mut plans = Vec::new();
        for runs in [single, longer] {
            if !runs.is_empty() {
                plans.push(Plan::new(gpu, heads, &table, most, &runs)?);
            }
        }
        let last = positions.iter().copied().max().unwrap_or(0) as usize + 1;
        let lists = [&ids[..], &slots, &clear, &positions];
        let [ids, slots, clear, positions] = gpu.upload_all(lists, "a step's lists")?;
        Ok(Step {
            rows,
            ids,
            slots,
            clear,
            positions,
            last,
            attention: plans,
        })
    }

    /// Sections 4 to 9 of NUMERICS.md: keys and values, and the residual stream in `scratch.h`.
    fn forward(&mut self, step: &Step) -> Result<()> {
        self.prepare_tables(step.last)?;
        self.prepare_scratch(step.rows)?;
        let Some(s) = &self.scratch else {
            return Ok(());
        };
        let (c, gpu, rows) = (&*self.config, &self.gpu, step.rows);
        let scale = attention::scale_log2e(c.attn_scale);
        let eps = c.norm_eps;
        launch::embed(
            gpu,
            &self.weights.embed.data,
            &step.ids,
            &s.h,
            rows,
            c.hidden,
            c.embed_scale,
        )?;
        let mut branch: Option<&Buffer> = None;
        for (l, (kind, w)) in c.layers.iter().zip(&self.weights.layers).enumerate() {
            launch::norm(
                gpu,
                &s.h,
                branch,
                Some((&w.attn_norm, &s.a)),
                rows,
                c.hidden,
                eps,
            )?;
            linear(gpu, &w.qkv, w.qkv_bias.as_ref(), &s.a, &s.qkv, rows)?;
            let Some(table) = self.tables.iter().find(|t| t.rope == kind.rope) else {
                return Err(CudaError::Unsupported("no table for a layer".into()));
            };
            let pool = (&self.kv, self.layer_at(l));
            launch::Heads {
                qkv: &s.qkv,
                q: &s.q,
                pool,
                slots: &step.slots,
                clear: &step.clear,
                positions: &step.positions,
                cos: &table.cos,
                sin: &table.sin,
                q_norm: w.q_norm.as_ref(),
                k_norm: w.k_norm.as_ref(),
                tokens: rows,
                heads: c.heads,
                kv_heads: c.kv_heads,
                head_dim: c.head_dim,
                eps,
            }
            .run(gpu)?;
            let job = Attention {
                q: &s.q,
                pool,
                out: &s.attended,
                window: kind.window,
                scale,
            };
            for plan in &step.attention {
                job.run(gpu, plan, plan.best(kind.window))?;
            }
            linear(gpu, &w.o, None, &s.attended, &s.b, rows)?;
            let b = post(gpu, w.post_attn_norm.as_ref(), &s.b, &s.post, rows, c)?;
            launch::norm(
                gpu,
                &s.h,
                Some(b),
                Some((&w.ffn_norm, &s.a)),
                rows,
                c.hidden,
                eps,
            )?;
            linear(gpu, &w.gate_up, None, &s.a, &s.gate_up, rows)?;
            launch::activation(
                gpu,
                &s.gate_up,
                &s.act,
                rows,
                c.ffn,
                c.activation == Activation::GeluTanh,
            )?;
            linear(gpu, &w.down, None, &s.act, &s.b, rows)?;
            branch = Some(post(gpu, w.post_ffn_norm.as_ref(), &s.b, &s.post, rows, c)?);
        }
        if branch.is_some() {
            launch::norm(gpu, &s.h, branch, None, rows, c.hidden, eps)?;
        }
        Ok(())
    }

    /// Section 10 for every output, in order.
    fn results(&self, segments: &[Segment]) -> Result<Vec<RowResult>> {
        let Some(s) = &self.scratch else {
            return Ok(Vec::new());
        };
        let (c, gpu) = (&*self.config, &self.gpu);
        let mut wanted = Vec::new();
        let mut first = 0;
        for segment in segments {
            wanted.extend(segment.outputs.iter().map(|o| (first + o.index, o)));
            first += segment.tokens.len();
        }
        let head = self.weights.head.as_ref().unwrap_or(&self.weights.embed);
        let mut out = Vec::with_capacity(wanted.len());
        for some in wanted.chunks(LOGIT_ROWS) {
            let rows = some.len();
            let row = c.hidden * 2;
            let x = gpu.alloc(rows * row, "output rows")?;
            for (i, (from, _)) in some.iter().enumerate() {
                gpu.copy(&s.h, from * row, &x, i * row, row)?;
            }
            let y = gpu.alloc(rows * row, "output rows")?;
            launch::norm(
                gpu,
                &x,
                None,
                Some((&self.weights.final_norm, &y)),
                rows,
                c.hidden,
                c.norm_eps,
            )?;
            let z = gpu.alloc(rows * head.rows * 4, "logits")?;
            let job = product(head, None, &y, &z, rows, true);
            job.run(gpu, job.best())?;
            let selection = Selection::new(gpu, rows)?;
            selection.run(gpu, &z, rows, head.rows, c.vocab_size)?;
            let picked = selection.read(gpu, rows, c.vocab_size)?;
            for (i, ((_, output), (top, log_sum_exp))) in some.iter().zip(picked).enumerate() {
                let Some(top) = top else {
                    out.push(RowResult {
                        nan: true,
                        top: Vec::new(),
                        log_sum_exp: 0.0,
                        logits: None,
                        score: None,
                    });
                    continue;
                };
                let read = |from: usize, n: usize| -> Result<Vec<f32>> {
                    let mut z_row = vec![0.0; n];
                    gpu.read(&z, (i * head.rows + from) * 4, &mut z_row)?;
                    Ok(z_row)
                };
                out.push(RowResult {
                    nan: false,
                    top,
                    log_sum_exp,
                    score: match output.score {
                        Some(token) => read(token as usize, 1)?.first().copied(),
                        None => None,
                    },
                    logits: match output.logits {
                        true => Some(read(0, c.vocab_size)?),
                        false => None,
                    },
                });
            }
        }
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

fn product<'a>(
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

fn linear(
    gpu: &Gpu,
    w: &Matrix,
    bias: Option<&Buffer>,
    x: &Buffer,
    y: &Buffer,
    tokens: usize,
) -> Result<()> {
    let job = product(w, bias, x, y, tokens, false);
    job.run(gpu, job.best())
}

/// A branch's own norm, where there is one.
fn post<'a>(
    gpu: &Gpu,
    w: Option<&Buffer>,
    b: &'a Buffer,
    to: &'a Buffer,
    rows: usize,
    c: &ModelConfig,
) -> Result<&'a Buffer> {
    match w {
        None => Ok(b),
        Some(w) => {
            launch::norm(gpu, b, None, Some((w, to)), rows, c.hidden, c.norm_eps)?;
            Ok(to)
        }
    }
}

impl Device for CudaDevice {
    fn info(&self) -> DeviceInfo {
        let mut facts = vec![("profile".to_string(), "hopper-bf16".to_string())];
        facts.extend(self.gpu.facts());
        DeviceInfo {
            name: format!("cuda:{}", self.gpu.index()),
            facts,
        }
    }

    fn kv_blocks(&self) -> usize {
        self.kv_blocks
    }

    fn supports(&self, family: KernelFamily) -> bool {
        family == KernelFamily::Contract
    }

    fn unsupported(&self, family: KernelFamily) -> String {
        match family {
            KernelFamily::Contract => "contract kernels are always there".into(),
            KernelFamily::Vendor => {
                "the CUDA device has no vendor kernels, only contract kernels".into()
            }
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
                let step = self.step(&launch.segments)?;
                self.forward(&step)?;
                let mut all = self.results(&launch.segments)?.into_iter();
                for segment in &launch.segments {
                    rows.push(all.by_ref().take(segment.outputs.len()).collect());
                }
                // A launch without outputs fails here, not later.
                self.gpu.synchronize()?;
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
