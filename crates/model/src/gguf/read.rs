//! The parser: a cursor that never reads past the file and never trusts a count.

use super::error::{GgufError, shown};
use super::{Array, Metadata, TENSOR_TYPES, TensorInfo, Value};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Arrays may hold arrays this deep; files in the wild use none.
const MAX_DEPTH: usize = 4;
/// Longest key or tensor name, in bytes (the specification's limit for keys).
const MAX_NAME: usize = 65_535;
/// Largest `general.alignment`.
const MAX_ALIGNMENT: usize = 1 << 20;
/// Dimensions a tensor may have.
const MAX_DIMS: u32 = 4;
/// Smallest possible key-value pair: key length, type, one byte.
const MIN_PAIR_BYTES: usize = 8 + 4 + 1;
/// Smallest possible tensor description: name length, dimensions, one of them, type, offset.
const MIN_TENSOR_BYTES: usize = 8 + 4 + 8 + 4 + 8;

/// Tensor types GGUF knows and this project does not read, to refuse them by name.
const OTHER_TENSOR_TYPES: [(u32, &str); 26] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (36, "IQ4_NL_4_4"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn truncated(&self, what: &str, needed: u128) -> GgufError {
        GgufError::Truncated {
            what: what.to_string(),
            at: self.at,
            needed,
            left: self.left(),
        }
    }

    fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8], GgufError> {
        if n > self.left() {
            return Err(self.truncated(what, n as u128));
        }
        let taken = &self.bytes[self.at..self.at + n];
        self.at += n;
        Ok(taken)
    }

    fn fixed<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.fixed(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.fixed(what)?))
    }

    /// A count of things that take at least `each` bytes.
    fn count(&mut self, each: usize, what: &str) -> Result<usize, GgufError> {
        let at = self.at;
        let n = self.u64(what)?;
        let needed = u128::from(n) * each as u128;
        if needed > self.left() as u128 {
            return Err(GgufError::Truncated {
                what: format!("{what} {n}"),
                at,
                needed: needed + 8,
                left: self.left() + 8,
            });
        }
        Ok(n as usize)
    }

    fn string(&mut self, what: &str) -> Result<&'a str, GgufError> {
        let n = self.count(1, what)?;
        let at = self.at;
        let bytes = self.take(n, what)?;
        std::str::from_utf8(bytes).map_err(|e| GgufError::Field {
            what: what.to_string(),
            at: at + e.valid_up_to(),
            given: "not UTF-8".to_string(),
            allowed: "UTF-8".to_string(),
        })
    }

    /// A key or tensor name: a string with a bounded length.
    fn name(&mut self, what: &str) -> Result<&'a str, GgufError> {
        let at = self.at;
        let s = self.string(what)?;
        if s.is_empty() || s.len() > MAX_NAME {
            return Err(GgufError::Field {
                what: format!("length of {what}"),
                at,
                given: s.len().to_string(),
                allowed: format!("1 to {MAX_NAME}"),
            });
        }
        Ok(s)
    }

    fn bool(&mut self, what: &str) -> Result<bool, GgufError> {
        let at = self.at;
        match self.fixed::<1>(what)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [b] => Err(GgufError::Field {
                what: what.to_string(),
                at,
                given: format!("boolean {b}"),
                allowed: "0 or 1".to_string(),
            }),
        }
    }

    fn value(&mut self, what: &str) -> Result<Value, GgufError> {
        let at = self.at;
        Ok(match self.u32(what)? {
            0 => Value::U8(u8::from_le_bytes(self.fixed(what)?)),
            1 => Value::I8(i8::from_le_bytes(self.fixed(what)?)),
            2 => Value::U16(u16::from_le_bytes(self.fixed(what)?)),
            3 => Value::I16(i16::from_le_bytes(self.fixed(what)?)),
            4 => Value::U32(self.u32(what)?),
            5 => Value::I32(i32::from_le_bytes(self.fixed(what)?)),
            6 => Value::F32(f32::from_le_bytes(self.fixed(what)?)),
            7 => Value::Bool(self.bool(what)?),
            8 => Value::Str(self.string(what)?.to_string()),
            9 => Value::Array(self.array(what, 1)?),
            10 => Value::U64(self.u64(what)?),
            11 => Value::I64(i64::from_le_bytes(self.fixed(what)?)),
            12 => Value::F64(f64::from_le_bytes(self.fixed(what)?)),
            t => return Err(bad_type(what, at, t)),
        })
    }

    /// An array's elements of one fixed width.
    fn elements<T, const N: usize>(
        &mut self,
        what: &str,
        from: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, GgufError> {
        let n = self.count(N, what)?;
        let bytes = self.take(n * N, what)?;
        Ok(bytes.as_chunks::<N>().0.iter().map(|&b| from(b)).collect())
    }

    fn array(&mut self, what: &str, depth: usize) -> Result<Array, GgufError> {
        let at = self.at;
        if depth > MAX_DEPTH {
            return Err(GgufError::Field {
                what: what.to_string(),
                at,
                given: format!("arrays nested {depth} deep"),
                allowed: format!("at most {MAX_DEPTH}"),
            });
        }
        Ok(match self.u32(what)? {
            0 => Array::U8(self.elements(what, u8::from_le_bytes)?),
            1 => Array::I8(self.elements(what, i8::from_le_bytes)?),
            2 => Array::U16(self.elements(what, u16::from_le_bytes)?),
            3 => Array::I16(self.elements(what, i16::from_le_bytes)?),
            4 => Array::U32(self.elements(what, u32::from_le_bytes)?),
            5 => Array::I32(self.elements(what, i32::from_le_bytes)?),
            6 => Array::F32(self.elements(what, f32::from_le_bytes)?),
            7 => {
                let n = self.count(1, what)?;
                Array::Bool((0..n).map(|_| self.bool(what)).collect::<Result<_, _>>()?)
            }
            8 => {
                let n = self.count(8, what)?;
                let mut out = Vec::with_capacity(n);
                for _ in 0..n {
                    out.push(self.string(what)?.to_string());
                }
                Array::Str(out)
            }
            9 => {
                let n = self.count(4 + 8, what)?;
                let mut out = Vec::new();
                for _ in 0..n {
                    out.push(self.array(what, depth + 1)?);
                }
                Array::Array(out)
            }
            10 => Array::U64(self.elements(what, u64::from_le_bytes)?),
            11 => Array::I64(self.elements(what, i64::from_le_bytes)?),
            12 => Array::F64(self.elements(what, f64::from_le_bytes)?),
            t => return Err(bad_type(what, at, t)),
        })
    }
}

