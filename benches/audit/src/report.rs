//! The report, as text or JSON.

use std::{fmt, time::Duration};

use cynode_bench::{
    machine::Facts,
    samples::milliseconds,
    table::{json_of, latencies},
};
use serde_json::{Value, json};

use crate::{
    cost::{Alone, Cost},
    fill::Filled,
    growth::{Growth, Verified},
    load::Load,
};

#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) facts: Facts,
    pub(crate) alone: Alone,
    pub(crate) cost: Cost,
    pub(crate) load: Load,
    pub(crate) load_without: Load,
    pub(crate) filled: Filled,
    pub(crate) growth: Growth,
    pub(crate) read: Vec<(&'static str, Duration)>,
    pub(crate) verified: Verified,
}

impl Report {
    pub(crate) fn json(&self) -> Value {
        let Self {
            facts,
            alone,
            cost,
            load: audited,
            load_without,
            filled,
            growth,
            read,
            verified,
        } = self;
        let load = |load: &Load| {
            json!({
                "sessions": load.sessions,
                "execs_per_second": load.per_second,
                "times": json_of(&load.times),
            })
        };
        let pages = read
            .iter()
            .map(|(name, time)| json!({ "what": name, "ms": milliseconds(*time) }));
        json!({
            "machine": facts.json(),
            "alone": {
                "exec": alone.ways().map(json_of),
                "times_faster_than_podman_exec": alone.against_podman(),
            },
            "exec": cost.ways().map(json_of),
            "added_ms": cost.added() * 1_000.0,
            "added_in_bare_commits": cost.in_commits(),
            "times_faster_than_podman_exec": cost.against_podman(),
            "load": { "audited": load(audited), "without_a_trail": load(load_without) },
            "filled": {
                "records": filled.records,
                "ms": milliseconds(filled.time),
                "bytes": filled.bytes,
            },
            "growth": {
                "long": json_of(&growth.long),
                "empty": json_of(&growth.empty),
                "percent_slower": growth.percent(),
            },
            "pages": pages.collect::<Vec<_>>(),
            "verify": {
                "records": verified.verdict.records,
                "ms": milliseconds(verified.time),
                "records_per_minute": verified.per_minute(),
            },
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            facts,
            alone,
            cost,
            load,
            load_without,
            filled,
            growth,
            read,
            verified,
        } = self;
        writeln!(f, "{facts}\n")?;
        writeln!(f, "{}\n", latencies("one after the other", alone.ways()))?;
        writeln!(
            f,
            " audited: {:.0}x faster than podman exec\n",
            alone.against_podman()
        )?;
        writeln!(
            f,
            "{}\n",
            latencies("in turn with a second stack", cost.ways())
        )?;
        writeln!(
            f,
            " the trail adds {:.2} ms at the median: {:.1} bare commits",
            cost.added() * 1_000.0,
            cost.in_commits()
        )?;
        writeln!(
            f,
            " audited: {:.0}x faster than podman exec\n",
            cost.against_podman()
        )?;
        writeln!(f, "{}\n", latencies("at once, audited", [&load.times]))?;
        writeln!(
            f,
            " {} sessions at once: {:.0} audited execs a second; {:.0} without a trail (p99 {:.1} \
             ms)\n",
            load.sessions,
            load.per_second,
            load_without.per_second,
            milliseconds(load_without.times.percentile(99).unwrap_or_default())
        )?;
        writeln!(
            f,
            "{}\n",
            latencies(
                &format!("{} records", filled.records),
                [&growth.long, &growth.empty]
            )
        )?;
        writeln!(
            f,
            " with {} records ({} MiB, filled in {:.0} s) an exec takes {:+.1} %",
            filled.records,
            filled.bytes >> 20,
            filled.time.as_secs_f64(),
            growth.percent()
        )?;
        let pages: Vec<String> = read
            .iter()
            .map(|(name, time)| format!("{name} {:.1}", milliseconds(*time)))
            .collect();
        writeln!(f, " a page of it, in ms: {}", pages.join(", "))?;
        write!(
            f,
            " verified {} records in {:.1} s by the API: {:.2} million a minute",
            verified.verdict.records,
            verified.time.as_secs_f64(),
            verified.per_minute() / 1e6
        )
    }
}
