//! The KV pool: who owns each block of the device's KV memory, and which ended blocks are kept for reuse.
//!
//! A block is in exactly one of three states:
//! 1. **used**: `refs > 0` sequences hold it; it may also be findable by its key;
//! 2. **cached**: no sequence holds it, it is findable by its key, and may be evicted;
//! 3. **free**: no sequence holds it and no key finds it.
//!
//! Only full blocks have a key, and a block with a key is never written again, so sharing needs no copies.
//! Every choice is deterministic: the block freed last is taken first; then the cached block used longest ago goes,
//! the deepest of a chain first, then the lowest id.

use crate::prefix::ChainKey;
use device::{BLOCK_TOKENS, BlockId};
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

/// Blocks that hold `tokens` tokens.
pub fn blocks_for(tokens: usize) -> usize {
    tokens.div_ceil(BLOCK_TOKENS)
}

/// What a findable block holds.
#[derive(Debug)]
struct Entry {
    key: ChainKey,
    parent: ChainKey,
    depth: usize,
    tokens: Box<[u32]>,
}

#[derive(Debug, Default)]
struct Block {
    refs: usize,
    entry: Option<Entry>,
    last_use: u64,
}

/// Ownership of every KV block. See the module's page for the states.
#[derive(Debug)]
pub struct KvPool {
    blocks: Vec<Block>,
    /// A stack.
    free: Vec<BlockId>,
    /// Looked up, never iterated: its order is not deterministic.
    by_key: HashMap<ChainKey, BlockId>,
    /// Exactly the cached blocks, the next to go first.
    cached: BTreeSet<(u64, Reverse<usize>, BlockId)>,
    /// Blocks whose contents nobody needs any more, since `take_freed`.
    freed: Vec<BlockId>,
    now: u64,
}

impl KvPool {
    /// A pool of `blocks` free blocks.
    pub fn new(blocks: usize) -> Self {
        let ids = 0..u32::try_from(blocks).unwrap_or(u32::MAX);
        Self {
            blocks: ids.clone().map(|_| Block::default()).collect(),
            free: ids.clone().rev().collect(),
            by_key: HashMap::new(),
            cached: BTreeSet::new(),
            freed: ids.collect(),
            now: 0,
        }
    }

    /// Blocks in the pool.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether the pool has no block at all.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Blocks some sequence holds.
    pub fn used(&self) -> usize {
        self.len() - self.available()
    }

    /// Blocks kept for reuse that no sequence holds.
    pub fn cached(&self) -> usize {
        self.cached.len()
    }

    /// Blocks nobody holds and no key finds.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Blocks that `allocate` could give: free and cached ones.
    pub fn available(&self) -> usize {
        self.free.len() + self.cached.len()
    }

    /// Sets the time by which later uses are ordered; a step number.
    pub fn set_time(&mut self, now: u64) {
        self.now = now;
    }

