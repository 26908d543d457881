//! GGUF files that must be refused: quickly, in one line, without a large allocation.

use crate::watch::refused;
use model::gguf::{GgufFile, GgufModelError, Value};
use model::synthetic::Synthetic;
use model::testing::{self, Written};
use model::{ModelConfig, Weights};
use std::sync::Arc;

pub fn load(bytes: Vec<u8>) -> Result<(ModelConfig, Weights), GgufModelError> {
    GgufFile::parse(Arc::new(bytes))?.model()
}

/// A model's file before it is written.
pub struct Parts {
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<Written>,
}

impl Parts {
    pub fn tiny() -> Self {
        let s = Synthetic::parse("tiny-llama").unwrap();
        Self {
            metadata: testing::gguf_metadata(&s.config()),
            tensors: testing::gguf_tensors(&s.config(), &s.weights()),
        }
    }

    pub fn file(&self) -> Vec<u8> {
        testing::gguf_file(&self.metadata, &self.tensors)
    }

    pub fn set(&mut self, key: &str, value: Value) {
        self.metadata.retain(|(k, _)| k != key);
        self.metadata.push((key.to_string(), value));
    }

    pub fn tensor(&mut self, name: &str) -> &mut Written {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap()
    }
}

/// A file from fields: each element is appended little-endian.
enum F<'a> {
    U32(u32),
    U64(u64),
    Str(&'a str),
    Raw(&'a [u8]),
}

fn raw(fields: &[F]) -> Vec<u8> {
    let mut out = Vec::new();
    for f in fields {
        match f {
            F::U32(n) => out.extend(n.to_le_bytes()),
            F::U64(n) => out.extend(n.to_le_bytes()),
            F::Str(s) => {
                out.extend((s.len() as u64).to_le_bytes());
                out.extend(s.as_bytes());
            }
            F::Raw(b) => out.extend_from_slice(b),
        }
    }
    out
}

/// A file with these counts and this rest.
fn headed(tensors: u64, pairs: u64, rest: &[F]) -> Vec<u8> {
    let mut out = raw(&[F::Raw(b"GGUF"), F::U32(3), F::U64(tensors), F::U64(pairs)]);
    out.extend(raw(rest));
    out
}

/// A file with one tensor: its dimensions (fastest first), type number and offset, and `data` bytes after the header.
fn one_tensor(dims: &[u64], kind: u32, offset: u64, data: usize) -> Vec<u8> {
    let mut out = headed(1, 0, &[F::Str("t"), F::U32(dims.len() as u32)]);
    out.extend(dims.iter().flat_map(|d| d.to_le_bytes()));
    out.extend(raw(&[F::U32(kind), F::U64(offset)]));
    out.resize(out.len().next_multiple_of(32) + data, 0);
    out
}

#[test]
fn malformed_files_are_refused() {
    let max = u64::MAX;
    let nested = |depth: usize| {
        let mut out = headed(0, 1, &[F::Str("k"), F::U32(9)]);
        for _ in 1..depth {
            out.extend(raw(&[F::U32(9), F::U64(1)]));
        }
        out.extend(raw(&[F::U32(4), F::U64(0)]));
        out
    };
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (
            vec![],
            "not a GGUF file: it starts with nothing, allowed: \"GGUF\"",
        ),
        (
            b"GG".to_vec(),
            "not a GGUF file: it starts with \"GG\", allowed: \"GGUF\"",
        ),
        (
            b"PK\x03\x04....".to_vec(),
            "not a GGUF file: it starts with \"PK\\x03\\x04\", allowed: \"GGUF\"",
        ),
        (
            b"GGUF".to_vec(),
            "version at byte 4 takes 4 bytes, but the file has only 0 left",
        ),
        (
            raw(&[F::Raw(b"GGUF"), F::U32(1)]),
            "GGUF version 1 at byte 4 is not supported, allowed: 2 and 3, little-endian",
        ),
        (
            raw(&[F::Raw(b"GGUF"), F::U32(3 << 24)]),
            "GGUF version 50331648 at byte 4 is not supported, allowed: 2 and 3, little-endian",
        ),
        (
            headed(max, 0, &[]),
            "tensor count 18446744073709551615 at byte 8 takes 590295810358705651688 bytes, but the file has only 16 left",
        ),
        (
            headed(0, max, &[]),
            "metadata count 18446744073709551615 at byte 16 takes 239807672958224171003 bytes, but the file has only 8 left",
        ),
        (
            headed(0, 1, &[F::U64(max), F::Raw(&[0; 40])]),
            "a metadata key 18446744073709551615 at byte 24 takes 18446744073709551623 bytes, but the file has only 48 left",
        ),
        (
            headed(0, 1, &[F::U64(0), F::Raw(&[0; 40])]),
            "length of a metadata key at byte 24 is 0, allowed: 1 to 65535",
        ),
        (
            headed(0, 1, &[F::U64(70_000), F::Raw(&[b'k'; 80_000])]),
            "length of a metadata key at byte 24 is 70000, allowed: 1 to 65535",
        ),
        (
            headed(0, 1, &[F::U64(2), F::Raw(&[0xff; 40])]),
            "a metadata key at byte 32 is not UTF-8, allowed: UTF-8",
        ),
        (
            headed(0, 1, &[F::Str("k\n"), F::U32(13)]),
            "type of metadata key \"k\\n\" at byte 34 is 13, allowed: 0 to 12",
        ),
        (
            headed(0, 1, &[F::Str("k"), F::U32(7), F::Raw(&[2])]),
            "metadata key \"k\" at byte 37 is boolean 2, allowed: 0 or 1",
        ),
        (
            headed(0, 1, &[F::Str("k"), F::U32(8), F::U64(max)]),
            "metadata key \"k\" 18446744073709551615 at byte 37 takes 18446744073709551623 bytes, but the file has only 8 left",
        ),
        (
            headed(0, 1, &[F::Str("k"), F::U32(9), F::U32(8), F::U64(max)]),
            "metadata key \"k\" 18446744073709551615 at byte 41 takes 147573952589676412928 bytes, but the file has only 8 left",
        ),
        (
            headed(0, 1, &[F::Str("k"), F::U32(9), F::U32(9), F::U64(max)]),
            "metadata key \"k\" 18446744073709551615 at byte 41 takes 221360928884514619388 bytes, but the file has only 8 left",
        ),
        (
            headed(0, 1, &[F::Str("k"), F::U32(9), F::U32(12), F::U64(1 << 61)]),
            "metadata key \"k\" 2305843009213693952 at byte 41 takes 18446744073709551624 bytes, but the file has only 8 left",
        ),
        (
            headed(0, 1, &[F::Str("k"), F::U32(9), F::U32(13), F::U64(0)]),
            "type of metadata key \"k\" at byte 37 is 13, allowed: 0 to 12",
        ),
        (
            nested(5),
            "metadata key \"k\" at byte 85 is arrays nested 5 deep, allowed: at most 4",
        ),
        (
            headed(
                0,
                2,
                &[
                    F::Str("k"),
                    F::U32(4),
                    F::U32(0),
                    F::Str("k"),
                    F::U32(0),
                    F::Raw(&[0]),
                ],
            ),
            "key \"k\" at byte 41 appears twice, allowed: once",
        ),
        (
            headed(0, 1, &[F::Str("general.alignment"), F::U32(4), F::U32(0)]),
            "metadata key \"general.alignment\" is 0, allowed: a power of two from 8 to 1048576",
        ),
        (
            headed(0, 1, &[F::Str("general.alignment"), F::U32(4), F::U32(48)]),
            "metadata key \"general.alignment\" is 48, allowed: a power of two from 8 to 1048576",
        ),
        (
            headed(0, 1, &[F::Str("general.alignment"), F::U32(8), F::Str("8")]),
            "metadata key \"general.alignment\" is string \"8\", allowed: an integer that is not negative",
        ),
        (
            one_tensor(&[], 0, 0, 64),
            "tensor \"t\": the number of dimensions is 0, allowed: 1 to 4",
        ),
        (
            one_tensor(&[1; 5], 0, 0, 64),
            "tensor \"t\": the number of dimensions is 5, allowed: 1 to 4",
        ),
        (
            one_tensor(&[4, 0], 0, 0, 64),
            "tensor \"t\": a dimension is 0, allowed: 1 or more",
        ),
        (
            one_tensor(&[max, max], 0, 0, 64),
            "tensor \"t\": its row length is 18446744073709551615, allowed: a multiple of 1 for F32",
        ),
        (
            one_tensor(&[1 << 40, 1 << 40], 0, 0, 64),
            "tensor \"t\": its extent is [1099511627776, 1099511627776] at offset 0, allowed: what fits in the file",
        ),
        (
            one_tensor(&[33], 3, 0, 64),
            "tensor \"t\": its row length is 33, allowed: a multiple of 32 for Q4_1",
        ),
        (
            one_tensor(&[128], 12, 0, 64),
            "tensor \"t\": its row length is 128, allowed: a multiple of 256 for Q4_K",
        ),
        (
            one_tensor(&[4], 10, 0, 64),
            "tensor \"t\": its type is Q2_K, allowed: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K",
        ),
        (
            one_tensor(&[4], 777, 0, 64),
            "tensor \"t\": its type is number 777, allowed: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K",
        ),
        (
            one_tensor(&[4], 0, 31, 64),
            "tensor \"t\": its offset is 31, allowed: a multiple of 32",
        ),
        (
            one_tensor(&[16], 0, max - 31, 64),
            "tensor \"t\": its extent is [16] at offset 18446744073709551584, allowed: what fits in the file",
        ),
        (
            one_tensor(&[4], 0, max - 63, 64),
            "tensor \"t\": its byte range is 18446744073709551552..18446744073709551568 after byte 64, allowed: up to 64, the file's end",
        ),
        (
            one_tensor(&[17], 0, 0, 64),
            "tensor \"t\": its byte range is 0..68 after byte 64, allowed: up to 64, the file's end",
        ),
        (
            one_tensor(&[4], 0, 64, 64),
            "tensor \"t\": its byte range is 64..80 after byte 64, allowed: up to 64, the file's end",
        ),
    ];
    for (bytes, expected) in cases {
        assert_eq!(refused(|| load(bytes.clone())), expected);
    }
    // Allowed, down to the missing architecture.
    for bytes in [
        nested(4),
        one_tensor(&[16], 0, 0, 64),
        one_tensor(&[1, 1, 1, 16], 0, 0, 64),
    ] {
        assert_eq!(
            refused(|| load(bytes.clone())),
            "metadata key \"general.architecture\" is missing"
        );
    }
}

#[test]
fn truncation_at_every_byte_is_refused() {
    let file = Parts::tiny().file();
    let header = file
        .windows(18)
        .rposition(|w| w == b"output_norm.weight")
        .unwrap()
        + 100;
    let cuts = (0..header).chain((header..file.len()).step_by(4099));
    for cut in cuts.chain([file.len() - 1]) {
        let message = refused(|| load(file[..cut].to_vec()));
        let named = ["the file has only", "not a GGUF file", "the file's end"];
        assert!(
            named.iter().any(|n| message.contains(n)),
            "cut at {cut}: {message}"
        );
    }
    assert!(load(file).is_ok());
}

#[test]
fn every_flipped_header_byte_is_refused_or_harmless() {
    let file = Parts::tiny().file();
    let header = file
        .windows(18)
        .rposition(|w| w == b"output_norm.weight")
        .unwrap()
        + 100;
    let mut loaded = 0;
    for at in 0..header {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut bytes = file.clone();
            bytes[at] = value;
            loaded += u32::from(load(bytes).is_ok());
        }
    }
    // Some bytes do not matter (a longer context, another epsilon); most do.
    assert!(
        loaded > 0 && loaded < 5 * header as u32 / 4,
        "{loaded} of {}",
        5 * header
    );
}
