//! Black-box tests: the built command on the tiny synthetic model and, where it is at hand, on the default model.

mod bad_input;
mod bad_models;
mod batch;
mod clients;
mod combinations;
mod commands;
mod coverage;
mod deploy;
mod generate;
mod hostile;
mod kernels;
mod limits;
mod locked;
mod logs;
mod metrics;
mod page;
mod profiles;
mod pull;
mod real;
mod serve;
mod serve_cases;
mod serve_json;
mod serve_tools;
mod serving;
mod support;
mod worded;
