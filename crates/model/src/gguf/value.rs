//! GGUF metadata: typed values and typed access to them.

use super::error::{GgufError, shown};
use std::collections::BTreeMap;

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Str(String),
    Array(Array),
}

/// An array of one element type.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    Str(Vec<String>),
    Array(Vec<Array>),
}

impl Value {
    /// What it is, for messages: type and, where short, value.
    fn describe(&self) -> String {
        match self {
            Value::U8(v) => format!("u8 {v}"),
            Value::I8(v) => format!("i8 {v}"),
            Value::U16(v) => format!("u16 {v}"),
            Value::I16(v) => format!("i16 {v}"),
            Value::U32(v) => format!("u32 {v}"),
            Value::I32(v) => format!("i32 {v}"),
            Value::U64(v) => format!("u64 {v}"),
            Value::I64(v) => format!("i64 {v}"),
            Value::F32(v) => format!("f32 {v}"),
            Value::F64(v) => format!("f64 {v}"),
            Value::Bool(v) => format!("bool {v}"),
            Value::Str(v) => format!("string \"{}\"", shown(v)),
            Value::Array(a) => format!("an array of {} {}", a.len(), a.element()),
        }
    }

    /// Any integer type, widened.
    fn integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }
}

impl Array {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::F64(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::Str(v) => v.len(),
            Array::Array(v) => v.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn element(&self) -> &'static str {
        match self {
            Array::U8(_) => "u8",
            Array::I8(_) => "i8",
            Array::U16(_) => "u16",
            Array::I16(_) => "i16",
            Array::U32(_) => "u32",
            Array::I32(_) => "i32",
            Array::U64(_) => "u64",
            Array::I64(_) => "i64",
            Array::F32(_) => "f32",
            Array::F64(_) => "f64",
            Array::Bool(_) => "bool",
            Array::Str(_) => "strings",
            Array::Array(_) => "arrays",
        }
    }

    /// The elements as `T`, whatever integer type they are stored as; `None` where the elements are not integers, the
    /// first that does not fit as the error.
    fn integers<T: TryFrom<i128>>(&self) -> Option<Result<Vec<T>, i128>> {
        fn convert<S: Copy + Into<i128>, T: TryFrom<i128>>(v: &[S]) -> Result<Vec<T>, i128> {
            v.iter()
                .map(|&x| T::try_from(x.into()).map_err(|_| x.into()))
                .collect()
        }
        Some(match self {
            Array::U8(v) => convert(v),
            Array::I8(v) => convert(v),
            Array::U16(v) => convert(v),
            Array::I16(v) => convert(v),
            Array::U32(v) => convert(v),
            Array::I32(v) => convert(v),
            Array::U64(v) => convert(v),
            Array::I64(v) => convert(v),
            _ => return None,
        })
    }
}

/// All metadata of a file. The getters return `Ok(None)` where the key is absent and an error naming the key where it
/// holds something else than asked for; chain [`Metadata::required`] where absence is an error too.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Metadata(pub BTreeMap<String, Value>);

impl Metadata {
    /// The raw value.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// `value`, or the error that says `key` is missing.
    pub fn required<T>(key: &str, value: Option<T>) -> Result<T, GgufError> {
        value.ok_or_else(|| GgufError::MissingKey { key: shown(key) })
    }

    /// A string.
    pub fn get_str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Str(s)) => Ok(Some(s)),
            Some(v) => Err(GgufError::key(key, v.describe(), "a string")),
        }
    }

    /// A boolean.
    pub fn get_bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(v) => Err(GgufError::key(key, v.describe(), "a boolean")),
        }
    }

    fn get_integer<T: TryFrom<i128>>(
        &self,
        key: &str,
        allowed: &str,
    ) -> Result<Option<T>, GgufError> {
        let Some(v) = self.get(key) else {
            return Ok(None);
        };
        match v.integer().map(T::try_from) {
            Some(Ok(x)) => Ok(Some(x)),
            _ => Err(GgufError::key(key, v.describe(), allowed)),
        }
    }

    /// An integer of any stored width that fits u32.
    pub fn get_u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.get_integer(key, "an integer from 0 to 2^32-1")
    }

    /// An integer of any stored width that fits usize.
    pub fn get_usize(&self, key: &str) -> Result<Option<usize>, GgufError> {
        self.get_integer(key, "an integer that is not negative")
    }

    /// A float; f64 is rounded.
    pub fn get_f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        Ok(self.get_f64(key)?.map(|v| v as f32))
    }

    /// A float; f32 is widened.
    pub fn get_f64(&self, key: &str) -> Result<Option<f64>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::F32(v)) => Ok(Some(f64::from(*v))),
            Some(Value::F64(v)) => Ok(Some(*v)),
            Some(v) => Err(GgufError::key(key, v.describe(), "a float")),
        }
    }

    /// An array of strings.
    pub fn get_str_array(&self, key: &str) -> Result<Option<&[String]>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::Str(v))) => Ok(Some(v)),
            Some(v) => Err(GgufError::key(key, v.describe(), "an array of strings")),
        }
    }

    /// An array of f32.
    pub fn get_f32_array(&self, key: &str) -> Result<Option<&[f32]>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::F32(v))) => Ok(Some(v)),
            Some(v) => Err(GgufError::key(key, v.describe(), "an array of f32")),
        }
    }

    fn get_integers<T: TryFrom<i128>>(
        &self,
        key: &str,
        allowed: &str,
    ) -> Result<Option<Vec<T>>, GgufError> {
        let Some(v) = self.get(key) else {
            return Ok(None);
        };
        let integers = match v {
            Value::Array(a) => a.integers(),
            _ => None,
        };
        match integers {
            Some(Ok(x)) => Ok(Some(x)),
            Some(Err(bad)) => Err(GgufError::key(key, format!("an array with {bad}"), allowed)),
            None => Err(GgufError::key(key, v.describe(), allowed)),
        }
    }

    /// An array of integers, of any stored width, that fit i32.
    pub fn get_i32_array(&self, key: &str) -> Result<Option<Vec<i32>>, GgufError> {
        self.get_integers(key, "an array of integers from -2^31 to 2^31-1")
    }

    /// An array of integers, of any stored width, that fit u32.
    pub fn get_u32_array(&self, key: &str) -> Result<Option<Vec<u32>>, GgufError> {
        self.get_integers(key, "an array of integers from 0 to 2^32-1")
    }
}
