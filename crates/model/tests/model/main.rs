//! Loading models: every format, and what must be refused.

mod formats;
mod synthetic;
