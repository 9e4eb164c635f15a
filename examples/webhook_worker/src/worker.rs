//! The worker: sends what is due until the outbox is empty.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use reqwest::{Client, redirect};
use tokio::{task::JoinSet, time::sleep};
use tower_tenant::{Limits, Permit, TenantLimiter};

use crate::outbox::{Customer, Delivery, Outbox};

/// After how many attempts a row is dead.
pub const MAX_ATTEMPTS: u32 = 4;
/// How often the outbox is asked for what is due, if no delivery ends before.
const POLL: Duration = Duration::from_millis(20);

/// Sends all rows of the database, and ends when none is left.
pub async fn run(path: &Path) -> rusqlite::Result<()> {
    let outbox = Outbox::open(path)?;
    outbox.recover()?;
    let worker = Worker::new(outbox)?;
    // Ends with this function: a panic of a delivery is one of the worker.
    let mut deliveries = JoinSet::new();
    loop {
        worker.send_due(&mut deliveries).await;
        if deliveries.is_empty() && worker.outbox.ask(|outbox| outbox.is_empty()).await {
            return Ok(());
        }
        tokio::select! {
            Some(done) = deliveries.join_next() => done.expect("no delivery panics"),
            () = sleep(POLL) => {}
        }
    }
}

#[derive(Clone)]
struct Worker {
    outbox: Shared,
    customers: Arc<HashMap<String, Customer>>,
    limiter: TenantLimiter<String>,
    client: Client,
}

impl Worker {
    fn new(outbox: Outbox) -> rusqlite::Result<Self> {
        let customers = outbox.customers()?.into_iter();
        let by_name = customers.map(|customer| (customer.name.clone(), customer));
        let customers: Arc<HashMap<_, _>> = Arc::new(by_name.collect());
        let caps = Arc::clone(&customers);
        let cap_of =
            move |name: &String| caps.get(name).map_or(0, |customer| customer.cap as usize);
        let client = Client::builder()
            .no_proxy()
            .redirect(redirect::Policy::none());
        Ok(Self {
            outbox: Shared(Arc::new(Mutex::new(outbox))),
            customers,
            limiter: TenantLimiter::new(Limits::from_fn(cap_of)),
            client: client.build().expect("a client"),
        })
    }

    /// Starts as many deliveries of each customer as it has room for; all else stays queued.
    async fn send_due(&self, deliveries: &mut JoinSet<()>) {
        for customer in self.outbox.ask(Outbox::customers_due).await {
            while let Ok(permit) = self.limiter.try_acquire(&customer) {
                let customer = customer.clone();
                let claimed = self.outbox.ask(move |outbox| outbox.claim(&customer)).await;
                let Some(delivery) = claimed else { break };
                deliveries.spawn(self.clone().deliver(delivery, permit));
            }
        }
    }

    /// Makes one attempt. The back-off is a time in the table: no permit is held in the meantime.
    async fn deliver(self, delivery: Delivery, permit: Permit) {
        let sent = self.send(&delivery).await;
        let back_off =
            self.customers[&delivery.customer].back_off * 2_u32.pow(delivery.attempt - 1);
        let Delivery { id, attempt, .. } = delivery;
        let outcome = move |outbox: &Outbox| match sent {
            Ok(()) => outbox.delivered(id),
            Err(why) if attempt < MAX_ATTEMPTS => outbox.put_back(id, &why, back_off),
            Err(why) => outbox.give_up(id, &why),
        };
        self.outbox.ask(outcome).await;
        drop(permit);
    }

    /// Sends one delivery, for as long as the customer's timeout.
    async fn send(&self, delivery: &Delivery) -> Result<(), String> {
        let customer = &self.customers[&delivery.customer];
        let request = self
            .client
            .post(&customer.url)
            .header("webhook-id", delivery.id)
            .timeout(customer.timeout)
            .body(delivery.body.clone());
        match request.send().await {
            Ok(answer) if answer.status().is_success() => Ok(()),
            Ok(answer) => Err(answer.status().to_string()),
            Err(error) if error.is_timeout() => {
                Err(format!("no answer within {:?}", customer.timeout))
            }
            Err(error) => Err(error.to_string()),
        }
    }
}

#[derive(Clone)]
struct Shared(Arc<Mutex<Outbox>>);

impl Shared {
    /// Uses the database on a thread that may block.
    async fn ask<R, F>(&self, question: F) -> R
    where
        R: Send + 'static,
        F: FnOnce(&Outbox) -> rusqlite::Result<R> + Send + 'static,
    {
        let outbox = Arc::clone(&self.0);
        let answer = move || question(&outbox.lock().expect("never poisoned"));
        let answered = tokio::task::spawn_blocking(answer).await;
        answered
            .expect("questions do not panic")
            .expect("the database works")
    }
}
