//! Buffers that workers share: aligned, zeroed lazily, written through pointers in disjoint parts.

use super::pack::Aligned;

/// Zeroed f32 aligned to a cache line.
pub(crate) struct Floats {
    data: Aligned,
    len: usize,
}

impl Floats {
    pub fn zeroed(len: usize) -> Self {
        Self {
            data: Aligned::zeroed(len * size_of::<f32>()),
            len,
        }
    }

    /// At least `len` floats; contents are kept or zeroed, as it comes.
    pub fn reserve(&mut self, len: usize) {
        if len > self.len {
            *self = Self::zeroed(len);
        }
    }

    pub fn ptr(&mut self) -> Ptr {
        Ptr(self.data.bytes_mut().as_mut_ptr().cast())
    }
}

/// A pointer that may cross threads. Whoever uses it sees to it that parts are disjoint between barriers.
#[derive(Clone, Copy)]
pub(crate) struct Ptr(pub *mut f32);

// SAFETY: a pointer alone does nothing; each use states why its part is its own.
unsafe impl Send for Ptr {}
// SAFETY: as above.
unsafe impl Sync for Ptr {}

impl Ptr {
    /// The pointer `floats` further on.
    ///
    /// # Safety
    /// Must stay within the allocation.
    #[inline]
    pub unsafe fn at(self, floats: usize) -> *mut f32 {
        // SAFETY: the caller's.
        unsafe { self.0.add(floats) }
    }

    /// A part as a slice.
    ///
    /// # Safety
    /// Within the allocation, initialised, and not written by others while the slice lives.
    #[inline]
    pub unsafe fn slice<'a>(self, from: usize, len: usize) -> &'a [f32] {
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts(self.0.add(from), len) }
    }

    /// A part as a mutable slice.
    ///
    /// # Safety
    /// Within the allocation, initialised, and not used by others while the slice lives.
    #[inline]
    pub unsafe fn slice_mut<'a>(self, from: usize, len: usize) -> &'a mut [f32] {
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(from), len) }
    }
}
