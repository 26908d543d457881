//! Error studies behind the contract: how far sums of one product lie apart by order, when that turns an argmax, how
//! close the two best of a vocabulary come, and what follows for whole answers.
//!
//! Pure functions of their arguments: inputs are drawn from Philox by (seed, study, sample), elementary functions are
//! the `libm` crate's, so that a study gives the same bits on every machine. `blocklock lab` runs them.

pub mod odds;
pub mod planted;
pub mod random;
pub mod stats;
pub mod sums;
pub mod ties;
