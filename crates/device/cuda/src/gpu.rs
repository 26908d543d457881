//! A device's context, memory, modules and launches.

use crate::args::{Args, Plain, Shape, TensorMap};
use crate::cache::ARCH;
pub use crate::memory::Buffer;
use crate::memory::Stream;
use crate::timing::Timer;
use crate::{Cache, CudaError, Nvrtc, kernels};
use cudarc::driver::sys::{self, CUdevice_attribute, CUfunction, CUlaunchAttributeID};
use cudarc::driver::{CudaContext, DriverError, result};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The least driver, as `cuDriverGetVersion` counts: kernels are machine code of CUDA 13.0.
const DRIVER: i32 = 13000;

/// A queue of work on one GPU, ready to run the kernels of [`kernels::UNITS`].
pub struct Gpu {
    stream: Arc<Stream>,
    pub(crate) timer: Timer,
    card: Arc<Card>,
}

/// The GPU itself, and its kernels.
struct Card {
    index: usize,
    name: String,
    driver: i32,
    nvrtc: String,
    multiprocessors: usize,
    modules: Vec<sys::CUmodule>,
    functions: HashMap<&'static str, CUfunction>,
    context: Arc<CudaContext>,
}

// SAFETY: handles of the driver may be used from any thread; every entry point binds the context to its thread first.
unsafe impl Send for Card {}
// SAFETY: as above; what is not a handle never changes after `open`.
unsafe impl Sync for Card {}

/// Whether a CUDA driver is installed here; says why not.
pub fn find_driver() -> Result<(), CudaError> {
    // `cudarc` panics where the library is missing, so ask first. It looks for these names.
    let mut why = String::new();
    for name in ["libcuda.so", "libcuda.so.1"] {
        // SAFETY: NVIDIA's driver runs no code of ours on loading.
        match unsafe { libloading::Library::new(name) } {
            Ok(_) => return Ok(()),
            Err(error) => why = crate::error_text(&error),
        }
    }
    Err(CudaError::NoDriver { why })
}

