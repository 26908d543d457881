//! Compiled kernels on disk, so that each is compiled once a machine.
//!
//! A file's name is a hash of everything that decides its content: source, headers, options, compiler version and
//! architecture. Files are written aside and renamed, and carry a hash of what they hold: a torn or altered one is
//! compiled again. A folder that cannot be written costs a warning and time, nothing else.

use crate::kernels::{self, UNITS, Unit};
use crate::report::{self, Resources};
use crate::{CudaError, Nvrtc};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

const MAGIC: &[u8; 16] = b"blocklock cubin1";

/// The architecture that the kernels are written for.
pub const ARCH: &str = "sm_90a";

/// A folder of compiled kernels, or none.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: Option<PathBuf>,
}

/// A unit ready to load.
#[derive(Debug, Clone)]
pub struct Built {
    /// Its name in [`kernels::UNITS`].
    pub name: &'static str,
    /// Machine code.
    pub cubin: Vec<u8>,
    /// One entry a kernel.
    pub resources: Vec<Resources>,
    /// Whether it came from the cache.
    pub cached: bool,
}

impl Cache {
    /// Keeps compiled kernels in `folder`, or nowhere.
    pub fn new(folder: Option<PathBuf>) -> Self {
        Self { folder }
    }

    /// A unit's machine code, from the folder or from the compiler.
    pub fn build(
        &self,
        nvrtc: &Nvrtc,
        unit: &'static Unit,
        arch: &str,
    ) -> Result<Built, CudaError> {
        let path = self.folder.as_ref().map(|f| {
            f.join(format!(
                "{}-{}.cubin",
                unit.name,
                key(nvrtc.version, unit, arch)
            ))
        });
        let built = |cubin, log: &str, cached| Built {
            name: unit.name,
            cubin,
            resources: report::parse(log),
            cached,
        };
        if let Some(path) = &path
            && let Some((cubin, log)) = read(path)
        {
            return Ok(built(cubin, &log, true));
        }
        let options = kernels::options(unit, arch);
        let compiled = nvrtc.compile(unit.name, unit.source, kernels::HEADERS, &options)?;
        if let Some(path) = &path
            && let Err(error) = write(path, &compiled.cubin, &compiled.log)
        {
            tracing::warn!(
                "compiled kernels cannot be kept at {}, so they are compiled anew each time: {error}",
                path.display()
            );
        }
        Ok(built(compiled.cubin, &compiled.log, false))
    }

    /// Every unit, in order; several are compiled at once.
    pub fn build_all(&self, nvrtc: &Nvrtc, arch: &str) -> Result<Vec<Built>, CudaError> {
        let next = AtomicUsize::new(0);
        let workers = std::thread::available_parallelism().map_or(1, |n| n.get());
        let work = || {
            let mut mine = Vec::new();
            while let Some(unit) = UNITS.get(next.fetch_add(1, Ordering::Relaxed)) {
                mine.push(self.build(nvrtc, unit, arch));
            }
            mine
        };
        let mut built = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
            let results = threads.into_iter().filter_map(|t| t.join().ok()).flatten();
            results.collect::<Result<Vec<_>, _>>()
        })?;
        let place = |b: &Built| UNITS.iter().position(|u| u.name == b.name);
        built.sort_by_key(place);
        match built.len() == UNITS.len() {
            true => Ok(built),
            false => Err(CudaError::Unsupported(
                "a thread of the kernels' compiler panicked".into(),
            )),
        }
    }
}

