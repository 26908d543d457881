//! Launching attention over paged keys and values.

use crate::args::{Args, Shape};
use crate::gpu::{Buffer, Gpu};
use crate::launch::{holds, refuse};
use crate::lists::{List, Lists};
use crate::{Cost, CudaError, kernels as sources};
use device::{KernelFamily, KvSplit};
use numerics::attention;

type Result<T> = std::result::Result<T, CudaError>;

/// The plain kernel, which can do everything.
pub const PLAIN: &str = "attention_ref";

/// Sizes of a model's heads.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// Query heads.
    pub query: usize,
    /// Key/value heads.
    pub kv: usize,
    /// Elements a head, at most 256.
    pub dim: usize,
}

/// Queries at consecutive positions of one sequence, whose last key is that of the last query.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// Row of the first query in q and the results.
    pub row: usize,
    /// Row of the table of pages.
    pub sequence: usize,
    /// Position of the first query.
    pub start: usize,
    /// Queries.
    pub count: usize,
}

impl Run {
    fn end(&self) -> usize {
        self.start + self.count
    }
}

/// The kernels that can do these runs: the plain one, then from slow to fast.
pub fn kernels(heads: Heads, window: Option<usize>, runs: &[Run]) -> Vec<&'static str> {
    let mut all = vec![PLAIN];
    let limited = window.is_some_and(|w| runs.iter().any(|r| r.end() > w));
    match (heads.dim, limited) {
        (64, false) => all.push("attention_prefill_64"),
        (128, false) => all.push("attention_prefill_128"),
        (256, false) => all.push("attention_prefill_256"),
        (64, true) => all.push("attention_prefill_window_64"),
        (128, true) => all.push("attention_prefill_window_128"),
        (256, true) => all.push("attention_prefill_window_256"),
        _ => {}
    }
    if runs.iter().all(|r| r.count == 1) {
        all.extend(decode_kernel(heads));
    }
    all
}

/// The kernel of the vendor family for these runs, a function of each run's own shape where all are one query, and where
/// none is.
fn vendor(heads: Heads, window: Option<usize>, runs: &[Run]) -> &'static str {
    if let Some(decode) = decode_kernel(heads)
        && runs.iter().all(|r| r.count == 1)
    {
        return decode;
    }
    match (heads.dim, window.is_some()) {
        (64, false) => "attention_whole_64",
        (128, false) => "attention_whole_128",
        (256, false) => "attention_whole_256",
        // Without chunks these spill.
        (64, true) => "attention_prefill_window_64",
        (128, true) => "attention_prefill_window_128",
        (256, true) => "attention_prefill_window_256",
        _ => PLAIN,
    }
}

fn decode_kernel(heads: Heads) -> Option<&'static str> {
    match (heads.dim, heads.query / heads.kv) {
        (64, ..=4) => Some("attention_decode_64"),
        (128, ..=4) => Some("attention_decode_128"),
        (64, 5..=8) => Some("attention_decode_wide_64"),
        (128, 5..=8) => Some("attention_decode_wide_128"),
        _ => None,
    }
}

/// Keys of a chunk of decode: the contract's, or in the vendor family a multiple of 64, at most what a unit holds.
fn chunk(split: KvSplit, keys: usize) -> usize {
    let keys = match split {
        KvSplit::Contract => attention::CHUNK,
        KvSplit::Parts(n) => keys.div_ceil(n.max(1) as usize),
        KvSplit::Every(n) => n as usize,
    };
    keys.next_multiple_of(64).clamp(64, attention::CHUNK)
}

/// What the kernels read beside q and the pool: the same for every layer of a step. Two plans of one [`PlanShape`]
/// launch equally; what their lists say may differ.
pub struct Plan {
    heads: Heads,
    runs: Vec<Run>,
    rows: usize,
    /// Blocks a row of the table has room for.
    most: usize,
    sequence: List,
    position: List,
    table: List,
    prefill: (usize, List),
    decode: Option<Decode>,
}

/// What launches of a plan are made of, beside the contents of its lists.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PlanShape {
    rows: usize,
    most: usize,
    lists: [List; 4],
    items: usize,
    decode: Option<Decode>,
}

