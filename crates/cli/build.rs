//! Names the build: a hash of every source, of the locked dependencies and of what the compiler was told. Vendor bits may
//! differ between builds, so results and certificates that rest on them carry it.

use std::path::{Path, PathBuf};

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = vec![root.join("Cargo.toml"), root.join("Cargo.lock")];
    sources(&root.join("crates"), &mut files);
    files.sort();
    let mut hash = blake3::Hasher::new();
    for file in &files {
        // A package without the workspace around it is named by what is left.
        if let Ok(bytes) = std::fs::read(file) {
            let name = file.strip_prefix(&root).unwrap_or(file);
            hash.update(name.to_string_lossy().as_bytes());
            hash.update(blake3::hash(&bytes).as_bytes());
        }
    }
    for name in [
        "TARGET",
        "PROFILE",
        "OPT_LEVEL",
        "DEBUG",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_CFG_TARGET_FEATURE",
    ] {
        let value = std::env::var(name).unwrap_or_default();
        hash.update(format!("\n{name}={value}").as_bytes());
    }
    let compiler = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    if let Ok(version) = std::process::Command::new(compiler).arg("-vV").output() {
        hash.update(&version.stdout);
    }
    println!(
        "cargo:rustc-env=BLOCKLOCK_BUILD={}",
        &hash.finalize().to_hex()[..16]
    );
    for path in ["Cargo.toml", "Cargo.lock", "crates"] {
        println!("cargo:rerun-if-changed={}", root.join(path).display());
    }
}

/// Everything under `src/` folders and every manifest; tests change no build.
fn sources(folder: &Path, files: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for path in entries.map(|e| e.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            if !matches!(&*name, "tests" | "examples" | "target") {
                sources(&path, files);
            }
        } else if matches!(
            path.extension().and_then(|e| e.to_str()),
            Some("rs" | "cu" | "cuh" | "h" | "toml")
        ) {
            files.push(path);
        }
    }
}
