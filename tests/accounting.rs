//! One permit, one slot: taken once, given back once.

mod support;

use support::{Gate, call, probe, tenant_of};
use tokio_test::{assert_pending, assert_ready_ok};
use tower::Layer;
use tower_tenant::TenantConcurrencyLayer;

#[test]
fn a_finished_and_dropped_request_gives_back_one_slot() {
    let gate = Gate::shut();
    let layer = TenantConcurrencyLayer::new(1, tenant_of);
    let service = layer.layer(gate.clone());
    let mut request = call(&service, "T");
    assert_pending!(request.poll());
    gate.let_out(1);
    assert_ready_ok!(request.poll());
    drop(request);
    probe(layer.limiter(), "T", 1, 0);
    assert_eq!(gate.peak("T"), 1);
}
