//! Audits: does a protection keep what it promises? Pure of terminals and files.
//!
//! [`check()`] runs a target alone, then in many crowds derived from a seed, and compares every token and every Top-20
//! logit bit.

pub mod check;
pub mod compare;
pub mod crowd;
pub mod golden;
pub mod host;
pub mod report;
pub mod runner;

pub use check::{CheckError, CheckPlan, Progress, check};
pub use compare::{Comparison, Difference, Trace, TraceStep, compare};
pub use crowd::{Crowd, CrowdSpace, random_prompt};
pub use host::Host;
pub use report::{CheckReport, FirstDivergence, ProtectionReport, median};
pub use runner::{RunError, Target, run_crowd, run_one, run_solo};
