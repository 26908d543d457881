//! An allocator that remembers the largest single request of the current thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

struct Watching;

#[global_allocator]
static ALLOCATOR: Watching = Watching;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn note(size: usize) {
    // While a thread ends its locals may be gone; what it allocates then is of no interest.
    let _ = LARGEST.try_with(|l| l.set(l.get().max(size)));
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

/// The largest single allocation `f` makes on this thread, in bytes, and its result.
pub fn largest_allocation<T>(f: impl FnOnce() -> T) -> (usize, T) {
    LARGEST.set(0);
    let out = f();
    (LARGEST.get(), out)
}

/// The message `f` refuses its input with, which has to be one short line, given within a second and without an
/// allocation above 16 MiB.
pub fn refused<T, E: std::fmt::Display>(mut f: impl FnMut() -> Result<T, E>) -> String {
    let mut took = Vec::new();
    // Milliseconds on a free core; a busy machine may hold a thread up, so that the fastest of three counts.
    while took.len() < 3 {
        let start = Instant::now();
        let (largest, result) = largest_allocation(&mut f);
        took.push(start.elapsed());
        let Err(error) = result else {
            panic!("accepted, but should be refused");
        };
        let message = error.to_string();
        assert!(
            largest <= 16 << 20,
            "{message}: allocated {largest} bytes at once"
        );
        assert!(!message.contains(['\n', '\r']), "{message:?}");
        assert!(!message.is_empty() && message.len() < 600, "{message}");
        if took[took.len() - 1] < Duration::from_secs(1) {
            return message;
        }
    }
    panic!("three attempts took {took:?}");
}
