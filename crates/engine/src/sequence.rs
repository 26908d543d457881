//! One request on its way: its tokens, how far they are computed, and what has been reported.

use crate::constraint::Held;
use crate::kv::blocks_for;
use crate::prefix::ChainKey;
use crate::request::{Event, FinishReason, Request, RequestId, Row};
use crate::sampler;
use device::{BLOCK_TOKENS, BlockId, Choose, OutputRow, RowResult, Segment};
use numerics::sample::History;

/// A request and its progress. After a preemption `tokens` are simply computed again: prompt and answer so far.
#[derive(Debug)]
pub struct Sequence {
    pub id: RequestId,
    /// The request, less its prompt.
    pub request: Request,
    /// Index of its planner.
    pub planner: usize,
    /// The step after which it was submitted, until it is admitted for the first time.
    pub waiting_since: Option<u64>,
    /// Prompt, then generated tokens.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// Tokens whose KV is in `blocks`.
    pub computed: usize,
    pub blocks: Vec<BlockId>,
    /// Blocks at the front of `blocks` that came from the cache or were published to it.
    pub published: usize,
    /// Next prompt position to report.
    next_row: Option<usize>,
    /// What penalties look at.
    history: History,
    /// What the answer is held to, up to where it is.
    held: Option<Held>,
    /// The cache keys: the root, then one for each full block as far as needed. Empty: the cache is not used.
    keys: Vec<ChainKey>,
}

impl Sequence {
    pub fn new(
        id: RequestId,
        mut request: Request,
        planner: usize,
        root: Option<ChainKey>,
        now: u64,
    ) -> Self {
        let tokens = std::mem::take(&mut request.prompt);
        Self {
            id,
            planner,
            waiting_since: Some(now),
            prompt_len: tokens.len(),
            computed: 0,
            blocks: Vec::new(),
            published: 0,
            next_row: request.prompt_rows_from,
            // A prompt's tokens matter to the repetition penalty alone.
            history: match request.sampling.repetition_penalty {
                1.0 => History::default(),
                _ => History::new(&tokens, &[]),
            },
            held: request.grammar.as_ref().map(Held::new),
            keys: root.into_iter().collect(),
            tokens,
            request,
        }
    }

    /// Tokens still to compute before the next one can be chosen.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Whether its next token lies in a block that it does not have yet.
    pub fn starts_block(&self) -> bool {
        self.blocks.len() < blocks_for(self.tokens.len())
    }

    pub fn generates(&self) -> bool {
        self.request.max_tokens > 0
    }

    /// Tokens whose KV must be recomputed at least from here on, because a result is still to be read there.
    pub fn first_needed(&self) -> usize {
        let last = self.tokens.len() - 1;
        self.next_row.map_or(last, |row| row.min(last))
    }

    /// The keys before and after full block `index`; `None` where the cache is not used.
    pub fn key_pair(&mut self, index: usize) -> Option<(ChainKey, ChainKey)> {
        while self.keys.len() <= index + 1 {
            let parent = *self.keys.last()?;
            self.keys
                .push(parent.extend(self.block_tokens(self.keys.len() - 1)));
        }
        Some((self.keys[index], self.keys[index + 1]))
    }

    /// Tokens of full block `index`.
    pub fn block_tokens(&self, index: usize) -> &[u32] {
        &self.tokens[index * BLOCK_TOKENS..(index + 1) * BLOCK_TOKENS]
    }

    /// The next `count` tokens as a segment at row `offset`.
    pub fn segment(&self, offset: usize, count: usize) -> Segment {
        let (start, end) = (self.computed, self.computed + count);
        let output = |position: usize| {
            let chooses = position + 1 == self.tokens.len() && self.generates();
            (chooses || self.wants_row(position)).then(|| OutputRow {
                index: position - start,
                // What is allowed next is worked out while the step runs, so the choice is made after it.
                logits: chooses && self.held.is_some(),
                log_sum_exp: self.request.log_sum_exp,
                score: self
                    .tokens
                    .get(position + 1)
                    .copied()
                    .filter(|_| self.wants_row(position)),
                choose: (chooses && self.held.is_none())
                    .then(|| self.choice())
                    .flatten(),
            })
        };
        Segment {
            offset,
            tokens: self.tokens[start..end].to_vec(),
            start,
            blocks: self.blocks.clone(),
            outputs: (start..end).filter_map(output).collect(),
        }
    }