impl Gpu {
    /// Opens device `index` and loads every kernel, compiling what the cache does not hold.
    pub fn open(index: usize, cache: Option<PathBuf>) -> Result<Self, CudaError> {
        find_driver()?;
        let fail = |what: &'static str| {
            move |e: DriverError| CudaError::Driver {
                index,
                what: what.into(),
                why: driver_text(e),
            }
        };
        let no_device = |e: DriverError| CudaError::NoDevice {
            why: driver_text(e),
        };
        let mut driver = 0;
        // SAFETY: an integer to write to; allowed before initialisation.
        unsafe { sys::cuDriverGetVersion(&mut driver) }
            .result()
            .map_err(no_device)?;
        if driver < DRIVER {
            return Err(CudaError::OldDriver { has: driver });
        }
        result::init().map_err(no_device)?;
        let count = result::device::get_count().map_err(no_device)?.max(0) as usize;
        if count == 0 {
            return Err(CudaError::NoDevice {
                why: "it counts 0".into(),
            });
        }
        if index >= count {
            return Err(CudaError::NoSuchDevice { index, count });
        }
        let context = CudaContext::new(index).map_err(fail("cannot create a context"))?;
        let name = context.name().map_err(fail("cannot read its name"))?;
        let attribute = |a| {
            context
                .attribute(a)
                .map_err(fail("cannot read an attribute"))
        };
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if (major, minor) != (9, 0) {
            return Err(CudaError::WrongDevice {
                index,
                name,
                major,
                minor,
            });
        }
        let multiprocessors =
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let nvrtc = Nvrtc::find()?;
        let stream = Stream::new(&context).map_err(fail("cannot create a stream"))?;
        let mut card = Card {
            index,
            name,
            driver,
            nvrtc: format!("{}.{}", nvrtc.version.0, nvrtc.version.1),
            multiprocessors,
            modules: Vec::new(),
            functions: HashMap::new(),
            context,
        };
        let cache = Cache::new(cache);
        for (unit, built) in kernels::UNITS.iter().zip(cache.build_all(&nvrtc, ARCH)?) {
            card.load(unit, &built.cubin)?;
        }
        Ok(Self {
            stream: Arc::new(stream),
            timer: Timer::default(),
            card: Arc::new(card),
        })
    }

    /// Another queue of the same GPU: its work runs beside this one's.
    pub fn beside(&self) -> Result<Self, CudaError> {
        self.bind()?;
        let stream =
            Stream::new(&self.card.context).map_err(|e| self.error("cannot create a stream", e))?;
        Ok(Self {
            stream: Arc::new(stream),
            timer: Timer::default(),
            card: Arc::clone(&self.card),
        })
    }

    /// Which device of this host.
    pub fn index(&self) -> usize {
        self.card.index
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.card.name
    }

    /// Multiprocessors.
    pub fn multiprocessors(&self) -> usize {
        self.card.multiprocessors
    }

    /// The stream that everything is queued in.
    pub(crate) fn stream(&self) -> *mut c_void {
        self.stream.handle().cast()
    }

    pub(crate) fn stream_handle(&self) -> sys::CUstream {
        self.stream.handle()
    }

    pub(crate) fn shared_stream(&self) -> Arc<Stream> {
        Arc::clone(&self.stream)
    }

    /// What may matter to an identity, by name.
    pub fn facts(&self) -> Vec<(String, String)> {
        let card = &self.card;
        let (d, m) = (card.driver, card.multiprocessors);
        vec![
            ("gpu".into(), card.name.clone()),
            ("multiprocessors".into(), m.to_string()),
            (
                "cuda driver".into(),
                format!("{}.{}", d / 1000, d % 1000 / 10),
            ),
            ("nvrtc".into(), card.nvrtc.clone()),
        ]
    }

    pub(crate) fn error(&self, what: impl Into<String>, error: DriverError) -> CudaError {
        self.card.error(what, error)
    }

    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        self.card
            .context
            .bind_to_thread()
            .map_err(|e| self.error("cannot use its context", e))
    }

    /// Bytes of its memory that nobody has taken.
    pub fn free_bytes(&self) -> Result<usize, CudaError> {
        self.bind()?;
        let (free, _total) =
            result::mem_get_info().map_err(|e| self.error("cannot read its free memory", e))?;
        Ok(free)
    }

    /// `bytes` bytes of device memory, not initialised, in order with launches: taking and dropping it costs little.
    /// `what` names them where memory runs out.
    pub fn alloc(&self, bytes: usize, what: &str) -> Result<Buffer, CudaError> {
        self.bind()?;
        // SAFETY: freed by the memory.
        match unsafe { result::malloc_async(self.stream.handle(), bytes.max(16)) } {
            Ok(address) => Ok(Buffer::new(address, bytes, &self.stream)),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let (free, total) = result::mem_get_info().unwrap_or((0, 0));
                Err(CudaError::OutOfMemory {
                    index: self.card.index,
                    what: what.into(),
                    wanted: bytes,
                    free,
                    total,
                })
            }
            Err(error) => Err(self.error(format!("cannot allocate {what}"), error)),
        }
    }

    /// A copy of `data` in device memory.
    pub fn upload<T: Plain>(&self, data: &[T], what: &str) -> Result<Buffer, CudaError> {
        let buffer = self.alloc(size_of_val(data), what)?;
        self.write(&buffer, 0, data)?;
        Ok(buffer)
    }

    /// Copies `data` to byte `at` of a buffer, after everything launched before.
    pub fn write<T: Plain>(&self, buffer: &Buffer, at: usize, data: &[T]) -> Result<(), CudaError> {
        self.inside(buffer, at, size_of_val(data))?;
        if data.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: in bounds, ordered by the stream; the driver has read pageable memory when the call returns.
        unsafe {
            result::memcpy_htod_async(buffer.address() + at as u64, data, self.stream.handle())
        }
        .map_err(|e| self.error("cannot copy to the device", e))
    }

    /// Copies from byte `at` of a buffer, after everything launched before.
    pub fn read<T: Plain>(
        &self,
        buffer: &Buffer,
        at: usize,
        data: &mut [T],
    ) -> Result<(), CudaError> {
        self.inside(buffer, at, size_of_val(data))?;
        if data.is_empty() {
            return self.synchronize();
        }
        self.bind()?;
        // SAFETY: in bounds, ordered by the stream, and `data` lives until the copy is done.
        unsafe {
            result::memcpy_dtoh_async(data, buffer.address() + at as u64, self.stream.handle())
        }
        .map_err(|e| self.error("cannot copy from the device", e))?;
        self.synchronize()
    }

    /// The first `n` values of a buffer.
    pub fn download<T: Plain>(&self, buffer: &Buffer, n: usize) -> Result<Vec<T>, CudaError> {
        let mut out = vec![T::ZERO; n];
        self.read(buffer, 0, &mut out)?;
        Ok(out)
    }

    /// Sets every byte of part of a buffer.
    pub fn fill(&self, buffer: &Buffer, at: usize, n: usize, byte: u8) -> Result<(), CudaError> {
        self.inside(buffer, at, n)?;
        self.bind()?;
        if n == 0 {
            return Ok(());
        }
        // SAFETY: in bounds, ordered by the stream.
        unsafe {
            result::memset_d8_async(buffer.address() + at as u64, byte, n, self.stream.handle())
        }
        .map_err(|e| self.error("cannot fill memory", e))
    }

    /// Sets every pair of bytes of part of a buffer, in order with launches. `at` and `n` are even.
    pub fn fill_halves(
        &self,
        buffer: &Buffer,
        at: usize,
        n: usize,
        x: u16,
    ) -> Result<(), CudaError> {
        self.inside(buffer, at, n)?;
        self.bind()?;
        // SAFETY: in bounds, ordered by the stream.
        unsafe {
            sys::cuMemsetD16Async(buffer.address() + at as u64, x, n / 2, self.stream.handle())
        }
        .result()
        .map_err(|e| self.error("cannot fill memory", e))
    }

    /// Copies within device memory, in order with launches.
    pub fn copy(
        &self,
        from: &Buffer,
        at: usize,
        to: &Buffer,
        to_at: usize,
        n: usize,
    ) -> Result<(), CudaError> {
        self.inside(from, at, n)?;
        self.inside(to, to_at, n)?;
        self.bind()?;
        if n == 0 {
            return Ok(());
        }
        let (src, dst) = (from.address() + at as u64, to.address() + to_at as u64);
        // SAFETY: in bounds, ordered by the stream.
        unsafe { result::memcpy_dtod_async(dst, src, n, self.stream.handle()) }
            .map_err(|e| self.error("cannot copy on the device", e))
    }

    /// Bytes a second that copies within device memory read and write, measured with 1 GiB of it.
    pub fn copy_bandwidth(&self) -> Result<f64, CudaError> {
        const HALF: usize = 512 << 20;
        const COPIES: u32 = 20;
        let [from, to] = [self.alloc(HALF, "a copy")?, self.alloc(HALF, "a copy")?];
        let copies = || -> Result<Duration, CudaError> {
            self.synchronize()?;
            let start = Instant::now();
            for _ in 0..COPIES {
                self.copy(&from, 0, &to, 0, HALF)?;
            }
            self.synchronize()?;
            Ok(start.elapsed())
        };
        copies()?; // the clock rises
        Ok(f64::from(COPIES) * 2.0 * HALF as f64 / copies()?.as_secs_f64())
    }

    fn inside(&self, buffer: &Buffer, at: usize, n: usize) -> Result<(), CudaError> {
        if at.checked_add(n).is_some_and(|end| end <= buffer.bytes()) {
            return Ok(());
        }
        Err(CudaError::Unsupported(format!(
            "bytes {at} and {n} more lie outside a buffer of {}",
            buffer.bytes()
        )))
    }

    /// Waits for everything launched.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: our stream.
        unsafe { result::stream::synchronize(self.stream.handle()) }
            .map_err(|e| self.error("a kernel failed", e))
    }

    /// Launches a kernel by its name in [`kernels::UNITS`]. It starts beside the one before and waits for it itself.
    ///
    /// # Safety
    /// The arguments must be those of the kernel's signature, in order, and stay inside their buffers.
    pub unsafe fn launch(
        &self,
        kernel: &'static str,
        shape: Shape,
        args: &Args,
    ) -> Result<(), CudaError> {
        let Some(&function) = self.card.functions.get(kernel) else {
            return Err(CudaError::Unsupported(format!("no kernel {kernel}")));
        };
        if shape.grid.contains(&0) {
            return Ok(());
        }
        self.bind()?;
        let mut pointers = args.pointers();
        let mut early: sys::CUlaunchAttribute = {
            // SAFETY: a plain C struct, for which zeros are valid.
            unsafe { std::mem::zeroed() }
        };
        early.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        early.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: shape.grid[0],
            gridDimY: shape.grid[1],
            gridDimZ: shape.grid[2],
            blockDimX: shape.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared,
            hStream: self.stream.handle(),
            attrs: &mut early,
            numAttrs: 1,
        };
        // SAFETY: the caller vouches for the arguments; everything pointed to lives until the call returns.
        unsafe {
            sys::cuLaunchKernelEx(
                &config,
                function,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .map_err(|e| self.error(format!("cannot launch {kernel}"), e))
    }

    /// A tensor map of a row-major bf16 matrix: boxes of 64 columns by `box_rows` rows, 128-byte swizzle, zeros outside.
    /// `columns` must be a multiple of 8.
    pub fn tensor_map(
        &self,
        buffer: &Buffer,
        rows: usize,
        columns: usize,
        box_rows: usize,
    ) -> Result<TensorMap, CudaError> {
        self.inside(buffer, 0, rows * columns * 2)?;
        self.bind()?;
        let mut map = TensorMap([0; 128]);
        let dims = [columns as u64, rows as u64];
        let strides = [columns as u64 * 2];
        let boxes = [64u32, box_rows as u32];
        let steps = [1u32, 1];
        // SAFETY: the map is 128 aligned bytes; arrays have the rank's length.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2,
                buffer.address() as *mut c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .map_err(|e| self.error("cannot describe a matrix", e))?;
        Ok(map)
    }
}

