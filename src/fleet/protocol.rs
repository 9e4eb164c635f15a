//! What a process of a fleet and the store say to each other.
//!
//! A process declares to the store, tenant by tenant, what it uses and what it needs
//! ([`Statement`]). One script in the store ([`SCRIPT`]) answers what the process may have in flight
//! ([`Answer`]), and for how long is up to the process: the lease it asked for, from when it asked.
//!
//! # Keys
//!
//! | key or channel | holds |
//! |---|---|
//! | `{PREFIX-v1-B:b}:h:NAME` | the leases of a tenant: a hash, see `sync.lua` |
//! | `{PREFIX-v1-B:b}:l:NAME` | the limit of a tenant, in digits, if it has one of its own |
//! | `{PREFIX-v1-B:b}:e` | when the store began to remember, in milliseconds |
//! | `PREFIX:n:PROCESS` | notices to a process: `recall NAME` or `wake NAME` |
//!
//! `B` is the number of buckets and `b` the [`bucket`] of the tenant. A cluster keeps all keys with
//! the same text in braces in one place, so one call can be for many tenants of one bucket. All
//! processes of a fleet must have the same prefix and the same number of buckets.

// Needs nothing of this crate: the tests of the fleet include it by its path.

use std::fmt;

/// The one script of the store.
pub(crate) const SCRIPT: &str = include_str!("sync.lua");

/// The form of keys and leases. Processes of two forms do not count each other's requests.
const FORM: &str = "v1";

/// The largest limit of a tenant. A larger one counts as this.
pub(crate) const MAX_LIMIT: u64 = 1_000_000;

/// The longest name of a tenant, in bytes.
pub(crate) const MAX_NAME: usize = 256;

/// The longest prefix.
pub(crate) const MAX_PREFIX: usize = 32;

// Lua and the store count in floating point: up to here each whole number is exact.
const MAX_NUMBER: u64 = 1 << 53;

/// What one process declares of one tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Statement {
    /// The name of the tenant: 1 to [`MAX_NAME`] bytes of any value.
    pub(crate) name: Vec<u8>,
    /// The number of the statement. The store ignores any but the newest of a process.
    pub(crate) seq: u64,
    /// How many requests are in flight.
    pub(crate) in_use: u64,
    /// How many may be in flight until the answer has come. Never denied.
    pub(crate) floor: u64,
    /// How many are in flight or wait.
    pub(crate) need: u64,
    /// The need, and a spare part for requests to come.
    pub(crate) want: u64,
    /// The limit over all processes, unless the store has another for the tenant.
    pub(crate) limit: u64,
    /// How long the oldest request has waited, in milliseconds; 0 if none waits.
    pub(crate) oldest_wait_ms: u64,
}

/// What the statements of a process have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    /// The name of this process: made up at its start, never used again, not empty.
    pub(crate) process: String,
    /// How long a grant lasts, in milliseconds, from when the store answers. The process, which
    /// does not know when that is, must not use it longer than this from when it sent the call.
    pub(crate) lease_ms: u64,
    /// For how long a store that has lost its memory grants only what is in use: at least as long as
    /// the longest lease of the fleet. 0 to grant at once.
    pub(crate) learning_ms: u64,
    pub(crate) keys: Keys,
    /// The part of a limit, in percent, that is granted only for need. `None` for 25 %, and 50 % of
    /// a limit below 16.
    pub(crate) reserve: Option<u8>,
    /// Whether requests wait in a queue; if not, a demand that cannot be met is forgotten.
    pub(crate) queues: bool,
}

/// The keys of a fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keys {
    prefix: String,
    buckets: u32,
}

/// The bucket of a tenant: the FNV-1a hash of its name in 64 bits, modulo the number of buckets.
///
/// All processes must agree on it, so it is fixed here and tested by value.
pub(crate) fn bucket(name: &[u8], buckets: u32) -> u32 {
    let hash = name.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    (hash % u64::from(buckets)) as u32
}

