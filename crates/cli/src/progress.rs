//! Progress on standard error, where that is a terminal and nobody asked for quiet.

use crate::args::Global;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// A bar over a known number of runs.
pub fn bar(global: &Global, total: u64) -> ProgressBar {
    let bar = hidden_or(global, ProgressBar::new(total));
    if let Ok(style) =
        ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {elapsed} (about {eta} left)")
    {
        bar.set_style(style);
    }
    bar
}

/// A count without a known end.
pub fn counter(global: &Global, what: &'static str) -> ProgressBar {
    let bar = hidden_or(global, ProgressBar::no_length());
    if let Ok(style) = ProgressStyle::with_template("{spinner} {pos} {msg}  {elapsed}") {
        bar.set_style(style);
    }
    bar.set_message(what);
    bar
}

/// A bar over a known number of bytes.
pub fn bytes(quiet: bool, total: u64, what: &'static str) -> ProgressBar {
    let bar = hidden_if(quiet, ProgressBar::new(total));
    if let Ok(style) =
        ProgressStyle::with_template("{bar:30} {bytes}/{total_bytes} {msg}  {elapsed}")
    {
        bar.set_style(style);
    }
    bar.set_message(what);
    bar
}

fn hidden_or(global: &Global, bar: ProgressBar) -> ProgressBar {
    hidden_if(global.quiet, bar)
}

fn hidden_if(quiet: bool, bar: ProgressBar) -> ProgressBar {
    if quiet || !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    bar
}
