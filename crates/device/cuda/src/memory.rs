//! Queues as the driver knows them, and memory that is freed in order with what they run.

use cudarc::driver::{CudaContext, DriverError, result, sys};
use std::sync::Arc;

/// The driver's side of a queue; outlives everything that is freed through it.
pub(crate) struct Stream {
    handle: sys::CUstream,
    context: Arc<CudaContext>,
}

// SAFETY: a handle of the driver, usable from any thread that binds the context.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        // Memory freed by one step serves the next instead of going back to the system.
        // SAFETY: the device's own pool, and a 64-bit value as its attribute asks.
        unsafe {
            let pool = result::device::get_default_mem_pool(context.cu_device())?;
            let mut keep = u64::MAX;
            sys::cuMemPoolSetAttribute(
                pool,
                sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                (&raw mut keep).cast(),
            )
            .result()?;
        }
        Ok(Self {
            handle: result::stream::create(result::stream::StreamKind::NonBlocking)?,
            context: Arc::clone(context),
        })
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Makes the context this thread's; whether that worked.
    pub(crate) fn bind(&self) -> bool {
        self.context.bind_to_thread().is_ok()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.bind() {
            // SAFETY: created by us; the driver ends what is queued first.
            let _ = unsafe { result::stream::destroy(self.handle) };
        }
    }
}

/// Memory of a device, or part of it, freed when the last part is dropped.
pub struct Buffer {
    address: u64,
    bytes: usize,
    memory: Arc<Memory>,
}

/// One allocation, freed in order with launches: kernels queued before may still use it.
struct Memory {
    address: u64,
    stream: Arc<Stream>,
}

impl Buffer {
    /// Of memory that was allocated on this stream.
    pub(crate) fn new(address: u64, bytes: usize, stream: &Arc<Stream>) -> Self {
        Self {
            address,
            bytes,
            memory: Arc::new(Memory {
                address,
                stream: Arc::clone(stream),
            }),
        }
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// So many bytes of it from `at`, as far as it has them.
    pub fn part(&self, at: usize, bytes: usize) -> Buffer {
        let at = at.min(self.bytes);
        Buffer {
            address: self.address + at as u64,
            bytes: bytes.min(self.bytes - at),
            memory: Arc::clone(&self.memory),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.stream.bind() {
            // SAFETY: allocated by us on this stream.
            let _ = unsafe { result::free_async(self.address, self.stream.handle) };
        }
    }
}
