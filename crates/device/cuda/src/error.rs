//! What can be missing or wrong.

use std::path::PathBuf;

/// Why CUDA could not do what it was asked. Each message is one line.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what the fields are
pub enum CudaError {
    /// libcuda is absent or cannot be loaded.
    #[error("no CUDA driver on this machine: libcuda.so.1 could not be loaded ({why})")]
    NoDriver { why: String },
    /// The driver is older than the kernels' machine code.
    #[error("the CUDA driver supports CUDA {}.{}; 13.0 (driver 580) or later is needed", has / 1000, has % 1000 / 10)]
    OldDriver { has: i32 },
    /// The driver sees no device.
    #[error("the CUDA driver finds no device ({why})")]
    NoDevice { why: String },
    /// The index is past the last device.
    #[error("cuda:{index}: no such device; this machine has {count}, from cuda:0")]
    NoSuchDevice { index: usize, count: usize },
    /// Not a Hopper GPU.
    #[error(
        "cuda:{index} ({name}) has compute capability {major}.{minor}; the kernels need 9.0 (H100, H200)"
    )]
    WrongDevice {
        index: usize,
        name: String,
        major: i32,
        minor: i32,
    },
    /// libnvrtc is absent.
    #[error(
        "NVRTC, which compiles the kernels, was not found: no libnvrtc.so.13 in {tried}; name its folder in \
         BLOCKLOCK_CUDA_LIBRARIES"
    )]
    NoNvrtc { tried: String },
    /// libnvrtc is there but does not load.
    #[error("NVRTC at {} could not be loaded: {why}", path.display())]
    BadNvrtc { path: PathBuf, why: String },
    /// libcublasLt is absent.
    #[error(
        "cuBLASLt, the vendor's products, was not found: no libcublasLt.so.13 in {tried}; name its folder in \
         BLOCKLOCK_CUDA_LIBRARIES"
    )]
    NoCublasLt { tried: String },
    /// libcublasLt is there but does not load.
    #[error("cuBLASLt at {} could not be loaded: {why}", path.display())]
    BadCublasLt { path: PathBuf, why: String },
    /// A call of cuBLASLt failed.
    #[error("{what} failed with status {status}")]
    CublasLt { what: String, status: i32 },
    /// A kernel does not compile.
    #[error("kernel {kernel} does not compile: {log}")]
    Compile { kernel: String, log: String },
    /// Device memory ran out.
    #[error("cuda:{index}: out of memory: {wanted} bytes for {what}, {free} of {total} free")]
    OutOfMemory {
        index: usize,
        what: String,
        wanted: usize,
        free: usize,
        total: usize,
    },
    /// A call of the driver failed.
    #[error("cuda:{index}: {what}: {why}")]
    Driver {
        index: usize,
        what: String,
        why: String,
    },
    /// A request outside what a kernel can do.
    #[error("{0}")]
    Unsupported(String),
}

impl From<CudaError> for device::DeviceError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Unsupported(_) | CudaError::WrongDevice { .. } => {
                Self::Unsupported(error.to_string())
            }
            _ => Self::Resource(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_is_one_line_that_names_what_is_wrong_and_what_is_needed() {
        let memory = CudaError::OutOfMemory {
            index: 1,
            what: "keys and values".into(),
            wanted: 4096,
            free: 100,
            total: 200,
        };
        let device = CudaError::WrongDevice {
            index: 0,
            name: "NVIDIA A100".into(),
            major: 8,
            minor: 0,
        };
        let nvrtc = CudaError::NoNvrtc {
            tried: "/a, /b".into(),
        };
        for (error, words) in [
            (CudaError::OldDriver { has: 12040 }, vec!["12.4", "13.0"]),
            (
                CudaError::NoSuchDevice { index: 3, count: 2 },
                vec!["cuda:3", "has 2"],
            ),
            (device, vec!["cuda:0", "A100", "8.0", "9.0"]),
            (nvrtc, vec!["NVRTC", "/a, /b", crate::library::VARIABLE]),
            (
                memory,
                vec!["cuda:1", "4096", "keys and values", "100 of 200"],
            ),
        ] {
            let text = error.to_string();
            assert!(!text.contains('\n'), "{text}");
            for word in words {
                assert!(text.contains(word), "{text} does not say {word}");
            }
        }
    }
}
