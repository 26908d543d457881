//! cuBLASLt, the vendor's matrix products, loaded from wherever it lies.
//!
//! For the vendor family the library's heuristic is asked once for every geometry (tokens, outputs, width, type); its
//! algorithm is kept and used for that geometry from then on. Each queue's products have a workspace of their own, and
//! reductions never go through atomics or in place.
//!
//! Contract launches of many tokens use it too, where it is proven to give the chain's bits on this very machine: an
//! algorithm that does not split K, from a list measured to be chains, compared with our own kernel on adversarial data
//! before the first use of a geometry. Token counts are rounded up to few geometries; the rows added are nobody's.

use crate::gpu::{Buffer, Gpu};
use crate::launch::{self, Linear};
use crate::{CudaError, library};
use libloading::os::unix::{Library, RTLD_NOW};
use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{from_mut, from_ref, null_mut};
use std::sync::Arc;

type Result<T> = std::result::Result<T, CudaError>;
type Handle = *mut c_void;

const NAME: &str = "libcublasLt.so.13";

/// Bytes of the workspace: what NVIDIA advises for Hopper.
const WORKSPACE: usize = 32 << 20;

// Constants of cublasLt.h and library_types.h, version 13.
const COMPUTE_F32: c_int = 68;
const F32: c_int = 0;
const BF16: c_int = 14;
const TRANSPOSE_A: c_int = 3;
const TRANSPOSED: i32 = 1;
const MOST_WORKSPACE: c_int = 1;
const REDUCTIONS: c_int = 3;
const ALGORITHM: c_int = 0;
const SPLIT_K: c_int = 2;
const REDUCTION: c_int = 3;
/// Algorithms every measured run of which was the chain, where K is not split (docs/evidence).
const CHAINS: [i32; 6] = [66, 21, 23, 24, 41, 42];
/// Candidates looked at for one of them.
const CANDIDATES: usize = 8;
/// Through a workspace, in f32 or in the output's type; bit 0 would be in place.
const ALLOWED_REDUCTIONS: u32 = 2 | 4;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Found {
    algorithm: [u64; 8],
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// The functions used, as cublasLt.h declares them. The library stays loaded as long as this lives.
struct Functions {
    version: unsafe extern "C" fn() -> usize,
    create: unsafe extern "C" fn(*mut Handle) -> c_int,
    destroy: unsafe extern "C" fn(Handle) -> c_int,
    desc: unsafe extern "C" fn(*mut Handle, c_int, c_int) -> c_int,
    desc_set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int,
    desc_destroy: unsafe extern "C" fn(Handle) -> c_int,
    layout: unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> c_int,
    layout_destroy: unsafe extern "C" fn(Handle) -> c_int,
    preference: unsafe extern "C" fn(*mut Handle) -> c_int,
    preference_set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int,
    preference_destroy: unsafe extern "C" fn(Handle) -> c_int,
    heuristic: unsafe extern "C" fn(
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        c_int,
        *mut Found,
        *mut c_int,
    ) -> c_int,
    config: unsafe extern "C" fn(*const Found, c_int, *mut c_void, usize, *mut usize) -> c_int,
    matmul: unsafe extern "C" fn(
        Handle,
        Handle,
        *const c_void,
        *const c_void,
        Handle,
        *const c_void,
        Handle,
        *const c_void,
        *const c_void,
        Handle,
        *mut c_void,
        Handle,
        *const Found,
        *mut c_void,
        usize,
        *mut c_void,
    ) -> c_int,
    _library: Library,
}

/// A geometry of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    tokens: usize,
    outputs: usize,
    width: usize,
    wide: bool,
    /// It must give the contract's bits.
    chain: bool,
}

/// What is kept for a geometry.
struct Plan {
    desc: Handle,
    w: Handle,
    x: Handle,
    y: Handle,
    found: Found,
}

/// The library and the algorithms in use.
pub struct CublasLt {
    functions: Functions,
    handle: Handle,
    /// Where proofs run.
    proofs: Place,
    /// `None`: nothing is proven to do it.
    plans: RefCell<HashMap<Shape, Option<Plan>>>,
    version: usize,
}

/// Where products run: a queue and its workspace.
pub struct Place {
    /// The queue.
    pub gpu: Arc<Gpu>,
    workspace: Buffer,
}

impl Place {
    /// With a workspace.
    pub fn new(gpu: Arc<Gpu>) -> Result<Self> {
        let workspace = gpu.alloc(WORKSPACE, "the workspace of products")?;
        Ok(Self { gpu, workspace })
    }
}

