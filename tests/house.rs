//! What the repository promises of itself: its words, the direction of its imports, and the map from
//! faults to tests.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Folders and files of `src` that stand in one row import from rows above only, or from their own.
const ROWS: [&[&str]; 8] = [
    &["util", "rejected", "extract"],
    &["error", "gate", "observe"],
    &["capacity", "limits"],
    &["tenant"],
    &["limiter"],
    &["service", "inspect"],
    &["http"],
    &["reqwest"],
];

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

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files(folder: &str, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                found.push(path);
            }
        }
    }
    found
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

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

fn row(module: &str) -> Option<usize> {
    ROWS.iter().position(|row| row.contains(&module))
}

/// The modules of `src` that a file names after `crate::`, in its code.
fn imports(text: &str) -> BTreeSet<String> {
    let code = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    let code: String = code.collect::<Vec<_>>().join("\n");
    let mut found = BTreeSet::new();
    for after in code.split("crate::").skip(1) {
        let Some(group) = after.strip_prefix('{') else {
            found.extend(first_name(after));
            continue;
        };
        let mut depth = 0;
        let mut begins = true;
        for (i, character) in group.char_indices() {
            match character {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => begins = true,
                _ if begins && character.is_alphabetic() => {
                    found.extend(first_name(&group[i..]));
                    begins = false;
                }
                _ => {}
            }
        }
    }
    found
}

fn first_name(text: &str) -> Option<String> {
    let name = text
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .next()?;
    Some(name.to_owned())
}

#[test]
fn imports_go_down_the_list_only() {
    let src = root().join("src");
    let mut found = Vec::new();
    for path in files("src", "rs") {
        let inside = path.strip_prefix(&src).unwrap();
        let module = inside.iter().next().unwrap().to_str().unwrap();
        let Some(own) = row(module.trim_end_matches(".rs")) else {
            continue;
        };
        for import in imports(&read(&path)) {
            if row(&import).is_some_and(|row| row > own) {
                found.push(format!("{} imports {import}", inside.display()));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn each_test_that_the_map_names_exists() {
    let mut code = String::new();
    for folder in ["src", "tests", "examples", "benches"] {
        for path in files(folder, "rs") {
            code += &read(&path);
        }
    }
    let map = read(&root().join("tests/README.md"));
    let names = map.split('`').skip(1).step_by(2);
    let names = names.filter_map(|name| name.rsplit("::").next());
    let is_test =
        |name: &&str| name.contains('_') && name.chars().all(|c| c.is_alphanumeric() || c == '_');
    let missing: Vec<_> = names
        .filter(is_test)
        .filter(|name| !code.contains(&format!("fn {name}(")))
        .collect();
    assert!(missing.is_empty(), "{missing:#?}");
}