/// Units of `attention_decode`, where every run is one query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Decode {
    /// Units there is room for; those past the last have no keys and are passed over.
    count: usize,
    /// Chunks a sequence has room for.
    most_chunks: usize,
    /// (row, kv head) pairs.
    pairs: usize,
    units: List,
}

/// Partial results of `attention_decode`, and counters that every launch leaves at zero.
pub struct Partial {
    results: Buffer,
    counters: Buffer,
}

/// How much [`Partial`] a plan needs: bytes of results, counters.
pub type PartialSize = (usize, usize);

impl Partial {
    /// Room for so much.
    pub fn new(gpu: &Gpu, (bytes, counters): PartialSize) -> Result<Self> {
        let results = gpu.alloc(bytes, "partial attention")?;
        let counts = gpu.alloc(counters * 4, "counters")?;
        gpu.fill(&counts, 0, counters * 4, 0)?;
        Ok(Self {
            results,
            counters: counts,
        })
    }

    /// The same, full of NaN, for tests: what was left by another kernel is no result of this one.
    pub fn poisoned(gpu: &Gpu, size: PartialSize) -> Result<Self> {
        let new = Self::new(gpu, size)?;
        gpu.fill(&new.results, 0, new.results.bytes(), 0xff)?;
        Ok(new)
    }

    /// What there is room for.
    pub fn size(&self) -> PartialSize {
        (self.results.bytes(), self.counters.bytes() / 4)
    }

    /// Whether there is room for so much.
    pub fn holds(&self, (bytes, counters): PartialSize) -> bool {
        bytes <= self.size().0 && counters <= self.size().1
    }
}

/// Integers a unit of `attention_decode`: row, kv head, chunk, keys, keys a chunk; from `PAGES` on the chunk's pages.
const UNIT: usize = PAGES + attention::CHUNK / 64;
const PAGES: usize = 8;

impl Plan {
    /// `table`: `[sequences][most]` blocks of the pool. `split` is of units of one query; other runs are never split. What
    /// kernels read is added to `lists`.
    pub fn new(
        lists: &mut Lists,
        heads: Heads,
        table: &[i32],
        most: usize,
        runs: &[Run],
        split: KvSplit,
    ) -> Result<Self> {
        let rows = runs.iter().map(|r| r.row + r.count).max().unwrap_or(0);
        let (mut sequence, mut position) = (vec![0i32; rows], vec![-1i32; rows]);
        for run in runs {
            let pages = run.end().div_ceil(64);
            refuse(
                pages <= most && (run.sequence + 1) * most <= table.len(),
                || format!("{pages} pages in a table of {most}"),
            )?;
            for i in 0..run.count {
                sequence[run.row + i] = run.sequence as i32;
                position[run.row + i] = (run.start + i) as i32;
            }
        }
        let items = items(prefill_unit(heads).1, runs);
        let decode = match runs.iter().all(|r| r.count == 1) {
            true => Some(Decode::new(lists, heads, table, most, runs, split)),
            false => None,
        };
        Ok(Self {
            heads,
            runs: runs.to_vec(),
            rows,
            most,
            sequence: lists.add(&sequence, 0),
            position: lists.add(&position, 0),
            table: lists.add(table, 0),
            prefill: (items.len(), lists.add(items.as_flattened(), 0)),
            decode,
        })
    }

    /// Every run is one query.
    pub fn decodes(&self) -> bool {
        self.decode.is_some()
    }

    /// See [`PlanShape`].
    pub fn shape(&self) -> PlanShape {
        PlanShape {
            rows: self.rows,
            most: self.most,
            lists: [self.sequence, self.position, self.table, self.prefill.1],
            items: self.prefill.0,
            decode: self.decode,
        }
    }

    /// The partial results it needs room for.
    pub fn partial(&self) -> PartialSize {
        let Some(d) = self.decode.filter(|d| d.most_chunks > 1) else {
            return (0, 0);
        };
        let group = self.heads.query / self.heads.kv;
        let bytes = d.pairs * d.most_chunks * group * (self.heads.dim + 8) * 4;
        (bytes, d.pairs)
    }

