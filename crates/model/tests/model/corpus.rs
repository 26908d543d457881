//! Replays what fuzzing has found and started from.

use crate::watch::largest_allocation;
use std::path::Path;

fn replay(target: &str, run: fn(&[u8]) -> bool) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target);
    let mut seeds = 0;
    for entry in std::fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        let data = std::fs::read(&path).unwrap();
        let start = std::time::Instant::now();
        let (largest, model) = largest_allocation(|| run(&data));
        assert!(
            largest <= 16 << 20,
            "{path:?} allocated {largest} bytes at once"
        );
        assert!(
            start.elapsed().as_secs_f64() < 5.0,
            "{path:?} took {:?}",
            start.elapsed()
        );
        if path
            .file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("seed-")
        {
            assert!(model, "{path:?} should be a model");
            seeds += 1;
        }
    }
    assert_eq!(seeds, 3, "seeds in {dir:?}");
}

#[test]
fn gguf() {
    replay("gguf", model::fuzzing::fuzz_gguf);
}

#[test]
fn safetensors() {
    replay("safetensors", model::fuzzing::fuzz_safetensors);
}