impl Keys {
    /// # Errors
    ///
    /// If the prefix is not 1 to [`MAX_PREFIX`] characters of `A-Z a-z 0-9 . _ -`, or there is no
    /// bucket.
    pub(crate) fn new(prefix: &str, buckets: u32) -> Result<Self, Invalid> {
        // Braces would move the keys of one bucket apart, and `*` or `[` would widen the pattern of
        // an access list.
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if !(1..=MAX_PREFIX).contains(&prefix.len()) || !prefix.bytes().all(allowed) {
            return Err(Invalid::Prefix);
        }
        if buckets == 0 {
            return Err(Invalid::Buckets);
        }
        Ok(Self {
            prefix: prefix.to_owned(),
            buckets,
        })
    }

    /// Returns the bucket of a tenant. All tenants of one call are of one bucket.
    pub(crate) fn bucket(&self, name: &[u8]) -> u32 {
        bucket(name, self.buckets)
    }

    /// Returns the key of the leases of a tenant.
    pub(crate) fn leases(&self, name: &[u8]) -> Vec<u8> {
        self.of_tenant(":h:", name)
    }

    /// Returns the key of the limit of a tenant.
    pub(crate) fn limit(&self, name: &[u8]) -> Vec<u8> {
        self.of_tenant(":l:", name)
    }

    /// Returns the key of when the store began to remember a bucket.
    pub(crate) fn epoch(&self, bucket: u32) -> Vec<u8> {
        format!("{}:e", self.tag(bucket)).into_bytes()
    }

    /// Returns the channel of notices to a process.
    pub(crate) fn channel(&self, process: &str) -> String {
        format!("{}:n:{process}", self.prefix)
    }

    fn of_tenant(&self, kind: &str, name: &[u8]) -> Vec<u8> {
        let mut key = self.tag(self.bucket(name)).into_bytes();
        key.extend_from_slice(kind.as_bytes());
        key.extend_from_slice(name);
        key
    }

    fn tag(&self, bucket: u32) -> String {
        format!("{{{}-{FORM}-{}:{bucket}}}", self.prefix, self.buckets)
    }
}

/// The keys and arguments of a call of the script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Encoded {
    pub(crate) keys: Vec<Vec<u8>>,
    pub(crate) args: Vec<Vec<u8>>,
}

impl Call {
    /// Returns the keys and arguments for statements about tenants of one bucket.
    ///
    /// # Errors
    ///
    /// If a name is empty or too long, if tenants are of different buckets, or if there are none.
    pub(crate) fn encode(&self, statements: &[Statement]) -> Result<Encoded, Invalid> {
        let first = statements.first().ok_or(Invalid::Bucket)?;
        let bucket = self.keys.bucket(&first.name);
        let mut keys = vec![self.keys.epoch(bucket)];
        let reserve = match self.reserve {
            Some(percent) => percent.min(100).to_string(),
            None => "-1".to_owned(),
        };
        let mut args = vec![
            self.process.clone().into_bytes(),
            number(self.lease_ms),
            number(self.learning_ms),
            self.keys.prefix.clone().into_bytes(),
            reserve.into_bytes(),
            number(self.queues.into()),
        ];
        for statement in statements {
            validate_name(&statement.name)?;
            if self.keys.bucket(&statement.name) != bucket {
                return Err(Invalid::Bucket);
            }
            keys.push(self.keys.leases(&statement.name));
            keys.push(self.keys.limit(&statement.name));
            args.extend([
                number(statement.seq),
                number(statement.in_use),
                number(statement.floor),
                number(statement.need.min(MAX_LIMIT)),
                number(statement.want.min(MAX_LIMIT)),
                number(statement.limit.min(MAX_LIMIT)),
                statement.name.clone(),
                number(statement.oldest_wait_ms),
            ]);
        }
        Ok(Encoded { keys, args })
    }
}

fn number(value: u64) -> Vec<u8> {
    value.min(MAX_NUMBER).to_string().into_bytes()
}

/// # Errors
///
/// If the name of a tenant is not 1 to [`MAX_NAME`] bytes long.
pub(crate) fn validate_name(name: &[u8]) -> Result<(), Invalid> {
    if (1..=MAX_NAME).contains(&name.len()) {
        Ok(())
    } else {
        Err(Invalid::Name)
    }
}

