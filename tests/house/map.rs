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
    let map = read(&root().join("tests/README.md"));
    let mut missing = Vec::new();
    let mut known = 0;
    for list in map.split(['|', ';']) {
        let Some((module, tests)) = list.trim().split_once(": `") else {
            continue;
        };
        let code = code_of(module);
        for name in tests.split('`').step_by(2) {
            let function = name.rsplit("::").next().unwrap();
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
