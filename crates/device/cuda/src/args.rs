//! What a launch is told: its shape, and a kernel's arguments in order.

use crate::gpu::Buffer;
use std::ffi::c_void;

/// How many threads, and what they share.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads a block.
    pub block: u32,
    /// Dynamic shared memory, bytes.
    pub shared: u32,
}

impl Shape {
    /// Blocks in a row, of `block` threads.
    pub fn new(blocks: usize, block: u32) -> Self {
        Self {
            grid: [blocks as u32, 1, 1],
            block,
            shared: 0,
        }
    }

    /// So many blocks along the second axis.
    pub fn by(mut self, blocks: usize) -> Self {
        self.grid[1] = blocks as u32;
        self
    }

    /// With dynamic shared memory.
    pub fn shared(mut self, bytes: u32) -> Self {
        self.shared = bytes;
        self
    }
}

/// A kernel's view of a matrix.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct TensorMap(pub(crate) [u8; 128]);

/// A kernel's arguments, in order.
#[derive(Default)]
pub struct Args {
    values: Vec<Value>,
}

enum Value {
    Word(u64),
    Map(Box<TensorMap>),
}

impl Args {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// A buffer's address.
    pub fn buffer(self, buffer: &Buffer) -> Self {
        self.word(buffer.address())
    }

    /// The address of byte `at` of a buffer.
    pub fn inside(self, buffer: &Buffer, at: usize) -> Self {
        self.word(buffer.address() + at as u64)
    }

    /// A null pointer where there is no buffer.
    pub fn optional(self, buffer: Option<&Buffer>) -> Self {
        self.word(buffer.map_or(0, |b| b.address()))
    }

    /// A 32-bit integer.
    pub fn int(self, x: usize) -> Self {
        self.word(u64::from(x as u32))
    }

    /// An f32.
    pub fn float(self, x: f32) -> Self {
        self.word(u64::from(x.to_bits()))
    }

    /// A matrix.
    pub fn map(mut self, map: TensorMap) -> Self {
        self.values.push(Value::Map(Box::new(map)));
        self
    }

    fn word(mut self, x: u64) -> Self {
        self.values.push(Value::Word(x));
        self
    }

    /// The driver reads as many bytes as the kernel's signature says; words are little-endian.
    pub(crate) fn pointers(&self) -> Vec<*mut c_void> {
        self.values
            .iter()
            .map(|v| match v {
                Value::Word(x) => (&raw const *x) as *mut c_void,
                Value::Map(map) => (&raw const **map) as *mut c_void,
            })
            .collect()
    }
}

/// Types whose bytes may be copied to and from a device.
pub trait Plain: Copy {
    /// Any value.
    const ZERO: Self;
}
impl Plain for u8 {
    const ZERO: Self = 0;
}
impl Plain for u16 {
    const ZERO: Self = 0;
}
impl Plain for u32 {
    const ZERO: Self = 0;
}
impl Plain for u64 {
    const ZERO: Self = 0;
}
impl Plain for i32 {
    const ZERO: Self = 0;
}
impl Plain for f32 {
    const ZERO: Self = 0.0;
}
impl Plain for half::bf16 {
    const ZERO: Self = Self::ZERO;
}
