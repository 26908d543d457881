//! NVRTC, the compiler of kernels, loaded from wherever it lies. It needs no GPU.
//!
//! `cudarc` can only load it by name through the system's search path, which knows neither toolkits outside it nor
//! Python wheels; hence the few bindings here.

use crate::{CudaError, library};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

type Program = *mut c_void;

/// The functions used, as nvrtc.h declares them. The library stays loaded as long as this lives.
struct Functions {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    error: unsafe extern "C" fn(c_int) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    _library: Library,
}

/// NVRTC, loaded.
pub struct Nvrtc {
    functions: Functions,
    /// Major and minor version.
    pub version: (i32, i32),
    /// The file it was loaded from, or its bare name where the system's loader found it.
    pub path: PathBuf,
}

/// Machine code and what the compiler said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// The cubin (an ELF file).
    pub cubin: Vec<u8>,
    /// Warnings and the assembler's report.
    pub log: String,
}

const NAME: &str = "libnvrtc.so.13";

impl Nvrtc {
    /// Loads the first NVRTC 13 of [`library::folders`], else the system loader's.
    pub fn find() -> Result<Self, CudaError> {
        let folders = library::folders();
        for folder in &folders {
            let path = folder.join(NAME);
            if path.is_file() {
                return Self::load(&path);
            }
        }
        let only = std::env::var_os(library::VARIABLE).is_some_and(|v| !v.is_empty());
        if !only && let Ok(found) = Self::load(Path::new(NAME)) {
            return Ok(found);
        }
        let mut tried: Vec<String> = folders
            .iter()
            .filter(|f| only || f.is_dir())
            .map(|f| f.display().to_string())
            .collect();
        if !only {
            tried.push("the system's library path".into());
        }
        Err(CudaError::NoNvrtc {
            tried: tried.join(", "),
        })
    }

    /// Loads NVRTC from a file, or by name.
    pub fn load(path: &Path) -> Result<Self, CudaError> {
        let bad = |why: String| CudaError::BadNvrtc {
            path: path.to_path_buf(),
            why,
        };
        // NVRTC opens its built-in headers by bare name, which finds them only if they are loaded already.
        if let Some(folder) = path.parent() {
            for builtins in library::matching(folder, "libnvrtc-builtins.so.13") {
                // SAFETY: NVIDIA's library runs no code of ours on loading.
                if let Ok(lib) = unsafe { Library::open(Some(&builtins), RTLD_NOW | RTLD_GLOBAL) } {
                    std::mem::forget(lib);
                }
            }
        }
        // SAFETY: as above.
        let library = unsafe { Library::open(Some(path), RTLD_NOW) }
            .map_err(|e| bad(crate::error_text(&e)))?;
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the type is that of nvrtc.h for version 13.
                *unsafe { library.get($name) }.map_err(|e| bad(crate::error_text(&e)))?
            };
        }
        let functions = Functions {
            version: symbol!(b"nvrtcVersion\0"),
            error: symbol!(b"nvrtcGetErrorString\0"),
            create: symbol!(b"nvrtcCreateProgram\0"),
            destroy: symbol!(b"nvrtcDestroyProgram\0"),
            compile: symbol!(b"nvrtcCompileProgram\0"),
            cubin_size: symbol!(b"nvrtcGetCUBINSize\0"),
            cubin: symbol!(b"nvrtcGetCUBIN\0"),
            log_size: symbol!(b"nvrtcGetProgramLogSize\0"),
            log: symbol!(b"nvrtcGetProgramLog\0"),
            _library: library,
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two integers to write to.
        let code = unsafe { (functions.version)(&mut major, &mut minor) };
        if code != 0 || major != 13 {
            return Err(bad(format!("it is version {major}.{minor}, not 13")));
        }
        Ok(Self {
            functions,
            version: (major, minor),
            path: path.to_path_buf(),
        })
    }

    /// Compiles `source`, which may include `headers` (name, text), to machine code.
    pub fn compile(
        &self,
        kernel: &str,
        source: &str,
        headers: &[(&str, &str)],
        options: &[String],
    ) -> Result<Compiled, CudaError> {
        let failed = |log: String| CudaError::Compile {
            kernel: kernel.to_string(),
            log,
        };
        let text = |s: &str| CString::new(s).map_err(|e| failed(e.to_string()));
        let name = text(&format!("{kernel}.cu"))?;
        let source = text(source)?;
        let list = |items: Vec<&str>| items.into_iter().map(text).collect::<Result<Vec<_>, _>>();
        let names = list(headers.iter().map(|h| h.0).collect())?;
        let texts = list(headers.iter().map(|h| h.1).collect())?;
        let options = list(options.iter().map(String::as_str).collect())?;
        let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (names, texts, options) = (pointers(&names), pointers(&texts), pointers(&options));

        let f = &self.functions;
        let mut program: Program = ptr::null_mut();
        // SAFETY: all strings end in NUL and outlive the program, which is destroyed below.
        let code = unsafe {
            (f.create)(
                &mut program,
                source.as_ptr(),
                name.as_ptr(),
                names.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        if code != 0 {
            return Err(failed(self.error(code)));
        }
        // SAFETY: the program is live and the options end in NUL.
        let code = unsafe { (f.compile)(program, options.len() as c_int, options.as_ptr()) };
        let log = self.bytes(program, f.log_size, f.log);
        let cubin = match code {
            0 => self.bytes(program, f.cubin_size, f.cubin),
            code => Err(code),
        };
        // SAFETY: created above, used no more.
        unsafe { (f.destroy)(&mut program) };
        let log = log.unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let log = log.trim_end_matches('\0').trim();
        match cubin {
            Ok(cubin) => Ok(Compiled {
                cubin,
                log: log.to_string(),
            }),
            Err(code) => {
                let said = log.split_whitespace().collect::<Vec<_>>().join(" ");
                Err(failed(format!("{}: {said}", self.error(code))))
            }
        }
    }

    fn bytes(
        &self,
        program: Program,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, c_int> {
        let mut n = 0;
        // SAFETY: the program is live; NVRTC writes the size.
        let code = unsafe { size(program, &mut n) };
        if code != 0 {
            return Err(code);
        }
        let mut out = vec![0u8; n];
        // SAFETY: the buffer has the size that NVRTC asked for.
        match unsafe { get(program, out.as_mut_ptr().cast()) } {
            0 => Ok(out),
            code => Err(code),
        }
    }

    fn error(&self, code: c_int) -> String {
        // SAFETY: NVRTC returns a static string for every code.
        let text = unsafe { CStr::from_ptr((self.functions.error)(code)) };
        text.to_string_lossy().into_owned()
    }
}

impl std::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "NVRTC {}.{} at {}",
            self.version.0,
            self.version.1,
            self.path.display()
        )
    }
}
