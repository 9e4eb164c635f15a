//! One word for one thing.

use crate::files::{files, read, root};

/// Words that have another one in this project.
const RETIRED: &[&str] = &[
    "whoever",
    "nobody",
    "somebody",
    "refuse",
    "refusal",
    "refusing",
    "nameless",
    "what becomes of",
    "shed(",
];

#[test]
fn a_word_that_was_retired_is_not_used() {
    let mut texts = files("src", "rs");
    texts.extend(files("src", "html"));
    texts.extend(files("docs", "md"));
    for name in [
        "README.md",
        "DESIGN.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
    ] {
        texts.push(root().join(name));
    }
    let mut found = Vec::new();
    for path in texts {
        for (number, line) in read(&path).lines().enumerate() {
            let line = line.to_lowercase();
            for word in RETIRED.iter().filter(|word| line.contains(**word)) {
                found.push(format!("{}:{}: {word}", path.display(), number + 1));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}
