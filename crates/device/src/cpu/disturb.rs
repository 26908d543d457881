//! Noise on purpose: [`CpuDevice::execute_disturbed`] moves elements of a row's residual stream by units in the last place,
//! so that studies can see how far a rounding difference travels. Only that call does so: no [`Device`](crate::Device) method
//! takes a disturbance, so no engine can, and no result of it is under the contract.

use super::CpuDevice;
use super::forward::Step;
use super::items::Row;
use crate::DeviceError;
use crate::plan::{StepOutput, StepPlan};

/// Where to disturb a step, and by how much. Attention has read no key or value of the row's layer `after_layer + 1` or later
/// by then: they, and the row's logits, come from the disturbed stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disturbance {
    /// Launch of the plan.
    pub launch: usize,
    /// Segment of the launch.
    pub segment: usize,
    /// Token of the segment.
    pub token: usize,
    /// 0: the stream as the embedding gives it; l: as it leaves layer l, counted from 1.
    pub after_layer: usize,
    /// (element of the stream, ulps to move it by; see [`moved`]).
    pub ulps: Vec<(usize, i32)>,
}

/// Place of a float in the ascending order of representable numbers; both zeros are at 0.
pub fn ordinal(x: f32) -> i64 {
    let magnitude = i64::from(x.to_bits() & 0x7fff_ffff);
    if x.is_sign_negative() {
        -magnitude
    } else {
        magnitude
    }
}

/// `x` moved up by so many representable numbers, or down; at most to the largest finite one. NaN and infinities stay.
pub fn moved(x: f32, ulps: i32) -> f32 {
    if !x.is_finite() || ulps == 0 {
        return x;
    }
    let largest = ordinal(f32::MAX);
    let to = (ordinal(x) + i64::from(ulps)).clamp(-largest, largest);
    let magnitude = f32::from_bits(to.unsigned_abs() as u32);
    if to < 0 { -magnitude } else { magnitude }
}

impl CpuDevice {
    /// As `execute`, with these disturbances in this call alone; without any, the same bits as `execute`.
    pub fn execute_disturbed(
        &mut self,
        plan: &StepPlan,
        noise: &[Disturbance],
    ) -> Result<StepOutput, DeviceError> {
        self.validate(plan)?;
        noise.iter().try_for_each(|d| self.in_range(plan, d))?;
        Ok(self.run(plan, noise))
    }

    fn in_range(&self, plan: &StepPlan, d: &Disturbance) -> Result<(), DeviceError> {
        let c = &*self.model.config;
        let below = |what: &str, given: usize, limit: usize| match given < limit {
            true => Ok(()),
            false => Err(DeviceError::InvalidPlan(format!(
                "a disturbance of {what} {given}; below {limit} is needed"
            ))),
        };
        below("launch", d.launch, plan.launches.len())?;
        let launch = &plan.launches[d.launch];
        below("segment", d.segment, launch.segments.len())?;
        below("token", d.token, launch.segments[d.segment].tokens.len())?;
        below("layer", d.after_layer, c.layers.len() + 1)?;
        let elements = d.ulps.iter().map(|(e, _)| *e);
        elements
            .max()
            .map_or(Ok(()), |e| below("element", e, c.hidden))
    }
}

/// A disturbance and the row of its launch that it is for.
pub(super) type RowNoise<'a> = (usize, &'a Disturbance);

/// Disturbances of one launch, in the order of rows and layers.
pub(super) fn rows_of<'a>(
    noise: &'a [Disturbance],
    launch: usize,
    rows: &[Option<Row>],
) -> Vec<RowNoise<'a>> {
    let first = |segment| {
        rows.iter()
            .position(|r| r.is_some_and(|r| r.segment == segment))
    };
    let mut found: Vec<RowNoise> = noise
        .iter()
        .filter(|d| d.launch == launch)
        .filter_map(|d| Some((first(d.segment)? + d.token, d)))
        .collect();
    found.sort_by_key(place);
    found
}

fn place((row, d): &RowNoise) -> (usize, usize) {
    (*row, d.after_layer)
}

impl Step<'_> {
    /// Disturbs row r of h, where it is asked for there: `stream` layers have added to it.
    ///
    /// # Safety
    /// Row r must be the caller's alone.
    pub unsafe fn disturb(&self, r: usize, stream: usize) {
        let hidden = self.model.config.hidden;
        let from = self.noise.partition_point(|n| place(n) < (r, stream));
        let here = self.noise[from..].iter();
        for (_, d) in here.take_while(|n| place(n) == (r, stream)) {
            // SAFETY: row r is the caller's, and elements were checked.
            let h = unsafe { self.h.slice_mut(r * hidden, hidden) };
            for &(element, ulps) in &d.ulps {
                h[element] = moved(h[element], ulps);
            }
        }
    }
}
