//! HTTP: the OpenAI API over an engine on its own thread, with a protection for each request.

mod account;
mod answer;
mod ask;
mod calls;
mod connections;
mod conversation;
mod error;
mod explained;
mod fields;
mod format;
mod grammar;
#[cfg(test)]
mod grammar_tests;
mod job;
mod metrics;
mod openapi;
mod page;
mod reply;
mod routes;
mod served;
mod server;
mod stop;
mod stream;
mod tools;

pub use connections::LEAST_HEAD;
pub use grammar::Grammars;
pub use served::{Certified, Promise, Promises, Served};
pub use server::{Options, Server};
pub use stop::StopScanner;
