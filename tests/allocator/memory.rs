//! What tracked tenants cost in memory, and whether it comes back.

use std::{fs, time::Duration};

use tower_tenant::{Capacity, TenantLimiter};

use crate::{
    counting::{live, peak},
    support::{assert_available, evict_all, manual},
};

const MIB: usize = 1 << 20;

/// A tenth of the million in debug builds, whose steps are slow. The shards are as full at either.
const MANY: u64 = if cfg!(debug_assertions) {
    100_000
} else {
    1_000_000
};

/// What a thread may allocate once and keep.
const SLACK: usize = 64 << 10;

/// What one tracked tenant may cost beside its key.
const BYTES_PER_TENANT: usize = 128;

/// The memory that the system has given the process, where that can be read.
fn resident() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn print(what: &str, before: usize) {
    let resident = resident().map_or(0, |bytes| bytes / MIB);
    let grown = live().saturating_sub(before);
    println!("{what}: {grown} bytes more allocated, {resident} MiB resident");
}

fn track(limiter: &TenantLimiter<u64>, tenants: std::ops::Range<u64>) {
    for tenant in tenants {
        drop(limiter.try_acquire(&tenant).unwrap());
    }
}

// ME1
#[test]
fn memory_is_released_after_many_tenants() {
    let before = live();
    print("before", before);
    let limiter = TenantLimiter::<u64>::builder(4)
        .evictor(manual(Duration::ZERO))
        .build();
    print("no tenant", before);
    track(&limiter, 0..MANY);
    assert_eq!(limiter.tracked(), MANY as usize);
    print(&format!("{MANY} tenants"), before);
    let each = (live() - before) / MANY as usize;
    println!("{each} bytes for each tenant, of which 8 are the key");
    let busy: Vec<_> = (0..1_000)
        .map(|id| limiter.try_acquire(&id).unwrap())
        .collect();
    for sweep in 1..=3 {
        limiter.evict_idle();
        print(&format!("after sweep {sweep}"), before);
    }
    assert_eq!(limiter.tracked(), 1_000);
    let left = live() - before;
    assert!(left < MIB, "{left} bytes are left for 1000 tenants");
    drop(busy);
    assert_available(&limiter, 7, 4, 2);
    evict_all(&limiter);
    print("empty", before);
    let left = live() - before;
    assert!(left < MIB / 2, "{left} bytes are left without a tenant");
    drop(limiter);
    let left = live().saturating_sub(before);
    assert!(left < SLACK, "{left} bytes are left of a dropped limiter");
}

// ME1
#[test]
fn a_tracked_tenant_costs_128_bytes_and_its_key_at_most() {
    // Tables grow by doubling, so a tenant costs most just after it.
    for tenants in [MANY / 8, MANY / 4, MANY / 2, MANY * 3 / 4, MANY] {
        let before = live();
        let limiter = TenantLimiter::<u64>::builder(4)
            .evictor(manual(Duration::ZERO))
            .build();
        track(&limiter, 0..tenants);
        let each = (live() - before) as f64 / tenants as f64;
        println!("{tenants} numbers: {each:.1} bytes each");
        let bound = (BYTES_PER_TENANT + size_of::<u64>()) as f64;
        assert!(each <= bound, "{each} bytes for each of {tenants}");
        assert_available(&limiter, 7, 4, 2);
        evict_all(&limiter);
    }
    let before = live();
    let limiter = TenantLimiter::<String>::builder(4)
        .evictor(manual(Duration::ZERO))
        .build();
    let name = |id: u64| format!("tenant-{id:013}");
    for id in 0..MANY {
        drop(limiter.try_acquire(&name(id)).unwrap());
    }
    let each = (live() - before) as f64 / MANY as f64;
    println!("{MANY} names of 20 bytes: {each:.1} bytes each");
    let bound = (BYTES_PER_TENANT + size_of::<String>() + 20) as f64;
    assert!(each <= bound, "{each} bytes for each name");
    assert_available(&limiter, name(7), 4, 2);
    evict_all(&limiter);
}

// ME1
#[test]
fn tenants_that_end_bit_by_bit_release_their_memory_too() {
    let before = live();
    let limiter = TenantLimiter::<u64>::builder(1)
        .evictor(manual(Duration::ZERO))
        .build();
    let mut held: Vec<_> = (0..MANY)
        .map(|id| limiter.try_acquire(&id).unwrap())
        .collect();
    while !held.is_empty() {
        held.truncate(held.len() * 3 / 4);
        held.shrink_to_fit();
        limiter.evict_idle();
        assert_eq!(limiter.tracked(), held.len());
        let left = live() - before;
        // Twice the bound: a table is shrunk when it is mostly empty.
        let bound = held.len() * (2 * BYTES_PER_TENANT + 8) + MIB;
        assert!(left <= bound, "{left} bytes for {} tenants", held.len());
    }
    assert_available(&limiter, 7, 1, 2);
    evict_all(&limiter);
}

// ME3
#[test]
fn made_up_tenants_take_no_more_memory_than_the_table_allows() {
    const MAX: usize = 10_000;
    let before = live();
    let limiter = TenantLimiter::<u64>::builder(1).max_tenants(MAX).build();
    track(&limiter, 0..MAX as u64);
    print(&format!("{MAX} tenants"), before);
    let peak = peak(|| track(&limiter, MAX as u64..5 * MANY));
    assert_eq!(limiter.tracked(), MAX);
    print(&format!("{} tenants later", 5 * MANY), before);
    // Twice the usual: coming and going leaves tables less full.
    let bound = MAX * (2 * BYTES_PER_TENANT + size_of::<u64>());
    let peak = peak - before;
    assert!(peak <= bound, "{peak} bytes for {MAX} tenants");

    // All in use: new tenants are rejected and leave no trace.
    limiter.set_evictor(manual(Duration::ZERO));
    limiter.evict_idle();
    let held: Vec<_> = (0..MAX as u64)
        .map(|id| limiter.try_acquire(&id).unwrap())
        .collect();
    let full = live();
    for id in MAX as u64..MAX as u64 + 10_000 {
        assert!(limiter.try_acquire(&id).is_err());
    }
    let grown = live().saturating_sub(full);
    assert!(grown < SLACK, "rejections have left {grown} bytes");
    drop(held);
    assert_available(&limiter, 7, 1, 2);
    evict_all(&limiter);
}

#[test]
fn an_owner_is_evicted_with_the_last_of_its_tenants() {
    let before = live();
    let capacity = Capacity::new(8).owners(|tenant: &u64| tenant / 2);
    let limiter = TenantLimiter::<u64>::builder(4)
        .capacity(capacity)
        .evictor(manual(Duration::ZERO))
        .build();
    let empty = live();
    track(&limiter, 0..MANY);
    let each = (live() - empty) / (MANY as usize / 2);
    println!("{each} bytes for each owner of two tenants, of which 24 are keys and its id");
    evict_all(&limiter);
    let left = live().saturating_sub(empty);
    assert!(left < SLACK, "{left} bytes are left of the owners");
    assert_available(&limiter, 7, 4, 2);
    drop(limiter);
    assert!(live().saturating_sub(before) < SLACK);
}

#[test]
fn overrides_that_are_cleared_release_their_memory() {
    let limiter = TenantLimiter::<u64>::new(1);
    let before = live();
    for tenant in 0..50_000 {
        limiter.pause(&tenant);
    }
    for tenant in 0..50_000 {
        limiter.resume(&tenant);
    }
    print("paused and resumed", before);
    assert!(live() < before + 16 * 1024);
}
