//! The direction of imports in `src`.

use std::collections::BTreeSet;

use crate::files::{files, read, root};

/// Folders and files of `src` that stand in one row import from rows above only, or from their own.
const ROWS: [&[&str]; 8] = [
    &["util", "rejected", "extract"],
    &["error", "gate", "observe"],
    &["capacity", "limits"],
    &["tenant"],
    &["limiter"],
    &["service", "inspect", "fleet"],
    &["http"],
    &["reqwest"],
];

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
