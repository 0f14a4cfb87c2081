//! Tables of figures.

use comfy_table::{CellAlignment, Table, presets::NOTHING};
use serde_json::{Value, json};

use crate::samples::{Samples, milliseconds};

#[must_use]
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// A table of percentiles, one row per measurement.
#[must_use]
pub fn latencies<'a>(name: &str, ways: impl IntoIterator<Item = &'a Samples>) -> Table {
    let mut rows = table(&[name, "p50 ms", "p95 ms", "p99 ms", "rounds"]);
    for samples in ways {
        let shown = |percent| {
            samples.percentile(percent).map_or_else(
                || "-".to_owned(),
                |time| format!("{:.2}", milliseconds(time)),
            )
        };
        rows.add_row([
            samples.way.to_owned(),
            shown(50),
            shown(95),
            shown(99),
            samples.len().to_string(),
        ]);
    }
    rows
}

#[must_use]
pub fn json_of(samples: &Samples) -> Value {
    let percentile = |percent| samples.percentile(percent).map(milliseconds);
    json!({
        "way": samples.way,
        "rounds": samples.len(),
        "p50_ms": percentile(50),
        "p95_ms": percentile(95),
        "p99_ms": percentile(99),
    })
}
