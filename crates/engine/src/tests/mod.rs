//! Tests of the engine on a fake device that detects every wrong read, and on the reference device.

mod ahead;
mod cache;
mod certify;
mod constrained;
mod fairness;
mod fake;
mod harness;
mod hostile;
mod invariance;
mod locked;
mod log_sum_exp;
mod pace;
mod planners;
mod reference;
mod refusals;
mod scheduling;
mod threads;
