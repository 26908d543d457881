//! What the fuzz targets call: readers of untrusted bytes, which may refuse but never panic, hang or allocate far beyond
//! the size of the input.

use crate::gguf::GgufFile;
use crate::hf::{self, Checkpoint};
use std::sync::Arc;

/// A GGUF file, down to the weights. True where it holds a model.
pub fn fuzz_gguf(data: &[u8]) -> bool {
    let file = match GgufFile::parse(Arc::new(data.to_vec())) {
        Ok(file) => file,
        Err(e) => return refused(e),
    };
    for tensor in file.tensors.values() {
        // What the reader promises: ranges in the file, as long as the shape says.
        let bytes = &data[tensor.range.clone()];
        let cols = tensor.shape[tensor.shape.len() - 1];
        let rows = tensor.shape.iter().product::<usize>() / cols;
        assert_eq!(
            tensor.dtype.row_bytes(cols).map(|n| n * rows),
            Some(bytes.len())
        );
    }
    file.model().map_or_else(refused, |_| true)
}

fn refused(e: impl std::fmt::Display) -> bool {
    assert!(!e.to_string().contains('\n'));
    false
}

/// config.json, whose length is the first four bytes (little-endian), then a safetensors file. True where they make a
/// model.
pub fn fuzz_safetensors(data: &[u8]) -> bool {
    let Some((length, rest)) = data.split_first_chunk::<4>() else {
        return false;
    };
    let length = u32::from_le_bytes(*length) as usize;
    let (config, file) = rest.split_at(length.min(rest.len()));
    let mut checkpoint = Checkpoint::default();
    if let Err(e) = checkpoint.add("model.safetensors", Arc::new(file.to_vec())) {
        refused(e);
    }
    hf::model(config, &checkpoint).map_or_else(refused, |_| true)
}
