//! The engine: requests, KV pool, prefix cache, scheduler, protections. Synchronous at heart: a caller submits, then
//! steps; [`thread`] puts it on a thread of its own, behind channels.

mod ahead;
pub mod certify;
pub mod config;
pub mod constraint;
pub mod engine;
pub mod kv;
mod launches;
pub mod prefix;
pub mod protections;
pub mod request;
mod sampler;
mod scheduler;
mod sequence;
pub mod thread;

#[cfg(test)]
mod tests;

pub use config::{EngineConfig, EngineError, LockedConfig, ModelFacts};
pub use constraint::{Constraint, Grammar, SharedGrammar};
pub use device::BLOCK_TOKENS;
pub use engine::{Engine, Stats};
pub use request::{Event, FinishReason, Protection, Refusal, Request, RequestId, Row};
pub use thread::{EngineHandle, EngineThread, EventStream, SubmitError};
