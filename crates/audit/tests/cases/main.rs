//! What users of other engines hit, each as a named test on the tiny model: an `invariant` request gives the same
//! tokens and Top-20 bits whatever happens around it. "Solo" is the target alone in a new engine with a cold cache.

mod batch;
mod cache;
mod check;
mod long;
mod machine;
mod sampling;
mod scoring;
mod sizes;
mod support;