    /// What a layer's attention moves and computes.
    pub fn cost(&self, window: Option<usize>) -> Cost {
        let Heads { query, kv, dim } = self.heads;
        let (mut elements, mut pairs) = (0, 0);
        for run in &self.runs {
            let seen = |end: usize| window.map_or(end, |w| end.min(w));
            let keys = run.end() - (run.start + 1 - seen(run.start + 1));
            elements += 2 * (keys * kv + run.count * query) * dim;
            pairs += (run.start + 1..=run.end()).map(seen).sum::<usize>();
        }
        Cost {
            bytes: 2.0 * elements as f64,
            operations: 4.0 * (query * dim) as f64 * pairs as f64,
        }
    }

    /// The fastest kernel for a layer: of the contract, or of the vendor family.
    pub fn best(&self, window: Option<usize>, family: KernelFamily) -> &'static str {
        if family == KernelFamily::Vendor {
            return vendor(self.heads, window, &self.runs);
        }
        let all = kernels(self.heads, window, &self.runs);
        all.last().copied().unwrap_or(PLAIN)
    }
}

/// What a unit of `attention_prefill` is made of: query heads of one KV head, and positions.
fn prefill_unit(heads: Heads) -> (usize, usize) {
    match (heads.dim, heads.query / heads.kv % 2) {
        (256, _) => (1, 64),
        (_, 0) => (2, 64),
        _ => (1, 128),
    }
}

/// Queries for `attention_prefill`: aligned positions, those of them that are queries, row of the first, sequence. The
/// longest last: the list is taken from its end.
fn items(span: usize, runs: &[Run]) -> Vec<[i32; 5]> {
    let mut items = Vec::new();
    for run in runs {
        let mut from = run.start;
        while from < run.end() {
            let base = from / span * span;
            let to = run.end().min(base + span);
            let row = run.row + from - run.start;
            items.push([base, from, to, row, run.sequence].map(|x| x as i32));
            from = to;
        }
    }
    items.sort_by_key(|i| i[2]);
    items
}

/// Units of `attention_decode`, chunk by chunk.
fn units(
    heads: Heads,
    table: &[i32],
    most: usize,
    runs: &[Run],
    split: KvSplit,
) -> Vec<[i32; UNIT]> {
    let mut units = Vec::new();
    for run in runs {
        let pages = &table[run.sequence * most..][..run.end().div_ceil(64)];
        let keys = chunk(split, run.end());
        for (chunk, pages) in pages.chunks(keys / 64).enumerate() {
            for head in 0..heads.kv {
                let mut unit = [0; UNIT];
                for (to, x) in unit.iter_mut().zip([run.row, head, chunk, run.end(), keys]) {
                    *to = x as i32;
                }
                unit[PAGES..PAGES + pages.len()].copy_from_slice(pages);
                units.push(unit);
            }
        }
    }
    units
}

impl Decode {
    fn new(
        lists: &mut Lists,
        heads: Heads,
        table: &[i32],
        most: usize,
        runs: &[Run],
        split: KvSplit,
    ) -> Self {
        let units = units(heads, table, most, runs, split);
        let chunks = |r: &Run| r.end().div_ceil(chunk(split, r.end()));
        let most_chunks: usize = runs.iter().map(chunks).max().unwrap_or(0);
        let rows = runs.iter().map(|r| r.row + 1).max().unwrap_or(0);
        let count = match units.len() {
            n @ ..=256 => n.next_power_of_two(),
            n => n.next_multiple_of(128),
        };
        Self {
            count,
            most_chunks: most_chunks.next_power_of_two(),
            pairs: rows * heads.kv,
            units: lists.add(units.as_flattened(), count * UNIT),
        }
    }
}

/// One layer's attention.
pub struct Attention<'a> {
    /// `[rows][heads][head_dim]` bf16.
    pub q: &'a Buffer,
    /// Pages of the layer, and the byte where they begin.
    pub pool: (&'a Buffer, usize),
    /// `[rows][heads][head_dim]` bf16.
    pub out: &'a Buffer,
    /// Keys seen, where limited.
    pub window: Option<usize>,
    /// RN(attn_scale · log2 e).
    pub scale: f32,
}

