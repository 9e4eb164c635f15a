//! The outbox: the callbacks that are to be sent, in SQLite.
//!
//! All that is known about a delivery is in its row, so that a worker that is killed loses nothing:
//!
//! ```text
//! queued --> sending --> delivered
//!   ^           |------> dead       after the last attempt
//!   '-----------'                   after any other, or if the worker was killed
//! ```

use std::{
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rusqlite::{Connection, OptionalExtension, Result, Row, params};

const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS customer (
        name TEXT PRIMARY KEY,
        url TEXT NOT NULL,
        cap INTEGER NOT NULL,       -- how many deliveries may be in flight
        timeout INTEGER NOT NULL,   -- of one attempt, in ms
        back_off INTEGER NOT NULL   -- after the first attempt, in ms
    ) STRICT;
    CREATE TABLE IF NOT EXISTS outbox (
        id INTEGER PRIMARY KEY,
        customer TEXT NOT NULL REFERENCES customer,
        body TEXT NOT NULL,
        status TEXT NOT NULL DEFAULT 'queued',
        attempts INTEGER NOT NULL DEFAULT 0,
        next_attempt_at INTEGER NOT NULL,
        last_error TEXT,
        queued_at INTEGER NOT NULL,
        done_at INTEGER
    ) STRICT;
    CREATE INDEX IF NOT EXISTS due ON outbox (customer, next_attempt_at) WHERE status = 'queued';
";

/// The database. One process has it at a time, until it ends however it may.
pub struct Outbox(Connection);

#[derive(Clone, Debug)]
pub struct Customer {
    pub name: String,
    pub url: String,
    pub cap: u32,
    pub timeout: Duration,
    pub back_off: Duration,
}

/// A row that was claimed, to be sent now.
#[derive(Debug)]
pub struct Delivery {
    pub id: i64,
    pub customer: String,
    pub body: String,
    /// Which attempt this is, from 1.
    pub attempt: u32,
}

/// What the table says about a row.
#[derive(Debug)]
pub struct Entry {
    pub id: i64,
    pub customer: String,
    pub status: String,
    pub attempts: u32,
    pub last_error: Option<String>,
    pub queued_at: i64,
    pub done_at: Option<i64>,
}

impl Outbox {
    pub fn open(path: &Path) -> Result<Self> {
        let db = Connection::open(path)?;
        db.busy_timeout(Duration::ZERO)?;
        db.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
        db.pragma_update(None, "journal_mode", "WAL")?;
        // A kill undoes no commit; a loss of power may undo the last ones.
        db.pragma_update(None, "synchronous", "NORMAL")?;
        db.execute_batch(SCHEMA)?;
        Ok(Self(db))
    }

    pub fn add_customer(&self, customer: &Customer) -> Result<()> {
        let Customer { name, url, cap, .. } = customer;
        let timeout = millis(customer.timeout);
        let back_off = millis(customer.back_off);
        let sql = "INSERT INTO customer VALUES (?1, ?2, ?3, ?4, ?5)";
        self.0
            .execute(sql, params![name, url, cap, timeout, back_off])?;
        Ok(())
    }

    pub fn queue(&self, customer: &str, count: usize) -> Result<()> {
        let all = self.0.unchecked_transaction()?;
        let now = now();
        let mut insert = all.prepare(
            "INSERT INTO outbox (customer, body, next_attempt_at, queued_at)
             VALUES (?1, ?2, ?3, ?3)",
        )?;
        for number in 1..=count {
            let body = format!("event {number} of {customer}");
            insert.execute(params![customer, body, now])?;
        }
        drop(insert);
        all.commit()
    }

    pub fn customers(&self) -> Result<Vec<Customer>> {
        let sql = "SELECT name, url, cap, timeout, back_off FROM customer";
        self.all(sql, [], |row| {
            Ok(Customer {
                name: row.get(0)?,
                url: row.get(1)?,
                cap: row.get(2)?,
                timeout: duration(row.get(3)?),
                back_off: duration(row.get(4)?),
            })
        })
    }

    /// Queues again what a killed worker was sending. Whether it was delivered is unknown.
    pub fn recover(&self) -> Result<()> {
        let sql = "UPDATE outbox SET status = 'queued' WHERE status = 'sending'";
        self.0.execute(sql, [])?;
        Ok(())
    }

    /// The customers that have something due, however much it is, in the order they were added.
    pub fn customers_due(&self) -> Result<Vec<String>> {
        let sql = "SELECT name FROM customer WHERE EXISTS (
                       SELECT 1 FROM outbox
                       WHERE customer = name AND status = 'queued' AND next_attempt_at <= ?1)
                   ORDER BY rowid";
        self.all(sql, [now()], |row| row.get(0))
    }

    /// Takes the row of the customer that is due for longest.
    ///
    /// Its attempt counts from here: a row that kills the worker is not sent for ever.
    pub fn claim(&self, customer: &str) -> Result<Option<Delivery>> {
        let sql = "UPDATE outbox SET status = 'sending', attempts = attempts + 1
                   WHERE id = (
                       SELECT id FROM outbox
                       WHERE customer = ?1 AND status = 'queued' AND next_attempt_at <= ?2
                       ORDER BY next_attempt_at, id LIMIT 1)
                   RETURNING id, customer, body, attempts";
        let mut claim = self.0.prepare_cached(sql)?;
        let claimed = claim.query_row(params![customer, now()], |row| {
            Ok(Delivery {
                id: row.get(0)?,
                customer: row.get(1)?,
                body: row.get(2)?,
                attempt: row.get(3)?,
            })
        });
        claimed.optional()
    }

    pub fn delivered(&self, id: i64) -> Result<()> {
        let sql = "UPDATE outbox SET status = 'delivered', done_at = ?2 WHERE id = ?1";
        self.0.execute(sql, params![id, now()])?;
        Ok(())
    }

    /// Queues a row again, due when its back-off ends.
    pub fn put_back(&self, id: i64, error: &str, back_off: Duration) -> Result<()> {
        let sql = "UPDATE outbox SET status = 'queued', last_error = ?2, next_attempt_at = ?3
                   WHERE id = ?1";
        let due = now() + millis(back_off);
        self.0.execute(sql, params![id, error, due])?;
        Ok(())
    }

    pub fn give_up(&self, id: i64, error: &str) -> Result<()> {
        let sql = "UPDATE outbox SET status = 'dead', last_error = ?2, done_at = ?3 WHERE id = ?1";
        self.0.execute(sql, params![id, error, now()])?;
        Ok(())
    }

    /// Whether nothing is queued, now or for later.
    pub fn is_empty(&self) -> Result<bool> {
        let sql = "SELECT NOT EXISTS (SELECT 1 FROM outbox WHERE status = 'queued')";
        self.0.query_row(sql, [], |row| row.get(0))
    }

    pub fn entries(&self) -> Result<Vec<Entry>> {
        let sql = "SELECT id, customer, status, attempts, last_error, queued_at, done_at
                   FROM outbox ORDER BY id";
        self.all(sql, [], |row| {
            Ok(Entry {
                id: row.get(0)?,
                customer: row.get(1)?,
                status: row.get(2)?,
                attempts: row.get(3)?,
                last_error: row.get(4)?,
                queued_at: row.get(5)?,
                done_at: row.get(6)?,
            })
        })
    }

    fn all<T, P: rusqlite::Params>(
        &self,
        sql: &str,
        params: P,
        read: impl FnMut(&Row<'_>) -> Result<T>,
    ) -> Result<Vec<T>> {
        let mut query = self.0.prepare_cached(sql)?;
        query.query_map(params, read)?.collect()
    }
}

/// Milliseconds since 1970: unlike an `Instant`, they mean the same to the next worker.
pub fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    millis(since.expect("it is later than 1970"))
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).expect("a duration of this age")
}

fn duration(millis: i64) -> Duration {
    Duration::from_millis(millis.unsigned_abs())
}
