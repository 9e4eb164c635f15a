//! The map from faults to tests.

use crate::files::{files, read, root};

/// The code that the map means by the name of a module.
fn code_of(module: &str) -> String {
    let folder = match module {
        "model" => "src/model",
        "browser" => "tests/browser",
        "webhook_worker" => "examples/webhook_worker",
        module => return read(&root().join(format!("tests/{module}.rs"))),
    };
    files(folder, "rs").iter().map(|path| read(path)).collect()
}

#[test]
fn each_test_that_the_map_names_exists() {
    let map = read(&root().join("tests/README.md")).replace("\n  ", " ");
    let mut missing = Vec::new();
    let mut known = 0;
    for line in map.lines() {
        let list = line.strip_prefix("- ").or(line.rsplit(" | ").next());
        let Some((module, tests)) = list.and_then(|list| list.split_once(": `")) else {
            continue;
        };
        let code = code_of(module);
        for name in tests.split('`').step_by(2) {
            let (code, function) = match name.split_once("::") {
                Some((file, function)) => (
                    &read(&root().join(format!("src/model/{file}.rs"))),
                    function,
                ),
                None => (&code, name),
            };
            if code.contains(&format!("fn {function}(")) {
                known += 1;
            } else {
                missing.push(format!("{module}: {name}"));
            }
        }
    }
    assert!(known > 0, "no test is named");
    assert!(missing.is_empty(), "{missing:#?}");
}