impl Attention<'_> {
    /// Launches it on one of [`kernels`] or that of the vendor family. `lists`: those the plan was made with, in device
    /// memory. Blocks of the plan's table must lie in the pool, every key of every sequence be written, and the rest of
    /// each last page be +0.
    pub fn run(
        &self,
        gpu: &Gpu,
        plan: &Plan,
        lists: &Buffer,
        partial: Option<&Partial>,
        kernel: &'static str,
    ) -> Result<()> {
        let Heads { query, kv, dim } = plan.heads;
        holds(self.q, 0, plan.rows * query * dim * 2, "queries")?;
        holds(self.out, 0, plan.rows * query * dim * 2, "results")?;
        for list in plan.shape().lists {
            holds(lists, list.at, list.bytes, "lists")?;
        }
        let able = kernels(plan.heads, self.window, &plan.runs);
        let able = able.contains(&kernel) || kernel == vendor(plan.heads, self.window, &plan.runs);
        refuse(dim <= 256 && able, || {
            format!("{kernel} cannot do this attention")
        })?;
        let shared = sources::unit(kernel).map_or(0, |u| u.kernels[0].dynamic);
        let args = Args::new()
            .buffer(self.q)
            .inside(self.pool.0, self.pool.1)
            .buffer(self.out);
        if kernel == PLAIN {
            let args = args
                .inside(lists, plan.sequence.at)
                .inside(lists, plan.position.at)
                .inside(lists, plan.table.at)
                .int(plan.most)
                .int(query)
                .int(kv)
                .int(dim)
                .int(attention::tile(dim))
                .int(self.window.unwrap_or(0))
                .float(self.scale);
            let shape = Shape::new(plan.rows, 256).by(query);
            // SAFETY: the signature of attention_ref; the caller answers for the blocks.
            return unsafe { gpu.launch(kernel, shape, &args) };
        }
        if kernel.starts_with("attention_prefill") || kernel.starts_with("attention_whole") {
            let threads = if dim == 256 { 256 } else { 384 };
            let (items, list) = plan.prefill;
            let (at_once, _) = prefill_unit(plan.heads);
            let blocks = (items * query / at_once).min(gpu.multiprocessors());
            let shape = Shape::new(blocks, threads).shared(shared);
            let args = args
                .inside(lists, list.at)
                .int(items)
                .inside(lists, plan.table.at)
                .int(plan.most)
                .int(query)
                .int(kv)
                .int(at_once)
                .float(self.scale)
                .int(self.window.unwrap_or(0));
            // SAFETY: the signature of attention_prefill; the caller answers for the blocks.
            return unsafe { gpu.launch(kernel, shape, &args) };
        }
        let Some(decode) = &plan.decode else {
            return Err(CudaError::Unsupported(format!(
                "{kernel} takes one query a sequence"
            )));
        };
        holds(lists, decode.units.at, decode.units.bytes, "lists")?;
        let needed = plan.partial();
        let partial = partial.filter(|_| needed.1 > 0);
        refuse(
            needed.1 == 0 || partial.is_some_and(|p| p.holds(needed)),
            || format!("no room for {} bytes of partial attention", needed.0),
        )?;
        // Two blocks a multiprocessor, but one of the wide kernels.
        let at_once = if query / kv > 4 { 1 } else { 2 };
        let blocks = decode.count.min(at_once * gpu.multiprocessors());
        let args = args
            .inside(lists, decode.units.at)
            .int(decode.count)
            .int(query)
            .int(kv)
            .float(self.scale)
            .int(self.window.unwrap_or(0))
            .optional(partial.map(|p| &p.results))
            .optional(partial.map(|p| &p.counters))
            .int(decode.most_chunks);
        let shape = Shape::new(blocks, 288).shared(shared);
        // SAFETY: the signature of attention_decode; the plan has room for every unit's results.
        unsafe { gpu.launch(kernel, shape, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNS: [Run; 3] = [
        Run {
            row: 0,
            sequence: 1,
            start: 100,
            count: 60,
        },
        Run {
            row: 60,
            sequence: 0,
            start: 0,
            count: 1,
        },
        Run {
            row: 61,
            sequence: 2,
            start: 512,
            count: 200,
        },
    ];

    #[test]
    fn items_cover_every_query_once_and_are_aligned() {
        for span in [64, 128] {
            let items = items(span, &RUNS);
            let mut rows = Vec::new();
            for [base, from, to, row, _] in items.iter().copied() {
                let span = span as i32;
                assert!(base % span == 0 && base <= from && from < to && to <= base + span);
                rows.extend(row..row + to - from);
            }
            rows.sort_unstable();
            assert_eq!(rows, (0..261).collect::<Vec<_>>());
            assert!(items.is_sorted_by_key(|i| i[2]));
        }
    }

    #[test]
    fn units_of_many_queries_hold_whole_pairs_of_heads() {
        for (query, dim, want) in [
            (8, 128, (2, 64)),
            (8, 64, (2, 64)),
            (8, 256, (1, 64)),
            (6, 128, (1, 128)),
            (2, 64, (1, 128)),
        ] {
            let heads = Heads { query, kv: 2, dim };
            assert_eq!(prefill_unit(heads), want, "{heads:?}");
        }
    }

    #[test]
    fn units_hold_the_pages_of_their_chunk() {
        let heads = Heads {
            query: 4,
            kv: 2,
            dim: 64,
        };
        let table: Vec<i32> = (0..20).collect();
        let runs = [Run {
            row: 3,
            sequence: 1,
            start: 576,
            count: 1,
        }];
        let of = |split| units(heads, &table, 10, &runs, split);
        let contract = of(KvSplit::Contract);
        assert_eq!(contract.len(), 4);
        let first = [3, 1, 0, 577, 512, 0, 0, 0, 10, 11, 12, 13, 14, 15, 16, 17];
        assert_eq!(contract[1], first);
        let second = [3, 0, 1, 577, 512, 0, 0, 0, 18, 19, 0, 0, 0, 0, 0, 0];
        assert_eq!(contract[2], second);
        let parts = of(KvSplit::Parts(4));
        let last = [3, 1, 3, 577, 192, 0, 0, 0, 19, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!((parts.len(), parts[7]), (8, last));
    }

    #[test]
    fn vendor_chunks_follow_the_split_and_fit_a_unit() {
        for (split, keys, want) in [
            (KvSplit::Contract, 9000, 512),
            (KvSplit::Parts(16), 1, 64),
            (KvSplit::Parts(16), 1025, 128),
            (KvSplit::Parts(1), 300, 320),
            (KvSplit::Parts(3), 9000, 512),
            (KvSplit::Every(256), 9000, 256),
            (KvSplit::Every(1024), 9000, 512),
        ] {
            assert_eq!(chunk(split, keys), want, "{split:?} of {keys}");
        }
    }

    #[test]
    fn windows_that_hide_something_have_kernels_of_their_own() {
        let heads = Heads {
            query: 4,
            kv: 2,
            dim: 128,
        };
        let last = |window, runs: &[Run]| *kernels(heads, window, runs).last().unwrap();
        assert_eq!(last(None, &[RUNS[1]]), "attention_decode_128");
        assert_eq!(last(Some(1), &[RUNS[1]]), "attention_decode_128");
        assert_eq!(last(None, &RUNS), "attention_prefill_128");
        assert_eq!(last(Some(712), &RUNS), "attention_prefill_128");
        assert_eq!(last(Some(711), &RUNS), "attention_prefill_window_128");
        assert_eq!(kernels(Heads { dim: 80, ..heads }, None, &RUNS), [PLAIN]);
        let wide = Heads { query: 14, ..heads };
        assert_eq!(
            kernels(wide, None, &[RUNS[1]]).last(),
            Some(&"attention_decode_wide_128")
        );
        let wider = Heads { query: 18, ..heads };
        assert_eq!(
            kernels(wider, None, &[RUNS[1]]).last(),
            Some(&"attention_prefill_128")
        );
    }
}
