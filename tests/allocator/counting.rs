//! An allocator that counts for each thread, so that tests do not disturb each other.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

/// Counts allocations, and the bytes that are allocated.
pub struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    // Not 0 at the start: a thread may free what another one has allocated.
    static LIVE: Cell<usize> = const { Cell::new(1 << 40) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: `System` does the work. The counters have no destructor, so they exist as long as the
// thread, and to reach them allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        LIVE.set(live() + layout.size());
        PEAK.set(PEAK.get().max(live()));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.set(live() - layout.size());
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// How often `action` allocates.
#[cfg(feature = "http")]
pub fn allocations(action: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    action();
    ALLOCATIONS.get() - before
}

/// The bytes that are allocated now.
pub fn live() -> usize {
    LIVE.get()
}

/// The most bytes that were allocated at once during `action`.
pub fn peak(action: impl FnOnce()) -> usize {
    PEAK.set(live());
    action();
    PEAK.get()
}