    /// A block for one owner to write; `None` where all are used.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let (_, _, id) = self.cached.pop_first()?;
                self.forget(id);
                self.freed.push(id);
                id
            }
        };
        self.blocks[id as usize].refs = 1;
        Some(id)
    }

    /// What the next calls of `allocate` would give, in order; fewer where cached blocks would have to go.
    pub fn next_free(&self, count: usize) -> impl Iterator<Item = BlockId> {
        self.free.iter().rev().take(count).copied()
    }

    /// One more owner of a block that is used or cached.
    pub fn retain(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        if block.refs == 0 {
            let depth = block
                .entry
                .as_ref()
                .expect("a block to share has a key")
                .depth;
            self.cached.remove(&(block.last_use, Reverse(depth), id));
        }
        block.refs += 1;
    }

    /// One owner less of each block; without owners, a block with a key stays cached, another becomes free.
    pub fn release(&mut self, ids: &[BlockId]) {
        for &id in ids {
            let block = &mut self.blocks[id as usize];
            block.refs = block
                .refs
                .checked_sub(1)
                .expect("a released block has an owner");
            block.last_use = self.now;
            if block.refs > 0 {
                continue;
            }
            match &block.entry {
                Some(entry) => {
                    self.cached.insert((self.now, Reverse(entry.depth), id));
                }
                None => {
                    self.free.push(id);
                    self.freed.push(id);
                }
            }
        }
    }

    /// Makes a full, written block findable, for good. Where another block already has the key, that one stays.
    pub fn publish(
        &mut self,
        id: BlockId,
        parent: ChainKey,
        key: ChainKey,
        depth: usize,
        tokens: &[u32],
    ) {
        let entry = &mut self.blocks[id as usize].entry;
        if self.by_key.contains_key(&key) || entry.is_some() {
            return;
        }
        self.by_key.insert(key, id);
        *entry = Some(Entry {
            key,
            parent,
            depth,
            tokens: tokens.into(),
        });
    }

    /// The block of `key`, where it holds just these tokens after just this parent; hashes alone are not trusted.
    pub fn find(&self, parent: ChainKey, key: ChainKey, tokens: &[u32]) -> Option<BlockId> {
        let &id = self.by_key.get(&key)?;
        let entry = self.blocks[id as usize].entry.as_ref()?;
        (entry.parent == parent && *entry.tokens == *tokens).then_some(id)
    }

    /// Whether a sequence holds the block.
    pub fn is_used(&self, id: BlockId) -> bool {
        self.blocks[id as usize].refs > 0
    }

    /// Forgets every key: cached blocks become free, used ones private.
    pub fn clear_cache(&mut self) {
        for (_, _, id) in std::mem::take(&mut self.cached) {
            self.free.push(id);
            self.freed.push(id);
        }
        for id in 0..self.blocks.len() {
            self.forget(id as BlockId);
        }
    }

    /// Blocks whose contents became nobody's since the last call, each once, ascending; all of them on the first.
    /// Some may have a new owner already, which has not written to them yet.
    pub fn take_freed(&mut self) -> Vec<BlockId> {
        let mut freed = std::mem::take(&mut self.freed);
        freed.sort_unstable();
        freed.dedup();
        freed
    }

    fn forget(&mut self, id: BlockId) {
        if let Some(entry) = self.blocks[id as usize].entry.take() {
            self.by_key.remove(&entry.key);
        }
    }

    /// Checks the states of the module's page against the block lists of all owners. Says what is wrong.
    pub fn check<'a>(&self, owners: impl IntoIterator<Item = &'a [BlockId]>) -> Result<(), String> {
        let mut refs = vec![0; self.len()];
        for &id in owners.into_iter().flatten() {
            refs[id as usize] += 1;
        }
        let mut seen_free = vec![0; self.len()];
        for &id in &self.free {
            seen_free[id as usize] += 1;
        }
        for (id, block) in self.blocks.iter().enumerate() {
            let depth = block.entry.as_ref().map(|e| e.depth);
            let listed = depth.is_some_and(|d| {
                self.cached
                    .contains(&(block.last_use, Reverse(d), id as BlockId))
            });
            let found = |e: &Entry| self.by_key.get(&e.key) == Some(&(id as BlockId));
            if block.refs != refs[id] {
                return Err(format!(
                    "block {id}: {} references, {} owners",
                    block.refs, refs[id]
                ));
            }
            if !block.entry.as_ref().is_none_or(found) {
                return Err(format!("block {id}: its key does not find it"));
            }
            let expected = match (block.refs > 0, depth.is_some()) {
                (true, _) => (0, false),
                (false, true) => (0, true),
                (false, false) => (1, false),
            };
            if (seen_free[id], listed) != expected {
                return Err(format!(
                    "block {id}: {} references, key {}, yet free {} times and cached: {listed}",
                    block.refs,
                    depth.is_some(),
                    seen_free[id]
                ));
            }
        }
        let entries = self.blocks.iter().filter(|b| b.entry.is_some()).count();
        let idle = self
            .blocks
            .iter()
            .filter(|b| b.refs == 0 && b.entry.is_some())
            .count();
        if entries != self.by_key.len() || idle != self.cached.len() {
            return Err(format!(
                "{entries} blocks with a key, {} keys; {idle} of them without owner, {} cached",
                self.by_key.len(),
                self.cached.len()
            ));
        }
        Ok(())
    }
}