// SAFETY: the library's handles may be used from any thread, one at a time.
unsafe impl Send for CublasLt {}

/// The library's file, or why there is none.
fn find() -> Result<Library> {
    let bad = |path: &Path, why: String| CudaError::BadCublasLt {
        path: path.to_path_buf(),
        why,
    };
    // SAFETY: NVIDIA's library runs no code of ours on loading.
    let open = |path: &Path| unsafe { Library::open(Some(path), RTLD_NOW) };
    let folders = library::folders();
    let found = folders.iter().map(|f| f.join(NAME)).find(|p| p.is_file());
    if let Some(path) = found {
        return open(&path).map_err(|e| bad(&path, crate::error_text(&e)));
    }
    let only = std::env::var_os(library::VARIABLE).is_some_and(|v| !v.is_empty());
    if !only && let Ok(library) = open(Path::new(NAME)) {
        return Ok(library);
    }
    let seen = |f: &&PathBuf| only || f.is_dir();
    let tried = folders.iter().filter(seen);
    let mut tried: Vec<String> = tried.map(|f| f.display().to_string()).collect();
    if !only {
        tried.push("the system's library path".into());
    }
    Err(CudaError::NoCublasLt {
        tried: tried.join(", "),
    })
}

impl CublasLt {
    /// Loads the first cuBLASLt 13 of [`library::folders`], else the system loader's.
    pub fn open(gpu: Arc<Gpu>) -> Result<Self> {
        let library = find()?;
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the type is that of cublasLt.h for version 13.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }.map_err(|e| {
                    CudaError::BadCublasLt {
                        path: NAME.into(),
                        why: crate::error_text(&e),
                    }
                })?
            };
        }
        let functions = Functions {
            version: symbol!("cublasLtGetVersion"),
            create: symbol!("cublasLtCreate"),
            destroy: symbol!("cublasLtDestroy"),
            desc: symbol!("cublasLtMatmulDescCreate"),
            desc_set: symbol!("cublasLtMatmulDescSetAttribute"),
            desc_destroy: symbol!("cublasLtMatmulDescDestroy"),
            layout: symbol!("cublasLtMatrixLayoutCreate"),
            layout_destroy: symbol!("cublasLtMatrixLayoutDestroy"),
            preference: symbol!("cublasLtMatmulPreferenceCreate"),
            preference_set: symbol!("cublasLtMatmulPreferenceSetAttribute"),
            preference_destroy: symbol!("cublasLtMatmulPreferenceDestroy"),
            heuristic: symbol!("cublasLtMatmulAlgoGetHeuristic"),
            config: symbol!("cublasLtMatmulAlgoConfigGetAttribute"),
            matmul: symbol!("cublasLtMatmul"),
            _library: library,
        };
        let proofs = Place::new(gpu)?;
        let mut handle = null_mut();
        // SAFETY: a pointer to write to; the context is bound by `alloc`.
        done(unsafe { (functions.create)(&mut handle) }, "cublasLtCreate")?;
        // SAFETY: no arguments.
        let version = unsafe { (functions.version)() };
        Ok(Self {
            functions,
            handle,
            proofs,
            plans: RefCell::default(),
            version,
        })
    }

    /// Its version, as cuBLAS numbers itself.
    pub fn version(&self) -> String {
        let v = self.version;
        format!("{}.{}.{}", v / 10000, v / 100 % 100, v % 100)
    }

    /// `y = x · Wᵀ` for the vendor family; a bias is the caller's.
    pub fn product(&self, place: &Place, job: &Linear) -> Result<()> {
        job.check()?;
        let shape = Shape::new(job, job.tokens, false);
        let mut plans = self.plans.borrow_mut();
        let plan = match plans.entry(shape) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(Some(self.plan(shape, 0)?)),
        };
        match plan {
            Some(plan) => self.run(place, plan, job),
            None => Err(CudaError::Unsupported("no plan for a product".into())),
        }
    }

    /// The same with the chain's bits. `false`: not done, since nothing is proven for this geometry or there is no room for
    /// the rows added.
    pub fn chain(&self, place: &Place, job: &Linear) -> Result<bool> {
        let tokens = rounded(job.tokens);
        let element = if job.wide { 4 } else { 2 };
        let fits = tokens * job.width * 2 <= job.x.bytes()
            && tokens * job.outputs * element <= job.y.bytes();
        if job.bias.is_some() || !job.width.is_multiple_of(8) || !fits {
            return Ok(false);
        }
        job.check()?;
        let shape = Shape::new(job, tokens, true);
        let mut plans = self.plans.borrow_mut();
        let plan = match plans.entry(shape) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(self.proven(shape)?),
        };
        match plan {
            Some(plan) => self.run(place, plan, job).map(|()| true),
            None => Ok(false),
        }
    }

    fn run(&self, place: &Place, plan: &Plan, job: &Linear) -> Result<()> {
        let (one, zero) = (1f32, 0f32);
        let address = |b: &Buffer| b.address() as *mut c_void;
        let y = address(job.y);
        place.gpu.bind()?;
        // SAFETY: layouts are those of the buffers, whose sizes were checked; the workspace is as large as was said; the
        // algorithm is the library's own for this geometry.
        let status = unsafe {
            (self.functions.matmul)(
                self.handle,
                plan.desc,
                from_ref(&one).cast(),
                address(job.w),
                plan.w,
                address(job.x),
                plan.x,
                from_ref(&zero).cast(),
                y,
                plan.y,
                y,
                plan.y,
                &plan.found,
                address(&place.workspace),
                WORKSPACE,
                place.gpu.stream(),
            )
        };
        done(status, "cublasLtMatmul")
    }

    /// The first candidate that gives our own kernel's bits on adversarial data, if any does.
    fn proven(&self, shape: Shape) -> Result<Option<Plan>> {
        let (gpu, t, n, k) = (&self.proofs.gpu, shape.tokens, shape.outputs, shape.width);
        let element = if shape.wide { 4 } else { 2 };
        let room = |bytes| gpu.alloc(bytes, "the proof of a product");
        let buffers = (|| {
            Ok::<_, CudaError>([
                room(t * k * 2)?,
                room(n * k * 2)?,
                room(t * n * element)?,
                room(t * n * element)?,
            ])
        })();
        let [x, w, want, got] = match buffers {
            Ok(buffers) => buffers,
            Err(CudaError::OutOfMemory { .. }) => {
                tracing::warn!(
                    "no memory to prove a product of {t} x {n} x {k}; our own kernel does it"
                );
                return Ok(None);
            }
            Err(other) => return Err(other),
        };
        launch::adverse(gpu, &x, t * k, k, 1)?;
        launch::adverse(gpu, &w, n * k, k, 2)?;
        let mut job = Linear {
            x: &x,
            w: &w,
            bias: None,
            y: &want,
            wide: shape.wide,
            tokens: t,
            outputs: n,
            width: k,
        };
        job.run(gpu, job.best(gpu.multiprocessors()))?;
        job.y = &got;
        for candidate in 0..CANDIDATES {
            let Ok(plan) = self.plan(shape, candidate) else {
                break; // there are no more
            };
            if self.is_chain(&plan.found)? {
                gpu.fill(&got, 0, got.bytes(), 0xff)?;
                self.run(&self.proofs, &plan, &job)?;
                if launch::same(gpu, &want, &got, t * n * element)? {
                    return Ok(Some(plan));
                }
                tracing::warn!(
                    "cuBLASLt's candidate {candidate} for {t} x {n} x {k} is no chain; not used"
                );
            }
            self.destroy(&plan);
        }
        Ok(None)
    }

    fn is_chain(&self, found: &Found) -> Result<bool> {
        let get = |name| {
            let (mut value, mut size) = (0i32, 0usize);
            // SAFETY: the attributes asked for are four bytes wide.
            let status = unsafe {
                (self.functions.config)(found, name, from_mut(&mut value).cast(), 4, &mut size)
            };
            done(status, "cublasLtMatmulAlgoConfigGetAttribute").map(|()| value)
        };
        Ok(CHAINS.contains(&get(ALGORITHM)?) && get(SPLIT_K)? == 1 && get(REDUCTION)? == 0)
    }

    fn destroy(&self, plan: &Plan) {
        let f = &self.functions;
        // SAFETY: made by us and used no more; the library keeps nothing of them once a product is queued.
        unsafe {
            (f.desc_destroy)(plan.desc);
            for layout in [plan.w, plan.x, plan.y] {
                (f.layout_destroy)(layout);
            }
        }
    }

    /// The heuristic's candidate of this number. Column-major, as the library sees it: yᵀ `[outputs × tokens]` = Wᵀᵀ · xᵀ.
    fn plan(&self, shape: Shape, candidate: usize) -> Result<Plan> {
        let f = &self.functions;
        let (n, t, k) = (
            shape.outputs as u64,
            shape.tokens as u64,
            shape.width as u64,
        );
        let layout = |kind, rows, columns| {
            let mut layout = null_mut();
            // SAFETY: a pointer to write to.
            let status = unsafe { (f.layout)(&mut layout, kind, rows, columns, rows as i64) };
            done(status, "cublasLtMatrixLayoutCreate").map(|()| layout)
        };
        let mut plan = Plan {
            desc: null_mut(),
            w: layout(BF16, k, n)?,
            x: layout(BF16, k, t)?,
            y: layout(if shape.wide { F32 } else { BF16 }, n, t)?,
            found: Found::default(),
        };
        let mut preference = null_mut();
        let mut found = [Found::default(); CANDIDATES];
        let mut count = 0;
        let reductions = if shape.chain { 0 } else { ALLOWED_REDUCTIONS };
        // SAFETY: handles made here, values of the sizes said.
        unsafe {
            let status = (f.desc)(&mut plan.desc, COMPUTE_F32, F32);
            done(status, "cublasLtMatmulDescCreate")?;
            let status = (f.desc_set)(plan.desc, TRANSPOSE_A, from_ref(&TRANSPOSED).cast(), 4);
            done(status, "cublasLtMatmulDescSetAttribute")?;
            done(
                (f.preference)(&mut preference),
                "cublasLtMatmulPreferenceCreate",
            )?;
            let set = |name, value: *const c_void, size| {
                let status = (f.preference_set)(preference, name, value, size);
                done(status, "cublasLtMatmulPreferenceSetAttribute")
            };
            set(MOST_WORKSPACE, from_ref(&WORKSPACE).cast(), 8)?;
            set(REDUCTIONS, from_ref(&reductions).cast(), 4)?;
            let status = (f.heuristic)(
                self.handle,
                plan.desc,
                plan.w,
                plan.x,
                plan.y,
                plan.y,
                preference,
                candidate as c_int + 1,
                found.as_mut_ptr(),
                &mut count,
            );
            (f.preference_destroy)(preference);
            done(status, "cublasLtMatmulAlgoGetHeuristic")?;
        }
        plan.found = found[candidate];
        if (count as usize) <= candidate {
            self.destroy(&plan);
            return Err(CudaError::Unsupported(format!(
                "cuBLASLt has no product of {t} tokens by {n} outputs over {k}"
            )));
        }
        Ok(plan)
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        let _ = self.proofs.gpu.synchronize();
        for plan in self.plans.borrow().values().flatten() {
            self.destroy(plan);
        }
        // SAFETY: made by us, nothing runs.
        unsafe { (self.functions.destroy)(self.handle) };
    }
}