/// What cannot be sent to a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Invalid {
    /// A prefix that is empty, too long, or has other characters.
    Prefix,
    /// No bucket.
    Buckets,
    /// A name that is empty or too long.
    Name,
    /// No tenant, or tenants of different buckets in one call.
    Bucket,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prefix => write!(
                f,
                "the prefix of a fleet must be 1 to {MAX_PREFIX} characters of A-Z, a-z, 0-9, `.`, `_` and `-`"
            ),
            Self::Buckets => f.write_str("a fleet must have at least one bucket"),
            Self::Name => write!(
                f,
                "the name of a tenant must be 1 to {MAX_NAME} bytes long in a fleet"
            ),
            Self::Bucket => f.write_str("the tenants of one call must be of one bucket"),
        }
    }
}

impl std::error::Error for Invalid {}

/// A value that the store has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    Int(i64),
    Bytes(Vec<u8>),
    Array(Vec<Value>),
}

/// The answers to the statements of one call, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reply {
    /// The time of the store, in milliseconds since 1970, by a clock that may be set.
    pub(crate) now_ms: u64,
    /// Whether the store has lost its memory, and grants only what is in use.
    pub(crate) is_learning: bool,
    pub(crate) answers: Vec<Answer>,
}

/// The answer to one statement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Whether the store has seen a newer statement. All else is 0 then.
    pub(crate) is_stale: bool,
    /// How many requests may be in flight in this process.
    pub(crate) grant: u64,
    /// The limit over all processes.
    pub(crate) limit: u64,
    /// Whether requests of other processes wait for a slot.
    pub(crate) others_wait: bool,
    /// Whether the limit is nearly used up: no spare part is granted, and each release counts.
    pub(crate) is_tight: bool,
    /// Whether more is granted to all processes than the limit.
    pub(crate) is_overcommitted: bool,
    /// How much of what the others were granted may be unused.
    pub(crate) spare: u64,
    /// How many requests are in flight in all processes, by what they last declared.
    pub(crate) in_flight: u64,
    /// How many processes have a grant or a demand.
    pub(crate) processes: u64,
}

impl Reply {
    /// Reads the reply to a call with so many statements.
    ///
    /// # Errors
    ///
    /// If it is not what the script answers to them.
    pub(crate) fn decode(value: Value, statements: usize) -> Result<Self, Malformed> {
        let Value::Array(values) = value else {
            return Err(Malformed);
        };
        if values.len() != statements + 2 {
            return Err(Malformed);
        }
        let mut values = values.into_iter();
        let mut next = || values.next().ok_or(Malformed);
        Ok(Self {
            now_ms: natural(&next()?)?,
            is_learning: natural(&next()?)? != 0,
            answers: values.map(Answer::decode).collect::<Result<_, _>>()?,
        })
    }
}

impl Answer {
    fn decode(value: Value) -> Result<Self, Malformed> {
        let Value::Array(values) = value else {
            return Err(Malformed);
        };
        let numbers: Vec<u64> = values.iter().map(natural).collect::<Result<_, _>>()?;
        let [
            status @ 0..=1,
            grant,
            limit,
            flags @ 0..=7,
            spare,
            in_flight,
            processes,
        ] = numbers[..]
        else {
            return Err(Malformed);
        };
        Ok(Self {
            is_stale: status == 1,
            grant,
            limit,
            others_wait: flags & 1 != 0,
            is_tight: flags & 2 != 0,
            is_overcommitted: flags & 4 != 0,
            spare,
            in_flight,
            processes,
        })
    }
}

fn natural(value: &Value) -> Result<u64, Malformed> {
    match value {
        Value::Int(number) => u64::try_from(*number).map_err(|_| Malformed),
        Value::Bytes(_) | Value::Array(_) => Err(Malformed),
    }
}

/// A reply or a notice that the script does not send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the store has sent what the script of the fleet does not answer")
    }
}

impl std::error::Error for Malformed {}

/// What a process is told between its calls. A hint: it may be lost.
///
/// Whatever the notice, the process asks for the tenant at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// Others need what this process may not use of its grant.
    Recall(Vec<u8>),
    /// A slot is free for a request that waits here.
    Wake(Vec<u8>),
}

