//! An allocator that remembers the largest single request of the current thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

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

/// The message `f` refuses its input with, which has to be one short line, given quickly and without an allocation above
/// 16 MiB.
pub fn refused<T, E: std::fmt::Display>(f: impl FnOnce() -> Result<T, E>) -> String {
    let start = std::time::Instant::now();
    let (largest, result) = largest_allocation(f);
    let Err(error) = result else {
        panic!("accepted, but should be refused");
    };
    let message = error.to_string();
    // Milliseconds on a free core; a busy machine may hold a thread up for seconds.
    assert!(
        start.elapsed().as_secs_f64() < 5.0,
        "{message}: took {:?}",
        start.elapsed()
    );
    assert!(
        largest <= 16 << 20,
        "{message}: allocated {largest} bytes at once"
    );
    assert!(!message.contains(['\n', '\r']), "{message:?}");
    assert!(!message.is_empty() && message.len() < 600, "{message}");
    message
}