/// A hash of everything that decides a unit's machine code.
pub fn key(version: (i32, i32), unit: &Unit, arch: &str) -> String {
    let mut hash = blake3::Hasher::new_derive_key("blocklock cubin cache v1");
    let mut field = |bytes: &[u8]| {
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    field(format!("nvrtc {}.{}", version.0, version.1).as_bytes());
    for option in kernels::options(unit, arch) {
        field(option.as_bytes());
    }
    field(unit.source.as_bytes());
    for (name, text) in kernels::HEADERS {
        field(name.as_bytes());
        field(text.as_bytes());
    }
    hash.finalize().to_hex()[..32].to_string()
}

/// Machine code and log of a whole, unaltered file.
fn read(path: &Path) -> Option<(Vec<u8>, String)> {
    let bytes = fs::read(path).ok()?;
    let rest = bytes.strip_prefix(MAGIC)?;
    let (hash, payload) = rest.split_at_checked(32)?;
    if blake3::hash(payload).as_bytes() != hash {
        tracing::warn!("{} is damaged; compiling it again", path.display());
        return None;
    }
    let (length, rest) = payload.split_first_chunk::<8>()?;
    let (log, cubin) = rest.split_at_checked(u64::from_le_bytes(*length) as usize)?;
    Some((cubin.to_vec(), String::from_utf8(log.to_vec()).ok()?))
}

/// Writes aside, then renames, so that a reader sees a whole file or none.
fn write(path: &Path, cubin: &[u8], log: &str) -> std::io::Result<()> {
    let mut payload = (log.len() as u64).to_le_bytes().to_vec();
    payload.extend_from_slice(log.as_bytes());
    payload.extend_from_slice(cubin);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let aside = path.with_extension(format!("{}.part", std::process::id()));
    let result = fs::File::create(&aside)
        .and_then(|mut file| {
            file.write_all(MAGIC)?;
            file.write_all(blake3::hash(&payload).as_bytes())?;
            file.write_all(&payload)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&aside, path));
    if result.is_err() {
        let _ = fs::remove_file(&aside);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_comes_back_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deeper/k.cubin");
        write(&path, b"machine code", "log").unwrap();
        assert_eq!(
            read(&path),
            Some((b"machine code".to_vec(), "log".to_string()))
        );
        let whole = fs::read(&path).unwrap();
        for cut in 0..whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(read(&path), None, "cut at {cut}");
        }
        for at in 0..whole.len() {
            let mut bad = whole.clone();
            bad[at] ^= 1;
            fs::write(&path, &bad).unwrap();
            assert_eq!(read(&path), None, "altered at {at}");
        }
        let left = fs::read_dir(dir.path().join("deeper")).unwrap().count();
        assert_eq!(left, 1, "nothing is left aside");
    }

    #[test]
    fn everything_that_decides_the_code_is_in_the_key() {
        let unit = &kernels::UNITS[0];
        let other = &kernels::UNITS[1];
        let base = key((13, 0), unit, ARCH);
        assert_eq!(base, key((13, 0), unit, ARCH));
        assert_ne!(base, key((13, 1), unit, ARCH));
        assert_ne!(base, key((13, 0), unit, "sm_100a"));
        assert_ne!(base, key((13, 0), other, ARCH));
    }

    #[test]
    fn kernels_are_compiled_once_and_damage_is_repaired() {
        let nvrtc = match Nvrtc::find() {
            Ok(nvrtc) => nvrtc,
            Err(error) => {
                println!("not run: the kernel cache with a compiler ({error})");
                return;
            }
        };
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(dir.path().to_path_buf()));
        let unit = kernels::unit("embed").unwrap();
        let first = cache.build(&nvrtc, unit, ARCH).unwrap();
        let second = cache.build(&nvrtc, unit, ARCH).unwrap();
        assert!(!first.cached && second.cached);
        assert_eq!(first.resources, second.resources);
        assert_eq!(first.cubin, second.cubin);
        let file = fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap();
        let mut bytes = fs::read(file.path()).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(file.path(), bytes).unwrap();
        assert!(!cache.build(&nvrtc, unit, ARCH).unwrap().cached);
        assert!(cache.build(&nvrtc, unit, ARCH).unwrap().cached);

        // A path below a file can't be created, whoever runs this.
        let blocked = Cache::new(Some(file.path().join("below")));
        assert!(!blocked.build(&nvrtc, unit, ARCH).unwrap().cached);
    }
}
