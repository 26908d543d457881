//! Loading models: every format, and what must be refused.

mod bad_families;
mod bad_gguf;
mod bad_gguf_model;
mod bad_hf;
mod corpus;
mod families;
mod fixture;
mod formats;
mod synthetic;
mod watch;
