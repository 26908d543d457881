//! The CUDA device.
//!
//! Nothing of CUDA is needed to build or start a program that holds this crate: the driver and NVRTC are loaded when
//! first asked for, and whatever is missing or wrong is a [`CudaError`], one line that names it.
//!
//! [`kernels`] lists what there is to compile, [`nvrtc`] compiles it, [`cache`] keeps the results on disk. [`gpu`] owns
//! a device's context, memory and launches; [`launch`] and [`attention`] know each operation's kernels. On top of them
//! [`device`](mod@device) runs whole models, and [`ops`] runs single operations for tests to compare.

pub mod args;
pub mod asks;
pub mod attention;
pub mod cache;
mod chains;
pub mod cublaslt;
mod decoder;
pub mod device;
pub mod disturb;
pub mod error;
pub mod gated;
pub mod gpu;
pub mod graph;
pub mod head;
pub mod kernels;
mod lane;
pub mod launch;
pub mod library;
pub mod lists;
mod logits;
pub mod memory;
pub mod nvrtc;
pub mod ops;
mod own;
pub mod pages;
pub mod report;
pub mod selection;
mod step;
pub mod timing;
pub mod weights;

pub use crate::device::CudaDevice;
pub use cache::{Built, Cache};
pub use cublaslt::CublasLt;
pub use error::CudaError;
pub use gpu::Gpu;
pub use nvrtc::Nvrtc;
pub use ops::CudaOps;
pub use timing::{Cost, OpTime};

/// An error and its causes on one line; `dlopen`'s reason is such a cause.
fn error_text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(c) = cause {
        let c_text = c.to_string();
        if !text.contains(&c_text) {
            text = format!("{text}: {c_text}");
        }
        cause = c.source();
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
