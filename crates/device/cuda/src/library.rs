//! Where CUDA's libraries may lie.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// The variable that names folders to look in, separated by colons; where set, no other place is tried.
pub const VARIABLE: &str = "BLOCKLOCK_CUDA_LIBRARIES";

/// Folders that may hold CUDA's libraries, in the order in which they are tried.
pub fn folders() -> Vec<PathBuf> {
    if let Some(list) = env::var_os(VARIABLE).filter(|v| !v.is_empty()) {
        return env::split_paths(&list).collect();
    }
    let mut found = Vec::new();
    let mut toolkit = |root: &Path| {
        for part in ["targets/x86_64-linux/lib", "lib64", "lib"] {
            found.push(root.join(part));
        }
    };
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(root) = env::var_os(variable).filter(|v| !v.is_empty()) {
            toolkit(Path::new(&root));
        }
    }
    // The newest first.
    let mut installed = matching(Path::new("/usr/local"), "cuda");
    installed.sort();
    installed.reverse();
    for root in &installed {
        toolkit(root);
    }
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        if let Some(root) = env::var_os(variable).filter(|v| !v.is_empty()) {
            let root = PathBuf::from(root);
            found.extend(wheels(&root.join("lib")));
            found.push(root.join("lib"));
        }
    }
    if let Some(home) = env::var_os("HOME") {
        found.extend(wheels(&Path::new(&home).join(".local/lib")));
    }
    found.extend(wheels(Path::new("/usr/local/lib")));
    found.extend(wheels(Path::new("/usr/lib")));
    found
}

/// `lib` folders of NVIDIA's Python wheels under `python3*/{site,dist}-packages/nvidia`.
fn wheels(lib: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for python in matching(lib, "python3") {
        for packages in ["site-packages", "dist-packages"] {
            for part in matching(&python.join(packages).join("nvidia"), "") {
                found.push(part.join("lib"));
            }
        }
    }
    found
}

/// Entries of a folder whose name begins with `prefix`, sorted; none where the folder cannot be read.
pub(crate) fn matching(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().starts_with(prefix))
        .map(|e| e.path())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_are_found_below_any_python() {
        let dir = tempfile::tempdir().unwrap();
        let lib = dir.path().join("python3.12/site-packages/nvidia/cu13/lib");
        fs::create_dir_all(&lib).unwrap();
        fs::create_dir_all(dir.path().join("perl")).unwrap();
        assert_eq!(wheels(dir.path()), [lib]);
        assert!(wheels(&dir.path().join("absent")).is_empty());
    }
}
