//! Compares docs/limits.md with the constants that it names.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use fs_err as fs;

/// A number, or a time in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Number(u64),
    Millis(u64),
}

struct Row {
    bound: String,
    value: Value,
    constant: String,
    file: String,
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn rows() -> Vec<Row> {
    let text = fs::read_to_string(repository().join("docs/limits.md")).expect("docs/limits.md");
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|')
            .split('|')
            .map(|cell| cell.trim().to_owned())
            .collect()
    };
    let rows = text
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| bound"))
        .map(cells);
    let row = |cells: Vec<String>| {
        let [bound, value, constant, file, beyond] = cells.as_slice() else {
            panic!("a row needs five cells: {cells:?}")
        };
        assert!(!beyond.is_empty(), "{bound}: say what happens beyond it");
        let code = |cell: &str| {
            cell.strip_prefix('`')
                .and_then(|cell| cell.strip_suffix('`'))
                .unwrap_or_else(|| panic!("{bound}: {cell}"))
                .to_owned()
        };
        let value = parse_value(value).unwrap_or_else(|| panic!("{bound}: {value} is not a value"));
        Row {
            bound: bound.clone(),
            value,
            constant: code(constant),
            file: code(file),
        }
    };
    rows.map(row).collect()
}

/// Parses a value of the table.
fn parse_value(text: &str) -> Option<Value> {
    let (number, unit) = text.split_once(' ').unwrap_or((text, ""));
    let number: u64 = number.replace(',', "").parse().ok()?;
    Some(match unit {
        "" | "bytes" => Value::Number(number),
        "KiB" => Value::Number(number << 10),
        "MiB" => Value::Number(number << 20),
        "GiB" => Value::Number(number << 30),
        "ms" => Value::Millis(number),
        "s" => Value::Millis(number * 1_000),
        _ => return None,
    })
}

/// Evaluates the expression of a constant; other constants are looked up in the same file.
fn evaluated(expression: &str, source: &str) -> Option<Value> {
    let expression = expression.trim();
    if let Some(call) = expression.strip_prefix("Duration::") {
        let call = call.strip_prefix("from_").unwrap_or(call);
        let (unit, count) = call.strip_suffix(')')?.split_once('(')?;
        let count: u64 = count.replace('_', "").parse().ok()?;
        let factor = match unit {
            "millis" => 1,
            "secs" => 1_000,
            "mins" => 60_000,
            "hours" => 3_600_000,
            _ => return None,
        };
        return Some(Value::Millis(count * factor));
    }
    if let Some(permits) = expression
        .strip_prefix("Semaphore::const_new(")
        .and_then(|rest| rest.strip_suffix(')'))
    {
        return evaluated(permits, source);
    }
    for (sign, apply) in [
        (" - ", (|one, other| one - other) as fn(u64, u64) -> u64),
        (" + ", |one, other| one + other),
        (" << ", |one, other| one << other),
    ] {
        if let Some((left, right)) = expression.rsplit_once(sign) {
            return combined(evaluated(left, source)?, evaluated(right, source)?, apply);
        }
    }
    for (sign, apply) in [
        (" * ", (|one, other| one * other) as fn(u64, u64) -> u64),
        (" / ", |one, other| one / other),
    ] {
        if let Some((left, right)) = expression.rsplit_once(sign) {
            return combined(evaluated(left, source)?, evaluated(right, source)?, apply);
        }
    }
    let name = expression.rsplit("::").next()?;
    if name.starts_with(|first: char| first.is_ascii_uppercase()) {
        return evaluated(&definition(name, source)?, source);
    }
    expression.replace('_', "").parse().ok().map(Value::Number)
}

fn combined(left: Value, right: Value, apply: fn(u64, u64) -> u64) -> Option<Value> {
    match (left, right) {
        (Value::Number(left), Value::Number(right)) => Some(Value::Number(apply(left, right))),
        _ => None,
    }
}

fn definition(name: &str, source: &str) -> Option<String> {
    let line = source.lines().find(|line| {
        ["const ", "static "]
            .iter()
            .any(|kind| line.contains(&format!("{kind}{name}: ")))
    })?;
    line.split_once(" = ")?
        .1
        .strip_suffix(';')
        .map(str::to_owned)
}

/// Whether a plain number in seconds or milliseconds equals the time in the table.
fn agrees(stated: Value, actual: Value, constant: &str) -> bool {
    match (stated, actual) {
        (Value::Millis(stated), Value::Number(actual)) => {
            stated
                == if constant.ends_with("_MS") {
                    actual
                } else {
                    actual * 1_000
                }
        }
        _ => stated == actual,
    }
}

#[test]
// invariant: bounded
fn the_table_of_limits_matches_the_constants() {
    let rows = rows();
    assert!(
        rows.len() > 100,
        "the table was not read: {} rows",
        rows.len()
    );
    for Row {
        bound,
        value,
        constant,
        file,
    } in rows
    {
        let source = fs::read_to_string(repository().join("crates").join(&file))
            .unwrap_or_else(|error| panic!("{bound}: {file}: {error}"));
        let defined = definition(&constant, &source)
            .unwrap_or_else(|| panic!("{bound}: {file} has no constant {constant} on one line"));
        let actual = evaluated(&defined, &source)
            .unwrap_or_else(|| panic!("{bound}: {constant} = {defined} is not understood here"));
        assert!(
            agrees(value, actual, &constant),
            "{bound}: the table says {value:?}, {constant} in {file} is {actual:?}"
        );
    }
}

#[test]
fn every_constant_that_bounds_something_is_in_the_table() {
    let listed: BTreeSet<(String, String)> = rows()
        .into_iter()
        .map(|row| (row.file, row.constant))
        .collect();
    let crates = repository().join("crates");
    let (mut directories, mut missing) = (vec![crates.clone()], Vec::new());
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).expect("a directory").flatten() {
            let path = entry.path();
            if path.is_dir() {
                directories.push(path);
                continue;
            }
            let file = path
                .strip_prefix(&crates)
                .expect("below crates")
                .to_string_lossy()
                .into_owned();
            if path.extension().is_none_or(|extension| extension != "rs")
                || !file.contains("/src/")
                || file.contains("test")
                || file.contains("fuzz")
            {
                continue;
            }
            let source = fs::read_to_string(&path).expect("a source");
            let product = source
                .split("#[cfg(test)]\nmod tests")
                .next()
                .unwrap_or_default();
            for (at, _) in product.match_indices("const MAX_") {
                let after = &product[at + "const ".len()..];
                let name = after.split(':').next().unwrap_or_default().to_owned();
                if !listed.contains(&(file.clone(), name.clone())) {
                    missing.push(format!("{name} of {file}"));
                }
            }
        }
    }
    assert!(
        missing.is_empty(),
        "docs/limits.md has no row for {}",
        missing.join(", ")
    );
}
