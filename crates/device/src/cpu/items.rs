//! What a launch computes: its rows, the outputs asked, and attention's work cut into items.

use super::attention::{ITEM_ROWS, Ranges};
use super::load::Model;
use crate::plan::{KvSplit, Launch, LogitRows};

/// A row of the launch that is computed.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub token: u32,
    pub position: usize,
    pub segment: usize,
}

/// Some of attention's work: positions of a segment, one KV head, some of the key ranges.
pub(super) struct Item {
    pub segment: usize,
    pub first_row: usize,
    pub position: usize,
    pub positions: usize,
    pub kv_head: usize,
    pub ranges: Ranges,
    pub from: usize,
    pub to: usize,
}

/// (row, segment, place in the segment's outputs) of a result.
pub(super) type Output = (usize, usize, usize);

/// Rows that go through the output matrix together, each with its result's place among the outputs, if one was asked.
pub(super) type Heads = Vec<(usize, Option<usize>)>;

/// The batches of rows whose logits are computed together, at most `limit` rows each.
pub(super) fn heads_of(launch: &Launch, outputs: &[Output], limit: usize) -> Vec<Heads> {
    let asked = outputs.iter().enumerate().map(|(i, o)| (o.0, Some(i)));
    let (all, size): (Heads, usize) = match launch.logit_rows {
        LogitRows::Together => (asked.collect(), limit),
        LogitRows::Alone => (asked.collect(), 1),
        LogitRows::EveryRow => {
            let mut rows: Heads = (0..launch.rows).map(|r| (r, None)).collect();
            asked.for_each(|(r, i)| rows[r].1 = i);
            (rows, limit)
        }
    };
    all.chunks(size).map(<[_]>::to_vec).collect()
}

/// The rows to compute and the outputs asked, in the order of segments. Contract launches leave padding out.
pub(super) fn rows_of(launch: &Launch, exact: bool) -> (Vec<Option<Row>>, Vec<Output>) {
    let mut rows = Vec::new();
    let mut outputs = Vec::new();
    for (segment, s) in launch.segments.iter().enumerate() {
        if !exact {
            rows.resize(s.offset, None);
        }
        for (i, o) in s.outputs.iter().enumerate() {
            outputs.push((rows.len() + o.index, segment, i));
        }
        rows.extend(s.tokens.iter().enumerate().map(|(i, &token)| {
            Some(Row {
                token,
                position: s.start + i,
                segment,
            })
        }));
    }
    if !exact {
        rows.resize(launch.rows, None);
    }
    (rows, outputs)
}

/// Attention's items, the costliest first, and whether each holds a single range.
pub(super) fn items_of(
    model: &Model,
    launch: &Launch,
    rows: &[Option<Row>],
    exact: bool,
    threads: usize,
) -> (Vec<Item>, Option<usize>) {
    let c = &*model.config;
    let step = (ITEM_ROWS / (c.heads / c.kv_heads)).max(1);
    let mut items = Vec::new();
    let mut widest = 0;
    let mut row = 0;
    for (segment, s) in launch.segments.iter().enumerate() {
        while rows[row].is_none_or(|r| r.segment != segment) {
            row += 1;
        }
        let n = s.tokens.len();
        let end = s.start + n;
        let ranges = match launch.kv_split {
            _ if exact => Ranges::Chunks,
            KvSplit::Contract => Ranges::Parts {
                parts: 1,
                keys: end,
            },
            KvSplit::Parts(p) => Ranges::Parts {
                parts: p as usize,
                keys: end,
            },
            KvSplit::Every(keys) => Ranges::Every {
                keys: keys as usize,
            },
        };
        widest = widest.max(ranges.count(end));
        let mut i = 0;
        while i < n {
            let positions = step.min(n - i);
            let position = s.start + i;
            for kv_head in 0..c.kv_heads {
                items.push(Item {
                    segment,
                    first_row: row + i,
                    position,
                    positions,
                    kv_head,
                    ranges,
                    from: 0,
                    to: ranges.count(position + positions),
                });
            }
            i += positions;
        }
    }
    // Few long items leave workers idle; single ranges are independent of each other.
    let split = threads > 1 && widest > 1 && items.len() < 4 * threads && rows.len() <= ITEM_ROWS;
    if split {
        items = items
            .iter()
            .flat_map(|item| {
                (item.from..item.to).map(|from| Item {
                    from,
                    to: from + 1,
                    ..*item
                })
            })
            .collect();
    } else {
        items.sort_by_key(|i| std::cmp::Reverse(i.positions * (i.position + i.positions)));
    }
    (items, split.then_some(widest))
}