    /// How the next token is chosen, where that is not the largest logit.
    fn choice(&self) -> Option<Choose> {
        let params = &self.request.sampling;
        (!sampler::is_greedy(params)).then(|| Choose {
            params: params.clone(),
            history: self.history.clone(),
            position: self.tokens.len() as u64,
        })
    }

    /// Whether it ends once what remains is computed, whatever token it then chooses.
    pub fn ends_with_next(&self, context: usize) -> bool {
        let tokens = self.tokens.len() + 1;
        tokens - self.prompt_len >= self.request.max_tokens || tokens >= context
    }

    /// As if `count` tokens, all that remain, were computed and the next one, here 0, were chosen. Nothing with `count` 0.
    pub fn guess(&mut self, count: usize) {
        if count > 0 {
            self.tokens.push(0);
            self.computed += count;
        }
    }

    /// Undoes [`Sequence::guess`].
    pub fn take_back(&mut self, count: usize) {
        if count > 0 {
            self.tokens.pop();
            self.computed -= count;
        }
    }

    /// Puts in what was not known yet when the segment was made of a guess.
    pub fn complete(&self, segment: &mut Segment) {
        let tokens = self.tokens[segment.start..].iter();
        for (to, &token) in segment.tokens.iter_mut().zip(tokens) {
            *to = token;
        }
        if self.request.sampling.penalises() {
            let choices = segment.outputs.iter_mut().flat_map(|o| &mut o.choose);
            choices.for_each(|c| c.history = self.history.clone());
        }
    }

    /// Its constraint, where that has to say what may come next.
    pub fn unprepared(&mut self) -> Option<&mut Held> {
        self.held.as_mut().filter(|held| held.unprepared())
    }

    fn wants_row(&self, position: usize) -> bool {
        position < self.prompt_len && self.next_row.is_some_and(|row| position >= row)
    }

    /// Takes the results of `segment` out of `rows`, emits events, and says whether that ends the request.
    pub fn absorb(
        &mut self,
        segment: &Segment,
        rows: &mut [RowResult],
        context: usize,
        mut emit: impl FnMut(Event),
    ) -> Option<FinishReason> {
        let end = self.tokens.len();
        let mut stopped = false;
        for (output, result) in segment.outputs.iter().zip(rows) {
            let position = segment.start + output.index;
            if result.nan {
                return Some(FinishReason::Failed(format!(
                    "a logit after position {position} is NaN"
                )));
            }
            if output.log_sum_exp && result.log_sum_exp.is_none() {
                return Some(FinishReason::Failed(format!(
                    "the device gave no log-sum-exp after position {position}"
                )));
            }
            let mut chosen = None;
            if position + 1 == end && self.generates() {
                match self.choose(result) {
                    Ok(choice) => chosen = Some(choice),
                    Err(reason) => return Some(FinishReason::Failed(reason)),
                }
            }
            let row = Row {
                top: std::mem::take(&mut result.top),
                log_sum_exp: result.log_sum_exp,
                chosen_logit: chosen.map(|(_, logit)| logit).or(result.score),
            };
            if self.wants_row(position) {
                self.next_row = Some(position + 1).filter(|&next| next < self.prompt_len);
                emit(Event::PromptRow {
                    position,
                    row: row.clone(),
                });
            }
            if let Some((token, _)) = chosen {
                let index = end - self.prompt_len;
                self.tokens.push(token);
                if self.request.sampling.penalises() {
                    self.history.push(token);
                }
                stopped = self.request.stop_tokens.contains(&token);
                emit(Event::Token { index, token, row });
                if let (false, Some(held)) = (stopped, &mut self.held) {
                    match held.take(token) {
                        Ok(complete) => stopped = complete,
                        Err(reason) => return Some(FinishReason::Failed(reason)),
                    }
                }
            }
        }
        self.computed += segment.tokens.len();
        if stopped {
            Some(FinishReason::Stop)
        } else if self.computed >= self.prompt_len
            && self.tokens.len() - self.prompt_len >= self.request.max_tokens
        {
            Some(FinishReason::Length)
        } else if self.tokens.len() >= context && self.generates() {
            Some(FinishReason::Context)
        } else {
            None
        }
    }

    /// Chooses the next token from the last row.
    fn choose(&mut self, row: &RowResult) -> Result<(u32, f32), String> {
        let allowed = self.held.as_mut().map(Held::allowed).transpose()?;
        let sampling = &self.request.sampling;
        sampler::choose(row, sampling, &self.history, allowed, self.tokens.len())
    }
}
