//! The limiter this crate descends from, ported as it was: a map of semaphores, an evictor that
//! takes all slots of a tenant to see whether it is idle, and a release by name.
//!
//! It fails the very models that the core passes, so the models can fail.

use std::{collections::HashMap, sync};

use loom::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread,
};

use super::{Inside, TENANT, explore};

struct Semaphore {
    free: AtomicUsize,
    size: usize,
}

impl Semaphore {
    fn try_acquire(&self, slots: usize) -> bool {
        self.free
            .fetch_update(SeqCst, SeqCst, |free| free.checked_sub(slots))
            .is_ok()
    }

    fn release(&self, slots: usize) {
        let before = self.free.fetch_add(slots, SeqCst);
        assert!(before + slots <= self.size, "released more than held");
    }
}

#[derive(Clone)]
struct Original {
    semaphores: Arc<Mutex<HashMap<u8, Arc<Semaphore>>>>,
}

impl Original {
    fn new() -> Self {
        Self {
            semaphores: Arc::new(Mutex::new(HashMap::new())),
        }
    }

    fn semaphore(&self, tenant: u8) -> Arc<Semaphore> {
        let mut semaphores = self.semaphores.lock().unwrap();
        let new = || {
            Arc::new(Semaphore {
                free: AtomicUsize::new(1),
                size: 1,
            })
        };
        semaphores.entry(tenant).or_insert_with(new).clone()
    }

    fn try_acquire(&self, tenant: u8) -> bool {
        self.semaphore(tenant).try_acquire(1)
    }

    fn release(&self, tenant: u8) {
        let semaphores = self.semaphores.lock().unwrap();
        semaphores[&tenant].release(1);
    }

    fn evict(&self) {
        let mut semaphores = self.semaphores.lock().unwrap();
        semaphores.retain(|_, semaphore| {
            let idle = semaphore.try_acquire(semaphore.size);
            if idle {
                semaphore.release(semaphore.size);
            }
            !idle
        });
    }
}

/// A visitor that has looked its tenant up while the evictor looks at the tenant too.
fn visit_under_eviction(visit: impl Fn(&Original) + Send + Sync + Clone + 'static) {
    let original = Original::new();
    drop(original.semaphore(TENANT));
    let visits = [(); 2].map(|()| {
        let (original, visit) = (original.clone(), visit.clone());
        thread::spawn(move || visit(&original))
    });
    original.evict();
    for visit in visits {
        visit.join().unwrap();
    }
}

#[test]
#[should_panic = "two of one tenant"]
fn the_original_makes_two_entries_of_a_tenant() {
    explore(|| {
        let inside = sync::Arc::new(Inside::default());
        let visitors = inside.clone();
        visit_under_eviction(move |original| {
            if original.try_acquire(TENANT) {
                visitors.enter();
            }
        });
        assert!(inside.peak() <= 1, "two of one tenant");
    });
}

#[test]
#[should_panic = "no entry found for key"]
fn the_original_releases_what_its_evictor_took_away() {
    explore(|| {
        visit_under_eviction(|original| {
            if original.try_acquire(TENANT) {
                original.release(TENANT);
            }
        });
    });
}

#[test]
#[should_panic = "a slot was free"]
fn the_original_rejects_while_its_evictor_looks() {
    explore(|| {
        let original = Original::new();
        let semaphore = original.semaphore(TENANT);
        let evictor = {
            let original = original.clone();
            thread::spawn(move || original.evict())
        };
        assert!(semaphore.try_acquire(1), "a slot was free");
        evictor.join().unwrap();
    });
}
