//! `audit export`.

use std::{
    io::{self, BufWriter, Write},
    process::ExitCode,
};

use cynode_api::AuditRecord;
use cynode_audit::ocsf;
use cynode_client::UserClient;
use serde_json::{Value, json};

use crate::{
    cli::{AuditExport, ExportFormat},
    failure::Failure,
    output::{self, Progress},
    plane::Outcome,
    sanitize,
};

pub async fn run(client: &UserClient, args: &AuditExport) -> Outcome {
    if args.proof && args.format != ExportFormat::Jsonl {
        return Err(Failure::usage("only records as they are can be proven")
            .remedy("Leave out --format, or --proof."));
    }
    let progress = Progress::start("exporting");
    let mut out = BufWriter::with_capacity(256 * 1024, io::stdout());
    if args.proof {
        // Before the records: what is signed meanwhile is then only newer than what is proven.
        let checkpoints = client.audit_checkpoints().await?;
        for line in checkpoints.items {
            writeln!(
                out,
                "{}",
                sanitize::json(json!({ "checkpoint": line }).to_string())
            )?;
        }
        output::note(&sanitize::line(&format!(
            "verify it with 'cynode audit verify --file FILE --key {}'",
            checkpoints.key
        )));
    }
    let filter = args.filter.filter();
    let (mut rest, mut count) = (Some(0), 0_u64);
    while let Some(page) = super::next_page(client, &mut rest, &filter).await? {
        for record in page.items {
            writeln!(
                out,
                "{}",
                sanitize::json(written(record, args.format)?.to_string())
            )?;
            count += 1;
        }
        progress.say(format!("exporting: {count} records"));
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn written(record: Value, format: ExportFormat) -> Result<Value, Failure> {
    match format {
        ExportFormat::Jsonl => Ok(record),
        ExportFormat::Ocsf => {
            let record: AuditRecord = serde_json::from_value(record)
                .map_err(|error| Failure::internal(format!("a record can't be read: {error}")))?;
            Ok(ocsf(&record))
        }
    }
}
