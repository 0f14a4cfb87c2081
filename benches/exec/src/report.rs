//! The report, as text or JSON.

use std::{fmt, time::Duration};

use cynode_bench::table::{json_of, latencies, table};
use serde_json::{Value, json};

use crate::{
    bombs::Neighbour,
    create::Burst,
    exec::{BY_ORCHESTRATOR, PODMAN_EXEC, Parallel},
    first_token::FirstToken,
    jobs::JobTimes,
    machine::Facts,
    memory::Idle,
    samples::{Samples, milliseconds},
    through::Passed,
    throughput::Transfer,
};

#[derive(Debug)]
pub(crate) struct Report {
    facts: Facts,
    pub(crate) exec: Vec<Samples>,
    pub(crate) parallel: Parallel,
    pub(crate) create: Vec<Samples>,
    pub(crate) end: Vec<Samples>,
    pub(crate) jobs: JobTimes,
    pub(crate) first_token: FirstToken,
    pub(crate) burst: Burst,
    pub(crate) neighbour: Neighbour,
    pub(crate) transfers: Vec<Transfer>,
    pub(crate) passed: Passed,
    pub(crate) memory: Vec<Idle>,
}

impl Report {
    pub(crate) fn new(facts: Facts) -> Self {
        let parallel = Parallel {
            clients: 0,
            per_second: 0.0,
            samples: Samples::new(""),
        };
        Self {
            facts,
            exec: Vec::new(),
            parallel,
            create: Vec::new(),
            end: Vec::new(),
            jobs: JobTimes::default(),
            first_token: FirstToken::default(),
            burst: Burst::default(),
            neighbour: Neighbour::default(),
            transfers: Vec::new(),
            passed: Passed::default(),
            memory: Vec::new(),
        }
    }

    fn latencies(&self) -> [(&'static str, &[Samples]); 7] {
        [
            ("exec of true", &self.exec),
            ("create", &self.create),
            ("end", &self.end),
            ("step of a job", &self.jobs.steps),
            ("start of a job", &self.jobs.starts),
            ("first token", &self.first_token.ways),
            ("audit record", &self.first_token.append),
        ]
    }

    /// What ours adds to the lower bound that it is compared with.
    fn overheads(&self) -> Vec<String> {
        let medians = |ways: &[Samples]| match ways {
            [ours, bound] if !ours.is_empty() && !bound.is_empty() => {
                Some((ours.p50(), bound.p50()))
            }
            _ => None,
        };
        let over = |(ours, bound): (Duration, Duration)| milliseconds(ours.saturating_sub(bound));
        let times = |ours: Duration, bound: Duration| ours.as_secs_f64() / bound.as_secs_f64();
        let mut lines = Vec::new();
        if let Some((step, spawn)) = medians(&self.jobs.steps) {
            lines.push(format!(
                "step of a job: {:.2} ms over a plain spawn, {:.1} plain spawns",
                over((step, spawn)),
                times(step.saturating_sub(spawn), spawn)
            ));
        }
        if let Some((start, spawn)) = medians(&self.jobs.starts) {
            lines.push(format!(
                "start of a job: {:.1} plain spawns to the first step",
                times(start, spawn)
            ));
        }
        if let Some(both) = medians(&self.first_token.ways) {
            let append = self.first_token.append.first().map(Samples::p50);
            lines.push(format!(
                "first token: {:.2} ms over the model server itself; a durable append takes {:.2} ms",
                over(both),
                milliseconds(append.unwrap_or_default())
            ));
        }
        lines
    }

    pub(crate) fn json(&self) -> Value {
        let latency: Vec<Value> = self
            .latencies()
            .iter()
            .map(|(name, ways)| {
                let ways: Vec<_> = ways.iter().map(json_of).collect();
                json!({ "what": name, "ways": ways })
            })
            .collect();
        let transfer = |transfer: &Transfer| {
            let rate = |ways: &Samples| {
                json!({
                    "way": ways.way,
                    "rounds": ways.len(),
                    "p50_ms": milliseconds(ways.p50()),
                    "mib_per_second": rate(transfer.bytes, ways),
                })
            };
            let ways: Vec<_> = transfer.ways.iter().map(rate).collect();
            json!({ "what": transfer.name, "bytes": transfer.bytes, "ways": ways })
        };
        let idle = |row: &Idle| {
            json!({
                "sessions": row.sessions,
                "agents_pss_kib": row.agents,
                "monitors_pss_kib": row.monitors,
                "worker_rss_kib": row.worker,
                "worker_growth_kib": row.worker_growth,
            })
        };
        json!({
            "machine": self.facts.json(),
            "latency": latency,
            "parallel": {
                "clients": self.parallel.clients,
                "execs_per_second": self.parallel.per_second,
                "times": json_of(&self.parallel.samples),
            },
            "burst": {
                "sessions": self.burst.sessions,
                "ready_ms": milliseconds(self.burst.ready),
                "gone_ms": milliseconds(self.burst.gone),
            },
            "neighbour_of_ten_bombs": {
                "seconds": self.neighbour.seconds,
                "failed": self.neighbour.failed,
                "idle": self.neighbour.idle.as_ref().map(json_of),
                "beside": self.neighbour.beside.as_ref().map(json_of),
            },
            "through_the_orchestrator": {
                "bytes": self.passed.bytes,
                "ms": milliseconds(self.passed.time),
                "rss_before_bytes": self.passed.before,
                "rss_peak_bytes": self.passed.peak,
            },
            "throughput": self.transfers.iter().map(transfer).collect::<Vec<_>>(),
            "idle_memory": self.memory.iter().map(idle).collect::<Vec<_>>(),
        })
    }

    /// The ratio of our times to each of the others, as text.
    fn ratios(&self) -> Vec<String> {
        let mut lines = self.overheads();
        // The others are lower bounds.
        let compared = self.latencies().into_iter().take(3);
        let groups = compared.chain(
            self.transfers
                .iter()
                .map(|transfer| (transfer.name, transfer.ways.as_slice())),
        );
        for (name, ways) in groups {
            let Some((ours, others)) = ways.split_first() else {
                continue;
            };
            for other in others.iter().filter(|other| !other.is_empty()) {
                let ratio = other.p50().as_secs_f64() / ours.p50().as_secs_f64();
                let (factor, word) = if ratio >= 1.0 {
                    (ratio, "faster")
                } else {
                    (1.0 / ratio, "slower")
                };
                let digits = usize::from(factor < 10.0);
                lines.push(format!(
                    "{name}: {factor:.digits$}x {word} than {}",
                    other.way
                ));
            }
        }
        let way = |name| {
            self.exec
                .iter()
                .find(|samples| samples.way == name && !samples.is_empty())
        };
        if let (Some(ours), Some(podman)) = (way(BY_ORCHESTRATOR), way(PODMAN_EXEC)) {
            let ratio = podman.p50().as_secs_f64() / ours.p50().as_secs_f64();
            lines.push(format!(
                "{BY_ORCHESTRATOR}: {ratio:.0}x faster than {PODMAN_EXEC}"
            ));
        }
        lines
    }
}

/// MiB per second at the median.
fn rate(bytes: usize, samples: &Samples) -> f64 {
    bytes as f64 / f64::from(1 << 20) / samples.p50().as_secs_f64()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.facts)?;
        for (name, ways) in self.latencies() {
            let parallel = name.starts_with("exec").then_some(&self.parallel.samples);
            writeln!(f, "{}\n", latencies(name, ways.iter().chain(parallel)))?;
        }
        writeln!(
            f,
            " {} clients at once: {:.0} execs a second\n",
            self.parallel.clients, self.parallel.per_second
        )?;

