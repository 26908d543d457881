//! The engine: requests, KV pool, prefix cache, scheduler, protections. Synchronous at heart: a caller submits, then steps.

pub mod request;

pub use request::{Event, FinishReason, Protection, Refusal, Request, RequestId, Row};
