//! Plans the next step while this one runs, so that the device hardly waits between two steps of a decode.
//!
//! The guess: every request goes on with a token yet unknown, nobody comes and nobody goes. Where that comes true, the
//! plan lacks only its tokens; otherwise it is dropped and the step is planned as ever. A guess changes nothing, and a
//! plan is the same with and without it.

use crate::engine::Running;
use crate::kv::KvPool;
use crate::launches::Planned;
use crate::request::RequestId;
use crate::scheduler::Rules;
use crate::sequence::Sequence;
use device::BlockId;

/// A plan for the next step, and what has to come true for it.
pub(crate) struct Ahead {
    planned: Planned,
    mixes: bool,
    /// Of each running request.
    expected: Vec<Expected>,
    /// The blocks they start, in this order.
    blocks: Vec<BlockId>,
}

#[derive(PartialEq)]
struct Expected {
    id: RequestId,
    tokens: usize,
    computed: usize,
    starts_block: bool,
}

impl Expected {
    fn of(sequence: &Sequence) -> Self {
        Self {
            id: sequence.id,
            tokens: sequence.tokens.len(),
            computed: sequence.computed,
            starts_block: sequence.starts_block(),
        }
    }
}

impl Ahead {
    /// The step after `now`, which runs; `None` where that is no mere decode or can't be foreseen. `rules` are those of
    /// the next step, `context` is the tokens a sequence may have. `running` and its sequences are left as they were.
    pub fn new(
        rules: Rules,
        now: &Planned,
        running: &mut Running,
        pool: &KvPool,
        context: usize,
    ) -> Option<Self> {
        let mut in_step: Vec<(RequestId, usize)> =
            now.segments().map(|(id, s)| (id, s.tokens.len())).collect();
        in_step.sort_unstable(); // by arrival, as `running`
        let mut rest = in_step.into_iter().peekable();
        let count = |id| rest.next_if(|(other, _)| other == id).map_or(0, |c| c.1);
        let counts: Vec<usize> = running.keys().map(count).collect();
        let decodes_next = |(s, &count): (&Sequence, &usize)| match count {
            0 => s.remaining() == 1,
            _ => s.remaining() == count && !s.ends_with_next(context),
        };
        if !running.values().zip(&counts).all(decodes_next) {
            return None;
        }
        let all = running.values_mut().zip(&counts);
        all.for_each(|(s, &count)| s.guess(count));
        let ahead = Self::of_guessed(rules, running, pool);
        let all = running.values_mut().zip(&counts);
        all.for_each(|(s, &count)| s.take_back(count));
        ahead
    }

    fn of_guessed(rules: Rules, running: &mut Running, pool: &KvPool) -> Option<Self> {
        let expected: Vec<Expected> = running.values().map(Expected::of).collect();
        let starting = expected.iter().filter(|e| e.starts_block).count();
        let blocks: Vec<BlockId> = pool.next_free(starting).collect();
        if blocks.len() < starting {
            return None;
        }
        let starting = running.values_mut().filter(|s| s.starts_block());
        starting.zip(&blocks).for_each(|(s, &b)| s.blocks.push(b));
        let (shares, _) = rules.shares(running);
        let planned = rules.plan(running, &shares);
        let all = running.values_mut().zip(&expected);
        all.filter(|(_, e)| e.starts_block)
            .for_each(|(s, _)| s.blocks.truncate(s.blocks.len() - 1));
        Some(Self {
            planned,
            mixes: rules.mixes,
            expected,
            blocks,
        })
    }

    /// The plan, with its tokens, where the guess came true: nobody is admitted, and all is as expected. Their blocks are
    /// then given out.
    pub fn come_true(
        mut self,
        rules: Rules,
        running: &mut Running,
        pool: &mut KvPool,
    ) -> Option<Planned> {
        let same = rules.mixes == self.mixes
            && running.values().map(Expected::of).eq(self.expected)
            && pool
                .next_free(self.blocks.len())
                .eq(self.blocks.iter().copied());
        if !same {
            return None;
        }
        for sequence in running.values_mut().filter(|s| s.starts_block()) {
            sequence.blocks.extend(pool.allocate());
        }
        for (id, segment) in self.planned.segments_mut() {
            if let Some(sequence) = running.get(&id) {
                sequence.complete(segment);
            }
        }
        debug_assert!({
            let (shares, _) = rules.shares(running);
            self.planned.plan == rules.plan(running, &shares).plan
        });
        Some(self.planned)
    }
}
