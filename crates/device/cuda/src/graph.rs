//! Recorded steps: what a step queues, replayed in one call. And the host memory that such copies read and write.

use crate::CudaError;
use crate::gpu::Gpu;
use crate::memory::{Buffer, Stream};
use cudarc::driver::{result, sys};
use std::ffi::c_void;
use std::sync::Arc;

/// Launches and copies, recorded once.
pub struct Graph {
    exec: sys::CUgraphExec,
    stream: Arc<Stream>,
}

// SAFETY: a handle of the driver, used by one thread at a time, which binds the context.
unsafe impl Send for Graph {}

impl Gpu {
    /// Records what `queue` queues, without running it. It must neither wait nor allocate nor free.
    pub fn record(
        &self,
        queue: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Graph, CudaError> {
        self.bind()?;
        let stream = self.stream_handle();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: our stream, which captures nothing yet.
        unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }
            .result()
            .map_err(|e| self.error("cannot record a step", e))?;
        let queued = queue();
        let mut graph = std::ptr::null_mut();
        // SAFETY: our stream, capturing since above.
        let ended = unsafe { sys::cuStreamEndCapture(stream, &mut graph) }.result();
        let ready = queued.and_then(|()| {
            ended.map_err(|e| self.error("cannot record a step", e))?;
            let mut exec = std::ptr::null_mut();
            // SAFETY: a whole graph and a place for the result.
            unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) }
                .result()
                .map_err(|e| self.error("cannot prepare a recorded step", e))?;
            Ok(Graph {
                exec,
                stream: self.shared_stream(),
            })
        });
        if !graph.is_null() {
            // SAFETY: ours, and what was made of it does not need it.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
        ready
    }

    /// Queues what was recorded. Every buffer it uses must still be there.
    pub fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: a live graph of this stream's context.
        unsafe { sys::cuGraphLaunch(graph.exec, self.stream_handle()) }
            .result()
            .map_err(|e| self.error("cannot start a recorded step", e))
    }

    /// Host memory that copies go from and to without waiting.
    pub fn pinned(&self, words: usize) -> Result<Pinned, CudaError> {
        self.bind()?;
        let words = words.max(1);
        // SAFETY: freed by `Pinned`.
        let memory = unsafe { result::malloc_host(words * 4, 0) }
            .map_err(|e| self.error("cannot allocate host memory", e))?;
        // SAFETY: so many bytes, for which any value is valid.
        unsafe { std::ptr::write_bytes(memory.cast::<u8>(), 0, words * 4) };
        Ok(Pinned {
            memory,
            words,
            stream: self.shared_stream(),
        })
    }

    /// Queues a copy of the first `words` words to a buffer.
    pub fn send(&self, from: &Pinned, to: &Buffer, words: usize) -> Result<(), CudaError> {
        self.check_copy(from, to, words)?;
        // SAFETY: in bounds of both; the caller writes the memory only after waiting.
        unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.address(), from.memory, words * 4, self.stream_handle())
        }
        .result()
        .map_err(|e| self.error("cannot copy to the device", e))
    }

    /// Queues a copy of a buffer's first `words` words.
    pub fn fetch(&self, from: &Buffer, to: &Pinned, words: usize) -> Result<(), CudaError> {
        self.check_copy(to, from, words)?;
        // SAFETY: in bounds of both; the caller reads the memory only after waiting.
        unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.memory, from.address(), words * 4, self.stream_handle())
        }
        .result()
        .map_err(|e| self.error("cannot copy from the device", e))
    }

    fn check_copy(&self, host: &Pinned, buffer: &Buffer, words: usize) -> Result<(), CudaError> {
        self.bind()?;
        if words <= host.words && words * 4 <= buffer.bytes() {
            return Ok(());
        }
        Err(CudaError::Unsupported(format!(
            "a copy of {words} words between {} and {} bytes",
            host.words * 4,
            buffer.bytes()
        )))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.stream.bind() {
            // SAFETY: made by us; the driver ends what still runs first.
            let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}

/// Host memory that the device copies from and to.
pub struct Pinned {
    memory: *mut c_void,
    words: usize,
    stream: Arc<Stream>,
}

// SAFETY: plain memory, owned.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Its words. Nothing queued may write them.
    pub fn words(&self) -> &[i32] {
        // SAFETY: initialised when allocated.
        unsafe { std::slice::from_raw_parts(self.memory.cast(), self.words) }
    }

    /// Likewise; nor may anything queued read them.
    pub fn words_mut(&mut self) -> &mut [i32] {
        // SAFETY: initialised when allocated, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.memory.cast(), self.words) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.stream.bind() {
            // SAFETY: allocated by us; whoever queued a copy has waited.
            let _ = unsafe { result::free_host(self.memory) };
        }
    }
}