impl Notice {
    /// Reads what was published on the channel of this process.
    ///
    /// # Errors
    ///
    /// If the script does not publish this.
    pub(crate) fn decode(message: &[u8]) -> Result<Self, Malformed> {
        let space = message.iter().position(|byte| *byte == b' ');
        let (kind, name) = message.split_at(space.ok_or(Malformed)?);
        let name = name[1..].to_vec();
        validate_name(&name).map_err(|_| Malformed)?;
        match kind {
            b"recall" => Ok(Self::Recall(name)),
            b"wake" => Ok(Self::Wake(name)),
            _ => Err(Malformed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(buckets: u32) -> Keys {
        Keys::new("shop", buckets).unwrap()
    }

    fn call() -> Call {
        Call {
            process: "p1".to_owned(),
            lease_ms: 10_000,
            learning_ms: 9_000,
            keys: keys(1),
            reserve: None,
            queues: true,
        }
    }

    fn statement(name: &[u8]) -> Statement {
        Statement {
            name: name.to_vec(),
            seq: 7,
            in_use: 1,
            floor: 2,
            need: 3,
            want: 4,
            limit: 5,
            oldest_wait_ms: 6,
        }
    }

    fn ints(numbers: &[i64]) -> Value {
        Value::Array(numbers.iter().copied().map(Value::Int).collect())
    }

    #[test]
    fn a_bucket_is_that_of_fnv_1a() {
        // The published test vectors.
        let all = 1 << 31;
        assert_eq!(
            bucket(b"", all),
            (0xcbf2_9ce4_8422_2325_u64 % u64::from(all)) as u32
        );
        assert_eq!(
            bucket(b"a", all),
            (0xaf63_dc4c_8601_ec8c_u64 % u64::from(all)) as u32
        );
        assert_eq!(
            bucket(b"foobar", all),
            (0x8594_4171_f739_67e8_u64 % u64::from(all)) as u32
        );
        assert_eq!(bucket(b"foobar", 64), 0x68 % 64);
        assert_eq!(bucket(b"foobar", 1), 0);
    }

    #[test]
    fn keys_of_one_bucket_have_one_tag() {
        let keys = keys(64);
        assert_eq!(keys.leases(b"foobar"), b"{shop-v1-64:40}:h:foobar");
        assert_eq!(keys.limit(b"foobar"), b"{shop-v1-64:40}:l:foobar");
        assert_eq!(keys.epoch(40), b"{shop-v1-64:40}:e");
        assert_eq!(keys.channel("p1"), "shop:n:p1");
    }

    #[test]
    fn a_prefix_that_would_move_or_widen_keys_is_rejected() {
        for prefix in ["a", "A.b_c-9", &"x".repeat(32)] {
            assert!(Keys::new(prefix, 1).is_ok(), "{prefix}");
        }
        for prefix in [
            "",
            "{}",
            "a}b",
            "a b",
            "a*",
            "a:b",
            "\u{e4}",
            "a\n",
            &"x".repeat(33),
        ] {
            assert_eq!(Keys::new(prefix, 1), Err(Invalid::Prefix), "{prefix}");
        }
        assert_eq!(Keys::new("a", 0), Err(Invalid::Buckets));
    }

    #[test]
    fn a_call_is_encoded_in_the_order_the_script_reads() {
        let encoded = call().encode(&[statement(b"a b"), statement(&[0, 255])]);
        let encoded = encoded.unwrap();
        let keys: [&[u8]; 5] = [
            b"{shop-v1-1:0}:e",
            b"{shop-v1-1:0}:h:a b",
            b"{shop-v1-1:0}:l:a b",
            b"{shop-v1-1:0}:h:\0\xff",
            b"{shop-v1-1:0}:l:\0\xff",
        ];
        assert_eq!(encoded.keys, keys);
        let args: [&[u8]; 22] = [
            b"p1", b"10000", b"9000", b"shop", b"-1", b"1", b"7", b"1", b"2", b"3", b"4", b"5",
            b"a b", b"6", b"7", b"1", b"2", b"3", b"4", b"5", b"\0\xff", b"6",
        ];
        assert_eq!(encoded.args, args);
    }

    #[test]
    fn numbers_too_large_for_lua_are_taken_as_the_largest() {
        let large = Statement {
            seq: u64::MAX,
            in_use: u64::MAX,
            floor: u64::MAX,
            need: u64::MAX,
            want: u64::MAX,
            limit: u64::MAX,
            oldest_wait_ms: u64::MAX,
            ..statement(b"a")
        };
        let call = Call {
            reserve: Some(255),
            queues: false,
            ..call()
        };
        let encoded = call.encode(&[large]).unwrap();
        let args: [&[u8]; 14] = [
            b"p1",
            b"10000",
            b"9000",
            b"shop",
            b"100",
            b"0",
            b"9007199254740992",
            b"9007199254740992",
            b"9007199254740992",
            b"1000000",
            b"1000000",
            b"1000000",
            b"a",
            b"9007199254740992",
        ];
        assert_eq!(encoded.args, args);
    }

    #[test]
    fn a_name_that_is_empty_or_too_long_is_not_sent() {
        assert_eq!(call().encode(&[statement(b"")]), Err(Invalid::Name));
        assert!(call().encode(&[statement(&[b'x'; 256])]).is_ok());
        let encoded = call().encode(&[statement(b"a"), statement(&[b'x'; 257])]);
        assert_eq!(encoded, Err(Invalid::Name));
    }

    #[test]
    fn tenants_of_two_buckets_are_not_sent_in_one_call() {
        let call = Call {
            keys: keys(2),
            ..call()
        };
        let [even, odd] = [b"a", b"b"].map(|name: &[u8; 1]| statement(name));
        assert_ne!(call.keys.bucket(&even.name), call.keys.bucket(&odd.name));
        assert!(call.encode(std::slice::from_ref(&odd)).is_ok());
        assert_eq!(call.encode(&[even, odd]), Err(Invalid::Bucket));
        assert_eq!(call.encode(&[]), Err(Invalid::Bucket));
    }

    #[test]
    fn a_reply_is_decoded() {
        let value = Value::Array(vec![
            Value::Int(1_700_000_000_000),
            Value::Int(1),
            ints(&[0, 3, 8, 5, 2, 6, 4]),
            ints(&[1, 0, 0, 0, 0, 0, 0]),
        ]);
        let first = Answer {
            is_stale: false,
            grant: 3,
            limit: 8,
            others_wait: true,
            is_tight: false,
            is_overcommitted: true,
            spare: 2,
            in_flight: 6,
            processes: 4,
        };
        let second = Answer {
            is_stale: true,
            ..Answer::default()
        };
        let reply = Reply {
            now_ms: 1_700_000_000_000,
            is_learning: true,
            answers: vec![first, second],
        };
        assert_eq!(Reply::decode(value, 2), Ok(reply));
    }

    #[test]
    fn any_other_reply_is_an_error() {
        let good = || ints(&[0, 1, 1, 0, 0, 1, 1]);
        let reply = |now, learning, answer| Value::Array(vec![now, learning, answer]);
        let (now, no) = (Value::Int(5), Value::Int(0));
        assert!(Reply::decode(reply(now.clone(), no.clone(), good()), 1).is_ok());
        for bad in [
            Value::Int(1),
            Value::Bytes(b"OK".to_vec()),
            Value::Array(vec![]),
            Value::Array(vec![now.clone(), no.clone()]),
            Value::Array(vec![now.clone(), no.clone(), good(), good()]),
            reply(Value::Int(-1), no.clone(), good()),
            reply(Value::Bytes(b"5".to_vec()), no.clone(), good()),
            reply(now.clone(), no.clone(), no.clone()),
            reply(now.clone(), no.clone(), ints(&[2, 1, 1, 0, 0, 1, 1])),
            reply(now.clone(), no.clone(), ints(&[0, 1, 1, 8, 0, 1, 1])),
            reply(now.clone(), no.clone(), ints(&[0, -1, 1, 0, 0, 1, 1])),
            reply(now.clone(), no.clone(), ints(&[0, 1, 1, 0, 0, 1])),
            reply(now, no, ints(&[0, 1, 1, 0, 0, 1, 1, 1])),
        ] {
            assert_eq!(Reply::decode(bad.clone(), 1), Err(Malformed), "{bad:?}");
        }
    }

    #[test]
    fn a_notice_is_decoded() {
        let recall = Notice::Recall(b"a b".to_vec());
        assert_eq!(Notice::decode(b"recall a b"), Ok(recall));
        let wake = Notice::Wake(b" \xff".to_vec());
        assert_eq!(Notice::decode(b"wake  \xff"), Ok(wake));
        for bad in [&b""[..], b"wake", b"wake ", b"waken a", b" a"] {
            assert_eq!(Notice::decode(bad), Err(Malformed), "{bad:?}");
        }
    }
}