fn bad_type(what: &str, at: usize, given: u32) -> GgufError {
    GgufError::Field {
        what: format!("type of {what}"),
        at,
        given: given.to_string(),
        allowed: "0 to 12".to_string(),
    }
}

/// Metadata and tensors of a whole file.
pub(super) fn parse(bytes: &[u8]) -> Result<(Metadata, BTreeMap<String, TensorInfo>), GgufError> {
    let mut c = Cursor { bytes, at: 0 };
    let magic = &bytes[..bytes.len().min(4)];
    if magic != b"GGUF" {
        return Err(GgufError::Magic {
            given: match magic {
                [] => "nothing".to_string(),
                m => format!("\"{}\"", m.escape_ascii()),
            },
        });
    }
    c.at = 4;
    let version = c.u32("version")?;
    if version != 2 && version != 3 {
        return Err(GgufError::Version { given: version });
    }
    let tensor_count = c.count(MIN_TENSOR_BYTES, "tensor count")?;
    let pair_count = c.count(MIN_PAIR_BYTES, "metadata count")?;

    let mut metadata = BTreeMap::new();
    for _ in 0..pair_count {
        let at = c.at;
        let key = c.name("a metadata key")?;
        let value = c.value(&format!("metadata key \"{}\"", shown(key)))?;
        match metadata.entry(key.to_string()) {
            Entry::Vacant(e) => e.insert(value),
            Entry::Occupied(_) => {
                return Err(GgufError::Duplicate {
                    what: "key",
                    name: shown(key),
                    at,
                });
            }
        };
    }
    let metadata = Metadata(metadata);

    const ALIGNMENT: &str = "general.alignment";
    let alignment = metadata.get_usize(ALIGNMENT)?.unwrap_or(32);
    if !alignment.is_power_of_two() || !(8..=MAX_ALIGNMENT).contains(&alignment) {
        let allowed = format!("a power of two from 8 to {MAX_ALIGNMENT}");
        return Err(GgufError::key(ALIGNMENT, alignment, allowed));
    }

    let mut described = Vec::new();
    for _ in 0..tensor_count {
        described.push(describe(&mut c, alignment)?);
    }
    let data = c.at.next_multiple_of(alignment);
    let tensors = place(described, data, bytes.len())?;
    Ok((metadata, tensors))
}

