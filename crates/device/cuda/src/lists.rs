//! The lists of integers that a step's kernels read: laid out on the host, sent in one copy.

use crate::CudaError;
use crate::gpu::{Buffer, Gpu};

/// Lists one behind another, each at a multiple of 32 bytes: kernels read up to 16 at once.
#[derive(Default)]
pub struct Lists {
    all: Vec<i32>,
}

/// Where a list lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct List {
    /// First byte.
    pub at: usize,
    /// Length in bytes.
    pub bytes: usize,
}

impl Lists {
    /// Adds a list. What it leaves of `room` integers is zeros, so that a list of another length keeps those behind it in
    /// their places.
    pub fn add(&mut self, list: &[i32], room: usize) -> List {
        let start = self.all.len();
        self.all.extend_from_slice(list);
        self.all.resize(start + room.max(list.len()), 0);
        let end = self.all.len();
        self.all.resize(end.next_multiple_of(8), 0);
        List {
            at: start * 4,
            bytes: (end - start) * 4,
        }
    }

    /// All of them.
    pub fn words(&self) -> &[i32] {
        &self.all
    }

    /// Copies them to memory of their own.
    pub fn upload(&self, gpu: &Gpu) -> Result<Buffer, CudaError> {
        gpu.upload(&self.all, "lists")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_keeps_what_follows_in_its_place() {
        let layout = |list: &[i32]| {
            let mut lists = Lists::default();
            let first = lists.add(list, 5);
            (first, lists.add(&[7, 8], 0), lists.words().to_vec())
        };
        let (first, second, words) = layout(&[1, 2, 3]);
        assert_eq!(
            (first, second),
            (List { at: 0, bytes: 20 }, List { at: 32, bytes: 8 })
        );
        assert_eq!(words, [1, 2, 3, 0, 0, 0, 0, 0, 7, 8, 0, 0, 0, 0, 0, 0]);
        assert_eq!(layout(&[9]).1, second);
        assert_eq!(layout(&[1; 9]).1.at, 64);
    }
}
