//! cuBLASLt, the vendor's matrix products, loaded from wherever it lies.
//!
//! For the vendor family the library's heuristic is asked once for every geometry (tokens, outputs, width, type); its
//! algorithm is kept and used for that geometry from then on. Each queue's products have a workspace of their own, and
//! reductions never go through atomics or in place.
//!
//! Contract launches of many tokens use it too, where that is proven and fast: `chains`.

use crate::chains::Way;
use crate::gpu::{Buffer, Gpu};
use crate::launch::Linear;
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
pub(crate) const CANDIDATES: usize = 8;
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
pub(crate) struct Shape {
    pub tokens: usize,
    pub outputs: usize,
    pub width: usize,
    pub wide: bool,
    /// It must give the contract's bits.
    pub chain: bool,
}

/// What is kept for a geometry.
pub(crate) struct Plan {
    desc: Handle,
    w: Handle,
    x: Handle,
    y: Handle,
    found: Found,
    /// Its place in the heuristic's list.
    pub candidate: usize,
}

/// The library and the algorithms in use.
pub struct CublasLt {
    functions: Functions,
    handle: Handle,
    /// Where proofs run.
    pub(crate) proofs: Place,
    plans: RefCell<HashMap<Shape, Plan>>,
    /// `None`: nothing is proven to do it.
    pub(crate) chains: RefCell<HashMap<Shape, Option<Way>>>,
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
            chains: RefCell::default(),
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
            Entry::Vacant(new) => new.insert(self.plan(shape, 0)?),
        };
        self.run(place, plan, job)
    }

    pub(crate) fn run(&self, place: &Place, plan: &Plan, job: &Linear) -> Result<()> {
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

    /// Whether a plan's algorithm is one of those measured to be chains, and splits nothing.
    pub(crate) fn is_chain(&self, plan: &Plan) -> Result<bool> {
        let found = &plan.found;
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

    pub(crate) fn destroy(&self, plan: &Plan) {
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
    pub(crate) fn plan(&self, shape: Shape, candidate: usize) -> Result<Plan> {
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
            candidate,
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
        for plan in self.plans.borrow().values() {
            self.destroy(plan);
        }
        for way in self.chains.borrow().values().flatten() {
            if let Way::Library(plan) = way {
                self.destroy(plan);
            }
        }
        // SAFETY: made by us, nothing runs.
        unsafe { (self.functions.destroy)(self.handle) };
    }
}

impl Shape {
    pub fn new(job: &Linear, tokens: usize, chain: bool) -> Self {
        Self {
            tokens,
            outputs: job.outputs,
            width: job.width,
            wide: job.wide,
            chain,
        }
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