/// One tensor's description, its offset still relative to the data section.
struct Described<'a> {
    at: usize,
    name: &'a str,
    info: TensorInfo,
}

fn describe<'a>(c: &mut Cursor<'a>, alignment: usize) -> Result<Described<'a>, GgufError> {
    let at = c.at;
    let name = c.name("a tensor name")?;
    let what = format!("tensor \"{}\"", shown(name));
    let dims = c.u32(&what)?;
    if dims == 0 || dims > MAX_DIMS {
        let allowed = format!("1 to {MAX_DIMS}");
        return Err(GgufError::tensor(
            name,
            "the number of dimensions",
            dims,
            allowed,
        ));
    }
    let mut shape = Vec::new();
    for _ in 0..dims {
        let d = c.u64(&what)?;
        match usize::try_from(d) {
            Ok(d) if d > 0 => shape.push(d),
            _ => return Err(GgufError::tensor(name, "a dimension", d, "1 or more")),
        }
    }
    shape.reverse();
    let number = c.u32(&what)?;
    let Some(&(_, dtype)) = TENSOR_TYPES.iter().find(|t| t.0 == number) else {
        let other = OTHER_TENSOR_TYPES.iter().find(|t| t.0 == number);
        let given = other.map_or_else(|| format!("number {number}"), |t| t.1.to_string());
        let allowed = TENSOR_TYPES.map(|t| t.1.name()).join(", ");
        return Err(GgufError::tensor(name, "its type", given, allowed));
    };
    let offset = c.u64(&what)?;
    if offset % alignment as u64 != 0 {
        let allowed = format!("a multiple of {alignment}");
        return Err(GgufError::tensor(name, "its offset", offset, allowed));
    }
    let cols = shape[shape.len() - 1];
    let row = dtype.row_bytes(cols).ok_or_else(|| {
        let allowed = format!("a multiple of {} for {}", dtype.block_len(), dtype.name());
        GgufError::tensor(name, "its row length", cols, allowed)
    })?;
    let size = shape[..shape.len() - 1]
        .iter()
        .try_fold(row, |n, &d| n.checked_mul(d));
    let end = size
        .and_then(|n| n.checked_add(usize::try_from(offset).ok()?))
        .ok_or_else(|| {
            let given = format!("{shape:?} at offset {offset}");
            GgufError::tensor(name, "its extent", given, "what fits in the file")
        })?;
    Ok(Described {
        at,
        name,
        info: TensorInfo {
            dtype,
            shape,
            range: offset as usize..end,
        },
    })
}

/// Makes offsets absolute; refuses duplicates, overlaps and what lies outside the file.
fn place(
    described: Vec<Described>,
    data: usize,
    file: usize,
) -> Result<BTreeMap<String, TensorInfo>, GgufError> {
    let mut tensors = BTreeMap::new();
    for Described { at, name, mut info } in described {
        let end = data.checked_add(info.range.end).filter(|&end| end <= file);
        let Some(end) = end else {
            let given = format!("{:?} after byte {data}", info.range);
            let allowed = format!("up to {}, the file's end", file.saturating_sub(data));
            return Err(GgufError::tensor(name, "its byte range", given, allowed));
        };
        info.range = data + info.range.start..end;
        match tensors.entry(name.to_string()) {
            Entry::Vacant(e) => e.insert(info),
            Entry::Occupied(_) => {
                return Err(GgufError::Duplicate {
                    what: "tensor",
                    name: shown(name),
                    at,
                });
            }
        };
    }
    let mut by_offset: Vec<(&String, &TensorInfo)> = tensors.iter().collect();
    by_offset.sort_by_key(|(_, info)| info.range.start);
    for pair in by_offset.windows(2) {
        let ((before, a), (name, b)) = (pair[0], pair[1]);
        if b.range.start < a.range.end {
            let allowed = format!("{} or more, where \"{}\" ends", a.range.end, shown(before));
            return Err(GgufError::tensor(
                name,
                "its first byte",
                b.range.start,
                allowed,
            ));
        }
    }
    Ok(tensors)
}