impl Shape {
    fn new(job: &Linear, tokens: usize, chain: bool) -> Self {
        Self {
            tokens,
            outputs: job.outputs,
            width: job.width,
            wide: job.wide,
            chain,
        }
    }
}

/// The token count whose geometry serves this one: at most an eighth more above 512, no more than the next power of two, and
/// none at which the library's unsplit products were found slow.
fn rounded(tokens: usize) -> usize {
    match tokens {
        0..=256 => tokens.next_multiple_of(128),
        257..=1024 => tokens.next_multiple_of(64),
        _ => tokens.next_multiple_of(128),
    }
}

fn done(status: c_int, what: &str) -> Result<()> {
    match status {
        0 => Ok(()),
        status => Err(CudaError::CublasLt {
            what: what.into(),
            status,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounded_counts_are_few_and_fit_the_next_power_of_two() {
        let mut seen = std::collections::HashSet::new();
        for tokens in 65..=8192usize {
            let r = rounded(tokens);
            assert!(
                tokens <= r && r <= tokens.next_power_of_two(),
                "{tokens}: {r}"
            );
            assert!(tokens <= 512 || r - tokens <= tokens / 8, "{tokens}: {r}");
            seen.insert(r);
        }
        assert!(seen.len() < 75, "{}", seen.len());
    }

    #[test]
    fn where_it_is_missing_one_line_says_so() {
        match find() {
            Ok(_) => println!("not run: a machine without cuBLASLt (it is here)"),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains(NAME) && !text.contains('\n'), "{text}");
            }
        }
    }
}
