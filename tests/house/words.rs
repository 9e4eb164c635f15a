//! One word for one thing.

use std::fs;

use crate::files::{files, read, root};

/// Words that have another one in this project.
const RETIRED: &[&str] = &[
    "whoever",
    "nobody",
    "somebody",
    "everybody",
    "anybody",
    "refus",
    "nameless",
    "what becomes of",
    "gives back",
    "given back",
    "in the line",
    "overflow::shed",
];

/// Where such a word is used all the same: as data of a test.
const EXCEPT: &[(&str, &str)] = &[("service/missing.rs", "nameless")];

#[test]
fn a_word_that_was_retired_is_not_used() {
    let mut texts = Vec::new();
    for folder in ["src", "tests", "benches", "examples", "docs"] {
        for extension in ["rs", "html", "md"] {
            texts.extend(files(folder, extension));
        }
    }
    let top = fs::read_dir(root())
        .unwrap()
        .map(|entry| entry.unwrap().path());
    texts.extend(top.filter(|path| path.extension().is_some_and(|found| found == "md")));
    texts.retain(|path| !path.ends_with(file!()));
    let mut found = Vec::new();
    for path in texts {
        for (number, line) in read(&path).lines().enumerate() {
            // So that the words of a name are found too.
            let line = line.to_lowercase().replace('_', " ");
            for word in RETIRED.iter().filter(|word| line.contains(**word)) {
                let is_data = |(file, data): &(&str, &str)| path.ends_with(file) && data == word;
                if !EXCEPT.iter().any(is_data) {
                    found.push(format!("{}:{}: {word}", path.display(), number + 1));
                }
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}
