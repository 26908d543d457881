//! A step's launches: each protection plans its own requests; what they leave free goes to requests that ride.

use crate::engine::Running;
use crate::protections::{Geometry, Work};
use crate::request::{Protection, RequestId};
use crate::scheduler::Rules;
use crate::sequence::Sequence;
use device::{Launch, Segment, StepPlan};

/// A request's part of a step: the sequence and how many of its tokens.
type Share<'a> = (&'a Sequence, usize);

/// Shares with the row at which each starts.
type Placed<'a> = Vec<(Share<'a>, usize)>;

/// Whose a launch is, and the request of each of its segments.
pub(crate) struct OnBoard {
    pub protection: Protection,
    pub ids: Vec<RequestId>,
}

/// A step's launches, and who is in each.
#[derive(Default)]
pub(crate) struct Planned {
    pub plan: StepPlan,
    pub on_board: Vec<OnBoard>,
}

impl Planned {
    /// Every segment, and whose it is.
    pub fn segments(&self) -> impl Iterator<Item = (RequestId, &Segment)> {
        let ids = self.on_board.iter().flat_map(|o| &o.ids).copied();
        ids.zip(self.plan.launches.iter().flat_map(|l| &l.segments))
    }

    /// The same, to complete.
    pub fn segments_mut(&mut self) -> impl Iterator<Item = (RequestId, &mut Segment)> {
        let ids = self.on_board.iter().flat_map(|o| &o.ids).copied();
        let launches = self.plan.launches.iter_mut();
        ids.zip(launches.flat_map(|l| &mut l.segments))
    }
}

/// A launch on its way: the planner it comes from, its geometry, who is in it.
type Rough<'a> = (usize, Geometry, Placed<'a>);

impl Rules<'_> {
    /// Plans the step in which each of these requests computes so many tokens.
    pub fn plan(&self, running: &Running, shares: &[(RequestId, usize)]) -> Planned {
        let mut by_planner: Vec<Vec<Share>> = self.planners.iter().map(|_| Vec::new()).collect();
        for (id, count) in shares {
            let sequence = &running[id];
            by_planner[sequence.planner].push((sequence, *count));
        }
        let rides = |i: usize| self.planners[i].1.capabilities().rides;
        let family = |i: usize| self.planners[i].1.provenance().family;
        let mut launches: Vec<Rough> = Vec::new();
        for i in (0..by_planner.len()).filter(|&i| !rides(i)) {
            let mine = std::mem::take(&mut by_planner[i]);
            self.own_launches(i, &mine, &mut launches);
        }
        for i in (0..by_planner.len()).filter(|&i| rides(i)) {
            let mut left = std::mem::take(&mut by_planner[i]);
            let same = |l: &&mut Rough| family(l.0) == family(i);
            for (_, geometry, placed) in launches.iter_mut().filter(same) {
                fill(geometry, placed, &mut left);
            }
            // Weights are not read a second time for those who promise nothing.
            let takes_all = |l: &&mut Rough| self.planners[l.0].1.capabilities().takes_all;
            if self.mixes
                && let Some((_, geometry, placed)) = launches.iter_mut().find(takes_all)
            {
                for share in left.drain(..) {
                    placed.push((share, geometry.rows));
                    geometry.rows += share.1;
                }
            }
            self.own_launches(i, &left, &mut launches);
        }
        let mut planned = Planned::default();
        for (planner, geometry, placed) in launches {
            let segment = |((sequence, count), row): (Share, usize)| {
                (sequence.segment(row, count), sequence.id)
            };
            let (segments, ids) = placed.into_iter().map(segment).unzip();
            let protection = self.planners[planner].0;
            planned.on_board.push(OnBoard { protection, ids });
            planned.plan.launches.push(Launch {
                family: family(planner),
                rows: geometry.rows,
                kv_split: geometry.kv_split,
                logit_rows: geometry.logit_rows,
                segments,
            });
        }
        planned
    }

    fn own_launches<'a>(&self, index: usize, mine: &[Share<'a>], launches: &mut Vec<Rough<'a>>) {
        if mine.is_empty() {
            return;
        }
        let planner = &self.planners[index].1;
        let work = |(s, count): &Share| Work {
            rows: *count,
            length: s.computed + count,
            prompt: s.prompt_len,
        };
        let works: Vec<Work> = mine.iter().map(work).collect();
        for geometry in planner.plan(&works) {
            let placed = geometry.placed.iter().map(|&(i, row)| (mine[i], row));
            let placed = placed.collect();
            launches.push((index, geometry, placed));
        }
    }
}

/// Gives the free rows of a launch to riders, in their order; a prompt takes what fits and goes on in a later step. Rows
/// of one token are for riders that need one, longer ones first for prompts.
fn fill<'a>(geometry: &Geometry, placed: &mut Placed<'a>, riders: &mut Vec<Share<'a>>) {
    for slot in &geometry.slots {
        let (mut row, end) = (slot.row, slot.row + slot.rows);
        while row < end {
            let fits = |(_, count): &Share| slot.shared || (*count == 1) == (slot.rows == 1);
            let Some(i) = riders.iter().position(fits) else {
                break;
            };
            let (sequence, count) = riders.remove(i);
            let count = count.min(end - row);
            placed.push(((sequence, count), row));
            row += count;
            if !slot.shared {
                break;
            }
        }
    }
    placed.sort_by_key(|&(_, row)| row);
}