impl Card {
    fn load(&mut self, unit: &'static kernels::Unit, cubin: &[u8]) -> Result<(), CudaError> {
        let what = || format!("cannot load kernel {}", unit.name);
        // SAFETY: a whole cubin, which the driver copies.
        let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) }
            .map_err(|e| self.error(what(), e))?;
        self.modules.push(module);
        for kernel in unit.kernels {
            let symbol = CString::new(kernel.entry).unwrap_or_default();
            // SAFETY: the module is loaded and stays so.
            let function = unsafe { result::module::get_function(module, symbol) }
                .map_err(|e| self.error(what(), e))?;
            if kernel.dynamic > 48 << 10 {
                // SAFETY: a live function.
                unsafe {
                    result::function::set_function_attribute(
                        function,
                        sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        kernel.dynamic as i32,
                    )
                }
                .map_err(|e| self.error(what(), e))?;
            }
            self.functions.insert(kernel.name, function);
        }
        Ok(())
    }

    fn error(&self, what: impl Into<String>, error: DriverError) -> CudaError {
        CudaError::Driver {
            index: self.index,
            what: what.into(),
            why: driver_text(error),
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let _ = self.synchronize(); // before the last one unloads kernels
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        for &module in &self.modules {
            // SAFETY: loaded by us, nothing runs: every queue has ended.
            let _ = unsafe { result::module::unload(module) };
        }
    }
}

fn driver_text(error: DriverError) -> String {
    let part =
        |text: Result<&std::ffi::CStr, _>| text.map(|t| t.to_string_lossy().into_owned()).ok();
    match (part(error.error_name()), part(error.error_string())) {
        (Some(name), Some(text)) => format!("{text}, {name}"),
        _ => format!("{:?}", error.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_gpu_there_is_one_clear_line() {
        match Gpu::open(0, None) {
            Ok(gpu) => println!("not run: a machine without a GPU ({} is here)", gpu.name()),
            Err(error) => {
                let text = error.to_string();
                assert!(!text.contains('\n'), "{text}");
                assert!(
                    text.contains("CUDA") || text.contains("cuda:0") || text.contains("NVRTC"),
                    "{text}"
                );
            }
        }
    }
}
