//! Enums whose variants have a stable name.

use std::{error, fmt};

/// The error of parsing a name: no variant has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnknownName {
    expected: &'static [&'static str],
}

impl UnknownName {
    pub(crate) fn new(expected: &'static [&'static str]) -> Self {
        Self { expected }
    }
}

impl fmt::Display for UnknownName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "unknown name: expected one of {}",
            self.expected.join(", ")
        )
    }
}

impl error::Error for UnknownName {}

/// Implements `as_str`, `FromStr` and, with `serde`, `Serialize` and `Deserialize` for an enum.
macro_rules! names {
    ($type:ident { $($variant:ident = $name:literal,)* }) => {
        impl $type {
            /// All variants, in the order of declaration.
            #[allow(dead_code, reason = "not all enums are listed in all features")]
            pub(crate) const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];

            /// Returns a stable name in snake case, for logs, metric labels and machine-readable
            /// responses. [`FromStr`](std::str::FromStr) parses it.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::util::name::UnknownName;

            fn from_str(name: &str) -> Result<Self, Self::Err> {
                let found = Self::ALL.into_iter().find(|variant| variant.as_str() == name);
                found.ok_or($crate::util::name::UnknownName::new(&[$($name),*]))
            }
        }

        #[cfg(feature = "serde")]
        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        #[cfg(feature = "serde")]
        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let name = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
                name.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

pub(crate) use names;