        let Burst {
            sessions,
            ready,
            gone,
        } = &self.burst;
        writeln!(
            f,
            " {sessions} sessions at once: all run after {:.1} s, all gone {:.1} s after their \
             end\n",
            ready.as_secs_f64(),
            gone.as_secs_f64()
        )?;

        if let Neighbour {
            seconds,
            idle: Some(idle),
            beside: Some(beside),
            failed,
        } = &self.neighbour
        {
            let rows = latencies("beside ten bombs", [idle, beside]);
            let ratio = beside.p50().as_secs_f64() / idle.p50().as_secs_f64();
            writeln!(
                f,
                "{rows}\n p50 beside the bombs, {seconds} s long: {ratio:.1} times that of an \
                 idle machine; {failed} calls failed\n"
            )?;
        }

        let mebibytes = self
            .transfers
            .first()
            .map_or(0, |transfer| transfer.bytes >> 20);
        for transfer in &self.transfers {
            let mut rows = table(&[
                &format!("{}, {mebibytes} MiB", transfer.name),
                "p50 ms",
                "MiB/s",
                "rounds",
            ]);
            for ways in &transfer.ways {
                rows.add_row([
                    ways.way.to_owned(),
                    format!("{:.0}", milliseconds(ways.p50())),
                    format!("{:.0}", rate(transfer.bytes, ways)),
                    ways.len().to_string(),
                ]);
            }
            writeln!(f, "{rows}\n")?;
        }

        let Passed {
            bytes,
            time,
            before,
            peak,
        } = self.passed;
        writeln!(
            f,
            " {} MiB of output by the orchestrator: {:.1} s, {:.0} MiB/s; its memory {} MiB \
             before and {} MiB at its highest\n",
            bytes >> 20,
            time.as_secs_f64(),
            (bytes >> 20) as f64 / time.as_secs_f64(),
            before >> 20,
            peak >> 20
        )?;

        let mut rows = table(&[
            "idle sessions",
            "agents KiB",
            "each",
            "conmon KiB",
            "each",
            "worker KiB",
            "growth",
            "each",
        ]);
        for Idle {
            sessions,
            agents,
            monitors,
            worker,
            worker_growth,
        } in &self.memory
        {
            let count = *sessions as f64;
            let each = |total: f64| format!("{:.0}", total / count);
            rows.add_row([
                sessions.to_string(),
                agents.to_string(),
                each(*agents as f64),
                monitors.to_string(),
                each(*monitors as f64),
                worker.to_string(),
                worker_growth.to_string(),
                each(*worker_growth as f64),
            ]);
        }
        writeln!(f, "{rows}\n")?;
        for line in self.ratios() {
            writeln!(f, " {line}")?;
        }
        Ok(())
    }
}
