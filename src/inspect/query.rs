//! The query parameters of a request for a snapshot.

use crate::{inspect::response::Fault, limiter::snapshot::SortBy};

/// The default number of rows in a response.
const ROWS: usize = 100;
/// The maximum number of rows, so that a million tenants do not make a response of 100 MB.
const MAX_ROWS: usize = 1_000;

/// Which tenants to show, and in which order.
#[derive(Debug, PartialEq)]
pub(super) struct Query {
    /// `None` sorts by name.
    pub(super) sort: Option<SortBy>,
    pub(super) top: usize,
    /// [Folded](fold).
    pub(super) search: String,
}

impl Query {
    /// Parses the part of the URI after `?`. An unknown parameter is an error, so that a typing
    /// mistake does not show all tenants.
    pub(super) fn parse(query: &str) -> Result<Self, Fault> {
        let mut parsed = Self {
            sort: Some(SortBy::InFlight),
            top: ROWS,
            search: String::new(),
        };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = decode(value);
            match key {
                "sort" if value == "tenant" => parsed.sort = None,
                "sort" => parsed.sort = Some(value.parse().map_err(|_| bad(key))?),
                "top" => parsed.top = value.parse().map_err(|_| bad(key))?,
                "search" => parsed.search = fold(&value),
                _ => {
                    let sentence = "Unknown query parameter: expected `sort`, `search` or `top`";
                    return Err(Fault::bad(sentence));
                }
            }
        }
        parsed.top = parsed.top.min(MAX_ROWS);
        Ok(parsed)
    }
}

/// Folds the case of a text.
///
/// It converts to upper case first, since the lower-case sigma has another form at the end of a
/// word.
pub(super) fn fold(text: &str) -> String {
    let upper = text.chars().flat_map(char::to_uppercase);
    upper.flat_map(char::to_lowercase).collect()
}

fn bad(key: &str) -> Fault {
    let expected = match key {
        "top" => "a number",
        _ => "`tenant` or a field such as `in_flight`",
    };
    Fault::bad(format!(
        "Invalid query parameter `{key}`: expected {expected}"
    ))
}

/// Decodes form encoding. Invalid escapes are kept unchanged.
fn decode(value: &str) -> String {
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        match (first, after) {
            (b'+', _) => bytes.push(b' '),
            (b'%', [high, low, after @ ..]) => match (digit(*high), digit(*low)) {
                (Some(high), Some(low)) => {
                    bytes.push(16 * high + low);
                    rest = after;
                }
                _ => bytes.push(b'%'),
            },
            _ => bytes.push(*first),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn digit(byte: u8) -> Option<u8> {
    let digit = char::from(byte).to_digit(16)?;
    u8::try_from(digit).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_is_decoded_and_what_is_wrong_in_it_stays() {
        for (encoded, plain) in [
            ("", ""),
            ("a+b%20c", "a b c"),
            ("%C3%a9%26", "é&"),
            ("100%", "100%"),
            ("%4", "%4"),
            ("%zz%2", "%zz%2"),
            ("%ff", "\u{fffd}"),
        ] {
            assert_eq!(decode(encoded), plain, "{encoded}");
        }
    }

    #[test]
    fn letters_of_both_cases_are_equal_wherever_they_stand() {
        for (name, search) in [
            ("ΟΔΟΣ", "Σ"),
            ("ΑΣΑ", "ΑΣ"),
            ("οδος", "ΔΟΣ"),
            ("Straße", "SS"),
        ] {
            assert!(fold(name).contains(&fold(search)), "{name} {search}");
        }
    }

    #[test]
    fn a_query_has_defaults_and_bounds() {
        let query = Query::parse("").unwrap();
        assert_eq!((query.sort, query.top), (Some(SortBy::InFlight), 100));
        let query = Query::parse("sort=tenant&top=9999999&search=ACME").unwrap();
        assert_eq!((query.sort, query.top), (None, 1_000));
        assert_eq!(query.search, "acme");
        for wrong in ["sort=name", "top=-1", "top=", "limit=3"] {
            assert!(Query::parse(wrong).is_err(), "{wrong}");
        }
    }
}
