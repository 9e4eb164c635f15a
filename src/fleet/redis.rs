//! Redis or Valkey as the store of a fleet.

use std::hash::{BuildHasher, RandomState};

use tokio::sync::watch;

use crate::fleet::{
    link::{Health, InvalidSettings, Link, LinkSettings, LinkState, Notices, Run, Script, Value},
    protocol::{self, Call, Notice, Reply, SCRIPT, Statement},
    store::{Failure, Store},
};

/// Redis or Valkey as the store of a fleet.
pub(crate) struct RedisStore {
    link: Link,
    health: watch::Receiver<Health>,
    notices: Notices,
    script: Script,
    call: Call,
}

impl RedisStore {
    /// Makes a store, and the work of connecting to it.
    pub(crate) fn open(settings: LinkSettings, call: Call) -> Result<(Self, Run), InvalidSettings> {
        let (link, run, notices) = Link::open(settings)?;
        let store = Self {
            health: link.health(),
            link,
            notices,
            script: Script::new(SCRIPT),
            call,
        };
        Ok((store, run))
    }
}

impl Store for RedisStore {
    fn bucket(&self, name: &[u8]) -> u32 {
        self.call.keys.bucket(name)
    }

    async fn call(&mut self, statements: Vec<Statement>) -> Result<Reply, Failure> {
        let encoded = self.call.encode(&statements).map_err(|_| Failure)?;
        let route = encoded.keys.first().cloned().unwrap_or_default();
        let call = self
            .link
            .call(&self.script, &route, encoded.keys, encoded.args);
        let value = call.await.map_err(|_| Failure)?;
        Reply::decode(value.into(), statements.len()).map_err(|_| Failure)
    }

    async fn set_limit(&mut self, name: &[u8], limit: Option<usize>) -> Result<(), Failure> {
        let key = self.call.keys.limit(name);
        let result = match limit {
            Some(limit) => self.link.set(&key, limit.to_string().as_bytes()).await,
            None => self.link.delete(&key).await,
        };
        result.map_err(|_| Failure)
    }

    fn is_down(&self) -> bool {
        let state = self.health.borrow().state;
        matches!(state, LinkState::Connecting | LinkState::Down)
    }

    async fn changed(&mut self) -> Option<Vec<u8>> {
        tokio::select! {
            changed = self.health.changed() => {
                if changed.is_err() {
                    // The link is gone, and this task with it.
                    std::future::pending::<()>().await;
                }
                None
            }
            Some(notice) = self.notices.recv() => match Notice::decode(&notice) {
                Ok(Notice::Recall(name) | Notice::Wake(name)) => Some(name),
                Err(_) => None,
            },
        }
    }
}

impl From<Value> for protocol::Value {
    fn from(value: Value) -> Self {
        match value {
            Value::Nil => Self::Bytes(Vec::new()),
            Value::Int(number) => Self::Int(number),
            Value::Bytes(bytes) => Self::Bytes(bytes),
            Value::List(values) => Self::Array(values.into_iter().map(Into::into).collect()),
        }
    }
}

/// Returns a name for this process that no other has, in 128 random bits.
pub(crate) fn process() -> String {
    // Each `RandomState` has keys of its own, from the random numbers of the system.
    let half = |salt: u8| RandomState::new().hash_one(salt);
    format!("{:016x}{:016x}", half(0), half(1))
}
